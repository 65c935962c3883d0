"""Reads YAML of the user, with line numbers in errors, and bounded size."""

from typing import Any

import yaml

FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml where PyYAML was built with it: ten times as fast."""

# What a file may hold once its aliases are written out, if that is more than ten times what stands in it.
_MOST_VALUES = 100_000
_MOST_CHARACTERS = 1_000_000


class YamlProblem(ValueError):
    """A text is not valid YAML, or cannot be used as such."""

    def __init__(self, text: str, line: int | None) -> None:
        super().__init__(text)
        self.line = line
        """Line, from 1; None if the problem has none."""

    def at(self, file: Any) -> str:
        """Returns `file:line`."""
        return str(file) if self.line is None else f"{file}:{self.line}"


def check_length(text: str) -> None:
    """Raises `YamlProblem` if a text is longer than any configuration is; 10 MB would take half a minute."""
    if len(text) > _MOST_CHARACTERS:
        raise YamlProblem(f"it has {len(text):,} characters, and a configuration at most {_MOST_CHARACTERS:,}", None)


def parse(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """Returns the plain values of a YAML text, by one of PyYAML's loaders; a `YamlProblem` has the line."""
    check_length(text)
    try:
        reader = loader(text)
        try:
            node = reader.get_single_node()
            if node is None:
                return None
            _check_aliases(node)
            return reader.construct_document(node)
        finally:
            reader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        begun = error.context_mark
        context = f"{error.context} that begins on line {begun.line + 1}" if error.context and begun else error.context
        message = ", ".join(phrase for phrase in (context, error.problem) if phrase)
        raise YamlProblem(" ".join(message.split()), None if mark is None else mark.line + 1) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlProblem(f"the character {chr(error.character)!r} is not allowed", line) from error
    except RecursionError as error:
        raise YamlProblem("it is nested too deeply", None) from error
    except YamlProblem:
        raise
    except ValueError as error:  # a date that there is not, a number of thousands of digits
        raise YamlProblem(f"a value cannot be read: {error}", None) from error


def _check_aliases(root: yaml.Node) -> None:
    """Refuses a part that contains itself, and aliases that repeat parts excessively, before they are built."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0  # being counted
            below = node.value if isinstance(node, yaml.CollectionNode) else []
            parts = [child for item in below for child in (item if isinstance(item, tuple) else (item,))]
            sizes[id(node)] = 1 + sum(map(size, parts))
        elif not sizes[id(node)]:
            mark = node.start_mark
            raise yaml.MarkedYAMLError(None, None, "a part contains itself by an alias; write it out", mark)
        return sizes[id(node)]

    if size(root) > max(_MOST_VALUES, 10 * len(sizes)):
        raise YamlProblem(
            f"its aliases repeat {len(sizes):,} values to {sizes[id(root)]:.1e}; write out what is meant", None
        )
