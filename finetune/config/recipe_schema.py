"""The sections of a recipe: every key, its type, its default and what it means.

A text within `Annotated` is the key's unit; numbers have one.
"""

import json
import os
import re
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path, or what may be one, such as a model's name: `~` in front is the home directory."""


class Section(BaseModel):
    """One level of the recipe: immutable, and it knows all of its keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )
    short_for: ClassVar[str | None] = None
    """The key that a text in place of the section stands for."""


def section_in(annotation: Any) -> type[Section] | None:
    """The section type inside `Section`, `Section | None` or `tuple[Section, ...]`."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, Section) else None
    return next((s for s in map(section_in, get_args(annotation)) if s is not None), None)


class SampleSection(Section):
    """Text that the model writes during the run, to be looked at."""

    short_for = "prompt"

    prompt: str = ""
    """What the text begins with; with a `chat` section, what a user says."""
    every_steps: Annotated[PositiveInt | None, "optimiser steps"] = None
    """Steps between samples during the run."""
    at_end: bool = True
    """Write one after the last step."""
    max_new_tokens: Annotated[PositiveInt, "tokens"] = 100
    """Tokens at most; shorter if the model ends the text."""
    temperature: Annotated[NonNegativeFloat, "factor"] = 0.8
    """0 always takes the likeliest token."""
    top_k: Annotated[PositiveInt | None, "tokens"] = 50
    """Choose among this many likeliest tokens."""


class LogSection(Section):
    """What is written while training."""

    every_steps: Annotated[PositiveInt, "optimiser steps"] = 10
    """Steps between lines of `metrics.jsonl`, and of the output where there is no terminal; the loss is read from the
    device only then."""
    profile: Annotated[PositiveInt | None, "optimiser steps"] = None
    """Profile this many steps, once the run is warm: a torch trace of each process and a table of where a step's time
    goes, in `DIR/profile`."""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where to write metrics, samples, recipe and launch as well, below `DIR/trackers`; `wandb` offline unless
    WANDB_MODE says otherwise. Each is an extra of the same name."""


class OutputSection(Section):
    """Where the run's files go."""

    short_for = "dir"

    dir: Annotated[PathText, Field(min_length=1)] = "runs/run"
    """The run directory: recipe, metrics, `run.json`, the final model."""
    overwrite: bool = False
    """Delete a run that the directory already holds, checkpoints and exports too, and start anew."""
    save_model: bool = True
    """Write the final model to `DIR/model`."""


class CheckpointSection(Section):
    """Saving what a run needs to resume after it was stopped, by whatever means, on this or any other backend."""

    every_steps: Annotated[PositiveInt | None, "optimiser steps"] = None
    """Steps between checkpoints."""
    every_minutes: Annotated[PositiveFloat | None, "minutes"] = 30.0
    """Minutes between checkpoints, by rank 0's clock; whichever of the two comes first."""
    at_end: bool = True
    """Save after the last step, so that a longer run can resume from it."""
    keep: Annotated[PositiveInt, "checkpoints"] = 2
    """How many of the newest stay."""
    keep_best_by: str | None = "validation_loss"
    """Keep the one that is best by this key of `metrics.jsonl` as well, such as `validation_rouge1`. Lower is better
    for loss, perplexity, and a key with a `-` before it. Only those saved at a step that was evaluated count."""
    asynchronous: bool = True
    """Write behind the training. It costs host memory: each process keeps a copy of its share."""


def ranking(best_by: str) -> tuple[str, int]:
    """The key that a `keep_best_by` names, and what to multiply its values by so that the highest is the best."""
    key = best_by.removeprefix("-")
    return key, -1 if key != best_by or key in ("validation_loss", "validation_perplexity") else 1


class ResumeSection(Section):
    """Resuming where a run was stopped."""

    short_for = "mode"

    mode: Annotated[PathText, Field(min_length=1)] = "auto"
    """`auto`: resume if `output.dir` holds this run, else start; `must`: resume or fail; `never`: start, and fail if
    there is a run; or the path of a checkpoint or of another run, to begin from."""
    allow: tuple[str, ...] = ()
    """Keys or sections whose values may differ from the checkpoint's, such as `optim.lr` or `data`."""


