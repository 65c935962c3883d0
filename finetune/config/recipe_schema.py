"""Sections of a recipe: every key, its type, its default and its meaning.

A text within `Annotated` is the key's unit; numbers have one.
"""

import os
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PerEpoch = Annotated[float, Field(ge=0.01)]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path, or a name that may be one, such as that of a model; `~` in front is the home directory."""

NAMES_OF_CODE = ("task.name", "task.loss", "optim.name", "eval.metrics")
"""Keys whose values may name Python code, as `file.py:object` or `package.module:object`."""


class Section(BaseModel):
    """A section of the recipe, immutable, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )
    short_for: ClassVar[str | None] = None
    """Key that a text in place of the section stands for."""
    exclusive: ClassVar[dict[tuple[str, ...], str]] = {}
    """Groups of keys of which a recipe takes one, each with the problem of a recipe that gives several."""


def is_given(values: Any, key: str) -> bool:
    """Tells if a section, or plain keys and values, gives a dotted key: neither null nor false."""
    for name in key.split("."):
        if isinstance(values, list | tuple):
            values = {str(index): item for index, item in enumerate(values)}.get(name)
        else:
            values = values.get(name) if isinstance(values, Mapping) else getattr(values, name, None)
    return values is not None and values is not False


def section_in(annotation: Any) -> type[Section] | None:
    """Returns the section type inside `Section`, `Section | None` or `tuple[Section, ...]`."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, Section) else None
    return next((s for s in map(section_in, get_args(annotation)) if s is not None), None)


class SampleSection(Section):
    """Text that the model generates during the run, for people to read."""

    short_for = "prompt"

    prompt: str = ""
    """Beginning of the text; with a `chat` section, a message of the user; for `seq2seq_lm` a source."""
    every_steps: Annotated[PositiveInt | None, "optimiser steps"] = None
    """Steps between samples during the run."""
    at_end: bool = True
    """Generate one after the last step."""
    max_new_tokens: Annotated[PositiveInt, "tokens"] = 100
    """Maximum number of tokens; the text is shorter if the model ends it."""
    temperature: Annotated[NonNegativeFloat, "factor"] = 0.8
    """Sampling temperature; 0 always takes the most likely token."""
    top_k: Annotated[PositiveInt | None, "tokens"] = 50
    """Sample from this many of the most likely tokens."""


class LogSection(Section):
    """Logging during training."""

    every_steps: Annotated[PositiveInt, "optimiser steps"] = 10
    """Steps between lines of `metrics.jsonl`, and of the output if it is not a terminal. The loss is read from the
    device only then."""
    profile: Annotated[PositiveInt | None, "optimiser steps"] = None
    """Profile this many steps after warm-up: a torch trace of each process, and a table of where the time of a step
    goes, in `DIR/profile`."""
    system_every_s: Annotated[PositiveFloat | None, "seconds"] = 10.0
    """Seconds between lines of `machines.jsonl`: CPU, memory, network, disk and GPUs of each machine."""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Trackers that also get metrics, samples, recipe and launch, below `DIR/trackers`; `wandb` runs offline unless
    WANDB_MODE says otherwise. Each is an extra of the same name."""


class OutputSection(Section):
    """Files of the run."""

    short_for = "dir"

    dir: Annotated[PathText, Field(min_length=1)] = "runs/run"
    """Run directory: recipe, metrics, `run.json`, the final model."""
    overwrite: bool = False
    """Delete a run that is in the directory, with its checkpoints and exports, and start again."""
    save_model: bool = True
    """Write the final model to `DIR/model`."""
    model: Literal["last", "best"] = "last"
    """The weights of `DIR/model`, and what commands take of the finished run: those of the last step, or of the best
    evaluation by `checkpoint.keep_best_by`, which is saved as a checkpoint."""


class CheckpointSection(Section):
    """Checkpoints, from which a run that was stopped resumes, on the same backend or another."""

    exclusive = {("every_steps", "per_epoch"): "give `every_steps` or `per_epoch`, not both"}

    every_steps: Annotated[PositiveInt | None, "optimiser steps"] = None
    """Steps between checkpoints."""
    per_epoch: Annotated[PerEpoch | None, "checkpoints an epoch"] = None
    """Checkpoints in each epoch, at equal distances, the last at its end; `0.5`: every second epoch."""
    every_minutes: Annotated[PositiveFloat | None, "minutes"] = 30.0
    """Minutes between checkpoints, by the clock of rank 0. A checkpoint is due by steps or minutes, whichever comes
    first."""
    at_end: bool = True
    """Save after the last step, so that a longer run can resume from it."""
    keep: Annotated[PositiveInt, "checkpoints"] = 2
    """Number of latest checkpoints to keep."""
    keep_best_by: str | None = "validation_loss"
    """Also keep the best checkpoint by this key of `metrics.jsonl`, such as `validation_rouge1`. Lower is better for
    loss, perplexity, and a key with a `-` before it. Only checkpoints at a step that was evaluated count."""
    asynchronous: bool = True
    """Write in the background while training goes on. Each process keeps a copy of its shard in host memory."""


def ranking(best_by: str) -> tuple[str, int]:
    """Returns the key that a `keep_best_by` names, and the sign that makes its highest value the best."""
    key = best_by.removeprefix("-")
    return key, -1 if key != best_by or key in ("validation_loss", "validation_perplexity") else 1


