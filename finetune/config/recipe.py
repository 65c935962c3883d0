"""Loads, overrides, validates and dumps recipes. Imports no torch, so that `finetune --help` is instant.

A recipe is a YAML file. Later layers win: defaults < recipe file < `a.b=c` on the command line.
`recipe_schema.py` holds its keys.
"""

import copy
import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Protocol, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from finetune.config import config_files, preference_losses
from finetune.config.peer_keys import called_here
from finetune.config.provenance import Origin, concerns_key, place_of, places, printable
from finetune.config.recipe_schema import LengthSection, Recipe, Section, Source, is_given, ranking, section_in
from finetune.utils import json_files
from finetune.utils.errors import FinetuneError, RecipeError
from finetune.utils.file_formats import read_text
from finetune.utils.quoting import to_stderr
from finetune.utils.shipped_files import LAUNCH_FILES, RECIPES, shipped_names
from finetune.utils.yaml_files import YamlProblem, parse

TEXT_METRICS = ("exact_match", "f1", "rouge1", "rouge2", "rougeL")
"""Names that `eval.metrics` takes for tasks that generate text."""
CLASS_METRICS = ("accuracy", "f1_macro")
"""Names that `eval.metrics` takes for classification tasks."""

NUMBER_FIGURES = ("rmse", "pearson", "spearman")
"""Figures of tasks that predict numbers."""
TAG_FIGURES = ("accuracy", "precision", "recall", "f1")
"""Figures of tasks that tag words."""

EMBEDDED = ("anchor", "positive", "negative")
"""Texts of a record whose embeddings are learned, by the names of sentence-transformers."""

SCHEMA_FILE = Path(__file__).with_name("recipe.schema.json")
"""File with the JSON schema of recipes, installed for editors."""


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """What recipes are checked for of a task's kind of rows; by its defaults, of rows that a task makes itself."""

    writes_text: bool = False
    """True if networks write text, token by token."""
    reads_source: bool = False
    """True if that text is apart from the one that is read: a target and its source."""
    labels: Literal["", "class", "number", "tag"] = ""
    """What a field beside the text holds: of the document, or a tag for each of its words."""
    takes_pairs: bool | None = None
    """True if each document is a pair of texts, False if none is; None: those of a recipe are, or none is."""
    metrics: tuple[str, ...] = (*TEXT_METRICS, *CLASS_METRICS)
    """Names that `eval.metrics` takes."""
    figures: tuple[str, ...] | None = None
    """Figures of evaluations beside the loss; None where nobody knows them."""

    embeds: bool = False
    """True if networks give texts embeddings, of which a row is two or three: `padded`."""
    judged: bool = False
    """True if a row is answers that are preferred or not: `documents`, each answer one, if networks write text, and
    else `padded`."""

    taught: bool = False
    """True if a teacher says what is learned of their tokens."""

    @property
    def one_document(self) -> bool:
        """True if a row is one document, or a few texts: `padded`, and no conversation."""
        return bool(self.labels) or self.reads_source or self.embeds

    @property
    def takes_weights(self) -> bool:
        """True if documents may have weights."""
        return self.writes_text and not self.reads_source and not self.judged

    @property
    def gives_scores(self) -> bool:
        """True if networks give a document or its words classes, a number or an embedding, and write no text."""
        return bool(self.labels) or self.embeds or (self.judged and not self.writes_text)


class BuiltInTask(Protocol):
    """A task that recipes name without importing it."""

    @property
    def rows(self) -> RowFacts: ...


