"""The typed recipe: what is learned. Load, override, validate, dump. Imports no torch, so help is instant.

A recipe is a YAML file. Layers, later ones win: defaults < recipe file < `a.b=c` on the command line.
Nothing about processes, devices or sharding belongs here: that is the launch config.
`None` (YAML `null`) means off or "not given"; there are no magic numbers.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from finetune.errors import RecipeError

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """One level of the recipe: immutable, and it knows all of its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSection(Section):
    """The network and where its first weights come from."""

    name: str | None = None
    """A model directory, or a name on the Hugging Face hub. Leave out to start from `config`."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    config: dict[str, Any] | None = None
    """Start from random weights: `model_type` plus the architecture's own sizes, in its own key names."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] = "sdpa"
    """The attention implementation that the architecture is asked to use."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off, because it is code from the internet."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.name is not None and self.config is not None:
            raise ValueError("give `name` (pretrained weights) or `config` (random weights), not both")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("`config` needs `model_type`, for example `llama`")
        return self


class TokenizerSection(Section):
    """How text becomes tokens. Empty: the tokenizer that lies beside the model."""

    name: str | None = None
    """A directory with a tokenizer, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub tokenizer."""
    vocab_size: Annotated[int, Field(ge=260)] | None = None
    """Train a byte-level BPE of this many pieces on the training documents (256 bytes + specials at least)."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.name is not None and self.vocab_size is not None:
            raise ValueError("give `name` (an existing tokenizer) or `vocab_size` (train one), not both")
        return self


class Source(Section):
    """One place that documents come from: exactly one of `sample`, `path` and `hub`."""

    sample: PositiveInt | None = None
    """Take this many stories of the built-in generator (no network, no files)."""
    path: str | None = None
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
    label_field: str = "label"
    """The field that holds a document's class; read by sequence classification only."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often each document counts an epoch: 2 repeats all, 0.5 keeps a fixed half (chosen by hash)."""
    limit: PositiveInt | None = None
    """Read at most this many documents."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        given = [key for key in ("sample", "path", "hub") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of sample, path and hub (got {', '.join(given) or 'none'})")
        return self


class DataSection(Section):
    """The documents and how they become rows of tokens."""

    train: tuple[Source, ...] = ()
    """What is learned from."""
    validation: tuple[Source, ...] = ()
    """What evaluation reads. Empty: a part of `train` is held out, see `validation_fraction`."""
    validation_fraction: Fraction = 0.01
    """Share of the training documents held out if `validation` is empty; picked by a hash of the document,
    so that a document never moves between the two."""
    sequence_length: PositiveInt = 1024
    """Tokens a row (`T`)."""
    packing: Literal["wrapped", "documents", "padded"] = "documents"
    """`documents`: whole documents packed best-fit into rows, each blind to the others; `wrapped`: one stream
    cut every `sequence_length` tokens (pre-training); `padded`: one document a row."""
    long_documents: Literal["split", "truncate", "drop"] = "split"
    """What happens to documents longer than a row (`documents` and `padded`): go on in another row, lose their
    end, or be left out. The data report counts them."""
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
    cache_dir: str = ".cache/finetune"
    """Where prepared tokens are kept; safe to delete."""
    num_workers: PositiveInt | None = None
    """Processes that tokenise. Left out: one a core."""


class TaskSection(Section):
    """What the model is trained to do."""

    name: str = "causal_lm"
    """`causal_lm`, `sequence_classification`, or your own as `package.module:object`."""
    num_labels: PositiveInt | None = None
    """Classes of `sequence_classification`. Left out: counted in the data."""
    args: dict[str, Any] = {}
    """Arguments for a task of your own."""


class BatchSection(Section):
    """How much is learned from at once."""

    global_size: PositiveInt = 32
    """Rows an optimiser step, over all processes. Moving to more processes does not change it."""
    micro_size: PositiveInt = 8
    """Rows in one forward pass of one process. Changes memory and speed, not what is learned."""


class LengthSection(Section):
    """How long to train: exactly one of the three."""

    steps: Annotated[int, Field(ge=0)] | None = None
    """Optimiser steps; 0 evaluates only."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training rows."""
    tokens: PositiveInt | None = None
    """Tokens, counted as rows x `sequence_length`."""