class ResumeSection(Section):
    """Resuming a run that was stopped."""

    short_for = "mode"

    mode: Annotated[PathText, Field(min_length=1)] = "auto"
    """`auto`: resume if `output.dir` holds this run, else start; `must`: resume or fail; `never`: start, and fail if
    there is a run; or the path of a checkpoint or another run to continue from."""
    allow: tuple[str, ...] = ()
    """Keys or sections whose values may differ from those of the checkpoint, such as `optim.lr` or `data`."""


Event = Literal["finished", "stopped", "failed", "diverged", "write_failed", "stalled", "straggler"]
"""An event of a run that an alert can tell of."""


class GuardSection(Section):
    """Limits at which a run ends early or warns, and who is told what happens to it."""

    max_skipped_steps: Annotated[PositiveInt, "optimiser steps"] = 5
    """Consecutive steps that may be skipped, because a loss or gradient is not finite, before the run ends."""
    grace_s: Annotated[PositiveFloat, "seconds"] = 120.0
    """Seconds from a request to stop (SIGTERM, SIGINT, SIGUSR1) until the process ends, whether or not a checkpoint was
    saved."""
    stall_s: Annotated[PositiveFloat | None, "seconds"] = 600.0
    """Seconds without progress after which the run ends, with the stacks of all ranks written down; at least ten times
    what a step takes, and six times as long until the first is done, in evaluations and saves. Null: never."""
    straggler: Annotated[PositiveFloat | None, "share of a step"] = 0.25
    """A rank that the others wait for during more than this share of each step is named. Null: none is."""
    alert: str | None = None
    """Who is told what happens to the run: a command, as a shell splits it into words, or `$NAME`, the environment
    variable of rank 0 that holds the URL of a webhook. Both get JSON."""
    alert_on: Annotated[tuple[Event, ...], Field(min_length=1)] = get_args(Event)[:-1]
    """Events to tell of. `write_failed`: a checkpoint or journal cannot be written, as on a full disk. Not told unless
    it is named: `straggler`, one rank that holds up the others."""

    @field_validator("alert", mode="before")
    @classmethod
    def _holds_no_secret(cls, value: Any) -> Any:
        # No message may repeat the value.
        if value is None:
            return value
        if not isinstance(value, str) or not value.strip():
            raise ValueError("write a command as one text, or the name of a variable as `$NAME`")
        if "://" in value:
            raise ValueError(
                "a webhook's URL is a secret, and a recipe is copied into run directories, checkpoints and trackers. "
                "Put it into an environment variable, and write the variable's name: `$NAME`, on a command line in "
                "single quotes"
            )
        if value.startswith("$") and re.fullmatch(r"\$[A-Za-z_][A-Za-z0-9_]*", value) is None:
            raise ValueError("write an environment variable as `$NAME`, alone; a command is run without a shell")
        try:
            shlex.split(value)
        except ValueError as error:
            raise ValueError(f"it cannot be split into words: {str(error).lower()}") from error
        return value


class TokenizerSection(Section):
    """The tokenizer. Empty: the one in the model's directory."""

    short_for = "name"
    exclusive = {("name", "vocab_size"): "give `name` (an existing tokenizer) or `vocab_size` (train one), not both"}

    name: PathText | None = None
    """A directory with a tokenizer, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub tokenizer."""
    vocab_size: Annotated[Annotated[int, Field(ge=260)] | None, "pieces"] = None
    """Train a byte-level BPE of this many pieces on the training documents (at least 256 bytes and the special
    tokens)."""