class RecipeLoader(yaml.SafeLoader):
    """Reads YAML as users expect it: `1e-4` is a number, and a key given twice is an error.

    `<<` gives a section the keys of another one that it does not have itself.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        seen: set[str | int] = set()
        # Once: what `<<` merges stands among the section's own keys afterwards.
        for key_node, _ in () if hasattr(node, "flat") else node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int):
                raise yaml.MarkedYAMLError(None, None, f"key {key} is not a text", key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(None, None, f"key '{key}' is given twice", key_node.start_mark)
            seen.add(key)
        vars(node)["flat"] = True
        super().flatten_mapping(node)


class _Dumper(yaml.SafeDumper):
    """Writes what `RecipeLoader` reads: a text that looks like a number gets quotes, a rare line break an escape."""

    def text(self, value: str) -> yaml.ScalarNode:
        # PyYAML writes Unicode's own line breaks as they are, and reads them as an ordinary one.
        return self.represent_scalar("tag:yaml.org,2002:str", value, style='"' if _RARE_BREAK.search(value) else None)


_RARE_BREAK = re.compile("[\x85\u2028\u2029]")
_Dumper.add_representer(str, _Dumper.text)


# PyYAML follows YAML 1.1, in which `1e-4` is a string; 1.2's rule is what everybody writes.
_NUMBER = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9]*(?:[eE][-+]?[0-9]+)|[0-9]+\.[0-9]*|\.[0-9]+)$")
for _kind_of_yaml in (RecipeLoader, _Dumper):
    _kind_of_yaml.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789."))


def load_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    tasks: Mapping[str, BuiltInTask] | None = None,
    *,
    quiet: bool = False,
) -> Recipe:
    """Reads a recipe file, applies `a.b=c` overrides, and validates the result.

    Args:
        tasks: The built-in tasks by name; None skips the checks that depend on the task.
        quiet: Whether to print no line on keys of the file that overrides replace.

    Raises:
        RecipeError: With every problem that was found, each with its key.
    """
    trees = recipe_layers(read_recipe(path), overrides, path, quiet=quiet)
    return validate_recipe(trees[-1], Origin(path, trees[0], overrides), tasks)


def recipe_layers(
    tree: dict[str, Any],
    overrides: Sequence[str],
    file: str | Path | None = None,
    *,
    sections: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Returns keys and values of a recipe, with `sections` if there are any, and then after each override.

    A key that is set replaces those that it excludes; a line on stderr says so.

    Args:
        file: The file that holds `tree`, for that line.
        sections: Plain keys and values that replace those of `tree`.
        quiet: Whether to print no lines.

    Raises:
        RecipeError: If an override cannot be read, or two set keys that exclude each other.
    """
    trees, set_by, messages = [tree], dict[str, str](), []
    lines = {} if file is None else places(file)
    for change in [*([sections] if sections else []), *overrides]:
        tree = copy.deepcopy(trees[-1])
        if isinstance(change, str):
            apply_override(tree, change)
            sets = partial(concerns_key, change)
        else:
            tree, sets = _merged(tree, change), partial(is_given, change)
        for problem, given in list(_exclusive_keys(tree)):
            mine = [key for key in given if sets(key)]
            words = printable(change) if isinstance(change, str) else ", ".join(mine)
            for key in [key for key in given if mine and key not in mine]:
                if key in set_by:
                    raise RecipeError(f"{set_by[key]} and {words} exclude each other: {problem}.")
                replaced = f"{key}: {_shown(_take_out(tree, key))}"
                messages.append(f"{words} replaces {replaced} of {place_of(key, file or 'the recipe', lines)}")
            set_by |= dict.fromkeys(mine, words)
        trees.append(tree)
    for line in messages if not quiet else ():
        _say_once(line)
    return trees