class OptimSection(Section):
    """The optimiser."""

    name: str = "AdamW"
    """A class of `torch.optim`, or your own as `package.module:Class`. AdamW runs fused."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate at `reference_batch`, or at any batch where that is not given."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of the weights; norms, biases and embeddings are never decayed."""
    args: dict[str, Any] = {}
    """More arguments of the optimiser, such as `betas: [0.9, 0.95]`, `eps: 1e-8` or `momentum: 0.9`."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down. `null`: no clipping."""
    lr_scaling: Literal["linear", "sqrt"] | None = None
    """Multiply `lr` by global batch / `reference_batch`, or by its square root (Goyal et al. 2017; Hoffer et
    al. 2017)."""
    reference_batch: PositiveInt | None = None
    """The global batch, in rows, that `lr` was found at."""

    @model_validator(mode="after")
    def _scaling_has_reference(self) -> Self:
        if (self.lr_scaling is None) != (self.reference_batch is None):
            raise ValueError("`lr_scaling` and `reference_batch` go together: give both or neither")
        return self


class ScheduleSection(Section):
    """The learning rate as a function of the step."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """`wsd` is warm-up, stable, decay."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps over which the rate rises linearly from near 0 to its peak."""
    warmup_fraction: Fraction | None = None
    """The same, as a share of all steps."""
    floor: Fraction = 0.1
    """Where the decay ends, as a share of the peak; `constant` has no decay."""
    decay_fraction: Fraction = 0.2
    """`wsd` only: the share of all steps, at the end, over which the rate falls."""

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise ValueError("give `warmup_steps` or `warmup_fraction`, not both")
        return self


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
    """What the text begins with."""
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
    """Steps between lines of `metrics.jsonl`; the loss is read from the device only then."""
    trackers: tuple[str, ...] = ()
    """Accelerate trackers such as `tensorboard` or `wandb`. Off unless named here."""


class OutputSection(Section):
    """Where the run's files go."""

    dir: str = "runs/run"
    """The run directory: recipe, metrics, `run.json`, the final model."""
    overwrite: bool = False
    """Replace a run that the directory already holds."""
    save_model: bool = True
    """Write the final model to `DIR/model`."""


class Recipe(Section):
    """Everything that decides what is learned."""

    task: TaskSection = TaskSection()
    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    length: LengthSection = LengthSection()
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    eval: EvalSection = EvalSection()
    sample: SampleSection | None = None
    """Left out: no text is written."""
    log: LogSection = LogSection()
    output: OutputSection = OutputSection()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """What the network computes in. Weights, optimiser, reductions and the loss stay fp32. `auto`: bf16 where
    a GPU has it, else fp32."""
    seed: int = 0
    """Of the first weights, the order of rows, and dropout."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as users expect it: `1e-4` is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(None, None, f"key '{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# PyYAML follows YAML 1.1, in which `1e-4` is a string; 1.2's rule is what everybody writes.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9]*(?:[eE][-+]?[0-9]+)|[0-9]+\.[0-9]*|\.[0-9]+)$"),
    list("-+0123456789."),
)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file, applies `a.b=c` overrides, and validates the result.

    Raises:
        RecipeError: With every problem that was found, each with its key.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"Cannot read the recipe {file}: {error}.") from error
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{file} is not valid YAML: {_one_line(error)}.") from error
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise RecipeError(f"{file} must hold keys and values, got {_kind(tree)}.")
    for override in overrides:
        _apply(tree, override)
    return validate(tree, origin=str(file))


def validate(tree: Mapping[str, Any], origin: str = "the recipe") -> Recipe:
    """Turns plain keys and values into a recipe.

    Raises:
        RecipeError: With every problem that was found, each with its key.
    """
    problems: list[str] = []
    recipe: Recipe | None = None
    try:
        # By way of JSON: pydantic's strict mode then takes lists for tuples, but no "10" for 10.
        recipe = Recipe.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        problems = [_problem(item) for item in error.errors(include_url=False)]
    if recipe is not None:
        problems = list(_conflicts(recipe))
    if problems:
        word = "problem" if len(problems) == 1 else "problems"
        raise RecipeError(f"{origin} has {len(problems)} {word}: " + "; ".join(problems) + ".")
    assert recipe is not None
    return recipe


def dump(recipe: Recipe) -> str:
    """The full recipe, defaults included, as YAML that `load` reads back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def json_schema() -> dict[str, Any]:
    """The JSON schema of recipes, for editors."""
    schema = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _conflicts(recipe: Recipe) -> Iterable[str]:
    """Problems between sections, which no single section can see."""
    own_task = ":" in recipe.task.name
    if recipe.task.name not in ("causal_lm", "sequence_classification") and not own_task:
        known = ["causal_lm", "sequence_classification"]
        yield (
            f"task.name: there is no task '{recipe.task.name}'{_hint(recipe.task.name, known)}; allowed are "
            f"{', '.join(known)}, or your own as package.module:object"
        )
    if not own_task:
        if recipe.model.name is None and recipe.model.config is None:
            yield "model: give `name` (pretrained weights) or `config` (random weights)"
        if not recipe.data.train and recipe.length.steps != 0:
            yield "data.train: name at least one source"
        if recipe.length.steps == 0 and not (recipe.data.train or recipe.data.validation):
            yield "data.validation: name at least one source"
        if recipe.model.config is not None and not (recipe.tokenizer.name or recipe.tokenizer.vocab_size):
            yield (
                "tokenizer: a model from `model.config` brings none; give `tokenizer.name`, or "
                "`tokenizer.vocab_size` to train one"
            )
    given = [key for key in ("steps", "epochs", "tokens") if getattr(recipe.length, key) is not None]
    if len(given) != 1:
        yield f"length: give exactly one of steps, epochs and tokens (got {', '.join(given) or 'none'})"
    if recipe.batch.global_size % recipe.batch.micro_size:
        allowed = [n for n in range(1, recipe.batch.global_size + 1) if recipe.batch.global_size % n == 0]
        yield (
            f"batch.micro_size: {recipe.batch.micro_size} does not divide batch.global_size "
            f"{recipe.batch.global_size}; sizes that do: {', '.join(map(str, allowed))}"
        )
    if recipe.data.packing != "padded" and recipe.task.name == "sequence_classification":
        yield "data.packing: sequence_classification reads one document a row; set `padded`"
    if recipe.sample is not None and recipe.task.name == "sequence_classification":
        yield "sample: a classifier writes no text; remove the section"