class Source(Section):
    """A source of documents: exactly one of `sample`, `path` and `hub`."""

    short_for = "path"
    exclusive = {("sample", "path", "hub"): "give exactly one of sample, path and hub"}

    sample: Annotated[PositiveInt | None, "stories"] = None
    """Number of stories to take from the built-in generator, which needs no network or files. With a `chat` section it
    generates conversations, unless `format` is `text`."""
    path: PathText | None = None
    """A file, glob, or directory, with those below it: .txt (documents end with a line `<|endoftext|>`), .jsonl, .json,
    .parquet, .csv, .tsv, .conll, .conllu (a word and its tag a line); or a directory written by `datasets`'
    `save_to_disk`. Relative paths count from the working directory."""
    hub: str | None = None
    """Name of a data set on the Hugging Face hub."""
    hub_config: str | None = None
    """Configuration of a hub data set that has several."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set."""
    split: str | None = None
    """Split of a hub data set (left out: `train`), of a saved `datasets` directory, or of a folder or glob whose files
    or folders are named after splits. A path with several needs it."""
    text_field: str = "text"
    """Field that holds the text of a document; for `token_classification` its words, as a list."""
    pair_field: str | None = None
    """Field that holds a second text of each document, such as `hypothesis` beside `premise`: a classifier or
    regression reads both as its tokenizer pairs them; for `seq2seq_lm` the text that is to be written, such as
    `summary`."""
    format: Literal["auto", "text", "messages", "sharegpt", "alpaca", "prompt", "pairs"] = "auto"
    """With a `chat` section: format of the conversations. `auto`: detected from the fields of the first record."""
    fields: dict[str, str] = Field(default_factory=dict)
    """With a `chat` section: paths of fields that the format does not find, such as `{user: instruction, assistant:
    instances.0.output}` or `{messages: chat.turns}`; `role` and `content` are fields of a turn. For `embedding` those
    of `anchor`, `positive` and `negative`."""
    label_field: str = "label"
    """Field that holds the class of a document, its number for `regression`, or for `token_classification` the class
    of each word, as a list; other tasks do not read it."""
    weight_field: str | None = None
    """Field that holds the factor of a document's losses in `causal_lm`, a number of 0 or more; conversations have it
    as `weight`. The loss is divided by the sum of weights."""
    weight: Annotated[PositiveFloat, "times an epoch"] = 1.0
    """Number of times that each document is used in an epoch: 2 repeats all, 0.5 keeps a fixed half (chosen by
    hash)."""
    limit: Annotated[PositiveInt | None, "documents"] = None
    """Read at most this many documents."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        given = [key for key in ("sample", "path", "hub") if getattr(self, key) is not None]
        if not given:
            raise ValueError("give exactly one of sample, path and hub (got none)")
        for key, kinds in (("split", ("path", "hub")), ("hub_config", ("hub",)), ("revision", ("hub",))):
            # Recipes of earlier runs have `split: train` everywhere.
            asked = getattr(self, key) is not None and (key, getattr(self, key)) != ("split", "train")
            if asked and given[0] not in kinds:
                raise ValueError(f"`{key}` is of a source with {' or '.join(kinds)}; remove it")
        return self


class EvalSection(Section):
    """Exact evaluation: every validation document once, weighted by tokens; and metrics of the model's output."""

    exclusive = {("every_steps", "per_epoch"): "give `every_steps` or `per_epoch`, not both"}

    every_steps: Annotated[PositiveInt | None, "optimiser steps"] = None
    """Steps between evaluations during the run."""
    per_epoch: Annotated[PerEpoch | None, "evaluations an epoch"] = None
    """Evaluations in each epoch, at equal distances, the last at its end; `0.5`: every second epoch."""
    at_end: bool = True
    """Evaluate after the last step."""
    micro_size: Annotated[PositiveInt | None, "rows a forward pass and process"] = None
    """Rows in one forward pass of one process; changes speed only. Left out: `batch.micro_size`."""
    metrics: tuple[PathText, ...] = ()
    """Metrics besides the loss. For texts generated for `prompts`: `exact_match`, `f1`, `rouge1`, `rouge2`, `rougeL`;
    for classes: `accuracy`, `f1_macro`; or your own function as `package.module:function` or `file.py:function`."""
    prompts: tuple[Source, ...] = ()
    """Prompts with references, for metrics of generated texts: records with `prompt` and `reference` or `references`;
    with a `chat` section also conversations, whose last answer is the reference."""
    max_new_tokens: Annotated[PositiveInt, "tokens"] = 100
    """Maximum number of tokens generated for a prompt; fewer if the model ends the text, or prompt and text fill
    `data.sequence_length`."""
    patience: Annotated[PositiveInt | None, "evaluations"] = None
    """End the run after this many consecutive evaluations without a better value of `checkpoint.keep_best_by`."""


class DataSection(Section):
    """The documents, and how they become rows of tokens."""

    short_for = "train"

    train: tuple[Source, ...] = ()
    """Sources of training documents."""
    validation: tuple[Source, ...] = ()
    """Sources of validation documents. Empty: a part of `train` is held out, see `validation_fraction`."""
    validation_fraction: Annotated[Fraction, "share of the documents"] = 0.01
    """Fraction of the training documents that is held out if `validation` is empty. It is chosen by a hash of the
    document, of preferences by that of their prompt, so that a document never moves between the two."""
    sequence_length: Annotated[int, Field(ge=2, le=2**24), "tokens"] = 1024
    """Tokens in a row (`T`)."""
    packing: Literal["wrapped", "documents", "padded"] = "documents"
    """`documents`: whole documents packed best-fit into rows, without attention between them; `wrapped`: one stream cut
    every `sequence_length` tokens (pre-training); `padded`: one document in each row."""
    long_documents: Literal["split", "truncate", "drop"] = "split"
    """Documents longer than a row (with `documents` and `padded`): `split` continues them in another row, `truncate`
    cuts off their end, `drop` leaves them out. The data report counts them. Documents of a classifier, of regression or
    of tagged words lose their end, whatever it says; a source or target of `seq2seq_lm` does, unless `drop` leaves out
    its pair."""
    remainder: Literal["keep", "drop"] = "keep"
    """The last, incomplete row of a `wrapped` stream: padded, or left out."""
    last_batch: Literal["carry", "drop"] = "carry"
    """Rows of an epoch that do not fill a global batch: `carry` completes the batch with rows of the next epoch, `drop`
    leaves them out of this epoch."""
    strip: bool = True
    """Remove white space around each document."""
    lowercase: bool = False
    """Lower-case each document."""
    add_bos: bool = True
    """Add the tokenizer's beginning-of-text token before each document, if it has one."""
    add_eos: bool = True
    """Add the tokenizer's end-of-text token after each document, so that the model learns to stop."""
    cache_dir: PathText = ".cache/finetune"
    """Directory of prepared tokens; safe to delete."""
    num_workers: Annotated[PositiveInt | None, "threads"] = None
    """Threads that tokenize. Left out: one for each core."""