def _merged(below: Any, above: Any) -> Any:
    """Returns two trees of keys as one; where both have a value, the second's."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


def _exclusive_keys(
    tree: Mapping[str, Any], section: type[Section] = Recipe, prefix: str = ""
) -> Iterator[tuple[str, list[str]]]:
    """Yields each group of keys that exclude each other: the problem of several, and those that are given."""
    for group, problem in section.exclusive.items():
        given = [f"{prefix}{key}" for key in group if is_given(tree, key)]
        yield f"{prefix[:-1]}: {problem}" if prefix else problem, given
    for name, field in section.model_fields.items():
        inner, value = section_in(field.annotation), tree.get(name)
        items = [(f"{name}.{n}", item) for n, item in enumerate(value)] if isinstance(value, list) else [(name, value)]
        for item_key, item in items:
            if inner is not None and isinstance(item, Mapping):
                yield from _exclusive_keys(item, inner, f"{prefix}{item_key}.")


def _take_out(tree: Any, key: str) -> Any:
    """Takes a dotted key out of keys and values; returns its value."""
    *above, last = key.split(".")
    for name in above:
        tree = tree[int(name)] if isinstance(tree, list) else tree[name]
    return tree.pop(last)


@cache
def _say_once(line: str) -> None:
    """Prints a line on the first rank; commands read a recipe again where they start its run."""
    if os.environ.get("RANK", "0") == "0":
        to_stderr(line)


def check_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Checks overrides of a recipe that is not made yet: their keys, and kinds of values.

    Args:
        tree: What is known of it.

    Raises:
        RecipeError: With every problem.
    """
    recipe, problems = _checked(recipe_layers(tree, overrides, quiet=True)[-1], None)
    if recipe is None:
        raise RecipeError.of("The command line", [problem for _, problem in problems])


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Returns the plain keys and values of a recipe file.

    Raises:
        RecipeError: If it does not hold any.
    """
    tree = read_keys(Path(path), config_files.RECIPE, RecipeError)
    # So that an override changes one place only, where the file repeats a part by an alias.
    return write_out(json.loads(json.dumps(tree, default=str)))


def read_keys(file: Path, kind: str, error_class: type[FinetuneError]) -> dict[str, Any]:
    """Returns the plain keys and values of a recipe or launch file, as YAML or JSON has them.

    Args:
        kind: `config_files.RECIPE` or `config_files.LAUNCH`.
        error_class: Raised if the file does not hold any, or is of another kind.
    """
    name = kind.removeprefix("a ")
    try:
        text = read_text(file)
        tree = json_files.parse(text) if file.suffix == ".json" else parse(text, RecipeLoader)
    except YamlProblem as error:
        raise error_class(f"{error.at(file)}: the {name} is not valid YAML: {error}.") from error
    except (OSError, ValueError) as error:
        shipped = {config_files.RECIPE: shipped_names(RECIPES), config_files.LAUNCH: shipped_names(LAUNCH_FILES)}
        own, ((other, others),) = shipped.pop(kind), shipped.items()
        if file.name in others:
            text = f"{file.name} is {other} that ships, not {kind}. {config_files.PLACES[other]}"
            raise error_class(text) from error
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        problem = f"Cannot read the {name} {file}: {reason}{hint(file.name, own)}"
        advice = f"Name a file, or one of the {name}s that ship: {', '.join(own)}."
        raise error_class.of(str(file), [problem], advice) from error
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise error_class(f"{file} must hold keys and values, got {_kind(tree)}.")
    if (mistaken := config_files.other_kind(tree, kind)) is not None:
        raise error_class(f"{file}: {mistaken}")
    return tree


def validate_recipe(
    tree: Mapping[str, Any], origin: Origin | str | None = None, tasks: Mapping[str, BuiltInTask] | None = None
) -> Recipe:
    """Turns plain keys and values into a recipe.

    Args:
        origin: Place that they come from, or its name.
        tasks: The built-in tasks by name; None skips the checks that depend on the task.

    Raises:
        RecipeError: With every problem that was found, each with its key and its place.
    """
    recipe, problems = _checked(tree, tasks)
    if recipe is not None and not problems:
        return recipe
    if not isinstance(origin, Origin):
        messages = [f"{origin}: {problem}" if origin else problem for _, problem in problems]
        raise RecipeError.of(origin or "The recipe", messages)
    in_file = [problem for _, problem in _checked(origin.tree, tasks)[1]] if origin.overrides else []
    raise RecipeError.of(
        str(origin.path), [f"{origin.of(key, problem, in_file)}: {problem}" for key, problem in problems]
    )


def _checked(
    tree: Mapping[str, Any], tasks: Mapping[str, BuiltInTask] | None
) -> tuple[Recipe | None, list[tuple[str, str]]]:
    """Returns the recipe, None if it is not valid, and its problems, each with its key."""
    tree = write_out(tree)
    exclusive = [problem for problem, given in _exclusive_keys(tree) if len(given) > 1]
    try:
        # By way of JSON: pydantic's strict mode then takes lists for tuples, but no "10" for 10.
        recipe = Recipe.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # A key that takes values of several kinds has an error for each of them: one says what it takes.
        problems = list(dict.fromkeys(filter(None, map(_keyed_problem, errors))))
        # A problem of the whole recipe names its key itself.
        problems += [("", problem) for problem in exclusive]
        return None, [(key or problem.partition(":")[0], problem) for key, problem in problems]
    except ValueError as error:  # of Python, for a number of thousands of digits
        return None, [("recipe", f"recipe: a value cannot be read: {error}")]
    return recipe, [(problem.partition(":")[0], problem) for problem in [*exclusive, *_conflicts(recipe, tasks)]]


def write_out(tree: Mapping[str, Any], section: type[Section] = Recipe) -> dict[str, Any]:
    """Returns keys and values with short forms written out: `output: runs/x`, `lora: true`, one item for a list."""
    expanded = {**tree}
    for name in tree.keys() & section.model_fields.keys():
        annotation, value = section.model_fields[name].annotation, tree[name]
        inner = section_in(annotation)
        if get_origin(annotation) is tuple:
            if isinstance(value, str) or (inner is not None and isinstance(value, Mapping)):
                value = [value]
            if inner is not None and isinstance(value, list):
                value = [_section(item, inner) for item in value]
        elif inner is not None:
            if isinstance(value, bool) and section.model_fields[name].default is None:
                value = {} if value else None
            value = _section(value, inner)
        expanded[name] = value
    return expanded


def _section(value: Any, section: type[Section]) -> Any:
    if isinstance(value, str) and section.short_for is not None:
        value = {section.short_for: value}
    return write_out(value, section) if isinstance(value, Mapping) else value


def _with_short_form(schema: dict[str, Any], field: FieldInfo) -> dict[str, Any]:
    """Returns a field's schema for editors, extended by the short forms that `write_out` takes."""
    section, short = section_in(field.annotation), []
    text = {"type": "string"}
    if get_origin(field.annotation) is tuple:
        if section is not None and section.short_for is not None:
            schema["items"] = {"anyOf": [schema["items"], text]}
        short = [schema["items"] if section is not None else text]
    elif section is not None:
        short = [{"type": "boolean"}] if field.default is None else []
        short += [text] if section.short_for is not None else []
    if not short:
        return schema
    about: dict[str, Any] = {key: schema.pop(key) for key in ("default", "description", "title") if key in schema}
    about.setdefault("description", (section.__doc__ or "") if section is not None else "")
    return {"anyOf": [*schema.pop("anyOf", [schema]), *short], **about}


