"""Writes what a run has trained: checkpoints, and the model at its end."""

from functools import partial
from pathlib import Path

from finetune.checkpoint.run_facts import read_facts
from finetune.export import merge, model_card, save_model
from finetune.export.find_weights import WeightSource
from finetune.models.forward_wrapper import unwrap
from finetune.training.run import BuiltRun


def save_checkpoint(run: BuiltRun, *, evaluated: bool, wait: bool) -> None:
    """Saves a checkpoint of the state after the last step.

    Args:
        evaluated: Whether evaluation and samples that were due at this step are done.
        wait: Whether the checkpoint must be there before this returns.
    """
    state = {
        **run.state.to_dict(),
        **run.feed.state_dict(run.state.step),
        "scaler": run.backend.scaler_state(),
        "skipped": run.nonfinite.state,
        "looked_at": evaluated,
        "results": dict(run.results),  # It is written while training continues.
        "identity": run.identity,
        "recipe": run.recipe.model_dump(mode="json"),
        "backend": run.backend.launch.kind,
        "processes": run.backend.world_size,
        "precision": run.backend.precision,
    }
    run.checkpoints.save(unwrap(run.model), run.optimizer, state, must=wait)


def save_final_model(run: BuiltRun) -> None:
    """Writes the trained network, in the format that transformers opens, into the run directory."""
    path = run.directory.path / "model"
    build = run.task.build_skeleton
    with run.backend.loading(pretrained=False):
        skeleton = build(run.recipe, run.data) if build is not None else None
        save_model.save_model(run.backend, run.model, skeleton, run.data.tokenizer, path, partial(_write_card, run))
    run.results["model"] = str(path)
    run.reporter.say(f"model written to {path}")


def _write_card(run: BuiltRun, folder: Path) -> None:
    facts = {**read_facts(run.directory.path), "results": run.results}
    source = WeightSource(run.directory.path, folder, run.state.step, run.recipe, facts)
    model_card.write_model_card(folder, source, "model", [], merge.base_folder(run.recipe), run.task.head)