class ChatSection(Section):
    """Conversations: their template, and the parts that are learned."""

    short_for = "template"

    template: PathText | None = None
    """Chat template: a Jinja file, or the name of one that ships: `alpaca`, `chatml`, `deepseek`, `gemma`, `gpt-oss`,
    `llama2`, `llama3`, `llama4`, `mistral`, `phi`, `phi4`, `plain` (words that any tokenizer can read), `qwen`,
    `qwen3`. Left out: the tokenizer's own."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """More variables of the template, such as `enable_thinking: false`."""
    train_on: Literal["assistant", "last", "completions", "all"] = "assistant"
    """Tokens that are learned: those of every answer, of the last answer only, of all answers after the last user turn
    (or of the completion, if the record has one), or all tokens. Answers with `weight: 0`, `train: false` or `loss:
    false` never are."""
    end_token: Literal["template", "add"] = "template"
    """End of answers: as the template writes and marks it, or always a special token that is learned. That is the one
    after the answer, or else the tokenizer's end-of-text token, which is added."""
    too_long: Literal["drop", "cut_left", "cut_right"] = "drop"
    """Conversations longer than a row: `drop` leaves them out, `cut_left` removes their oldest exchanges (the system
    message stays), `cut_right` cuts off their end. One that keeps no answer is left out. The data report counts
    them."""
    drop_tools: bool = False
    """Learn from conversations whose `tools` the template does not write, without the tools. Off: they are refused,
    because a model would learn to call functions that it never saw."""
    drop_reasoning: bool = False
    """Learn answers whose `reasoning_content` (or `thinking`) the template does not write, without the reasoning. Off:
    they are refused."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field(default_factory=dict)
    """Roles of other speakers, such as `{customer: user, agent: assistant}`."""


class ChecksSection(Section):
    """Limits on figures of the data report; data outside them end the run before the first step."""

    max_broken: Annotated[Fraction, "share of the conversations"] = 0.0
    """Maximum fraction of conversations that are left out because they are broken: an unknown role, an empty answer, a
    missing field, or refused by the template. At 0 the first one is an error, with its place."""
    max_unsupervised: Annotated[Fraction, "share of the conversations"] = 1.0
    """Maximum fraction of conversations that are left out because there is nothing to learn from."""
    max_too_long: Annotated[Fraction, "share of the documents"] = 1.0
    """Maximum fraction of documents that are cut or left out because they are longer than a row."""
    max_left_out: Annotated[Fraction, "share of the documents"] = 0.5
    """Maximum fraction of documents or conversations that are left out for whatever reason: without text, too long,
    broken, or without anything to learn."""
    max_overlap: Annotated[Fraction, "share of the documents"] = 1.0
    """Maximum fraction of validation documents that are also training documents."""
    min_supervised: Annotated[Fraction, "share of the tokens"] = 0.0
    """Minimum fraction of tokens that are learned."""
    min_ended: Annotated[Fraction, "share of the documents"] = 0.0
    """Minimum fraction of conversations whose last answer ends in a special token that is learned, or of documents that
    end with the tokenizer's end-of-text token."""
    max_lossy: Annotated[Fraction, "share of the documents"] = 1.0
    """Maximum fraction of the tested documents that the tokenizer does not decode to the same text."""
    max_mojibake: Annotated[Fraction, "share of the documents"] = 1.0
    """Maximum fraction of documents with signs of wrong decoding, such as `cafÃ©` or the replacement character."""
    max_nul: Annotated[Fraction, "share of the documents"] = 1.0
    """Maximum fraction of documents that contain NUL characters."""
    max_duplicate_keys: Annotated[Fraction, "share of the records"] = 1.0
    """Maximum fraction of JSON records in which an object has a key more than once; the last value is read."""


def _modules(other: str) -> AfterValidator:
    """Returns a validator of modules: their names, or one regular expression."""

    def check(value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError(f"name at least one module, or {other}")
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"the regular expression '{value}' does not compile: {error}") from error
        return value

    return AfterValidator(check)


class RopeScalingSection(Section):
    """Stretches the rotary positions of a pretrained model, for rows that are longer than those it was trained on."""

    type: Literal["linear", "dynamic", "yarn", "llama3"]
    """`linear` (Chen et al. 2023), `dynamic` (NTK-aware, by the length of rows), `yarn` (Peng et al. 2023) or `llama3`
    (that of Llama 3.1)."""
    factor: Annotated[float, Field(gt=1), "times"]
    """Ratio of the new number of positions to that of the pretrained model."""
    attention_factor: Annotated[float | None, Field(gt=0), "times"] = None
    """`yarn`: factor that scales attention. Left out: it follows from `factor`."""
    beta_fast: Annotated[float | None, Field(gt=0), "rotations"] = None
    """`yarn`: frequencies with at least this many rotations are unchanged. Left out: 32."""
    beta_slow: Annotated[float | None, Field(gt=0), "rotations"] = None
    """`yarn`: frequencies with at most this many rotations are fully scaled. Left out: 1."""
    low_freq_factor: Annotated[float | None, Field(gt=0), "times"] = None
    """`llama3`: wavelengths above the model's positions divided by this are fully scaled. Left out: 1."""
    high_freq_factor: Annotated[float | None, Field(gt=0), "times"] = None
    """`llama3`: wavelengths below the model's positions divided by this are unchanged. Left out: 4."""

    @model_validator(mode="after")
    def _of_its_type(self) -> Self:
        yarn, llama3 = ("attention_factor", "beta_fast", "beta_slow"), ("low_freq_factor", "high_freq_factor")
        for key in (*yarn, *llama3):
            kind = "yarn" if key in yarn else "llama3"
            if getattr(self, key) is not None and self.type != kind:
                raise ValueError(f"`{key}` belongs to type `{kind}`, not to `{self.type}`")
        return self