def dump_recipe(recipe: Recipe) -> str:
    """Returns the full recipe, defaults included, as YAML that `load_recipe` reads back to an equal recipe."""
    return dump_tree(recipe.model_dump(mode="json"))


def dump_tree(tree: Mapping[str, Any]) -> str:
    """Returns keys and values of a recipe as YAML that `RecipeLoader` reads back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of recipes, for editors."""
    schema = Recipe.model_json_schema()
    for section in Section.__subclasses__():
        properties = (schema if section is Recipe else schema["$defs"][section.__name__])["properties"]
        for name, field in section.model_fields.items():
            properties[name] = _with_short_form(properties[name], field)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _conflicts(recipe: Recipe, tasks: Mapping[str, BuiltInTask] | None) -> Iterable[str]:
    """Yields problems between sections, which no single section can see."""
    own_task = ":" in recipe.task.name
    if tasks is not None and recipe.task.name not in tasks and not own_task:
        known = [*tasks]
        yield (
            f"task.name: there is no task '{recipe.task.name}'{hint(recipe.task.name, known)}; allowed are "
            f"{', '.join(known)}, or your own as package.module:object"
        )
    if not own_task:
        yield from source_conflicts(recipe)
    if recipe.length == LengthSection():
        yield "length: give exactly one of steps, epochs and tokens (got none)"
    if recipe.batch.micro_size == "auto" and recipe.length.steps == 0:
        yield "batch.micro_size: `auto` tries training steps, and length.steps is 0; give a number"
    task = (tasks or {}).get(recipe.task.name)
    rows = RowFacts() if task is None else task.rows
    yield from task_conflicts(recipe, rows)
    # Without tasks it is not known whether the sources are of texts that are embedded, which have names, too.
    for side in ("train", "validation") if recipe.chat is None and tasks is not None and not rows.embeds else ():
        for number, source in enumerate(getattr(recipe.data, side)):
            if source.format != "auto" or source.fields:
                # What is advised must not be refused next.
                remove = f"{recipe.task.name} reads no conversations; remove them"
                done = remove if rows.one_document else "add `chat: {}`"
                yield f"data.{side}.{number}: `format` and `fields` need a `chat` section; {done}"
    if recipe.chat is not None and recipe.data.packing == "wrapped":
        yield "data.packing: `wrapped` cuts through conversations; set `documents` or `padded`"
    if recipe.chat is not None and recipe.data.lowercase:
        yield "data.lowercase: conversations are read as they are written; remove it"


