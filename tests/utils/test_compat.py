"""Names of libraries that are private: used in one place only, and checked when it is imported."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

import pytest
from harness import ROOT

from finetune.utils.compat import library_versions
from finetune.utils.errors import FinetuneError

PACKAGE = ROOT / "finetune"
COMPAT = PACKAGE / "utils/compat"
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
LOOK_UPS = {"getattr", "hasattr", "setattr", "delattr", "pop", "get", "setdefault"}

# Of Python's own library.
PUBLIC = {"_asdict", "_current_frames", "_exit", "_replace"}
ALLOWED = {
    # Keys of a file, read before it is known whether `datasets` is needed, which takes seconds to import.
    ("data/sources/corpus.py", "_data_files"),
    ("data/sources/corpus.py", "_split"),
    # A key of torchtune's configs.
    ("cli/convert_config.py", "_component_"),
}


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and names: attributes of anything but self and cls, modules and names imported, names as strings."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names = [] if own else [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = node.args if called in LOOK_UPS else []
            # Modules that are imported by name.
            given = node.args[:1] if called == "import_module" else given
            names = [part for a in given for part in _text(a).split(".")]
        elif isinstance(node, ast.Subscript):
            names = [_text(node.slice)]
        yield from ((node.lineno, name) for name in names if PRIVATE.fullmatch(name) and name not in PUBLIC)


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def inherited_uses(trees: dict[str, ast.Module]) -> Iterator[tuple[str, int, str]]:
    """Files, lines and names: attributes of self and cls that nothing here defines, so that a library does."""
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
    read = []
    defined = set()
    for file, node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            if isinstance(node.ctx, ast.Store):
                defined.add(node.attr)
            elif PRIVATE.fullmatch(node.attr):
                read.append((file, node.lineno, node.attr))
    yield from (use for use in read if use[2] not in defined)


def trees() -> dict[str, ast.Module]:
    """The code outside `COMPAT`, by file."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file.parent != COMPAT]
    return {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def test_private_names_are_used_in_one_place() -> None:
    parsed = trees()
    found = [(file, line, name) for file, tree in parsed.items() for line, name in private_uses(tree)]
    found += inherited_uses(parsed)
    assert [(file, line, name) for file, line, name in found if (file, name) not in ALLOWED] == []
    assert {(file, name) for file, _, name in found} == ALLOWED


@pytest.mark.parametrize(
    "code",
    [
        "import torch._C",
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "from torch.nn.modules.dropout import _DropoutNd",
        "group = state._fsdp_param_group",
        "PartialState._shared_state['device'] = 'cpu'",
        "super()._update_peak_stats(state)",
        "getattr(parameter, '_unsharded_param', None)",
        "setattr(module, '_create_c10d_store', prefixed)",
        "whole.__dict__.pop('_weight_conversions', None)",
        "values['_growth_tracker']",
        "import_module('torch._dynamo.utils')",
    ],
)
def test_a_private_name_is_seen(code: str) -> None:
    assert list(private_uses(ast.parse(code)))


def test_an_inherited_private_name_is_seen() -> None:
    code = "class Tracker(MemTracker):\n  def now(self): return self._curr_mem_snap, self._own()\n  def _own(self): ..."
    assert [name for _, _, name in inherited_uses({"x.py": ast.parse(code)})] == ["_curr_mem_snap"]


@pytest.mark.parametrize("file", sorted(COMPAT.glob("*_private.py")), ids=lambda file: file.stem)
def test_every_name_is_there(file: Path) -> None:
    import_module(f"finetune.utils.compat.{file.stem}")


class Owner:
    """Holds a name as libraries do: on the class, in the code of a method, as a string."""

    _on_class = 1
    _annotated: int

    def __init__(self, other: object) -> None:
        self._in_init = 1
        self._later = lambda: self._in_lambda
        getattr(other, "_as_string", None)

    @property
    def known(self) -> int:
        return self._in_property

    @classmethod
    def make(cls) -> int:
        return cls._in_classmethod


def test_names_that_are_there_pass() -> None:
    names = ("_on_class", "_annotated", "_in_init", "_in_lambda", "_as_string", "_in_property", "_in_classmethod")
    library_versions.require("torch", Owner, *names)
    library_versions.require("torch", library_versions, "_mentioned")


def test_a_missing_name_is_reported() -> None:
    with pytest.raises(FinetuneError) as caught:
        library_versions.require("torch", Owner, "_on_class", "_made_up")
    assert isinstance(caught.value, ImportError)
    text = str(caught.value)
    assert f"torch {metadata.version('torch')} is installed" in text
    assert f"tested with torch {' to '.join(library_versions.PROVEN['torch'])}" in text
    assert "_made_up" in text
    assert "_on_class" not in text
    assert f"pip install 'torch=={library_versions.PROVEN['torch'][1]}.*'" in text
    assert "\n" not in text


def test_every_library_has_versions_that_were_tested() -> None:
    used = {file.stem.split("_")[0] for file in COMPAT.glob("*_private.py")}
    assert used <= set(library_versions.PROVEN)
