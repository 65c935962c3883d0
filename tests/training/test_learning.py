"""What a published model scores on published stories, and that training teaches."""

import pytest
from harness import Launcher
from testdata import MODEL, REAL, stories

# The form in which the figure is stated: every story stripped, BOS before each, no EOS, one stream, windows of 512.
STATED = {
    "model": {"name": str(REAL / "stories260K")},
    "data": {
        "validation": [{"path": str(REAL / "tinystories" / "validation.jsonl")}],
        "sequence_length": 512,
        "packing": "wrapped",
        "remainder": "drop",
        "add_eos": False,
    },
    "batch": {"global_size": 32, "micro_size": 16},
    "length": {"steps": 0},
    "precision": "fp32",
}


@pytest.mark.real_data
@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.xdist_group(f"stated_{name}")) for name in ("single", "ddp", "zero3")],
)
def test_known_model_scores_its_known_figure(launcher: Launcher, backend: str) -> None:
    run = launcher.one(backend, STATED).check()
    assert run.validation("validation_targets") == 387_072
    assert run.validation() == pytest.approx(1.34142, abs=0.0005)


LOWER = {
    "model": {"name": MODEL},
    "data": {
        "train": stories("train", limit=600),
        "validation": stories("validation", limit=40),
        "sequence_length": 128,
        "lowercase": True,
    },
    "batch": {"global_size": 16, "micro_size": 8},
    "optim": {"lr": 2e-3, "weight_decay": 0.0},
    "schedule": {"warmup_steps": 4},
    "precision": "fp32",
}
LAUNCHED_RUNS = {"fsdp": {"before": {**LOWER, "length": {"steps": 0}}, "after": {**LOWER, "length": {"steps": 40}}}}


@pytest.mark.xdist_group("fsdp")
def test_fine_tuning_lowers_the_loss_on_lower_cased_stories(launcher: Launcher) -> None:
    """The pretrained model has never seen a lower-cased story; 40 steps teach it."""
    runs = launcher.many("fsdp", LAUNCHED_RUNS["fsdp"])
    before, after = (runs[name].check().validation() for name in ("before", "after"))
    assert before - after >= 0.3, (before, after)
