"""The shape of the code: who may import whom, who may name a backend, and how large things may grow."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from harness import ROOT

PACKAGE = ROOT / "finetune"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each module imports of the project, and nothing behind it. `backend` and `data` are packages that
# others see as one. A new module gets a line here, and with it a place in the order.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "quiet": set(),
    "hub": {"errors"},
    "section": set(),
    "running": {"section"},
    "reading": {"section"},
    "sections": {"reading", "running", "section"},
    "layers": set(),
    "yamls": set(),
    "recipe": {"errors", "layers", "reading", "running", "section", "sections", "yamls"},
    "paths": {"errors", "recipe"},
    "files": set(),
    "parent": set(),
    "gpus": {"errors"},
    "backend": {"errors", "files", "layers", "parent", "recipe", "yamls"},
    "explain": {"backend", "errors", "layers", "recipe"},
    "data": {"errors", "files", "paths", "recipe"},
    "names": {"errors", "recipe"},
    "frozen": {"errors", "names"},
    "adapters": {"errors", "names", "recipe"},
    "quantization": {"errors", "frozen", "recipe"},
    "fp8": {"errors", "quantization", "recipe"},
    "pretrained": {"errors", "recipe"},
    "prompts": {"errors"},
    "attention": {"errors"},
    "loss": {"frozen"},
    "recompute": {"attention", "errors"},
    "profiling": {"backend", "errors", "files"},
    "models": {
        "adapters",
        "attention",
        "errors",
        "fp8",
        "frozen",
        "loss",
        "pretrained",
        "prompts",
        "quantization",
        "recipe",
        "recompute",
    },
    "layerwise": set(),
    "optim": {"errors", "layerwise", "recipe", "sections"},
    "tasks": {"adapters", "attention", "data", "errors", "loss", "models", "optim", "pretrained", "recipe"},
    "evaluate": {"backend", "tasks"},
    "generate": {"backend", "prompts", "recipe", "tasks"},
    "checkpoint": {"backend", "errors", "files"},
    "export": {"adapters", "backend", "errors", "files", "models"},
    "metrics": {"backend", "files", "gpus", "quantization"},
    "rundir": {"backend", "errors", "files", "recipe"},
    "length": {"errors", "recipe", "tasks"},
    "identity": {"errors", "files", "length", "recipe", "tasks"},
    "ledger": {"data", "errors", "files"},
    "guard": {"backend", "errors", "parent"},
    "keeper": {"backend", "checkpoint", "files", "guard", "ledger", "metrics", "recipe"},
    "resume": {"backend", "checkpoint", "errors", "identity", "recipe", "rundir"},
    "rehearsal": {"adapters", "backend", "errors", "evaluate", "loss", "models", "recipe", "tasks"},
    "run": {
        "adapters",
        "backend",
        "data",
        "export",
        "fp8",
        "frozen",
        "generate",
        "guard",
        "identity",
        "keeper",
        "length",
        "metrics",
        "models",
        "optim",
        "pretrained",
        "profiling",
        "quantization",
        "recipe",
        "recompute",
        "rehearsal",
        "resume",
        "rundir",
        "sizing",
        "tasks",
    },
    "train": {
        "data",
        "evaluate",
        "export",
        "gauge",
        "generate",
        "guard",
        "ledger",
        "metrics",
        "models",
        "optim",
        "profiling",
        "run",
    },
    "reopen": set(),
    "artefacts": {
        "adapters",
        "checkpoint",
        "data",
        "errors",
        "files",
        "identity",
        "ledger",
        "models",
        "pretrained",
        "prompts",
        "recipe",
        "reopen",
        "tasks",
    },
    "plan": {
        "loss",
        "recompute",
        "adapters",
        "backend",
        "comms",
        "data",
        "errors",
        "files",
        "frozen",
        "gpus",
        "metrics",
        "models",
        "optim",
        "pretrained",
        "quantization",
        "quiet",
        "recipe",
        "tasks",
    },
    "sizing": {"backend", "errors", "files", "metrics", "plan", "recipe"},
    "gauge": {"backend", "metrics", "plan", "recipe"},
    "trial": {"backend", "errors", "exits", "files", "guard", "parent", "quiet", "recipe", "run", "sizing", "train"},
    "dryrun": {"adapters", "backend", "errors", "fp8", "models", "optim", "plan", "recipe", "tasks"},
    "doctor": {"backend", "errors", "hub", "layers", "optim", "recipe"},
    "exits": {"errors", "parent"},
    "launcher": {"backend", "errors", "exits"},
    "parity": {"backend", "errors", "files", "launcher", "models", "recipe"},
    "comms": {"errors", "files"},
    "replay": {
        "checkpoint",
        "errors",
        "evaluate",
        "files",
        "ledger",
        "optim",
        "parity",
        "recipe",
        "run",
        "train",
    },
    "verbs": {"comms", "errors", "launcher", "parity", "recipe", "replay"},
    "__main__": {"cli", "exits"},
    "faults": {"cli", "errors", "exits", "models", "optim", "parity", "recipe", "run", "train"},
    "cli": {
        "artefacts",
        "backend",
        "data",
        "doctor",
        "dryrun",
        "errors",
        "exits",
        "explain",
        "guard",
        "hub",
        "launcher",
        "ledger",
        "parent",
        "paths",
        "plan",
        "quiet",
        "recipe",
        "run",
        "train",
        "verbs",
    },
}

LIGHT = [
    "__init__",
    "errors",
    "section",
    "reading",
    "running",
    "sections",
    "recipe",
    "paths",
    "cli",
    "exits",
    "launcher",
    "quiet",
    "hub",
    "verbs",
]
HEAVY = {"torch", "transformers", "accelerate", "datasets", "numpy", "tokenizers", "psutil", "safetensors"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib"}


def name_of(file: Path) -> str:
    """The module a file belongs to, packages as one: `finetune/data/cache.py` is `data`."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> set[str]:
    """Dotted names that a piece of code imports, wherever it does."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def project_imports(file: Path) -> set[str]:
    """The project's modules that a file imports, other than its own."""
    modules = {name.split(".")[1] for name in imported(tree_of(file)) if name.startswith("finetune.")}
    return (modules & {name_of(f) for f in FILES}) - {name_of(file)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_only_what_it_may(file: Path) -> None:
    module = name_of(file)
    if module == "__init__":
        assert not project_imports(file)
        return
    assert module in ALLOWED, "a new module needs a line in ALLOWED"
    assert project_imports(file) <= ALLOWED[module]


def test_nothing_is_allowed_that_is_not_used() -> None:
    used: dict[str, set[str]] = {}
    for file in FILES:
        used.setdefault(name_of(file), set()).update(project_imports(file))
    del used["__init__"]
    assert used == ALLOWED


def test_one_direction() -> None:
    order: list[str] = []
    while len(order) < len(ALLOWED):
        ready = [m for m in ALLOWED if m not in order and ALLOWED[m] <= set(order)]
        assert ready, f"a cycle among {sorted(set(ALLOWED) - set(order))}"
        order += ready


def at_start(tree: ast.Module) -> ast.Module:
    """What runs when a module is imported: all but what is inside functions."""

    class Drop(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

    return Drop().visit(tree)


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules(module: str) -> None:
    roots = {name.split(".")[0] for name in imported(at_start(tree_of(PACKAGE / f"{module}.py")))}
    assert not roots & HEAVY


def test_who_imports_what_is_special() -> None:
    def importers(library: str) -> set[str]:
        return {name_of(f) for f in FILES if any(n.split(".")[0] == library for n in imported(tree_of(f)))}

    # `reopen` is what a fresh process runs, without anything else of this toolkit.
    assert importers("peft") <= {"adapters", "reopen"}
    assert importers("bitsandbytes") <= {"optim", "quantization"}
    assert importers("deepspeed") <= {"backend"}
    assert importers("torchao") <= {"fp8"}
    # `models` takes a way to build networks without their weights, `fp8` one to replace modules.
    assert importers("accelerate") <= {"backend", "fp8", "launcher", "models"}


BACKEND_WORD = re.compile(r"fsdp|deepspeed|zero", re.IGNORECASE)
INNOCENT = re.compile(r"zero_grad|zeros_like|\bzeros\b|flatnonzero|nonzero", re.IGNORECASE)
# A launcher's name, a library whose version is noted, a fact that is written down, and why a logger is turned down.
NAMED = {
    "parent.py": {'"deepspeed"', '"deepspeed.launcher."'},
    "rundir.py": {'"deepspeed"', '"deepspeed_config"'},
    "quiet.py": {"# Accelerate notes per parameter that FSDP2 keeps fp32 masters, which the start line says as well."},
}
# Notices of work that goes on before there is a reporter.
TO_STDERR = {"exits.py", "sizing.py", "trial.py", "launcher.py", "cache.py", "progress.py", "rundir.py", "faults.py"}


@pytest.mark.parametrize(
    "file", [f for f in FILES if name_of(f) != "backend"], ids=lambda file: str(file.relative_to(PACKAGE))
)
def test_only_the_backend_names_backends(file: Path) -> None:
    found = []
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        text = INNOCENT.sub("", token.string)
        if BACKEND_WORD.search(text) and token.string not in NAMED.get(file.name, set()):
            found.append(f"{file.relative_to(ROOT)}:{token.start[0]}: {token.line.strip()}")
    assert not found


def test_the_loop_fits_one_screen() -> None:
    functions = {n.name: n for n in tree_of(PACKAGE / "train.py").body if isinstance(n, ast.FunctionDef)}
    for name in ("train", "train_step"):
        node = functions[name]
        assert node.end_lineno is not None
        assert node.end_lineno - node.lineno + 1 <= 50, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_what_is_not_done(file: Path) -> None:
    tree = tree_of(file)
    assert not {name.split(".")[0] for name in imported(tree)} & PICKLES
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        place = f"{file.relative_to(ROOT)}:{node.lineno}"
        assert called != "torch.load", f"{place}: reads pickle"
        assert called != "torch.save", f"{place}: writes pickle"
        if called == "print":
            to_stderr = any(k.arg == "file" and ast.unparse(k.value) == "sys.stderr" for k in node.keywords)
            allowed = file.name == "cli.py" or (file.name in TO_STDERR and to_stderr)
            assert allowed, f"{place}: prints; say it through the reporter"
        if re.search(r"Auto\w+\.from_(pretrained|config)$", called) or "_AUTO[" in called:
            # Left out, transformers asks on the terminal.
            said = {keyword.arg for keyword in node.keywords}
            assert said & {"trust_remote_code", None}, f"{place}: does not say whether the model's own code may run"
        for keyword in node.keywords:
            if keyword.arg == "trust_remote_code":
                fixed = isinstance(keyword.value, ast.Constant) and keyword.value.value
                assert not fixed, f"{place}: runs code from the internet unasked"
