"""The shape of the code: who may import whom, and who may name a backend."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest
from harness import ROOT

PACKAGE = ROOT / "finetune"
FILES = sorted(PACKAGE.rglob("*.py"))
# All uses of private names of libraries: each of its modules may import its library.
COMPAT = PACKAGE / "utils/compat"

# From the command line down: a package imports those after it only.
PACKAGES = [
    "cli",
    "diagnostics",
    "training",
    "planning",
    "export",
    "checkpoint",
    "monitoring",
    "tasks",
    "optim",
    "models",
    "data",
    "distributed",
    "config",
    "utils",
]

# What is imported before it is known whether anything heavy is needed.
LIGHT = [
    "__init__",
    "cli/main",
    "cli/completion",
    "cli/recipe_verbs",
    "cli/model_verbs",
    "cli/run_verbs",
    "cli/arguments",
    "training/entry_point",
    "distributed/launch/launcher",
    "config/recipe",
    "config/recipe_paths",
    "config/recipe_schema",
    "tasks/__init__",
    "tasks/task",
    "tasks/task_lookup",
    "utils/errors",
    "utils/exit_codes",
    "utils/hub_access",
    "utils/library_imports",
]
OURS = "finetune."
HEAVY = {"torch", "transformers", "accelerate", "datasets", "numpy", "tokenizers", "psutil", "safetensors"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib"}


def package_of(file: Path) -> str:
    """The package that a file belongs to; of the two files beside them, their own name."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
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


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file: Path) -> None:
    above, used = package_of(file), {name.split(".")[1] for name in imported(tree_of(file)) if name.startswith(OURS)}
    if above == "__init__":
        # What is public is named there for type checkers, and imported when it is asked for.
        ran = [n for n in tree_of(file).body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
        assert not any(name.startswith(OURS) for node in ran for name in imported(node))
    elif above == "__main__":
        assert used <= {"cli", "utils"}
    else:
        assert used - {"__version__"} <= set(PACKAGES[PACKAGES.index(above) :])


def test_packages_are_those_in_the_order() -> None:
    assert {package_of(file) for file in FILES} == {*PACKAGES, "__init__", "__main__"}


@cache
def imported_modules() -> dict[str, set[str]]:
    """The modules of this package that each of its modules imports, by dotted name."""
    names = {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in FILES}
    return {
        # A module itself, or the one that a name is taken from.
        name: {full if full in names else full.rpartition(".")[0] for full in imported(tree_of(f))} & set(names)
        for name, f in names.items()
    }


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """The nodes of a graph that are reached from themselves."""

    def below(node: str) -> set[str]:
        found: set[str] = set()
        left = [node]
        while left:
            new = graph.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    return {node for node in graph if node in below(node)}


def test_no_two_modules_import_each_other() -> None:
    assert not in_circles(imported_modules())


def folders_in_circles(modules: dict[str, set[str]]) -> set[str]:
    """Folders that import each other, be it by way of a module beside them."""
    graph: dict[str, set[str]] = {}
    for name, used in modules.items():
        # finetune.distributed.launch.launch_file is of the folder `distributed.launch`.
        folder, *others = [".".join(module.split(".")[1:3]) for module in (name, *used)]
        graph.setdefault(folder, set()).update(set(others) - {folder})
    return in_circles(graph)


def test_no_two_folders_import_each_other() -> None:
    assert folders_in_circles(imported_modules()) == set()
    planted = {**imported_modules(), "finetune.distributed.launch.planted": {"finetune.distributed.resolve_config"}}
    assert {"distributed.launch", "distributed.resolve_config"} <= folders_in_circles(planted)


def test_no_module_imports_a_package_that_it_is_in() -> None:
    upwards = {
        (name, above) for name, used in imported_modules().items() for above in used if name.startswith(f"{above}.")
    }
    # It prints the version.
    assert upwards == {("finetune.cli.main", "finetune")}


def at_start(file: Path) -> ast.Module:
    """What runs when a module is imported: all but what is inside functions, or for type checkers."""

    class Drop(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.If | None:
            return None if ast.unparse(node.test) == "TYPE_CHECKING" else node

    return Drop().visit(ast.parse(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules(module: str) -> None:
    roots = {name.split(".")[0] for name in imported(at_start(PACKAGE / f"{module}.py"))}
    assert not roots & HEAVY


def test_who_imports_what_is_special() -> None:
    def importers(library: str) -> set[str]:
        files = [f for f in FILES if f.parent != COMPAT or f.name != f"{library}_private.py"]
        return {package_of(f) for f in files if any(n.split(".")[0] == library for n in imported(tree_of(f)))}

    # What a fresh process runs to verify an export has nothing else of this toolkit.
    assert importers("peft") <= {"models", "export"}
    assert importers("bitsandbytes") <= {"optim", "models"}
    assert importers("deepspeed") <= {"distributed"}
    assert importers("torchao") <= {"models"}
    assert importers("torchmetrics") <= {"tasks"}
    # `models` takes a way to build networks without their weights, and one to replace modules.
    assert importers("accelerate") <= {"distributed", "models"}


# Not the number.
BACKEND_WORD = re.compile(r"(?i:fsdp|deepspeed|zero[-_ ]?(stage|[1-3]))|ZeRO")
# A launcher's name, a library whose version is noted, a fact that is written down, and why a logger is turned down.
NAMED = {
    "orphan_watch.py": {'"deepspeed"', '"deepspeed.launcher."'},
    "run_directory.py": {'"deepspeed"', '"deepspeed_config"'},
    # It writes launch files.
    "new_project.py": {'"fsdp"', '"deepspeed_config"', '"deepspeed_config_file"'},
    "library_imports.py": {
        "# Accelerate notes per parameter that FSDP2 keeps fp32 master weights, which the start line says as well."
    },
}
# They print lines of their own; texts that may be a stranger's go through `quoting`.
TO_STDERR = {"exit_codes.py", "fault_injection.py", "signals.py", "platforms.py"}
# They say what files are by their keys, and which launch file fits, and run nothing.
KNOWS_FILES = {"config_files.py", "convert_config.py"}


@pytest.mark.parametrize(
    "file",
    [
        f
        for f in FILES
        if package_of(f) not in ("distributed", "planning") and f.parent != COMPAT and f.name not in KNOWS_FILES
    ],
    ids=lambda file: str(file.relative_to(PACKAGE)),
)
def test_only_two_packages_name_backends(file: Path) -> None:
    found = []
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        if BACKEND_WORD.search(token.string) and token.string not in NAMED.get(file.name, set()):
            found.append(f"{file.relative_to(ROOT)}:{token.start[0]}: {token.line.strip()}")
    assert not found


TASK_NAME = re.compile(r"(?<!tasks\.)\b(causal_lm|seq2seq_lm|sequence_classification)\b")
# Their own modules, where they are looked up, and the recipe's default with what is said of it.
NAMES_TASKS = {
    "tasks/causal_lm.py",
    "tasks/classification.py",
    "tasks/seq2seq.py",
    "tasks/task_lookup.py",
    "config/recipe_schema.py",
}


def test_no_task_is_named_elsewhere() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for file in FILES
        if file.relative_to(PACKAGE).as_posix() not in NAMES_TASKS
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and TASK_NAME.search(node.value)
    ]
    assert not found


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
            allowed = file.parent.name == "cli" or file.name == "quoting.py" or (file.name in TO_STDERR and to_stderr)
            assert allowed, f"{place}: prints; say it through the reporter"
        if re.search(r"Auto\w+\.from_(pretrained|config)$", called) or called.endswith("auto.from_config"):
            # Left out, transformers asks on the terminal.
            said = {keyword.arg for keyword in node.keywords}
            assert said & {"trust_remote_code", None}, f"{place}: does not say whether the model's own code may run"
        for keyword in node.keywords:
            if keyword.arg == "trust_remote_code":
                fixed = isinstance(keyword.value, ast.Constant) and keyword.value.value
                assert not fixed, f"{place}: runs code from the internet unasked"