def source_conflicts(recipe: Recipe) -> Iterable[str]:
    """Yields problems of a recipe whose task trains the recipe's model on its data."""
    if recipe.model.name is None and recipe.model.config is None:
        yield "model: give `name` (pretrained weights) or `config` (random weights)"
    if not recipe.data.train and recipe.length.steps != 0:
        yield "data.train: name at least one source"
    if recipe.length.steps == 0 and not (recipe.data.train or recipe.data.validation):
        yield "data.validation: name at least one source"
    if recipe.model.config is not None and not (recipe.tokenizer.name or recipe.tokenizer.vocab_size):
        yield (
            "tokenizer: a model from `model.config` brings none; give `tokenizer.name`, or "
            "`tokenizer.vocab_size` to train one"
        )


def task_conflicts(recipe: Recipe, rows: RowFacts) -> Iterable[str]:
    """Yields problems between a recipe and its task's kind of rows."""
    name, section, best_by = recipe.task.name, recipe.eval, recipe.checkpoint.keep_best_by
    known = rows.metrics
    if rows.one_document:
        if recipe.data.packing != "padded":
            what = "one pair" if rows.reads_source else "a few texts" if rows.embeds else "one document"
            yield f"data.packing: {name} reads {what} a row; set `padded`"
        if recipe.chat is not None:
            who = "a classifier" if rows.labels else name
            yield f"chat: {who} reads no conversations; remove the section"
    if rows.judged:
        packing = "documents" if rows.writes_text else "padded"
        if recipe.data.packing != packing:
            yield f"data.packing: a row of {name} holds each answer as a document; set `{packing}`"
        if recipe.chat is not None and (recipe.chat.train_on == "all" or recipe.chat.too_long == "cut_left"):
            yield f"chat: {name} learns answers, after whole prompts; remove `train_on: all` and `too_long: cut_left`"
        if recipe.data.lowercase and recipe.chat is None:
            yield "data.lowercase: answers are read as they are written; remove it"
        # A run's own recipe names all keys.
        given = recipe.preference.model_dump(exclude_defaults=True) if recipe.preference else {}
        yield from preference_losses.problems(name, given)
        if given.get("reference") == "adapters_off" and (why := preference_losses.base_problem(recipe)):
            yield f"preference.reference is adapters_off, and {why}. {preference_losses.CACHED}"
    elif recipe.preference is not None and rows.figures is not None:
        yield f"preference: {name} learns no preferences; remove the section, or set task.name to `dpo`"
    if rows.taught and recipe.distillation is None:
        yield f"distillation: {name} learns from a teacher, and none is named; give `teacher: {{name: NAME}}`"
    elif recipe.distillation is not None and not rows.taught and rows.figures is not None:
        yield f"distillation: {name} has no teacher; remove the section, or set task.name to `distill`"
    if (rows.judged or rows.embeds) and recipe.length.tokens is not None:
        yield f"length.tokens: rows of {name} are of any length; give steps or epochs"
    if recipe.embedding is not None and not rows.embeds and rows.figures is not None:
        yield f"embedding: {name} learns no embeddings; remove the section, or set task.name to `embedding`"
    who = name if rows.embeds else "a classifier"
    if rows.gives_scores and recipe.sample is not None:
        yield f"sample: {who} writes no text; remove the section"
    sides = {"train": recipe.data.train, "validation": recipe.data.validation}
    sources = {f"data.{side}.{n}": source for side, given in sides.items() for n, source in enumerate(given)}
    pairs = {source.pair_field is not None for source in sources.values()}
    if rows.takes_pairs and False in pairs:
        yield f"data: {name} learns to write a text; name its column in each source as `pair_field`"
    elif rows.takes_pairs is False and True in pairs:
        yield f"data: `pair_field` of a source is for classifiers, and {name} reads one text; remove it"
    elif len(pairs) > 1:
        yield "data: some sources have a `pair_field` and some have none; give it for all, or for none"
    if rows.embeds:
        yield from _embedding_problems(recipe, sources)
    numbers = rows.labels == "number" or rows.judged or rows.embeds
    unused = {"class_weights": rows.writes_text or numbers, "num_labels": numbers}
    for key in (key for key, is_unused in unused.items() if is_unused and getattr(recipe.task, key) is not None):
        yield f"task.{key}: {name} has no classes; remove it"
    several = "a source and a target" if rows.reads_source else "several texts a row" if rows.embeds else ""
    if recipe.model.neftune_alpha is not None and several:
        yield f"model.neftune_alpha: {name} embeds {several}, and noise is for rows of one text; remove it"
    if recipe.task.label_smoothing is not None and numbers:
        instead = "; preference.label_smoothing is that of pairs" if rows.judged else ""
        yield f"task.label_smoothing: the loss of {name} is no cross-entropy of tokens or classes; remove it{instead}"
    own = [metric for metric in section.metrics if ":" in metric]
    if section.metrics and not known:
        yield f"eval.metrics: {name} always reports {', '.join(rows.figures or ())}, and no others; remove it"
    for metric in section.metrics if known else ():
        if metric not in known and metric not in own:
            yield (
                f"eval.metrics: there is no metric '{metric}'{hint(metric, known)}; allowed are {', '.join(known)}, "
                "or your own function as package.module:function or file.py:function"
            )
    if section.metrics and not section.prompts and rows.writes_text:
        yield "eval.metrics: they are computed of texts that are generated for prompts; name a source in `eval.prompts`"
    if section.prompts and rows.gives_scores:
        yield f"eval.prompts: {who} writes no text, its metrics are of the validation rows; remove it"
    elif section.prompts and not section.metrics:
        yield f"eval.prompts: without `eval.metrics` nothing is generated; name some of {', '.join(known)}"
    for number, source in enumerate(section.prompts):
        if source.weight != 1.0:
            yield f"eval.prompts.{number}.weight: every prompt counts once; remove it (`limit` reads fewer)"
        defaults = {"text_field": "text", "pair_field": None, "label_field": "label", "weight_field": None}
        for key, default in defaults.items():
            if getattr(source, key) != default:
                yield f"eval.prompts.{number}.{key}: prompts and references are named in `fields`; remove it"
    for source_key, source in sources.items() if rows != RowFacts() else ():
        if source.weight_field is not None and (recipe.chat is not None or not rows.takes_weights):
            why = "conversations have it as `weight`" if rows.takes_weights else f"{name} weighs no documents"
            yield f"{source_key}.weight_field: {why}; remove it"
    for source_key, source in sources.items() if rows.writes_text or rows.embeds else ():
        if source.label_field != "label":
            yield f"{source_key}.label_field: {name} reads no labels; remove it"
    wants_best = {"eval.patience": section.patience is not None, "output.model": recipe.output.model == "best"}
    for key in (key for key, wanted in wants_best.items() if wanted):
        if best_by is None:
            yield f"{key}: checkpoint.keep_best_by is null, so that no evaluation is better than another; name a key"
        if section.every_steps is None and section.per_epoch is None:
            yield f"{key}: nothing is evaluated before the end of the run; give `eval.every_steps` or `per_epoch`"
    if wants_best["output.model"] and not recipe.output.save_model:
        yield "output.model: output.save_model is false, so that no model is written; remove one of them"
    if best_by is not None and not own and rows.figures is not None:
        keys = [f"validation_{figure}" for figure in dict.fromkeys(("loss", *rows.figures, *section.metrics))]
        if ranking(best_by)[0] not in keys:
            yield (
                f"checkpoint.keep_best_by: no evaluation has '{best_by}'{hint(best_by, keys)}; allowed are "
                f"{', '.join(keys)}, with more in `eval.metrics`"
            )