class ModelSection(Section):
    """The network and its initial weights."""

    short_for = "name"
    exclusive = {("name", "config"): "give `name` (pretrained weights) or `config` (random weights), not both"}

    name: PathText | None = None
    """A model directory, or a name on the Hugging Face hub. Left out: the model of `config`."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    config: dict[str, Any] | None = None
    """Start from random weights: `model_type`, and the sizes of the architecture under its own key names."""
    rope_scaling: RopeScalingSection | None = None
    """Extend a pretrained model to more positions than it was trained on."""
    attention: Literal[
        "auto", "packed", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "auto"
    """Attention implementation. `packed`: `sdpa`, applied to each document of a row by itself. `auto`: `packed` if the
    architecture supports it, else `sdpa`, else `eager`."""
    loss: Literal["auto", "chunked", "plain"] = "auto"
    """Computation of a language model's loss. `chunked`: by its head, some tokens at a time, so that the logits of all
    tokens never exist at once; `plain`: from all logits. `auto`: `chunked`, unless logits are scaled or capped after
    the head."""
    freeze: Annotated[str | tuple[str, ...] | None, _modules("`null`")] = None
    """Without `lora`: modules that are not trained, with everything in them. Names such as `[embed_tokens]`, or one
    regular expression that matches full names, such as `model.layers.[0-7]`."""
    quantization: Literal["nf4", "fp4", "int8"] | None = None
    """Hold the frozen linear weights in 4 bits (`nf4`, `fp4`; QLoRA, Dettmers et al. 2023) or 8 bits (`int8`, one scale
    for each row, Dettmers et al. 2022); needs `lora`. `nf4` is the better format of 4 bits."""
    double_quantization: bool = True
    """Also quantize the scales of the 4-bit weights: 0.516 bytes for each weight instead of 0.563."""
    neftune_alpha: Annotated[PositiveFloat | None, "factor"] = None
    """Add uniform noise in [-1, 1) x alpha / sqrt(L h) to the embeddings of a document's L tokens, each h numbers, in
    training only (NEFTune, Jain et al. 2023; 5 to 15 there). It depends on seed, step, row and token alone."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass: less memory, about a third more time. `selective` keeps the outputs
    of matrix products and attention, and recomputes the cheap rest."""
    activation_offload: bool = False
    """Keep activations in host memory until the backward pass needs them. Without a GPU they are there anyway."""
    compile: bool = False
    """Compile each layer with `torch.compile`: minutes before the first step, then faster steps."""
    fp8: bool | Literal["emulated"] = False
    """Compute the products of all linear modules but the first and the last in fp8, with a scale for each token; needs
    `precision: bf16`, torchao and a GPU that supports it (Ada, Hopper or later). `emulated`: the same on any device,
    slowly."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off, because it is code from the internet."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.rope_scaling is not None and self.name is None:
            raise ValueError("`rope_scaling` is for pretrained weights (`name`); `config` has `rope_parameters` itself")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("`config` needs `model_type`, for example `llama`")
        return self


class LoraSection(Section):
    """Low-rank adapters: the model is frozen, and small matrices beside its linear modules are trained."""

    rank: Annotated[PositiveInt, "columns"] = 16
    """Columns of the matrices `A` and rows of `B` (`r`): their size, and how much they can learn."""
    alpha: Annotated[PositiveFloat, "factor"] = 32.0
    """The output of an adapter is scaled by `alpha` / `rank`."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0), "share"] = 0.0
    """Fraction of an adapter's inputs that is dropped at random during training."""
    targets: Annotated[str | tuple[str, ...], _modules("`all-linear`")] = "all-linear"
    """Modules that get an adapter: `all-linear` (all but the output head), a list of names such as `[q_proj, v_proj]`,
    or one regular expression that matches full names."""
    rslora: bool = False
    """Scale by `alpha` / sqrt(`rank`) instead, so that large ranks learn as fast (Kalajdzievski 2023)."""
    dora: bool = False
    """Train the magnitude of each weight column apart from its direction (Liu et al. 2024): better, and slower."""
    init: Literal["default", "gaussian", "orthogonal", "pissa"] = "default"
    """Initial weights. `default`: `A` random, `B` zero; `gaussian`: the same with a normal `A`; `orthogonal`: both
    random, with a product of zero; `pissa`: the largest singular vectors, which are taken out of the frozen weights."""
    save_modules: tuple[str, ...] = ()
    """Modules that are fully trained, such as `[embed_tokens, lm_head]`, and saved with the adapter."""

    @model_validator(mode="after")
    def _even_rank(self) -> Self:
        if self.init == "orthogonal" and self.rank % 2:
            raise ValueError(f"`orthogonal` needs an even `rank`, got {self.rank}")
        return self


class TaskSection(Section):
    """The task that the model is trained for."""

    short_for = "name"

    name: PathText = "causal_lm"
    """`causal_lm`, `sequence_classification`, `regression` (a number for each document), `token_classification` (a
    class for each word), `seq2seq_lm` (a text from another one, by an encoder-decoder), `dpo`, `cpo`, `simpo`, `orpo`
    or `reward` (preferences of pairs of answers), `kto` (answers with labels), `embedding` (texts by their likeness),
    `distill` (from a teacher), or your own as `package.module:object` or `file.py:object`."""
    loss: PathText | None = None
    """Your own loss, named in the same way, in place of the task's: a function of network and batch that returns the
    sum over the batch's targets, a scalar in fp32."""
    num_labels: Annotated[PositiveInt | None, "classes"] = None
    """Number of classes of `sequence_classification` or `token_classification`. Left out: counted in the data."""
    class_weights: Annotated[Literal["balanced"] | tuple[PositiveFloat, ...] | None, "factors"] = None
    """Factors of the losses of classes in training: one for each class in the order of their numbers, such as `[1.0,
    5.0]`, or `balanced`: rows / (classes x rows of the class), which makes all classes count alike. The weighted losses
    are divided by the number of rows, not by the sum of weights. Where words have classes, words are counted in place
    of rows. Evaluation is not weighted."""
    label_smoothing: Annotated[float | None, Field(gt=0.0, lt=1.0), "share of the loss"] = None
    """Learn (1 - e) x cross-entropy + e x the mean of -log p over all tokens of the vocabulary, or all classes.
    Evaluation is not smoothed, so that its perplexity is one. Left out: 0."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments for a custom task."""


