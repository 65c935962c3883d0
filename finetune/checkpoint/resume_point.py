"""Finds where a run begins: at its start, or at a checkpoint, which all ranks verify and any backend restores."""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.checkpoint import integrity, run_fingerprint
from finetune.checkpoint.best_evaluation import still_ended
from finetune.checkpoint.checkpoint_store import CheckpointStore, find_checkpoint, sealed_name
from finetune.checkpoint.run_directory import RunDirectory
from finetune.checkpoint.tensor_files import TensorReader
from finetune.config.recipe_schema import Recipe
from finetune.distributed.backend import Backend
from finetune.distributed.state.weight_average import AVERAGE
from finetune.utils.errors import CheckpointError, RecipeError
from finetune.utils.quoting import to_stderr


class _FoundElsewhere(CheckpointError):
    """Another rank has found that a checkpoint is not whole."""


@dataclass(frozen=True)
class ResumePoint:
    """Place at which a run begins: its start, or a whole checkpoint."""

    store: CheckpointStore | None = None
    """Store of the checkpoint; None at the start."""
    name: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    """Content of the checkpoint's `state.json`; empty at the start."""
    held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)
    """Keeps others from deleting the checkpoint, until it is restored."""
    keep_optimizer: bool = True
    """True if the checkpoint's optimiser state fits this recipe's optimiser."""
    changed: tuple[str, ...] = ()
    """Keys that differ from the checkpoint's, as the recipe allows."""
    finished: bool = False
    """True if the run had come to its end, and all is written."""
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Path or URL of the checkpoint, for people."""
        return self.store.address(self.name) if self.store is not None else ""

    @property
    def source(self) -> str | None:
        """Absolute path or URL of the checkpoint; None at the start."""
        return self.store.address(self.name, absolute=True) if self.store is not None else None

    @property
    def step(self) -> int:
        """Steps taken already."""
        return int(self.state.get("step", 0))

    @property
    def position(self) -> int:
        """The position of the first row to read."""
        return int(self.state.get("position", 0))

    @property
    def tokens(self) -> int:
        """Targets trained on already."""
        return int(self.state.get("tokens", 0))

    def evaluation_is_due(self, last: int) -> bool:
        """Returns whether evaluation and samples are due before the first step: what a stop cut off, or all there is.

        Args:
            last: Steps of the whole run.
        """
        return not self.state["looked_at"] if self.state else last == 0

    def restore(self, backend: Backend, network: nn.Module, optimizer: Any, *, evaluated: bool = False) -> None:
        """Fills a prepared network and its optimiser from the checkpoint, if there is one.

        Every rank reads what it needs; nothing is gathered. `evaluated` fills in averages, if there are any, in place
        of the weights that go on learning.

        Raises:
            CheckpointError: Naming the tensor that is missing, unexpected, or of another shape.
        """
        store = self.store
        if store is None:
            return
        places: dict[str, dict[str, Any]] = self.state["tensors"]
        averages = {key.replace(AVERAGE, "parameter", 1): key for key in places if key.startswith(f"{AVERAGE}/")}
        if evaluated:
            places = places | {key: places[average] for key, average in averages.items()}
        dropped = () if backend.averages else averages.values()
        files: dict[str, TensorReader] = {}

        def load(key: str) -> torch.Tensor:
            file, name, shape = (places[key][fact] for fact in ("file", "name", "shape"))
            try:
                if file not in files:
                    files[file] = TensorReader(store.open_file(self.name, file))
                tensor = files[file].read(name)
            except (OSError, ValueError, LookupError, TypeError) as error:
                address = store.address(self.name, file)
                raise CheckpointError(f"{address}: the tensor {name} cannot be read: {error}") from error
            if list(tensor.shape) != shape:
                raise CheckpointError(f"{self.address}: {key} has shape {list(tensor.shape)}, not {shape}")
            return tensor

        with self.held:
            state = [key for key in places if not key.startswith(("frozen/", "buffer/")) and key not in dropped]
            wanted = [key for key in state if self.keep_optimizer or key.startswith("parameter/")]
            backend.write_state(network, optimizer, wanted, load)
            for name, buffer in network.named_buffers():
                if f"buffer/{name}" in places:
                    buffer.copy_(load(f"buffer/{name}"))
        backend.set_scaler_state(self.state.get("scaler"))

    def lines(self) -> list[str]:
        """Lines for people."""
        if self.store is None:
            return []
        state = self.state
        lines = [
            f"resumed at step {self.step} from {self.address}, saved under "
            f"{state['backend']} x {state['processes']} in {state['precision']}"
        ]
        if self.changed:
            lines.append(f"changed since then, as resume.allow says: {', '.join(self.changed)}")
        if not self.keep_optimizer:
            lines.append("optim.name differs: the optimiser starts without its state")
        return lines


def check_resume(mode: str, directory: RunDirectory) -> None:
    """Raises a `RecipeError` if a `resume.mode` cannot be followed, before data is read or processes have met."""
    own = bool(integrity.list_resumable(directory.checkpoints))
    if mode == "must" and not own:
        raise RecipeError(
            f"resume=must, but {directory.path} holds no checkpoint. Check output.dir, or set resume=auto to start."
        )
    if mode in ("auto", "must", "never"):
        return
    source = Path(mode)
    if (source / "checkpoints").is_symlink():
        raise RecipeError(
            f"resume={mode}: {source / 'checkpoints'} is a symbolic link, and links in a run directory are not "
            "followed. Give the checkpoint itself that you want to begin from."
        )
    store, name = find_checkpoint(source.resolve())
    if name is None and not store.list_names():
        raise RecipeError(
            f"resume={mode}: there is no checkpoint, and no run with one. Give auto, must, never, the path of a "
            "checkpoint (such as runs/run/checkpoints/step-00000120), or of a run."
        )
    starts = (directory.previous or {}).get("starts", [])
    if not own and not starts:
        return
    inside = directory.checkpoints.address(absolute=True) == store.address()
    if inside and name is not None and integrity.newest_address(store) not in (None, store.address(name)):
        raise RecipeError(
            f"resume={mode}: {directory.path} holds newer checkpoints, which would be overtaken. Choose another "
            "output.dir to begin from this one."
        )
    begun = [start.get("resumed_from") for start in starts]
    if not inside and not any(path and Path(path).is_relative_to(source.resolve()) for path in begun):
        raise RecipeError(
            f"output.dir: {directory.path} already holds a run, which was not begun from {mode}. Choose another "
            "output.dir for a run that begins there."
        )


def compare_with_previous(allow: tuple[str, ...], directory: RunDirectory, now: dict[str, Any]) -> None:
    """Raises a `RecipeError` if mathematics differ from the run's in keys beside `allow`, before a network is built."""
    saved = (directory.previous or {}).get("identity")
    if saved is not None:
        # Whether the size of micro-batches matters is known once the network is built, and compared then.
        known = {key: value for key, value in saved.items() if key != run_fingerprint.MICRO_SIZE}
        allowed = [name for name in allow if name != run_fingerprint.MICRO_SIZE]
        run_fingerprint.compare_identities(known, now, allowed, place=str(directory.path))