class GuardSection(Section):
    """When a run gives up."""

    max_skipped_steps: Annotated[PositiveInt, "optimiser steps"] = 5
    """Steps in a row that are skipped, because a loss or gradient is not finite, before the run stops."""
    grace_s: Annotated[PositiveFloat, "seconds"] = 120.0
    """Seconds from a request to stop (SIGTERM, SIGINT, SIGUSR1) until the process ends, saved or not."""


class TokenizerSection(Section):
    """How text becomes tokens. Empty: the tokenizer that lies beside the model."""

    short_for = "name"

    name: PathText | None = None
    """A directory with a tokenizer, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub tokenizer."""
    vocab_size: Annotated[Annotated[int, Field(ge=260)] | None, "pieces"] = None
    """Train a byte-level BPE of this many pieces on the training documents (256 bytes + specials or more)."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.name is not None and self.vocab_size is not None:
            raise ValueError("give `name` (an existing tokenizer) or `vocab_size` (train one), not both")
        return self


class Source(Section):
    """One place that documents come from: exactly one of `sample`, `path` and `hub`."""

    short_for = "path"

    sample: Annotated[PositiveInt | None, "stories"] = None
    """Take this many stories of the built-in generator; with a `chat` section conversations, unless `format` is
    `text` (no network, no files)."""
    path: PathText | None = None
    """A file or glob: .txt (documents end with a line `<|endoftext|>`), .jsonl, .json, .parquet, .csv; or a
    directory written by `datasets`' `save_to_disk`. Relative paths count from the working directory."""
    hub: str | None = None
    """A data set name on the Hugging Face hub."""
    hub_config: str | None = None
    """The configuration of a hub data set that has several."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set."""
    split: str = "train"
    """Which split of a hub data set or of a saved `datasets` directory."""
    text_field: str = "text"
    """The field that holds a document's text."""
    format: Literal["auto", "text", "messages", "sharegpt", "alpaca", "prompt", "pairs"] = "auto"
    """With a `chat` section: how records say a conversation. `auto`: told by the fields of the first record."""
    fields: dict[str, str] = Field(default_factory=dict)
    """With a `chat` section: where fields lie that the format does not find, as paths such as
    `{user: instruction, assistant: instances.0.output}` or `{messages: chat.turns}`."""
    label_field: str = "label"
    """The field that holds a document's class; read by sequence classification only."""
    weight: Annotated[PositiveFloat, "times an epoch"] = 1.0
    """How often each document counts an epoch: 2 repeats all, 0.5 keeps a fixed half (chosen by hash)."""
    limit: Annotated[PositiveInt | None, "documents"] = None
    """Read at most this many documents."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        given = [key for key in ("sample", "path", "hub") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of sample, path and hub (got {', '.join(given) or 'none'})")
        return self


class EvalSection(Section):
    """Exact evaluation: every validation document once, weighted by tokens; and metrics of what the model puts out."""

    every_steps: Annotated[PositiveInt | None, "optimiser steps"] = None
    """Steps between evaluations during the run."""
    at_end: bool = True
    """Evaluate after the last step."""
    micro_size: Annotated[PositiveInt | None, "rows a forward pass and process"] = None
    """Rows in one forward pass of one process; changes speed only. Left out: `batch.micro_size`."""
    metrics: tuple[PathText, ...] = ()
    """What is computed beside the loss. Of texts that are generated for `prompts`: `exact_match`, `f1`, `rouge1`,
    `rouge2`, `rougeL`; of classes: `accuracy`, `f1_macro`; or your own function as `package.module:function` or
    `file.py:function`."""
    prompts: tuple[Source, ...] = ()
    """Prompts with references, for metrics of generated texts: records with `prompt` and `reference` or `references`;
    with a `chat` section also conversations, whose last answer is the reference."""
    max_new_tokens: Annotated[PositiveInt, "tokens"] = 100
    """Tokens at most that are generated for a prompt; fewer if the model ends the text, or prompt and text fill
    `data.sequence_length`."""
    patience: Annotated[PositiveInt | None, "evaluations"] = None
    """End the run after so many evaluations in a row without a better value of `checkpoint.keep_best_by`."""


class DataSection(Section):
    """The documents and how they become rows of tokens."""

    short_for = "train"

    train: tuple[Source, ...] = ()
    """What is learned from."""
    validation: tuple[Source, ...] = ()
    """What evaluation reads. Empty: a part of `train` is held out, see `validation_fraction`."""
    validation_fraction: Annotated[Fraction, "share of the documents"] = 0.01
    """Share of the training documents held out if `validation` is empty; picked by a hash of the document,
    so that a document never moves between the two."""
    sequence_length: Annotated[int, Field(ge=2), "tokens"] = 1024
    """Tokens a row (`T`)."""
    packing: Literal["wrapped", "documents", "padded"] = "documents"
    """`documents`: whole documents packed best-fit into rows, each blind to the others; `wrapped`: one stream
    cut every `sequence_length` tokens (pre-training); `padded`: one document a row."""
    long_documents: Literal["split", "truncate", "drop"] = "split"
    """What happens to documents longer than a row (`documents` and `padded`): continue in another row, lose
    their end, or be left out. The data report counts them."""
    remainder: Literal["keep", "drop"] = "keep"
    """The last, incomplete row of a `wrapped` stream: padded, or left out."""
    last_batch: Literal["carry", "drop"] = "carry"
    """The rows of an epoch that do not fill a global batch: completed with rows of the next epoch, or left
    out of this one."""
    strip: bool = True
    """Remove white space around each document."""
    lowercase: bool = False
    """Lower-case each document."""
    add_bos: bool = True
    """Put the tokenizer's begin-of-text token before each document, if it has one."""
    add_eos: bool = True
    """Put the tokenizer's end-of-text token behind each document, so that a model learns to stop."""
    cache_dir: PathText = ".cache/finetune"
    """Where prepared tokens are kept; safe to delete."""
    num_workers: Annotated[PositiveInt | None, "threads"] = None
    """Threads that tokenise. Left out: one a core."""


