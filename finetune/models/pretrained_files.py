"""The files of a pretrained model: where they lie, in which dtype, and whether they hold all of a network."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from finetune.config.recipe_schema import ModelSection, Recipe, TokenizerSection
from finetune.models.heads import Head
from finetune.utils import json_files
from finetune.utils.compat.transformers_private import tied_names, untie
from finetune.utils.errors import RecipeError
from finetune.utils.file_formats import format_of

# As safetensors names them, the widest first.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
# Vocabularies that tokenizer.json was made of, and what opens a processor of images and sound.
_VOCABULARIES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model")
_LEGACY_TEMPLATE = "chat_template.json"
_PROCESSORS = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("audio_tokenizer_config.json", _LEGACY_TEMPLATE),
)
# The module of a class in `auto_map` ("modeling_own.OwnModel"), or one that a module beside it imports.
_MODULES = r'"(\w+)\.[A-Z]\w*"|(?m:^\s*from\s+\.(\w+)\s+import)'
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Weights:
    """A pretrained model's files, which hold every tensor of its network in the right shape."""

    folder: Path
    lines: tuple[str, ...]
    """Lines to report: tensors that are new, and tensors that are left out."""
    not_weights: frozenset[str]
    """Tensors that may hold infinities: buffers (masks), packed weights, and what the network does not read."""
    new: frozenset[str] = frozenset()
    """Tensors of a head that the files lack."""

    def first_not_finite(self, rank: int = 0, world: int = 1) -> int | None:
        """Returns the position of the first tensor with NaN or infinity, among those that this rank looks at."""
        for position, (file, name) in enumerate(self._tensors()):
            if position % world == rank and not _finite(_read(file, name)):
                return position
        return None

    def refuse(self, position: int) -> None:
        """Raises a `RecipeError` for the tensor at this position."""
        file, name = self._tensors()[position]
        tensor = _read(file, name)
        raise RecipeError(
            f"{file}: {name} holds {int((~torch.isfinite(tensor.float())).sum()):,} numbers that are NaN or infinite, "
            f"of {tensor.numel():,}. Such a model can neither be trained nor used. Take an intact copy of it."
        )

    def check_values(self) -> None:
        """Raises a `RecipeError` if a tensor holds NaN or infinity."""
        if (position := self.first_not_finite()) is not None:
            self.refuse(position)

    def _tensors(self) -> list[tuple[Path, str]]:
        # Names in files may have the prefix of the base model, or lack it.
        skipped = self.not_weights | {name.partition(".")[2] for name in self.not_weights}
        tensors = [(file, name) for file in weight_files(self.folder) for name in _dtypes(file)]
        return [(f, n) for f, n in tensors if n not in skipped and n.partition(".")[2] not in self.not_weights]


def load_pretrained(
    auto: Any, name: str, config: Any, *, new_head: bool = False, revision: str | None = None, **options: Any
) -> tuple[PreTrainedModel, Weights]:
    """Calls `auto.from_pretrained`, and refuses what that would fill with random values.

    Args:
        auto: One of transformers' `AutoModelFor…`.
        name: A directory, or a model on the hub.
        new_head: Allows a random head where the files lack all of it.
        options: For `from_pretrained`, `trust_remote_code` among them.

    Raises:
        RecipeError: If a file cannot be read, or a tensor is missing or of another shape.
        OSError: If there is no such model.
    """
    folder = weights_folder(name, revision)
    if Path(name).is_dir():
        pickles = {file.name for pattern in _PICKLES for file in folder.glob(pattern)}
        if pickles and not weight_files(folder):
            raise RecipeError(
                f"{folder} holds weights as a pickle only ({_some(pickles)}), which can run code when it is read. If "
                "you trust it, convert it: `AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)`."
            )
        refuse_adapter(folder)
    try:
        network, loading_info = auto.from_pretrained(
            name,
            config=config,
            revision=revision,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            use_safetensors=True,
            **options,
        )
    except RecursionError as error:  # of JSON, which the library reads
        raise RecipeError(
            f"{name} cannot be opened: one of its JSON files is nested too deeply. Take an intact copy of the model."
        ) from error
    except SafetensorError:
        for file in weight_files(folder):
            _dtypes(file)  # refuses the one that is damaged
        raise
    except RuntimeError as error:
        if "conversion of the weights" not in str(error) and "loading state_dict" not in str(error):
            raise
        raise _not_whole(folder, _missing_parts(auto, folder, config, options["trust_remote_code"])) from error
    drawn = _new_head(network, loading_info["missing_keys"]) if new_head else set()
    missing = sorted(loading_info["missing_keys"] - drawn)
    if missing:
        raise RecipeError(
            f"{folder} lacks {len(missing)} of the network's tensors: {_some(missing)}. They would be filled with "
            "random values. Take a complete copy of the model, or a config.json that describes what is there."
        )
    if loading_info["mismatched_keys"]:
        tensor, there, wanted = min(loading_info["mismatched_keys"])
        more = len(loading_info["mismatched_keys"]) - 1
        raise RecipeError(
            f"{folder}: {tensor} has shape {list(there)}, but the network needs {list(wanted)}"
            + (f" ({more} more tensors differ)" if more else "")
            + ". Take the config.json that belongs to the weights; a classifier needs as many classes as its head."
        )
    if options.get("device_map") == "meta" and (other := _other_network(network, auto, options["trust_remote_code"])):
        raise RecipeError(
            f"{folder}: what transformers makes of it is not what config.json describes: {other}. Take the model alone."
        )
    lines = []
    if drawn:
        new = "pooler, which is not trained" if network.base_model is network else "head for this task"
        lines.append(f"weights: {folder} has no {new}, its {len(drawn)} tensors are new: {_some(drawn)}")
    if pair := untied_tensors(folder, type(config).from_pretrained(folder), type(network)):
        lines.append(f"weights: {pair[0]} and {pair[1]} of {folder} differ, and are trained as two tensors")
    keep_apart(network, folder)
    left_out = loading_info["unexpected_keys"]
    if left_out:
        lines.append(f"weights: the network does not use {len(left_out)} tensors of {folder}: {_some(left_out)}")
    buffers = {buffer for buffer, _ in network.named_buffers()}
    return network, Weights(folder, tuple(lines), frozenset(buffers | left_out), frozenset(drawn))


