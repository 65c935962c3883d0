"""What a run saves: checkpoints while it goes, and the model at its end."""

from finetune.export import save_model
from finetune.models.forward_wrapper import unwrap
from finetune.training.build_run import Run


def save_checkpoint(run: Run, *, evaluated: bool, wait: bool) -> None:
    """Saves a checkpoint of the state after the last step.

    Args:
        evaluated: Whether evaluation and samples that were due at this step are done.
        wait: Whether the checkpoint must be there before this returns.
    """
    state = {
        **run.state.to_dict(),
        "position": run.sampler.position(run.state.step),
        "scaler": run.backend.scaler_state(),
        "skipped": run.nonfinite.state,
        "looked_at": evaluated,
        "results": dict(run.results),  # It is written while training continues.
        "identity": run.identity,
        "recipe": run.recipe.model_dump(mode="json"),
        "backend": run.backend.launch.kind,
        "processes": run.backend.world,
        "precision": run.backend.precision,
    }
    run.checkpoints.save(unwrap(run.model), run.optimizer, state, must=wait)


def save_final_model(run: Run) -> None:
    """Writes the trained network, in the format that transformers opens, into the run directory."""
    path = run.directory.path / "model"
    build = run.task.build_skeleton
    with run.backend.loading(pretrained=False):
        skeleton = build(run.recipe, run.data) if build is not None else None
        save_model.save_model(run.backend, run.model, skeleton, run.data.tokenizer, path)
    run.results["model"] = str(path)
    run.reporter.say(f"model written to {path}")
