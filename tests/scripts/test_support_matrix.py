"""The support matrix: each test that it names is there and runs what it is said to, each refusal is a real one."""

import difflib
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import support_matrix
from harness import ROOT, environment, run
from support_matrix import FEATURES, LAUNCHES, PROOFS, Feature, Mark, mark, proofs, quick_proofs

from finetune.config.recipe import validate_recipe
from finetune.distributed.strategies import refusals
from finetune.training import dry_run

pytestmark = pytest.mark.xdist_group("support_matrix")


def test_the_page_is_what_dry_runs_say() -> None:
    written = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    found = support_matrix.page()
    changes = difflib.unified_diff(written.splitlines(), found.splitlines(), "docs/support.md", "now", lineterm="", n=0)
    assert written == found, "run `make support-matrix`:\n" + "\n".join(changes)


def test_every_test_that_it_names_is_there(request: pytest.FixtureRequest) -> None:
    named = {*proofs().values(), *quick_proofs()}
    # As xdist names those of a group. A session of some files collects the others apart.
    session = {re.sub(r"@[^\]]*$", "", item.nodeid) for item in request.session.items}
    if named <= session:
        return
    files = sorted({test.partition("::")[0] for test in named})
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-n", "0", *files]
    code, output = run(words, env=environment())
    assert code == 0, output[-3000:]
    assert named - set(output.splitlines()) == set()


def test_every_launch_file_has_a_column() -> None:
    files = {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert files - set(LAUNCHES) == {"fsdp_grad_op", "fsdp_2nodes", "zero3_2nodes"}


@pytest.mark.parametrize("proof", [proof for proof in PROOFS if len(proof) == 4], ids=lambda proof: proof[3])
def test_a_proof_runs_what_it_is_said_to(proof: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    test, _, features, place = proof
    table, _, name = place.partition(".")
    file = ROOT / "tests" / test.partition("::")[0]
    monkeypatch.syspath_prepend(file.parent)
    tree = getattr(_module(file), table)[name]
    values = validate_recipe(tree).model_dump()
    assert [feature for feature in features.split() if not _has(values, FEATURES[feature])] == []


@cache
def _module(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"proving_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _has(values: dict[str, Any], feature: Feature) -> bool:
    """Whether a recipe has a feature, in whatever size."""
    if feature is FEATURES["accumulation"]:
        return bool(values["batch"]["micro_size"] * 2 < values["batch"]["global_size"])
    for key, wanted in feature.keys.items():
        found: Any = values
        for part in key.split("."):
            found = found.get(part) if found is not None else None
        exact = wanted is None or (isinstance(wanted, str) and key not in ("sample.prompt", "task.name"))
        if (found != wanted) if exact else (not found):
            return False
    return True


def test_a_table_that_lies_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "The launch file splits layers over 2 ranks (tp_size), which is not offered with model.fp8."
    refused = mark("tp", "fp8")
    assert refused.kind == "refused"
    assert refused.why.startswith(reason)
    with monkeypatch.context() as patch:
        patch.setattr(refusals, "check_split_layers", lambda *_: None)
        assert mark("tp", "fp8") == Mark("works"), "the page would change with the check"
    known = {**proofs(), frozenset(("fsdp", "Adafactor")): "tests/a.py::test_that_cannot_be"}
    monkeypatch.setattr(support_matrix, "proofs", lambda: known)
    with pytest.raises(AssertionError, match=r"test_that_cannot_be proves fsdp .* which is refused: optim\.name"):
        mark("fsdp", "Adafactor")
    monkeypatch.setattr(dry_run, "check_optimizer", lambda *_, **__: None)
    assert mark("fsdp", "Adafactor").kind == "proven"


def test_marks() -> None:
    assert mark("single", "lora", "nf4") == mark("single", "lora", "all") == Mark("blank")
    assert mark("fsdp_offload", "lora") == Mark("gpu")
    assert mark("single", "own_task", "documents").kind == "never"
    assert mark("single", "own_task", "wrapped").kind == "refused"
    assert mark("zero2", "lora") == Mark(
        "proven", "tests/models/test_lora.py::test_same_path_on_every_backend[zero2-plain]"
    )
    assert re.match(r"The launch file asks for ZeRO stage 3, and", mark("zero3", "fp8").why)
