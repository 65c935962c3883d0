"""The sections of a recipe on what happens while a run goes: looked at, written, saved, resumed, stopped."""

from typing import Annotated

from pydantic import Field

from finetune.section import PositiveInt, Section


class EvalSection(Section):
    """Exact evaluation: every validation document once, weighted by tokens."""

    every_steps: PositiveInt | None = None
    """Steps between evaluations during the run."""
    at_end: bool = True
    """Evaluate after the last step."""
    micro_size: PositiveInt | None = None
    """Rows in one forward pass of one process; changes speed only. Left out: `batch.micro_size`."""


class SampleSection(Section):
    """Text that the model writes during the run, to be looked at."""

    prompt: str = ""
    """What the text begins with; with a `chat` section, what a user says."""
    every_steps: PositiveInt | None = None
    """Steps between samples during the run."""
    at_end: bool = True
    """Write one after the last step."""
    max_new_tokens: PositiveInt = 100
    """Tokens at most; shorter if the model ends the text."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """0 always takes the likeliest token."""
    top_k: PositiveInt | None = 50
    """Choose among this many likeliest tokens."""


class LogSection(Section):
    """What is written while training."""

    every_steps: PositiveInt = 10
    """Steps between lines of `metrics.jsonl`, and of the output where there is no terminal; the loss is read from the
    device only then."""
    profile: PositiveInt | None = None
    """Profile this many steps, once the run is warm: a torch trace of each process and a table of where a step's time
    goes, in `DIR/profile`."""
    trackers: tuple[str, ...] = ()
    """Accelerate trackers such as `tensorboard` or `wandb`. Off unless named here."""


class OutputSection(Section):
    """Where the run's files go."""

    dir: Annotated[str, Field(min_length=1)] = "runs/run"
    """The run directory: recipe, metrics, `run.json`, the final model."""
    overwrite: bool = False
    """Delete a run that the directory already holds, checkpoints and exports too, and start anew."""
    save_model: bool = True
    """Write the final model to `DIR/model`."""


class CheckpointSection(Section):
    """Saving what a run needs to go on after it was stopped, by whatever means, on this or any other backend."""

    every_steps: PositiveInt | None = None
    """Steps between checkpoints."""
    every_minutes: Annotated[float, Field(gt=0)] | None = 30.0
    """Minutes between checkpoints, by rank 0's clock; whichever of the two comes first."""
    at_end: bool = True
    """Save after the last step, so that a longer run can go on from it."""
    keep: PositiveInt = 2
    """How many of the newest stay."""
    keep_best: bool = True
    """Keep the one with the lowest validation loss as well. Only those saved at a step that was evaluated count."""
    asynchronous: bool = True
    """Write behind the training. It costs host memory: each process keeps a copy of its share."""


class ResumeSection(Section):
    """Going on where a run was stopped. `resume=VALUE` is short for `resume.mode=VALUE`."""

    mode: Annotated[str, Field(min_length=1)] = "auto"
    """`auto`: go on if `output.dir` holds this run, else start; `must`: go on or fail; `never`: start, and fail if
    there is a run; or the path of a checkpoint or of another run, to begin from."""
    allow: tuple[str, ...] = ()
    """Keys or sections whose values may differ from the checkpoint's, such as `optim.lr` or `data`."""


class GuardSection(Section):
    """When a run gives up."""

    max_skipped_steps: PositiveInt = 5
    """Steps in a row that are skipped, because a loss or gradient is not finite, before the run stops."""
    grace_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds from a request to stop (SIGTERM, SIGINT, SIGUSR1) until the process ends, saved or not."""
