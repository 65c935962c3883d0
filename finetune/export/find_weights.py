"""Finds what a run has saved: its recipe, `run.json`, and the weights of a step."""

import os
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.checkpoint import checkpoint_store, integrity, trusted_code
from finetune.checkpoint.checkpoint_store import CheckpointStore, name_of, step_of
from finetune.checkpoint.run_facts import RUN, read_facts
from finetune.config import recipe_paths
from finetune.config.recipe import load_recipe
from finetune.config.recipe_schema import Recipe
from finetune.utils.errors import CheckpointError, RecipeError


@dataclass(frozen=True)
class WeightSource:
    """A run, and the weights of one of its steps."""

    run: Path
    weights: Path
    """A folder with a network's weights, or an adapter's."""
    step: int | None
    recipe: Recipe
    facts: dict[str, Any]
    """`run.json`; empty if the run has none."""
    trusted: bool = False
    """True if the person at the keyboard says that the run's code may run."""
    held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)
    """Keeps the run from deleting the checkpoint; close it when it has been read."""

    @property
    def ends(self) -> list[str] | None:
        """The tokens that the answers it learned end in, as text; None if it learned no conversations."""
        train = (self.facts.get("data") or {}).get("train") or {}
        chat = train.get("chat")
        return None if chat is None else list(chat["ends"])

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes that it learned, in order of their numbers; none if it learned no classes."""
        data = self.facts.get("data") or {}
        sides = (data.get(name) or {} for name in ("train", "validation"))
        return tuple(next((side["classes"] for side in sides if side.get("classes")), ()))

    def learned_stop_tokens(self, tokenizer: Any) -> list[int]:
        """Returns the tokens that the answers it learned end in; none if it learned no conversations.

        Raises:
            CheckpointError: If the tokenizer does not know one of them.
        """
        if tokenizer is None or self.ends is None:
            return []
        known = tokenizer.get_vocab()
        absent = [name for name in self.ends if name not in known]
        if absent:
            raise CheckpointError(
                f"{self.run / 'run.json'}: answers end in '{absent[0]}', which the tokenizer lacks. Restore the run's."
            )
        return [int(known[name]) for name in self.ends]


# Files and folders that are read or written in a run's directory.
_NAMES = ("recipe.yaml", "run.json", "incidents.jsonl", "checkpoints", "model", "exports", "harness.json")


def is_run(folder: Path) -> bool:
    """True if a folder is a run's, or one of its checkpoints."""
    return (folder / "recipe.yaml").is_file() or _is_checkpoint(folder)


def find_weights(
    folder: Path, step: int | None = None, *, runs: Collection[str] = (trusted_code.SHIPPED,), trusted: bool = False
) -> WeightSource:
    """Returns the weights that a run or checkpoint holds, every byte compared with a checkpoint's manifest.

    Of a run it is the step that is asked for, else that of `model/` if it has finished, else the newest checkpoint's.

    Args:
        runs: Keys of its recipe whose code the caller runs; by default what opening a network may run.
        trusted: True if the person at the keyboard says that it may.

    Raises:
        CheckpointError: If there are none, or they are damaged.
        RecipeError: If the recipe beside them cannot be read, or leads to code that nobody vouches for.
    """
    run, store, name = locate(folder, step)
    with ExitStack() as stack:
        if name is None:
            weights, step = run / "model", _model_step(_facts(run))
        else:
            try:
                stack.enter_context(store.hold(name))
                integrity.verify_checkpoint(store, name)
                step = integrity.read_state(store, name)["step"]
            except CheckpointError as error:
                raise CheckpointError(f"{error}. Name another step with --step.") from error
            weights = store.local_folder(name) / "model"
        recipe, facts = load_recipe(run / "recipe.yaml"), _facts(run)
        began, name = Path(str((facts.get("base") or {}).get("name"))), recipe.model.name or "."
        same = began.is_absolute() and began.is_dir() and began.match(os.path.normpath(name).lstrip("./") or "/")
        if same and not Path(name).is_dir():
            # Where it was when the run began: the recipe's path counts from another working directory.
            recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": str(began)})})
        if not trusted:
            trusted_code.check_code(run, recipe, runs, weights)
        return WeightSource(run, weights, step, recipe, facts, trusted, stack.pop_all())