class FrozenModelSection(Section):
    """A second model, which stays as it is; its tokenizer has the vocabulary of the data's."""

    name: PathText
    """A model directory, or a name on the Hugging Face hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    quantization: Literal["nf4", "fp4", "int8"] | None = None
    """Hold its linear weights in 4 or 8 bits; see `model.quantization`."""


class PreferenceSection(Section):
    """Preferences: the losses of answers, by TRL's names, and their hyperparameters. Which losses a task has,
    and which of these keys a loss reads, is checked."""

    loss: tuple[str, ...] = ()
    """Losses whose weighted sum is learned. Left out: `sigmoid` for `dpo` and `cpo`. `dpo` has `sigmoid`, `hinge`,
    `ipo`, `sigmoid_norm`, `robust`, `exo_pair`, `discopop`, `sft`, `nca_pair`, `bco_pair`, `sppo_hard`, `apo_zero`,
    `apo_down`, `aot` and `aot_unpaired`; `cpo` has `sigmoid`, `hinge` and `ipo`; `kto` has `kto` (default) and
    `apo_zero_unpaired`; `simpo` and `orpo` have one."""
    loss_weights: Annotated[tuple[PositiveFloat, ...] | None, "factors"] = None
    """A factor for each loss. Left out: 1."""
    beta: Annotated[PositiveFloat, "factor of log ratios"] = 0.1
    """How much the difference of answers counts: the larger, the nearer the policy stays to the reference. Of `orpo`
    the factor of the odds ratio."""
    reference: Literal["start", "adapters_off"] | FrozenModelSection = "start"
    """What `dpo` and `kto` compare with. `start`: the model as training begins, whose scores of all rows are computed
    once and cached; `adapters_off`: the base without its adapters, computed anew in each step; or another model by
    `name`, whose scores are computed once and cached."""
    label_smoothing: Annotated[float, "share of labels"] = 0.0
    """Share of pairs whose answers are taken to be exchanged."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence from the reference that losses of score differences are derived from."""
    f_alpha: Annotated[float, "order"] = 0.5
    """Order of `alpha_divergence`."""
    discopop_tau: Annotated[PositiveFloat, "temperature"] = 0.05
    """Temperature of `discopop`."""
    ld_alpha: Annotated[float | None, "factor"] = None
    """What tokens beyond the length of the shorter answer count in the sums of `dpo` (LD-DPO). Left out: as others."""
    use_weighting: bool = False
    """Weight each pair of `dpo` by how likely both answers are to the policy, as if it had written them (WPO). `sft` is
    not weighted."""
    ranking: Literal["extremes", "all"] = "extremes"
    """Pairs of a record that ranks several answers: the best against the worst, or each against all that are worse."""
    gamma: Annotated[float, "margin"] = 0.5
    """Target margin of `simpo`."""
    sft_weight: Annotated[float | None, "factor"] = None
    """Factor of the mean cross-entropy of chosen tokens beside the loss of `cpo`, `simpo` and `orpo`. Left out: 1; 0
    for `simpo`."""
    desirable_weight: Annotated[PositiveFloat, "factor"] = 1.0
    """Factor of the losses of desirable answers of `kto`."""
    undesirable_weight: Annotated[PositiveFloat, "factor"] = 1.0
    """Factor of the losses of the other answers of `kto`."""
    centering: Annotated[float | None, "factor"] = None
    """Factor of the squared sum of both scores in the loss of `reward`, which keeps them near 0. Left out: 0."""


class EmbeddingSection(Section):
    """Embeddings of texts: how they are made of a network's output, and their loss."""

    pooling: Literal["mean", "cls", "last"] | None = None
    """What the embedding of a text is made of: the `mean` of its tokens, its first one (`cls`), or its `last` one. Left
    out: `mean` for encoders, `last` for decoders."""
    scale: Annotated[PositiveFloat, "factor of similarities"] = 20.0
    """Factor of cosine similarities in the loss, which is 1 / temperature."""
    symmetric: bool = False
    """Have each positive find its anchor among all anchors, too: the mean of both losses."""


class DistillationSection(Section):
    """Distillation: what the task `distill` learns of a teacher, by TRL's names."""

    teacher: FrozenModelSection
    """The network to learn from, with the student's vocabulary."""
    top_k: Annotated[PositiveInt | None, "tokens"] = None
    """Compute the teacher once, and keep so many of its likeliest tokens of each learned token; all others are one
    outcome. Left out: it is computed in each step, and all tokens count."""
    beta: Annotated[float, Field(ge=0.0, le=1.0), "share"] = 1.0
    """Divergence of both distributions: 0 for forward KL, 1 for reverse KL, and between them the generalized
    Jensen-Shannon divergence, whose mixture has this share of the teacher's."""
    temperature: Annotated[PositiveFloat, "divisor of logits"] = 1.0
    """Divides the logits of both before the divergence."""
    sft_weight: Annotated[float, Field(ge=0.0), "factor"] = 0.0
    """Factor of the targets' cross-entropy beside it."""


