"""Notes which uses of libraries' private names are reached, in every fork of a session (`forkserver.py`).

Once `begin` has named a folder, the modules of `MODULES` are compiled with a note at each use: at each private name in
a function, at the beginning of each function, which a library may have to call, and at each call of a library's
function that has got another name. A note is a line of a process's own file. `unused` says what nobody has reached.
"""

import ast
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from harness import ROOT

FOLDER = "FINETUNE_PRIVATE_USES"
COMPAT = "finetune.utils.compat"
ELSEWHERE = ("finetune.distributed.state.zero_state", "finetune.distributed.strategies.fsdp")
"""Modules that read names which `compat` requires; of these, each name counts once, wherever it is."""
MODULES = (
    *(f"{COMPAT}.{file.stem}" for file in sorted((ROOT / "finetune/utils/compat").glob("*_private.py"))),
    *ELSEWHERE,
)


@dataclass(frozen=True)
class Use:
    """A place in a module where a name is used."""

    module: str
    line: int
    name: str
    """The private name, or `NAME()` for a function that has to be called."""

    def __str__(self) -> str:
        return f"{self.module}:{self.line}:{self.name}"


def _parsed(module: str) -> ast.Module:
    return ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))


def _is_require(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require"


@functools.cache
def required_names() -> frozenset[str]:
    """The names that `compat` requires of libraries, private or not."""
    calls = (node for module in MODULES for node in ast.walk(_parsed(module)) if _is_require(node))
    # Without the library and the owner.
    words = (word for call in calls for given in call.args[2:] for word in ast.walk(given))
    return frozenset(word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str))


def _counts(name: object) -> bool:
    private = isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name.isidentifier()
    return private or name in required_names()


class _Noter(ast.NodeTransformer):
    """Adds the notes to a module's code, and lists them."""

    def __init__(self, module: str) -> None:
        self.module, self.depth = module, 0
        self.uses: list[Use] = []

    def _use(self, node: ast.AST, name: str) -> ast.Constant:
        self.uses.append(Use(self.module, node.lineno, name))  # type: ignore[attr-defined]
        return ast.Constant(str(self.uses[-1]))

    def _noted(self, node: ast.AST, name: str, value: ast.expr, by: str = "_note_use") -> Any:
        return ast.Call(ast.Name(by, ast.Load()), [self._use(node, name), value], [])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        documented = ast.get_docstring(node) is not None
        if documented and len(node.body) == 1:
            return node  # for subclasses to override
        begins = ast.Expr(self._noted(node, f"{node.name}()", ast.Constant(None)))
        self.depth += 1
        node.body = [part for statement in node.body if (part := self.visit(statement)) is not None]
        self.depth -= 1
        node.body.insert(int(documented), begins)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.depth += 1
        body = self.visit(node.body)
        self.depth -= 1
        both = ast.Tuple([self._noted(node, "lambda()", ast.Constant(None)), body], ast.Load())
        node.body = ast.Subscript(both, ast.Constant(1), ast.Load())
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        self.generic_visit(node)
        if self.depth and _counts(node.attr) and (self.module not in ELSEWHERE or not own):
            node.value = self._noted(node, node.attr, node.value)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        imported = self.depth and isinstance(node.ctx, ast.Load) and node.id in required_names()
        return self._noted(node, node.id, node) if imported else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _is_require(node):
            return node
        self.generic_visit(node)
        if self.depth:
            node.args = [
                self._noted(given, given.value, given)
                if isinstance(given, ast.Constant) and isinstance(given.value, str) and _counts(given.value)
                else given
                for given in node.args
            ]
        return node

    def _named(self, node: ast.Assign | ast.AnnAssign, target: ast.expr) -> ast.AST:
        value = node.value
        self.generic_visit(node)
        if not self.depth and isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and _counts(value.attr):
            node.value = self._noted(node, f"{target.id}()", value, "_note_calls")
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return self._named(node, node.targets[0])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return self._named(node, node.target)


def _with_notes(module: str) -> tuple[ast.Module, list[Use]]:
    noter = _Noter(module)
    return ast.fix_missing_locations(noter.visit(_parsed(module))), noter.uses


# ---------------------------------------------------------------- in the processes that are watched

_noted: set[str] = set()


def _note_use(use: str, value: Any) -> Any:
    if use not in _noted:
        _noted.add(use)
        # Ranks end without a chance to write later.
        with open(Path(os.environ[FOLDER]) / str(os.getpid()), "a", encoding="utf-8") as file:
            file.write(f"{use}\n")
    return value


def _note_calls(use: str, value: Any) -> Any:
    """A function that notes its calls. A class stays what it is, for `isinstance`; that it is there is all to note."""
    if not isinstance(value, FunctionType):
        return _note_use(use, value)

    @functools.wraps(value)
    def noting(*arguments: Any, **options: Any) -> Any:
        _note_use(use, None)
        return value(*arguments, **options)

    return noting


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        return compile(_with_notes(fullname)[0], self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_note_use=_note_use, _note_calls=_note_calls)
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in MODULES or (found := PathFinder.find_spec(name, path, target)) is None:
            return None
        found.loader = _Loader(name, str(found.origin))
        return found


def watch() -> None:
    """Has this process note uses, if the session does; before it imports `finetune`."""
    if FOLDER in os.environ:
        assert not set(MODULES) & sys.modules.keys(), "imported before"
        sys.meta_path.insert(0, _Finder())


# ---------------------------------------------------------------- in the session


def begin(folder: Path) -> None:
    """Has the processes that are started from now on note uses in a folder."""
    folder.mkdir()
    os.environ[FOLDER] = str(folder)


def _expected() -> Iterator[Use]:
    for module in MODULES:
        yield from _with_notes(module)[1]


def unused(folder: Path) -> list[str]:
    """Uses in `compat`, and names that it requires, that no process has reached."""
    noted = {line for file in folder.iterdir() for line in file.read_text(encoding="utf-8").splitlines()}
    uses = list(_expected())
    missed = [use for use in uses if str(use) not in noted and use.module not in ELSEWHERE]
    reached = {use.name for use in uses if str(use) in noted}
    # Those that have got another name as their module was imported are among the uses, by that name.
    imported = {
        node.attr
        for module in MODULES
        for statement in _parsed(module).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute)
    }
    return [str(use) for use in missed] + sorted(
        name for name in required_names() - reached - imported if f"{name}()" not in reached
    )
