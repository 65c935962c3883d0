"""The sections of a recipe that say what is read: tokenizer, documents, conversations, and what is expected of them."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from finetune.section import Fraction, PositiveInt, Section


class TokenizerSection(Section):
    """How text becomes tokens. Empty: the tokenizer that lies beside the model."""

    name: str | None = None
    """A directory with a tokenizer, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub tokenizer."""
    vocab_size: Annotated[int, Field(ge=260)] | None = None
    """Train a byte-level BPE of this many pieces on the training documents (256 bytes + specials or more)."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.name is not None and self.vocab_size is not None:
            raise ValueError("give `name` (an existing tokenizer) or `vocab_size` (train one), not both")
        return self


class Source(Section):
    """One place that documents come from: exactly one of `sample`, `path` and `hub`."""

    sample: PositiveInt | None = None
    """Take this many stories of the built-in generator; with a `chat` section conversations, unless `format` is
    `text` (no network, no files)."""
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
    format: Literal["auto", "text", "messages", "sharegpt", "alpaca", "prompt", "pairs"] = "auto"
    """With a `chat` section: how records say a conversation. `auto`: told by the fields of the first record."""
    fields: dict[str, str] = Field(default_factory=dict)
    """With a `chat` section: where fields lie that the format does not find, as paths such as
    `{user: instruction, assistant: instances.0.output}` or `{messages: chat.turns}`."""
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
    sequence_length: Annotated[int, Field(ge=2)] = 1024
    """Tokens a row (`T`)."""
    packing: Literal["wrapped", "documents", "padded"] = "documents"
    """`documents`: whole documents packed best-fit into rows, each blind to the others; `wrapped`: one stream
    cut every `sequence_length` tokens (pre-training); `padded`: one document a row."""
    long_documents: Literal["split", "truncate", "drop"] = "split"
    """What happens to documents longer than a row (`documents` and `padded`): go on in another row, lose
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
    cache_dir: str = ".cache/finetune"
    """Where prepared tokens are kept; safe to delete."""
    num_workers: PositiveInt | None = None
    """Processes that tokenise. Left out: one a core."""


class ChatSection(Section):
    """Conversations: how they are written, and what of them is learned."""

    template: str | None = None
    """The chat template: a Jinja file, or `plain` for the one that ships. Left out: the tokenizer's own."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """More variables of the template, such as `enable_thinking: false`."""
    train_on: Literal["assistant", "last", "completions", "all"] = "assistant"
    """What is learned: every answer, the last one only, all answers behind the last user turn (or the
    completion, where the record has one), or every token. Answers with `weight: 0` never are."""
    end_token: Literal["template", "add"] = "template"
    """How answers end: as the template writes and marks them, or always with a special token that is learned:
    the one behind the answer, else the tokenizer's end-of-text token, which is then put there."""
    too_long: Literal["drop", "cut_left", "cut_right"] = "drop"
    """What becomes of conversations longer than a row: left out, or without their oldest exchanges (the system
    message stays), or without their end. One that keeps no answer is left out. The data report counts them."""
    drop_tools: bool = False
    """Learn from conversations whose `tools` the template does not write, without these. Off: they are refused, because
    a model would learn calls of functions that it never saw."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field(default_factory=dict)
    """Roles of more speakers, such as `{customer: user, agent: assistant}`."""


class ChecksSection(Section):
    """What the data report may say; anything else ends the run before the first step."""

    max_broken: Fraction = 0.0
    """Largest share of conversations that are left out because they are broken: an unknown role, an empty answer,
    a missing field, or refused by the template. At 0 the first one is an error, with its place."""
    max_unsupervised: Fraction = 1.0
    """Largest share of conversations that are left out because there is nothing to learn from."""
    max_too_long: Fraction = 1.0
    """Largest share of documents that lost something, or were left out, because they are longer than a row."""
    max_overlap: Fraction = 1.0
    """Largest share of validation documents that are training documents too."""
    min_supervised: Fraction = 0.0
    """Smallest share of tokens that are learned."""
    min_ended: Fraction = 0.0
    """Smallest share of conversations whose last answer ends in a special token that is learned, or of documents that
    the tokenizer's end-of-text token ends."""
    max_lossy: Fraction = 1.0
    """Largest share of documents, of those that are tried, that the tokenizer does not give back as they were."""
    max_mojibake: Fraction = 1.0
    """Largest share of documents with signs of a wrong decoding, such as `cafÃ©` or the replacement character."""
    max_nul: Fraction = 1.0
    """Largest share of documents that hold NUL characters."""
    max_duplicate_keys: Fraction = 1.0
    """Largest share of JSON records with a key that an object has more than once; its last value is read."""