def check_packed_files(folder: Path) -> Weights:
    """Checks the file headers of a model that is stored packed; it can only be put together with storage.

    Raises:
        RecipeError: If a file cannot be read, or a quantized weight lacks one of its parts.
    """
    refuse_adapter(folder)
    names = [name for file in weight_files(folder) for name in _dtypes(file)]
    if missing := _incomplete(names):
        raise _not_whole(folder, missing)
    # Several numbers in one of the type that they are stored as, which may look like NaN.
    packed = {f"{owner}.weight" for owner, _, state in (name.partition(".weight.") for name in names) if state}
    return Weights(folder, (), frozenset(packed))


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that transformers reads a model's weights from; other copies may lie beside them.

    Raises:
        RecipeError: If one that the index names is absent.
    """
    index = folder / _INDEX
    if (folder / _WHOLE).is_file() or not index.is_file():
        return [file for file in [folder / _WHOLE] if file.is_file()]
    causes = (OSError, ValueError, KeyError, TypeError, AttributeError)
    with RecipeError.explaining(f"{index} cannot be read", "Take an intact copy of the model.", *causes):
        files = sorted({folder / file for file in json_files.read(index)["weight_map"].values()})
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise RecipeError(f"{folder} lacks {_some(absent)}, which its index names. Take a complete copy of the model.")
    return files


def stored_dtype(folder: Path) -> torch.dtype:
    """Returns the widest floating type that a folder's weights are stored in: in it they are read without loss.

    Raises:
        RecipeError: If a file cannot be read.
    """
    dtypes = {dtype for file in weight_files(folder) for dtype in _dtypes(file).values()}
    return next((dtype for name, dtype in _FLOATS.items() if name in dtypes), torch.float32)


def weights_folder(name: str, revision: str | None) -> Path:
    """Folder of a pretrained model's files: its directory, or that of a hub model in the local cache.

    Raises:
        OSError: If a hub model is not there.
    """
    if Path(name).is_dir():
        return Path(name)
    return Path(str(cached_file(name, "config.json", revision=revision))).parent


def files_beside(recipe: Recipe) -> dict[str, bytes]:
    """Returns the files beside a recipe's base, by name, that are needed to open it and that nothing here writes.

    They are its processor's, the vocabulary that its tokenizer was made of, and the code that ships with it, if that is
    trusted; an adapter leaves the network's code at its base. Those of a hub's model that are neither in the cache nor
    in reach are left out; see `unknown_processor`.
    """
    model, tokenizer = recipe.model, recipe.tokenizer
    contents: dict[str, bytes] = {}

    def read(file: str, section: ModelSection | TokenizerSection) -> str:
        with suppress(OSError, ValueError):
            if section.name is not None:
                contents[file] = Path(str(cached_file(section.name, file, revision=section.revision))).read_bytes()
        return contents.get(file, b"").decode(errors="replace")

    for file in _VOCABULARIES if tokenizer.vocab_size is None else ():
        read(file, tokenizer if tokenizer.name else model)
    texts = [read(file, model) for file in (("config.json", *_PROCESSORS) if recipe.lora is None else _PROCESSORS)]
    while texts and model.trust_remote_code:
        files = {f"{''.join(names)}.py" for names in re.findall(_MODULES, texts.pop())}
        texts += [read(file, model) for file in files - contents.keys()]
    contents.pop("config.json", None)
    return contents


def unknown_processor(section: ModelSection, folder: Path) -> str | None:
    """Returns a warning if a folder may lack the processor of its base; None if it has one, or there is none.

    Whether a hub's model has one, only the hub knows; that others of its kind have one is known without it.
    """
    name = section.name
    if name is None or Path(name).is_dir() or any((folder / file).exists() for file in _PROCESSORS):
        return None
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    # A path where the cache has a file, a mark where it has noted that there is none, else None.
    cached = {file: try_to_load_from_cache(name, file, revision=section.revision) for file in _PROCESSORS}
    unknown = [file for file, known in cached.items() if known is None]
    config = json_files.read(weights_folder(name, section.revision) / "config.json")
    processor = PROCESSOR_MAPPING_NAMES.get(config.get("model_type"))
    if processor is None or not unknown:
        return None
    return (
        f"Whether {name} has a {processor} is not known: the hub's cache lacks {', '.join(unknown)}, and the hub could "
        f"not be asked. If it has one, {folder} opens for text alone, until `hf download {name} --include "
        f"'*processor*' --local-dir {folder}` has added it."
    )


def write_beside(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes what `files_beside` has returned into a folder with weights, except what is there already.

    Raises:
        OSError: If the folder cannot be written.
    """
    for name, content in files.items():
        # A processor would take the older form of a chat template for the one that was trained.
        written = (name, "chat_template.jinja") if name == _LEGACY_TEMPLATE else (name,)
        if not any((folder / file).exists() for file in written):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