def locate(place: Path, step: int | None) -> tuple[Path, CheckpointStore, str | None]:
    """Returns a run, its checkpoints, and the name of one; None for what lies in `model/`.

    Raises:
        CheckpointError: If there are none.
    """
    if _is_checkpoint(place):
        if step is not None and step != step_of(place.resolve().name):
            raise CheckpointError(f"{place} is one checkpoint, and not that of step {step}. Leave --step out.")
        folder, store = place.resolve(), checkpoint_store.CheckpointStore(place.resolve().parent)
        run = folder.parent.parent
        _check_links(run)
        if not (run / "recipe.yaml").is_file():
            raise CheckpointError(
                f"{store.address(folder.name)} does not lie in its run's directory: {run} has no recipe.yaml, which "
                "says what the weights are. Put it back below checkpoints/ of its run."
            )
        return run, store, folder.name
    _check_links(place)
    if not (place / "recipe.yaml").is_file():
        if (wrong := recipe_paths.why_not(place, "run")) is not None:
            raise CheckpointError(f"{wrong} Weights are taken out of run directories and checkpoints.")
        raise CheckpointError(
            f"{place} is no run (it has no recipe.yaml) and no checkpoint of one (no manifest.json). Name a run "
            "directory, such as runs/sample, or runs/sample/checkpoints/step-00000100."
        )
    checkpoints = checkpoint_store.open_store(place)
    names = checkpoints.list_names()
    if step is not None:
        if name_of(step) not in names:
            there = ", ".join(str(step_of(name)) for name in reversed(names))
            raise CheckpointError(f"{place} has no checkpoint of step {step}. Its steps are {there or 'none'}.")
        return place, checkpoints, name_of(step)
    newest = next(iter(names), None)
    facts = _facts(place)
    if "finished" in facts and (place / "model").is_dir():
        return place, checkpoints, next((name for name in names if step_of(name) == _model_step(facts)), None)
    if newest is None:
        raise CheckpointError(
            f"{place} holds no weights: it has no checkpoint, and no model/ of a finished run. Let it train to a "
            "checkpoint (checkpoint.every_steps) or to its end."
        )
    return place, checkpoints, newest


def check_kind(run: Path, recipe: Recipe, kind: str) -> None:
    """Raises a `RecipeError` if an adapter is to be written of a run that has none which peft could open."""
    if recipe.lora is None:
        why = "trained all weights (its recipe has no lora section), so there is no adapter"
    elif recipe.model.rope_scaling is not None:
        why = "stretched the positions of its base (model.rope_scaling), of which an adapter says nothing"
    elif recipe.model.name is None:
        why = "put its adapter onto random weights, which lie in no folder that peft could open"
    else:
        return
    if kind == "adapter":
        raise RecipeError(f"{run} {why}. Use --as merged or --as merged-16bit.")


def _check_links(run: Path) -> None:
    """Refuses links, by which a run from elsewhere would have other places read and written."""
    for path in (*(run / name for name in _NAMES), *sorted((run / "model").glob("*"))):
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a symbolic link, and links in a run directory are not followed. Put its target there."
            )


def _is_checkpoint(folder: Path) -> bool:
    return checkpoint_store.find_checkpoint(folder)[1] is not None or step_of(folder.name) is not None


def _model_step(facts: dict[str, Any]) -> int | None:
    """Returns the step whose weights a finished run has written into `model/`."""
    step: int | None = facts.get("results", {}).get("model_step", facts.get("length", {}).get("num_steps"))
    return step


def _facts(run: Path) -> dict[str, Any]:
    return read_facts(run) if (run / RUN).exists() else {}