def kept_micro_size(recipe: Recipe, directory: RunDirectory) -> int | None:
    """Returns the size of micro-batches that a resumed run has to keep; None if it is free to choose."""
    before, asked = directory.previous or {}, recipe.batch.micro_size
    saved, facts = before.get("identity", {}).get(run_fingerprint.MICRO_SIZE), before.get("micro_size")
    same = asked in ("auto", facts.get("asked") if isinstance(facts, dict) else facts)
    free = {run_fingerprint.MICRO_SIZE, "batch"}.intersection(recipe.resume.allow)
    return None if saved is None or free or not same else int(saved)


def choose_resume_point(
    recipe: Recipe, directory: RunDirectory, backend: Backend, now: dict[str, Any], *, num_steps: int
) -> ResumePoint:
    """Returns the place to begin at of a run of `num_steps`, the same on every rank; every rank must call it.

    A run's own newest checkpoint comes first, also where it once began from another run's: so the same command
    resumes after every stop.

    Raises:
        RecipeError: If the checkpoint is of a run whose mathematics differ, or beyond this run's end; or if the run
            had checkpoints, and none is there.
        CheckpointError: If there are checkpoints, but none is whole; or if a whole one cannot be given its name.
    """
    # As rank 0 has read it, which alone holds the directory.
    previous: dict[str, Any] | None = backend.broadcast_object(directory.previous)
    own = find_newest(directory.checkpoints, backend, unsealed=True) if previous is not None else None
    before = previous or {}
    finished = "finished" in before and before["length"]["num_steps"] == num_steps
    finished = finished and still_ended(recipe, before["results"])
    point = own
    if own is None and previous is not None:
        if finished:
            return ResumePoint(finished=True, results=before["results"])
        if "finished" in before:
            raise RecipeError(
                f"output.dir: {directory.path} already holds a run, which has ended and left no checkpoint to resume "
                "from. Choose another output.dir, or set output.overwrite=true to delete it."
            )
        if backend.broadcast_object(directory.had_checkpoints()):
            raise RecipeError(
                f"output.dir: {directory.path} holds a run that has written checkpoints, but none is left in "
                f"{directory.checkpoints.address()}. Starting again at step 1 would overwrite its metrics. To resume, "
                "put a checkpoint back there, or choose another output.dir and begin from a copy by resume=PATH. To "
                "start again, choose another output.dir, or set output.overwrite=true, which deletes what is left."
            )
    if own is None and recipe.resume.mode not in ("auto", "must", "never"):
        # What is named may be a link; what lies in it may not.
        store, name = find_checkpoint(Path(recipe.resume.mode).resolve())
        point = verify_on_all_ranks(store, name, backend) if name is not None else find_newest(store, backend)
    if point is None:
        return ResumePoint()
    changed = run_fingerprint.compare_identities(point.state["identity"], now, recipe.resume.allow, place=point.address)
    if point.state["step"] > num_steps:
        raise RecipeError(
            f"{point.address} is at step {point.state['step']}, but this recipe ends at step {num_steps}. Raise the "
            "recipe's length, or choose another output.dir."
        )
    name = sealed_name(point.name)
    if own is not None and name != own.name:
        # Whole, though the run ended before it was sealed.
        directory.on_main(backend, lambda: directory.checkpoints.seal(own.name))
        if backend.is_main:
            to_stderr(f"{own.address} is whole, though the run ended before it got its name. It is {name} now.")
        point = replace(own, name=name)
    return replace(
        point,
        keep_optimizer="optim.name" not in changed,
        changed=tuple(changed),
        finished=finished,
        results=before["results"] if finished else point.state["results"],
    )