class ChatSection(Section):
    """Conversations: how they are written, and what of them is learned."""

    short_for = "template"

    template: PathText | None = None
    """The chat template: a Jinja file, or `plain` for the one that ships. Left out: the tokenizer's own."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """More variables of the template, such as `enable_thinking: false`."""
    train_on: Literal["assistant", "last", "completions", "all"] = "assistant"
    """What is learned: every answer, the last one only, all answers behind the last user turn (or the
    completion, where the record has one), or every token. Answers with `weight: 0`, `train: false` or `loss: false`
    never are."""
    end_token: Literal["template", "add"] = "template"
    """How answers end: as the template writes and marks them, or always with a special token that is learned:
    the one behind the answer, else the tokenizer's end-of-text token, which is then put there."""
    too_long: Literal["drop", "cut_left", "cut_right"] = "drop"
    """What becomes of conversations longer than a row: left out, or without their oldest exchanges (the system
    message stays), or without their end. One that keeps no answer is left out. The data report counts them."""
    drop_tools: bool = False
    """Learn from conversations whose `tools` the template does not write, without these. Off: they are refused, because
    a model would learn calls of functions that it never saw."""
    drop_reasoning: bool = False
    """Learn answers whose `reasoning_content` (or `thinking`) the template does not write, without it. Off: they are
    refused."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field(default_factory=dict)
    """Roles of more speakers, such as `{customer: user, agent: assistant}`."""


class ChecksSection(Section):
    """What the data report may say; anything else ends the run before the first step."""

    max_broken: Annotated[Fraction, "share of the conversations"] = 0.0
    """Largest share of conversations that are left out because they are broken: an unknown role, an empty answer,
    a missing field, or refused by the template. At 0 the first one is an error, with its place."""
    max_unsupervised: Annotated[Fraction, "share of the conversations"] = 1.0
    """Largest share of conversations that are left out because there is nothing to learn from."""
    max_too_long: Annotated[Fraction, "share of the documents"] = 1.0
    """Largest share of documents that lost something, or were left out, because they are longer than a row."""
    max_overlap: Annotated[Fraction, "share of the documents"] = 1.0
    """Largest share of validation documents that are training documents too."""
    min_supervised: Annotated[Fraction, "share of the tokens"] = 0.0
    """Smallest share of tokens that are learned."""
    min_ended: Annotated[Fraction, "share of the documents"] = 0.0
    """Smallest share of conversations whose last answer ends in a special token that is learned, or of documents that
    the tokenizer's end-of-text token ends."""
    max_lossy: Annotated[Fraction, "share of the documents"] = 1.0
    """Largest share of documents, of those that are tried, that the tokenizer does not give back as they were."""
    max_mojibake: Annotated[Fraction, "share of the documents"] = 1.0
    """Largest share of documents with signs of a wrong decoding, such as `cafÃ©` or the replacement character."""
    max_nul: Annotated[Fraction, "share of the documents"] = 1.0
    """Largest share of documents that hold NUL characters."""
    max_duplicate_keys: Annotated[Fraction, "share of the records"] = 1.0
    """Largest share of JSON records with a key that an object has more than once; its last value is read."""