def _apply(tree: dict[str, Any], override: str) -> None:
    """Sets one `a.b=c` in a tree of plain dicts and lists; `c` is read as YAML."""
    path, equals, value = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise RecipeError(f"The override '{override}' is not of the form key.key=value, as in optim.lr=1e-4.")
    try:
        parsed = yaml.load(value, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"The value in '{override}' is not valid YAML: {_one_line(error)}.") from error
    node: Any = tree
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise RecipeError(
                    f"The override '{override}': '{'.'.join(keys[:depth])}' is a list of {len(node)}; "
                    f"'{key}' is not one of 0 to {len(node) - 1}."
                )
            if last:
                node[int(key)] = parsed
            else:
                node = node[int(key)]
        elif isinstance(node, dict):
            if last:
                node[key] = parsed
            else:
                if node.get(key) is None:
                    node[key] = {}
                node = node[key]
        else:
            raise RecipeError(
                f"The override '{override}': '{'.'.join(keys[:depth])}' is {_kind(node)} and has no keys."
            )


def _problem(item: Any) -> str:
    """One pydantic error as `key: what is wrong`."""
    location = [str(part) for part in item["loc"]]
    key = ".".join(location) or "recipe"
    kind, message = item["type"], str(item["msg"])
    if kind == "extra_forbidden":
        known = _known_keys(item["loc"][:-1])
        return f"{key}: unknown key{_hint(location[-1], known)} (allowed: {', '.join(known)})"
    if kind == "value_error":
        return f"{key}: {message.removeprefix('Value error, ')}"
    return f"{key}: {message[0].lower()}{message[1:]}, got {json.dumps(item['input'], default=str)}"


def _known_keys(location: Sequence[str | int]) -> list[str]:
    """The keys that the recipe has at a location such as ("data", "train", 0)."""
    section: type[Section] = Recipe
    for part in location:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part)
        found = _section_in(field.annotation) if field else None
        if found is None:
            return []
        section = found
    return list(section.model_fields)


def _section_in(annotation: Any) -> type[Section] | None:
    """The section type inside `Section`, `Section | None` or `tuple[Section, ...]`."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, Section) else None
    return next((s for s in map(_section_in, get_args(annotation)) if s is not None), None)


def _hint(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f", did you mean '{close[0]}'?" if close else ""


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", int: "a number", float: "a number"}.get(type(value), repr(value))


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()