def find_newest(store: CheckpointStore, backend: Backend, *, unsealed: bool = False) -> ResumePoint | None:
    """Returns the newest whole checkpoint of a store, the same on every rank; None if there is none, whole or not.

    Every rank must call it. What is wrong with newer ones is reported on the rank that found it. With `unsealed`, one
    counts as well that is whole, and whose writer ended before it was sealed.

    Raises:
        CheckpointError: If there are checkpoints, but none is whole.
    """
    # Rank 0's list counts: another machine's view of a shared folder may lag behind.
    names: list[str] = backend.broadcast_object(
        integrity.list_resumable(store, unsealed=unsealed) if backend.is_main else []
    )
    if not names:
        return None
    for name in names:
        try:
            return verify_on_all_ranks(store, name, backend)
        except _FoundElsewhere:
            continue
        except CheckpointError as error:
            to_stderr(f"Checkpoint refused: {error}. Trying an older one.")
    raise CheckpointError(
        f"No checkpoint below {store.address()} is whole, as said above. Restore one from a copy, or choose another "
        "output.dir; output.overwrite=true starts from the beginning."
    )


def verify_on_all_ranks(store: CheckpointStore, name: str, backend: Backend) -> ResumePoint:
    """Returns a checkpoint whose files all ranks have read and compared with its manifest, each a part of them.

    Raises:
        CheckpointError: On every rank if it is not whole.
    """
    problem: CheckpointError | None = None
    state: dict[str, Any] = {}
    held = ExitStack()
    try:
        held.enter_context(store.hold(name))
        integrity.verify_checkpoint(store, name, share=backend.rank, shares=backend.world_size)
        state = integrity.read_state(store, name)
    except CheckpointError as error:
        problem = error
    failed = backend.all_reduce_sum(torch.tensor([float(problem is not None)], device=backend.device)).item()
    if failed:
        held.close()
    if problem is not None:
        raise problem
    if failed:
        raise _FoundElsewhere(f"{store.address(name)} is not whole, as another process found")
    return ResumePoint(store, name, state, held)