def _names_or_expression(value: str | tuple[str, ...], other: str) -> str | tuple[str, ...]:
    if not value:
        raise ValueError(f"name at least one module, or {other}")
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"the regular expression '{value}' does not compile: {error}") from error
    return value


def _size_or_auto(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if type(value) is not int or value < 1:
        raise ValueError(f"give a whole number above 0, or `auto`; got {json.dumps(value, default=str)}")
    return value


_OF_ONE_TYPE = {
    "attention_factor": "yarn",
    "beta_fast": "yarn",
    "beta_slow": "yarn",
    "low_freq_factor": "llama3",
    "high_freq_factor": "llama3",
}


class RopeScalingSection(Section):
    """Stretches the rotary positions of a pretrained model, for rows that are longer than those it was trained on."""

    type: Literal["linear", "dynamic", "yarn", "llama3"]
    """`linear` (Chen et al. 2023), `dynamic` (NTK-aware, by the length of rows), `yarn` (Peng et al. 2023) or `llama3`
    (that of Llama 3.1)."""
    factor: Annotated[float, Field(gt=1), "times"]
    """How many times as many positions the model has then."""
    attention_factor: Annotated[float | None, Field(gt=0), "times"] = None
    """`yarn`: what attention is scaled by; left out, it follows from `factor`."""
    beta_fast: Annotated[float | None, Field(gt=0), "rotations"] = None
    """`yarn`: rotations from which on a frequency stays as it is; left out, 32."""
    beta_slow: Annotated[float | None, Field(gt=0), "rotations"] = None
    """`yarn`: rotations up to which a frequency is stretched whole; left out, 1."""
    low_freq_factor: Annotated[float | None, Field(gt=0), "times"] = None
    """`llama3`: wavelengths above the model's positions divided by it are stretched whole; left out, 1."""
    high_freq_factor: Annotated[float | None, Field(gt=0), "times"] = None
    """`llama3`: wavelengths below the model's positions divided by it stay as they are; left out, 4."""

    @model_validator(mode="after")
    def _of_its_type(self) -> Self:
        for key, kind in _OF_ONE_TYPE.items():
            if getattr(self, key) is not None and self.type != kind:
                raise ValueError(f"`{key}` belongs to type `{kind}`, not to `{self.type}`")
        return self


class ModelSection(Section):
    """The network and where its first weights come from."""

    short_for = "name"

    name: PathText | None = None
    """A model directory, or a name on the Hugging Face hub. Leave out to start from `config`."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    config: dict[str, Any] | None = None
    """Start from random weights: `model_type` plus the architecture's own sizes, in its own key names."""
    rope_scaling: RopeScalingSection | None = None
    """Of a pretrained model: more positions than it was trained on."""
    attention: Literal[
        "auto", "packed", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "auto"
    """The attention implementation that the architecture is asked to use. `packed`: `sdpa`, but each document of a row
    by itself, and told where they begin. `auto`: `packed` where the architecture can, else `sdpa`, else `eager`."""
    loss: Literal["auto", "chunked", "plain"] = "auto"
    """How a language model's loss is computed. `chunked`: by its head, some tokens at a time, so that all logits never
    exist at once; `plain`: from all logits. `auto`: chunked, but where logits are scaled or capped behind the head."""
    freeze: str | tuple[str, ...] | None = None
    """Without `lora`: modules that are not trained, with all that is in them: names such as `[embed_tokens]`, or one
    regular expression that matches whole names, such as `model.layers.[0-7]`."""
    quantization: Literal["nf4", "fp4", "int8"] | None = None
    """Hold the frozen linear weights in 4 bits (QLoRA, Dettmers et al. 2023) or 8 (`int8`, one scale a row, Dettmers et
    al. 2022); needs `lora`. `nf4` is the better one of 4 bits."""
    double_quantization: bool = True
    """Quantise the scales of the 4-bit weights as well: 0.516 bytes a weight instead of 0.563."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass: less memory, about a third more time. `selective` keeps what matrix
    products and attention put out, and recomputes the cheap rest."""
    activation_offload: bool = False
    """Keep activations in host memory until the backward pass needs them. On a machine without a GPU they are there."""
    compile: bool = False
    """Compile each layer by `torch.compile`: minutes before the first step, and faster ones then."""
    fp8: bool | Literal["emulated"] = False
    """Compute the products of linear modules in fp8, all but the first and the last, with a scale for each token; needs
    `precision: bf16`, torchao and a GPU that can (Ada, Hopper or later). `emulated`: the same on any device, slowly."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off, because it is code from the internet."""

    @field_validator("freeze")
    @classmethod
    def _meant(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        return None if value is None else _names_or_expression(value, "`null`")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.name is not None and self.config is not None:
            raise ValueError("give `name` (pretrained weights) or `config` (random weights), not both")
        if self.rope_scaling is not None and self.name is None:
            raise ValueError("`rope_scaling` is for pretrained weights (`name`); `config` has `rope_parameters` itself")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("`config` needs `model_type`, for example `llama`")
        return self


class LoraSection(Section):
    """Low-rank adapters: the model stays frozen, and small matrices beside its linear modules are trained."""

    rank: Annotated[PositiveInt, "columns"] = 16
    """Columns of the matrices `A` and rows of `B` (`r`): their size, and how much they can learn."""
    alpha: Annotated[PositiveFloat, "factor"] = 32.0
    """The adapter's output is scaled by `alpha` / `rank`."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0), "share"] = 0.0
    """Share of an adapter's inputs that is left out, at random, while training."""
    targets: str | tuple[str, ...] = "all-linear"
    """The modules that get an adapter: `all-linear` (all but the output head), a list of names such as
    `[q_proj, v_proj]`, or one regular expression that matches their whole names."""
    rslora: bool = False
    """Scale by `alpha` / sqrt(`rank`) instead, so that large ranks learn as fast (Kalajdzievski 2023)."""
    dora: bool = False
    """Train the length of each weight column apart from its direction (Liu et al. 2024): better, and slower."""
    init: Literal["default", "gaussian", "orthogonal", "pissa"] = "default"
    """The first weights. `default`: `A` random, `B` zero; `gaussian`: the same with a normal `A`; `orthogonal`:
    both random, and their product zero; `pissa`: the largest singular vectors, taken out of the frozen weights."""
    save_modules: tuple[str, ...] = ()
    """Modules that are trained whole, such as `[embed_tokens, lm_head]`, and kept in the adapter's file."""

    @model_validator(mode="after")
    def _even_rank(self) -> Self:
        if self.init == "orthogonal" and self.rank % 2:
            raise ValueError(f"`orthogonal` needs an even `rank`, got {self.rank}")
        return self

    @field_validator("targets")
    @classmethod
    def _meant(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return _names_or_expression(value, "`all-linear`")


class TaskSection(Section):
    """What the model is trained to do."""

    short_for = "name"

    name: PathText = "causal_lm"
    """`causal_lm`, `sequence_classification`, or your own as `package.module:object` or `file.py:object`."""
    loss: PathText | None = None
    """A loss of your own, named likewise, in place of the task's: a function of network and batch that returns the sum
    over the batch's targets, a scalar in fp32."""
    num_labels: Annotated[PositiveInt | None, "classes"] = None
    """Classes of `sequence_classification`. Left out: counted in the data."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments for a custom task."""


class BatchSection(Section):
    """How much is learned from at once."""

    global_size: Annotated[PositiveInt, "rows an optimiser step"] = 32
    """Rows an optimiser step, over all processes. Moving to more processes does not change it."""
    micro_size: Annotated[
        int | Literal["auto"],
        PlainValidator(_size_or_auto, json_schema_input_type=PositiveInt | Literal["auto"]),
        "rows a forward pass and process",
    ] = 8
    """Rows in one forward pass of one process. Changes memory and speed; what is learned only where the network has
    dropout, whose masks depend on it, or batch norms. `auto`: the most that fit, found by trial before the first run of
    such a model under such a launch."""

    @property
    def rows(self) -> int:
        """`micro_size` as a number. Where `auto` is not settled yet it is 1, which always comes out even."""
        return 1 if self.micro_size == "auto" else self.micro_size


class LengthSection(Section):
    """How long to train: exactly one of the three."""

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
    """A class of `torch.optim`; `LARS` or `LAMB`; one of `bitsandbytes.optim` (`AdamW8bit`, `PagedAdamW`,
    `PagedAdamW8bit`, ...: on one process or under DDP, paged ones on a GPU); or your own as `package.module:Class` or
    `file.py:Class`. AdamW runs fused."""
    lr: Annotated[PositiveFloat, "rate"] = 3e-4
    """Peak learning rate at `reference_batch`, or at any batch where that is not given."""
    weight_decay: Annotated[NonNegativeFloat, "share of the rate"] = 0.1
    """Decay of the weights; norms, biases and embeddings are never decayed."""
    args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of the optimiser, such as `betas: [0.9, 0.95]`, `eps: 1e-8` or `momentum: 0.9`."""
    clip_norm: Annotated[PositiveFloat | None, "norm"] = 1.0
    """Largest global gradient norm; larger gradients are scaled down. `null`: no clipping."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """What gradients are summed over processes in. `bf16` halves what is sent, and rounds."""
    lr_scaling: Literal["linear", "sqrt"] | None = None
    """Multiply `lr` by global batch / `reference_batch`, or by its square root (Goyal et al. 2017; Hoffer et
    al. 2017)."""
    reference_batch: Annotated[PositiveInt | None, "rows"] = None
    """The global batch, in rows, that `lr` was found at."""

    @field_validator("args")
    @classmethod
    def _said_elsewhere(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in ("lr", "weight_decay", "params"):
            if name in value:
                other = "the model gives them" if name == "params" else f"give it as `optim.{name}`"
                raise ValueError(f"`{name}` is no argument to give here: {other}")
        return value

    @model_validator(mode="after")
    def _scaling_has_reference(self) -> Self:
        if (self.lr_scaling is None) != (self.reference_batch is None):
            raise ValueError("`lr_scaling` and `reference_batch` go together: give both or neither")
        return self


class ScheduleSection(Section):
    """The learning rate as a function of the step."""

    short_for = "name"

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """`wsd` is warm-up, stable, decay."""
    warmup_steps: Annotated[NonNegativeInt | None, "optimiser steps"] = None
    """Steps over which the rate rises linearly from near 0 to its peak."""
    warmup_fraction: Annotated[Fraction | None, "share of the steps"] = None
    """The same, as a share of all steps."""
    floor: Annotated[Fraction, "share of the peak"] = 0.1
    """Where the decay ends, as a share of the peak; `constant` has no decay."""
    decay_fraction: Annotated[Fraction, "share of the steps"] = 0.2
    """`wsd` only: the share of all steps, at the end, over which the rate falls."""

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise ValueError("give `warmup_steps` or `warmup_fraction`, not both")
        return self


class Recipe(Section):
    """Everything that decides what is learned."""

    task: TaskSection = TaskSection()
    model: ModelSection = ModelSection()
    lora: LoraSection | None = None
    """Left out: every weight is trained."""
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection()
    chat: ChatSection | None = None
    """Left out: sources hold documents, not conversations."""
    checks: ChecksSection = ChecksSection()
    batch: BatchSection = BatchSection()
    length: LengthSection = LengthSection()
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    eval: EvalSection = EvalSection()
    sample: SampleSection | None = None
    """Left out: no text is written."""
    log: LogSection = LogSection()
    output: OutputSection = OutputSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resume: ResumeSection = ResumeSection()
    guard: GuardSection = GuardSection()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """What the network computes in. Weights, optimiser, reductions and the loss stay fp32. `auto`: bf16 where
    a GPU has it, else fp32."""
    seed: Annotated[int, Field(ge=0, lt=2**63), "number"] = 0
    """Of the first weights, the order of rows, and dropout."""

    @property
    def loss_by_head(self) -> bool:
        """Whether a language model's head may compute the loss, in chunks."""
        return self.model.loss != "plain" and self.task.loss is None

    @field_validator("tokenizer", "checks", mode="before")
    @classmethod
    def _left_out(cls, value: Any, info: ValidationInfo) -> Any:
        """These two do nothing unless something in them is given, so `null` can only mean left out."""
        return cls.model_fields[str(info.field_name)].default if value is None else value

    @model_validator(mode="after")
    def _quantised_is_frozen(self) -> Self:
        if self.lora is not None and self.model.freeze is not None:
            raise ValueError(
                "model.freeze: with a `lora` section the whole model is frozen already. Remove one of both"
            )
        if self.lora is not None and self.model.fp8:
            raise ValueError(
                "model.fp8: it is for linear weights that are trained, and a `lora` section freezes them (packed ones, "
                "by model.quantization, have products of their own). Set fp8 to false, or remove `lora`"
            )
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