class BatchSection(Section):
    """Size of the batches."""

    global_size: Annotated[PositiveInt, "rows an optimiser step"] = 32
    """Rows in an optimiser step, over all processes. It stays the same on more processes."""
    micro_size: Annotated[PositiveInt | Literal["auto"], "rows a forward pass and process"] = 8
    """The most rows in one forward pass of one process: the largest number up to this is taken that divides the rows
    of a process. Changes memory and speed; it changes what is learned only if the network has batch norms, or dropout,
    whose masks depend on it. `auto`: the largest that fits, found by trial before the first run of such a model under
    such a launch."""

    @property
    def rows(self) -> int:
        """Micro-batch size as a number; 1 while `auto` is not resolved, which divides every batch."""
        return 1 if self.micro_size == "auto" else self.micro_size


class LengthSection(Section):
    """Length of the training: exactly one of the three."""

    exclusive = {("steps", "epochs", "tokens"): "give exactly one of steps, epochs and tokens"}

    steps: Annotated[NonNegativeInt | None, "optimiser steps"] = None
    """Optimiser steps; 0 evaluates only."""
    epochs: Annotated[PositiveFloat | None, "passes over the rows"] = None
    """Passes over the training rows."""
    tokens: Annotated[PositiveInt | None, "tokens"] = None
    """Tokens, counted as rows x `sequence_length`."""