def _embedding_problems(recipe: Recipe, sources: Mapping[str, Source]) -> Iterable[str]:
    if recipe.batch.global_size == 1:
        yield "batch.global_size: with one row there is nothing to tell a positive from; set at least 2"
    for key, source in sources.items():
        if source.format != "auto" or source.text_field != "text":
            yield f"{key}: `format` and `text_field` are not read for embeddings; name texts in `fields`"
        if unknown := source.fields.keys() - {*EMBEDDED}:
            yield f"{key}.fields: there is no {', '.join(sorted(unknown))}; it names {', '.join(EMBEDDED)}"


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive number, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Applies an override `a.b=c` to a tree of plain dicts and lists; `c` is read as YAML."""
    path, equals, value = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise RecipeError(f"The override '{override}' is not of the form key.key=value, as in optim.lr=1e-4.")
    try:
        parsed = parse(value, RecipeLoader)
    except YamlProblem as error:
        raise RecipeError(f"The value in '{override}' is not valid YAML: {error}.") from error
    annotation = RECIPE_FIELDS[path].annotation if path in RECIPE_FIELDS else None
    section = None if get_origin(annotation) is tuple else section_in(annotation)
    if isinstance(parsed, str) and section is not None and section.short_for is not None:
        keys.append(section.short_for)
    node: Any = tree
    for depth, key in enumerate(keys):
        parent_key = ".".join(keys[:depth])
        slot: Any = key
        if isinstance(node, list):
            # One past the end adds an item.
            if not key.isdecimal() or int(key) > len(node):
                raise RecipeError(
                    f"The override '{override}': '{parent_key}' is a list of {len(node)}; "
                    f"'{key}' is not one of 0 to {len(node)}."
                )
            slot = int(key)
            node += [None] * (slot == len(node))
        elif isinstance(node, dict):
            node.setdefault(key)
        else:
            raise RecipeError(f"The override '{override}': '{parent_key}' is {_kind(node)} and has no keys.")
        if depth == len(keys) - 1:
            node[slot] = parsed
        elif node[slot] is None:
            node[slot] = [] if keys[depth + 1] == "0" else {}
        node = node[slot]
    tree.update(write_out(tree))


# Keys that decide which weights or tokens are trained: a wrong guess would train something else.
_WHAT_IS_TRAINED = ("targets", "save_modules", "freeze", "quantization", "train_on", "loss")
_TYPO = 0.85

# By pydantic's kind of error, what a key takes.
_EXAMPLES = {
    "model_type": "a section",
    "dict_type": "a mapping, such as {key: value}",
    "tuple_type": "a list, such as [first, second]",
}

# By key, what it takes, where values of several kinds are allowed.
_MODULES = "a list of names of modules, or one text, a regular expression that matches full names"
_OF_SEVERAL_KINDS = {
    "task.class_weights": (
        "'balanced', or a list with one number above 0 for each class, in the order of the classes, such as [1.0, 5.0]"
    ),
    "batch.micro_size": "a whole number above 0, or 'auto'",
    "model.freeze": _MODULES,
    "model.gradient_checkpointing": "true, false or 'selective'",
    "model.fp8": "true, false or 'emulated'",
    "lora.targets": f"'all-linear', {_MODULES}",
    "preference.reference": "'start', 'adapters_off', or the `name` of a model, its `revision` and `quantization`",
}


def _keyed_problem(item: Any) -> tuple[str, str] | None:
    """Returns the key of a pydantic error, and `key: what is wrong`; None if another error of the key says it.

    Where values of several kinds are allowed, the kind that was tried is behind the key, and then items of a list.
    """
    key, tried = ".".join(map(str, item["loc"][:2])), len(item["loc"]) - 2
    if key not in _OF_SEVERAL_KINDS or tried < 1:
        return ".".join(map(str, item["loc"])), _problem(item)
    if tried > 1:
        return None
    return key, f"{key}: got {_shown(item['input'])}; allowed are {_OF_SEVERAL_KINDS[key]}"


def _problem(item: Any) -> str:
    """Returns a pydantic error as `key: what is wrong`."""
    location = [str(segment) for segment in item["loc"]]
    key = ".".join(location) or "recipe"
    kind, message = item["type"], str(item["msg"])
    if kind == "extra_forbidden":
        known = _known_keys(item["loc"][:-1])
        if (explanation := called_here(location[-1])) is not None:
            return f"{key}: unknown key; {explanation}"
        typos = difflib.get_close_matches(location[-1], _WHAT_IS_TRAINED, cutoff=_TYPO)
        close = [name for name in known if name not in _WHAT_IS_TRAINED or name in typos]
        return f"{key}: unknown key{hint(location[-1], close, cutoff=0.6)} (allowed: {', '.join(known)})"
    if kind == "value_error":
        explanation = message.removeprefix("Value error, ")
        return f"{key}: {explanation}" if location else explanation  # of the whole recipe, it says its key itself
    got = _shown(item["input"])
    if kind in _EXAMPLES:
        known = _known_keys(item["loc"])
        form = f"a section: write its keys below it ({', '.join(known)})" if known else _EXAMPLES[kind]
        return f"{key}: this is {form}, got {got}"
    return f"{key}: {message[0].lower()}{message[1:]}, got {got}"


def _shown(value: Any) -> str:
    got = json.dumps(value, default=str)
    return got if len(got) <= 80 else got[:80] + " …"


def _known_keys(location: Sequence[str | int]) -> list[str]:
    """Returns the keys that the recipe has at a location such as ("data", "train", 0)."""
    section = ".".join("0" if isinstance(segment, int) else segment for segment in location)
    places = (key.rpartition(".") for key in RECIPE_FIELDS)
    return [name for above, _, name in places if above == section]


def _fields(section: type[Section] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        inner = section_in(field.annotation)
        if inner is not None:
            number = "0." if get_origin(field.annotation) is tuple else ""
            yield from _fields(inner, f"{prefix}{name}.{number}")


RECIPE_FIELDS = dict(_fields())
"""Every key that a recipe can have, and its field; those of sources once, as `data.train.0.path`."""


def hint(word: str, known: Sequence[str], *, cutoff: float = 0.5) -> str:
    """Returns `, did you mean 'x'?` with the most similar word, or an empty text."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f", did you mean '{close[0]}'?" if close else ""


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", int: "a number", float: "a number"}.get(type(value), repr(value))