def untied_tensors(folder: Path, config: PretrainedConfig, network_class: Any) -> tuple[str, str] | None:
    """Returns two tensors of a folder that a configuration says are one, and that are not equal; None without."""
    return next((pair for _, pair in _untied_pairs(folder, config, network_class)), None)


def keep_apart(network: PreTrainedModel, folder: Path) -> None:
    """Has a network keep tensors apart that its class ties, and that differ in its files.

    T5's classes tie two embeddings and the head to one tensor, whatever config.json says; in the files of T5 1.1,
    Flan-T5 and mT5 the head is another. transformers sees that in the values, and forgets it where ties are made anew.
    """
    names = [name for name, _ in _untied_pairs(folder, network.config, type(network))]
    if names:
        untie(network, names)


def _untied_pairs(folder: Path, config: PretrainedConfig, network_class: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields the name of a tied tensor in the network, with two names in the files, where what they hold differs."""
    if not any(getattr(settings, "tie_word_embeddings", False) for settings in (config, config.get_text_config())):
        return
    places = {name: file for file in weight_files(folder) for name in _dtypes(file)}
    for pair in tied_names(network_class).items():
        # Names in files may have another prefix than those of the network.
        short = [".".join(key.split(".")[-2:]) for key in pair]
        matches = [[name for name in places if f".{name}".endswith(f".{key}")] for key in short]
        if all(len(names) == 1 for names in matches):
            (one,), (other,) = matches
            if not torch.equal(_read(places[one], one), _read(places[other], other)):
                yield pair[0], (one, other)


def _other_network(network: PreTrainedModel, auto: Any, trusted: bool) -> str | None:
    """Says how a network that was read from files differs from the one that its configuration describes.

    `from_pretrained` follows more than config.json: what lies beside it may wrap, replace or freeze parts.
    """
    with torch.device("meta"):
        described = auto.from_config(network.config, trust_remote_code=trusted)
    if type(network) is not type(described):
        return f"it is a {type(network).__name__}, not a {type(described).__name__}"
    wanted, there = (
        {name: parameter.requires_grad for name, parameter in each.named_parameters(remove_duplicate=False)}
        for each in (described, network)
    )
    if wanted.keys() != there.keys():
        return f"its tensors are others ({_some(wanted.keys() ^ there.keys())})"
    frozen = [name for name in there if wanted[name] and not there[name]]
    return f"{len(frozen)} of its {len(there)} tensors are frozen ({_some(frozen)})" if frozen else None


def as_written(network: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a network's tensors as `save_pretrained` writes them; some architectures compute with others."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(network, state))


def written_one_by_one(network: PreTrainedModel) -> bool:
    """True if each tensor that `save_pretrained` writes is made of a single one of the network's."""
    alone = (as_written(network, {name: t.to("meta")}) for name, t in network.state_dict().items())
    pairs, whole = [(name, tuple(t.shape)) for saved in alone for name, t in saved.items()], written_shapes(network)
    return len(pairs) == len(whole) and dict(pairs) == whole


def written_ties(network: PreTrainedModel) -> dict[str, str]:
    """Returns tied tensors by the names that `save_pretrained` writes: each, and the one that it is."""
    ties, state = network.all_tied_weights_keys, network.state_dict()
    alone = {name: as_written(network, {name: state[name].to("meta")}) for pair in ties.items() for name in pair}
    return {next(iter(alone[name])): next(iter(alone[source])) for name, source in ties.items()}


def written_shapes(network: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the tensors that `save_pretrained` writes."""
    state = {name: tensor.to("meta") for name, tensor in network.state_dict().items()}
    return {name: tuple(tensor.shape) for name, tensor in as_written(network, state).items()}


def _new_head(network: PreTrainedModel, missing: set[str]) -> set[str]:
    """Returns the tensors of a head that is missing as a whole, and of the pooler below it; else none."""
    base = f"{network.base_model_prefix}."
    names = {name for name, _ in network.named_parameters()}
    pooler = {name for name in names if "pooler" in name.split(".")}
    if network.base_model is network:  # without a head
        return pooler if pooler <= missing else set()
    head = {name for name in names if not name.startswith(base)}
    if not head or not head <= missing:
        return set()
    return head | pooler if pooler <= missing else head


def added_modules(network: Any, section: ModelSection, head: Head) -> list[str]:
    """Returns the names of the modules that a task adds to a pretrained network, and trains whole.

    They are those beside its body, and a pooler within it that the files lack, as those of a language model do.

    Raises:
        RecipeError: If a file cannot be read.
    """
    added = head.modules_beside_body(network)
    if not added or section.name is None:
        return added
    stored = [name for file in weight_files(weights_folder(section.name, section.revision)) for name in _dtypes(file)]
    poolers = [name for name, _ in network.base_model.named_modules() if name.rpartition(".")[2] == "pooler"]
    absent = [name for name in poolers if not any(f".{name}." in f".{tensor}" for tensor in stored)]
    return added + [f"{network.base_model_prefix}.{name}" for name in absent if stored]


def _missing_parts(auto: Any, folder: Path, config: Any, trusted: bool) -> list[str]:
    """Names the absent tensors of those that a network holds packed, or several as one."""
    stored = [name for file in weight_files(folder) for name in _dtypes(file)]
    if getattr(config, "quantization_config", None) is not None:
        return _incomplete(stored)
    with torch.device("meta"):
        network = auto.from_config(config, trust_remote_code=trusted)
    # Either the names that are computed with, or those that `save_pretrained` writes.
    known = {*stored, *network.all_tied_weights_keys}
    needed = (set(network.state_dict()), set(written_shapes(network)))
    return sorted(min((names - known for names in needed), key=len))


def _not_whole(folder: Path, missing: list[str]) -> RecipeError:
    which = f" {len(missing)} tensors are missing: {_some(missing)}." if missing else ""
    return RecipeError(f"{folder}: its tensors do not make up the network.{which} Take a complete copy of the model.")


def _incomplete(names: Iterable[str]) -> list[str]:
    """Names absent parts of quantized weights, such as scales, that others of the same files have.

    bitsandbytes stores `NAME.weight` with `NAME.weight.absmax` and others beside it.
    """
    parts: dict[str, set[str]] = defaultdict(set)
    for name in names:
        owner, _, state = name.partition(".weight.")
        parts[owner if state else name.removesuffix(".weight")].add(state)
    packed = {owner: own for owner, own in parts.items() if len(own) > 1}
    every = set().union(*packed.values())
    return sorted(f"{owner}.weight.{state}".removesuffix(".") for owner, own in packed.items() for state in every - own)


def refuse_adapter(folder: Path) -> None:
    """Raises RecipeError for a whole model beside which an adapter lies: only one would be used."""
    if weight_files(folder) and (folder / _ADAPTER).is_file():
        raise RecipeError(
            f"{folder} holds a whole model and an adapter beside it ({_ADAPTER}), which transformers would put into "
            "it and train alone. Move the adapter's files elsewhere; to begin from both, merge them first: "
            "`PeftModel.from_pretrained(MODEL, ADAPTER).merge_and_unload().save_pretrained(NEW_DIR)` of peft."
        )


def _dtypes(file: Path) -> dict[str, str]:
    """Returns the type of each tensor in a file, as safetensors calls it, by name."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and (file_format := format_of(file)):
            raise RecipeError(f"{file} is {file_format.name}, and holds no weights. {file_format.advice}") from error
        raise RecipeError(
            f"{file} cannot be read, it is damaged or incomplete ({error}). Copy or download it again."
        ) from error


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor


def _finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # One pass without a copy; both ends are NaN where any number is.
    ends = (tensor.float() if tensor.itemsize == 1 else tensor).aminmax()
    return all(bool(torch.isfinite(end)) for end in ends)


def _some(names: Iterable[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "")