class OptimSection(Section):
    """The optimiser."""

    short_for = "name"

    name: PathText = "AdamW"
    """A class of `torch.optim`; `LARS`, `LAMB`, `Muon`, `ScheduleFreeAdamW`; one of `bitsandbytes.optim` (`AdamW8bit`,
    `PagedAdamW`, `PagedAdamW8bit`, ...: on one process or under DDP, paged ones on a GPU); or your own as
    `package.module:Class` or `file.py:Class`. AdamW runs fused."""
    lr: Annotated[PositiveFloat, "rate"] = 3e-4
    """Peak learning rate; if `reference_batch` is given, for a global batch of that size."""
    weight_decay: Annotated[NonNegativeFloat, "share of the rate"] = 0.1
    """Weight decay. It is never applied to norms, biases and embeddings."""
    args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of the optimiser, such as `betas: [0.9, 0.95]`, `eps: 1e-8` or `momentum: 0.9`."""
    clip_norm: Annotated[PositiveFloat | None, "norm"] = 1.0
    """Maximum global gradient norm; larger gradients are scaled down. `null`: no clipping."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are summed over processes. `bf16` halves the traffic, and rounds."""
    lr_scaling: Literal["linear", "sqrt"] | None = None
    """Multiply `lr` by global batch / `reference_batch`, or by its square root (Goyal et al. 2017; Hoffer et
    al. 2017)."""
    reference_batch: Annotated[PositiveInt | None, "rows"] = None
    """Global batch, in rows, for which `lr` was found."""
    lora_plus: Annotated[PositiveFloat | None, "factor"] = None
    """LoRA+ (Hayou et al. 2024): the matrices `B` of adapters learn with `lr` times this, such as 16, as do trained
    tensors of one dimension."""
    layer_decay: Annotated[float | None, Field(gt=0.0, le=1.0), "factor a layer"] = None
    """Layer l of L learns with `lr` x `layer_decay`^(L + 1 - l), embeddings with l = 0, all else (the head, the last
    norm) with `lr`, as in BEiT (Bao et al. 2022)."""
    lr_factors: Annotated[dict[str, PositiveFloat], "factors"] = Field(default_factory=dict)
    """What rates of single modules are times `lr`, by names or last parts of names: `{lm_head: 10, embed_tokens:
    0.1}`."""
    ema_decay: Annotated[float | None, Field(gt=0.0, lt=1.0), "factor a step"] = None
    """Evaluate and write an exponential moving average of the weights: average = `ema_decay` x average + (1 -
    `ema_decay`) x weights, such as 0.999. The weights themselves go on learning as ever."""
    ema_every_steps: Annotated[PositiveInt, "optimiser steps"] = 1
    """Steps between two weights that are averaged."""

    @property
    def averages(self) -> bool:
        """True if the optimiser's state has averages of the weights, which are evaluated and written."""
        return self.ema_decay is not None or self.name == "ScheduleFreeAdamW"

    @field_validator("args")
    @classmethod
    def _said_elsewhere(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in ("lr", "weight_decay", "params"):
            if name in value:
                other = "the model gives them" if name == "params" else f"give it as `optim.{name}`"
                raise ValueError(f"`{name}` is no argument to give here: {other}")
        return value

    @model_validator(mode="after")
    def _one_average(self) -> Self:
        if self.ema_decay is not None and self.name == "ScheduleFreeAdamW":
            raise ValueError("`ema_decay`: ScheduleFreeAdamW keeps an average of its own. Remove one of both")
        if self.ema_every_steps != 1 and self.ema_decay is None:
            raise ValueError("`ema_every_steps` needs `ema_decay`, such as 0.999")
        return self

    @model_validator(mode="after")
    def _scaling_has_reference(self) -> Self:
        if (self.lr_scaling is None) != (self.reference_batch is None):
            raise ValueError("`lr_scaling` and `reference_batch` go together: give both or neither")
        return self


class ScheduleSection(Section):
    """The learning rate as a function of the step."""

    short_for = "name"
    exclusive = {("warmup_steps", "warmup_fraction"): "give `warmup_steps` or `warmup_fraction`, not both"}

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Schedule after the warm-up. `wsd` is warm-up, stable, decay."""
    warmup_steps: Annotated[NonNegativeInt | None, "optimiser steps"] = None
    """Steps over which the rate rises linearly from near 0 to its peak."""
    warmup_fraction: Annotated[Fraction | None, "share of the steps"] = None
    """The same, as a fraction of all steps."""
    floor: Annotated[Fraction, "share of the peak"] = 0.1
    """Rate at the end of the decay, as a fraction of the peak; `constant` has no decay."""
    decay_fraction: Annotated[Fraction, "share of the steps"] = 0.2
    """`wsd` only: fraction of all steps, at the end, over which the rate falls."""


class Recipe(Section):
    """All settings that decide what is learned."""

    exclusive = {
        ("task.class_weights", "task.loss"): (
            "task.class_weights: your own `task.loss` weighs classes by itself; remove one of both"
        ),
        ("task.label_smoothing", "task.loss"): (
            "task.label_smoothing: your own `task.loss` smooths labels itself; remove one of both"
        ),
        ("model.freeze", "lora"): (
            "model.freeze: with a `lora` section the whole model is frozen already. Remove one of both"
        ),
        ("model.fp8", "lora"): (
            "model.fp8: it is for linear weights that are trained, and a `lora` section freezes them (packed ones, by "
            "model.quantization, have products of their own). Set fp8 to false, or remove `lora`"
        ),
    }

    task: TaskSection = TaskSection()
    model: ModelSection = ModelSection()
    lora: LoraSection | None = None
    """Left out: all weights are trained."""
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection()
    chat: ChatSection | None = None
    """Left out: sources hold documents, not conversations."""
    preference: PreferenceSection | None = None
    """Left out: the defaults, for tasks that learn preferences."""
    embedding: EmbeddingSection | None = None
    """Left out: the defaults, for the task `embedding`."""
    distillation: DistillationSection | None = None
    """The teacher of the task `distill`."""
    checks: ChecksSection = ChecksSection()
    batch: BatchSection = BatchSection()
    length: LengthSection = LengthSection()
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    eval: EvalSection = EvalSection()
    sample: SampleSection | None = None
    """Left out: no samples are generated."""
    log: LogSection = LogSection()
    output: OutputSection = OutputSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resume: ResumeSection = ResumeSection()
    guard: GuardSection = GuardSection()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the network's computations. Weights, optimiser state, reductions and the loss stay fp32. `auto`: bf16 if
    a GPU supports it, else fp32."""
    seed: Annotated[int, Field(ge=0, lt=2**63), "number"] = 0
    """Seed of the initial weights, the order of rows, and dropout."""

    @property
    def loss_by_head(self) -> bool:
        """True if the head of a language model may compute the loss, in chunks."""
        return self.model.loss != "plain" and self.task.loss is None

    @property
    def frozen_models(self) -> dict[str, FrozenModelSection]:
        """Second models, by their keys."""
        named = {
            "preference.reference": self.preference.reference if self.preference is not None else None,
            "distillation.teacher": self.distillation.teacher if self.distillation is not None else None,
        }
        return {key: section for key, section in named.items() if isinstance(section, FrozenModelSection)}

    def of_frozen(self, section: FrozenModelSection) -> Self:
        """Returns the recipe by which a second model is read: with that one as its model, and its own tokenizer."""
        own = self.model
        model = ModelSection(**section.model_dump(), attention=own.attention, loss=own.loss)
        return self.model_copy(update={"model": model, "lora": None, "tokenizer": TokenizerSection()})

    def with_micro_size(self, rows: int) -> Self:
        """Returns the recipe with another size of micro-batches."""
        return self.model_copy(update={"batch": self.batch.model_copy(update={"micro_size": rows})})

    @field_validator("tokenizer", "checks", mode="before")
    @classmethod
    def _left_out(cls, value: Any, info: ValidationInfo) -> Any:
        """Takes `null` for left out: these two sections do nothing unless they have a key."""
        return cls.model_fields[str(info.field_name)].default if value is None else value

    @model_validator(mode="after")
    def _free_of_schedules(self) -> Self:
        if self.optim.name == "ScheduleFreeAdamW" and self.schedule.name != "constant":
            raise ValueError(
                f"schedule.name: ScheduleFreeAdamW averages in place of a decay, got {self.schedule.name}. Set it to "
                "constant; a warm-up may stay"
            )
        return self

    @model_validator(mode="after")
    def _lora_plus_has_adapters(self) -> Self:
        if self.optim.lora_plus is not None and self.lora is None:
            raise ValueError("optim.lora_plus: it is for adapters. Add a `lora` section, or leave it out")
        return self

    @model_validator(mode="after")
    def _quantised_is_frozen(self) -> Self:
        if self.model.quantization is None:
            return self
        if self.lora is None:
            raise ValueError(
                f"model.quantization: quantized weights ({self.model.quantization}) cannot be trained. Add a `lora` "
                "section, whose adapters are, or leave quantization out"
            )
        if self.lora.init == "pissa":
            raise ValueError(
                "lora.init: `pissa` takes singular vectors out of the weights, which model.quantization has packed. "
                "Take another init, or leave quantization out"
            )
        return self
