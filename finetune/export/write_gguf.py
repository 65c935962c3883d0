"""Writes a network and its tokenizer as GGUF, the format of llama.cpp and Ollama.

Only what is proved to be read back as it was trained is written: a few architectures, and byte-level BPE that splits
text as llama.cpp can. Names of keys and tensors, and quantisation, are those of ggml's own package `gguf` (the extra
[gguf]). Source of the layout: llama.cpp's `convert_hf_to_gguf.py`.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from finetune.config.recipe_schema import Recipe
from finetune.models import prompts
from finetune.models.pretrained_files import as_written
from finetune.utils.bounded_work import bounded_work
from finetune.utils.errors import CheckpointError, RecipeError

TYPES = {"gguf-f16": "F16", "gguf-q8_0": "Q8_0"}
"""ggml's type of matrices, by the kind of export. Vectors are fp32, and rows that blocks of 32 do not fit are fp16."""

ROUNDED: dict[str, torch.dtype | str] = {"gguf-f16": torch.float16, "gguf-q8_0": "q8_0"}
"""The same by the keys of `verify_export.TOLERANCE`."""

MOST_STOPS = 3
"""Tokens that a file can name as ends of texts: of text, of a turn, of a message."""

# llama.cpp computes Mistral as it does Llama.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Of the configuration: what these architectures are in llama.cpp, whatever the file says.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# By how text is split, and whether a piece that is a token is taken whole: the name in llama-vocab.cpp.
_SPLITS = {
    ("GPT-2", False): "gpt-2",
    ("digits, GPT-2", False): "smollm",
    (_WORDS + r"\p{N}" + _REST, False): "qwen2",
    (_WORDS + r"\p{N}{1,3}" + _REST, True): "llama-bpe",
    (_WORDS + r"\p{N}{1,3}" + _REST, False): "smaug-bpe",
}

# What two programs must cut into the same tokens.
_TEXTS = (
    "Once upon a time, it's 12345 o'clock: I'LL go, WE'Ve gone.",
    "  two spaces,   three\n\n\n\tand a tab \r\n  ",
    "naïve Äpfel — “quotes”, 你好, Привет, 🙂!? e = mc² <|no token|>",
    "def f(x):\n    return x**2  # {'a': [1, 2.50]}\n",
)

# Go templates of Ollama, for chat templates that write the same.
_TEMPLATES = (
    ("<|im_start|>{role}\n{text}<|im_end|>\n", "<|im_start|>assistant\n"),
    (
        "<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
)
_TURNS = [("system", "SYSTEM"), ("user", "U"), ("assistant", "A"), ("user", "V")]


def check_convertible(config: PretrainedConfig, tokenizer: Any, run: Path, *, text: bool) -> None:
    """Raises a `RecipeError` with the commands of llama.cpp for a network or tokenizer that is not written here.

    Of networks those are written that continue a `text`.
    """
    try:
        if not text:
            raise ValueError("As GGUF, models are written here that continue a text, and this one does not.")
        _check_network(config)
        split_of(tokenizer)
    except ValueError as error:
        raise RecipeError(
            f"{error} llama.cpp's own converter may know it. Export with `finetune export {run} --as merged-16bit --to "
            "FOLDER`, and run in a checkout of llama.cpp: `pip install -r "
            "requirements/requirements-convert_hf_to_gguf.txt`, then `python convert_hf_to_gguf.py FOLDER --outfile "
            "model.gguf --outtype f16`."
        ) from error


def _check_network(config: PretrainedConfig) -> None:
    if config.model_type not in _ARCHITECTURES:
        raise ValueError(f"As GGUF, {', '.join(_ARCHITECTURES)} are written here, and this is {config.model_type}.")
    for key, value in _FIXED.items():
        actual = getattr(config, key, value)
        if actual != value and actual is not None:
            raise ValueError(f"As GGUF, {config.model_type} is written with {key} {value}, and this one has {actual}.")
    kind = _rope(config)["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"As GGUF, positions are written that are scaled as linear or llama3, and these are {kind}.")


def split_of(tokenizer: Any) -> str:
    """Returns llama.cpp's name for how a tokenizer splits text.

    Raises:
        ValueError: If it is no byte-level BPE, or llama.cpp has no name for how it splits.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("As GGUF, a model is written with its tokenizer, and this one has none of `tokenizers`.")
    spec = json.loads(backend.to_str())
    model, normalizer, before = spec["model"], spec["normalizer"], spec["pre_tokenizer"] or {}
    if model["type"] != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise ValueError(f"As GGUF, byte-level BPE is written, and this tokenizer is {model['type']} of another kind.")
    steps = before.get("pretokenizers", [before])
    how = [_step(step) for step in steps]
    last = steps[-1]
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space") and normalizer in (None, {"type": "NFC"}):
        name = _SPLITS.get((", ".join(text for text in how if text), bool(model.get("ignore_merges"))))
        if name is not None:
            return name
    raise ValueError(f"As GGUF, this tokenizer cannot be written: llama.cpp has no name for how it splits ({before}).")


def _step(step: dict[str, Any]) -> str:
    match step:
        case {"type": "ByteLevel"}:
            return "GPT-2" if step.get("use_regex", True) else ""
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return str(pattern)
    return f"unknown: {step}"


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, **(getattr(config, "rope_parameters", None) or {})}


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def write_gguf(
    model: PreTrainedModel, tokenizer: Any, file: Path, kind: str, stops: Sequence[int], *, add_bos: bool
) -> str:
    """Writes a network in fp32 to a GGUF file, a tensor at a time, and says for people what was written.

    Args:
        kind: One of `TYPES`.
        stops: Tokens that end a text, of which the file names the first `MOST_STOPS`.
        add_bos: True if texts begin with the tokenizer's token for that.

    Raises:
        CheckpointError: If a number is not finite, or beyond fp16.
    """
    import gguf

    config: Any = model.config
    arch = _ARCHITECTURES[config.model_type]
    names = _names(config)
    writer = gguf.GGUFWriter(file, arch)
    _add_sizes(writer, config)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{TYPES[kind]}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_tokenizer(writer, tokenizer, config.vocab_size, stops, add_bos)
    ties = model.all_tied_weights_keys
    tensors = {name: t for name, t in as_written(model, model.state_dict()).items() if name not in ties}
    if (factors := _rope_factors(config)) is not None:
        tensors["rope_freqs.weight"] = factors
    types = {}
    for name, tensor in tensors.items():
        wanted = "F32" if tensor.dim() == 1 else "F16" if tensor.shape[-1] % 32 else TYPES[kind]
        types[name] = gguf.GGMLQuantizationType[wanted]
        shape = gguf.quant_shape_to_byte_shape(tuple(tensor.shape), types[name])
        writer.add_tensor_info(names[name], shape, np.dtype(np.uint8), math.prod(shape), types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        rows = _permuted(name, tensor.float(), config, 2)
        if not bool(rows.isfinite().all()) or (types[name] != 0 and float(rows.abs().max()) > 65504):
            raise CheckpointError(f"{name} holds numbers that are not finite, or beyond fp16. Take an earlier --step.")
        writer.write_tensor_data(gguf.quantize(rows.numpy(), types[name]))
    writer.close()
    return f"Written: {len(tensors)} tensors of {TYPES[kind]}, {file.stat().st_size:,} bytes."


def _names(config: Any) -> dict[str, str]:
    """Returns the names in the file by those of transformers."""
    import gguf

    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == _ARCHITECTURES[config.model_type])
    known = gguf.get_tensor_name_map(arch, config.num_hidden_layers).mapping
    return {f"{name}{end}": f"{target}{end}" for name, (_, target) in known.items() for end in (".weight", ".bias")}


def read_tensors(file: Path, config: PretrainedConfig, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields those tensors that have these names in transformers, in fp32, of a file that `write_gguf` wrote."""
    import gguf

    known = _names(config)
    back = {known[name]: name for name in names}
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name in back:
            rows = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            name = back[tensor.name]
            yield name, _permuted(name, rows, config, _head_dim(config) // 2)


def _permuted(name: str, rows: torch.Tensor, config: Any, first: int) -> torch.Tensor:
    """Returns a weight with the rows of each head in another order: `first` is 2 to write, half of a head to read back.

    llama.cpp turns neighbours in a Llama's head by one angle, transformers the first half with the second.
    """
    if _ARCHITECTURES[config.model_type] != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return rows
    return rows.reshape(-1, first, _head_dim(config) // first, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def _rope_factors(config: PretrainedConfig) -> torch.Tensor | None:
    """Returns what llama.cpp divides the angles of a head by; None if it knows by the type of scaling."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size = _head_dim(config)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors: torch.Tensor = rope["rope_theta"] ** (torch.arange(0, size, 2).float() / -size) / scaled
    return factors


def _add_sizes(writer: Any, config: Any) -> None:
    import gguf

    rope, size = _rope(config), _head_dim(config)
    # A window of attention is not written: up to its length, there is no difference.
    longest = min(config.max_position_embeddings, getattr(config, "sliding_window", None) or math.inf)
    writer.add_context_length(int(longest))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_tokenizer(writer: Any, tokenizer: Any, size: int, stops: Sequence[int], add_bos: bool) -> None:
    import gguf

    names, kinds = [f"[PAD{number}]" for number in range(size)], [gguf.TokenType.UNUSED] * size
    for name, number in tokenizer.get_vocab().items():
        names[number], kinds[number] = name, gguf.TokenType.NORMAL
    for number, added in tokenizer.added_tokens_decoder.items():
        special = added.special or number in stops
        kinds[number] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split_of(tokenizer))
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_add_bos_token(add_bos)
    writer.add_add_eos_token(False)
    ends = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, number in zip(ends, stops, strict=False):
        add(number)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if number is not None:
            add(number)
    if (template := _template(tokenizer)) is not None:
        writer.add_chat_template(template)


def _template(tokenizer: Any) -> str | None:
    return tokenizer.get_chat_template() if tokenizer.chat_template else None


def check_texts(tokenizer: Any) -> list[str]:
    """Returns texts that must become the same tokens, with every special token in one of them."""
    texts = [*_TEXTS, "a b".join(["", *tokenizer.all_special_tokens, ""])]
    # transformers' reader does not know that this splits numbers into digits.
    return [re.sub(r"\d", "", text) for text in texts] if split_of(tokenizer) == "smollm" else texts


def write_modelfile(folder: Path, file: str, tokenizer: Any, stops: Sequence[int]) -> bool:
    """Writes a `Modelfile` for Ollama; returns True if it has a template: of ChatML, or of the format of Llama 3."""
    lines, bos = [f"FROM ./{file}"], tokenizer.bos_token or ""
    whole, later = (_render(tokenizer, turns).removeprefix(bos) for turns in (_TURNS, _TURNS[1:]))
    for turn, start in _TEMPLATES:
        system, *others = (turn.format(role=role, text=text) for role, text in _TURNS)
        rest = "".join(others) + start
        if whole != system + rest or not later.endswith(rest):
            continue
        body = turn.format(role="{{ .Role }}", text="{{ .Content }}")
        lines.append(f'TEMPLATE """{{{{- range .Messages }}}}{body}{{{{ end }}}}{start}"""')
        before, _, behind = system.partition("SYSTEM")
        if default := later.removesuffix(rest).removeprefix(before).removesuffix(behind):
            lines.append(f'SYSTEM """{default}"""')
    lines += [f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(number)}"' for number in stops]
    (folder / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return any(line.startswith("TEMPLATE") for line in lines)


def begins_with_bos(tokenizer: Any, recipe: Recipe) -> bool:
    """Returns True if what was learned begins with the token that begins texts."""
    if tokenizer.bos_token is None:
        return False
    if recipe.chat is None:
        return recipe.data.add_bos
    return _render(tokenizer, _TURNS[1:]).startswith(tokenizer.bos_token)


def _render(tokenizer: Any, turns: Sequence[tuple[str, str]]) -> str:
    """Returns what the chat template writes; nothing if there is none, or it refuses the turns."""
    messages = [{"role": role, "content": text} for role, text in turns]
    try:
        with bounded_work(*prompts.BOUND):
            return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception:  # whatever a template does with what it did not expect
        return ""


def not_in_reader(config: PretrainedConfig) -> dict[str, Any]:
    """Returns what the file says, but transformers' reader of GGUF does not take from it."""
    missed: dict[str, Any] = {"head_dim": _head_dim(config)} if config.model_type == "qwen3" else {}
    return missed | ({"rope_parameters": _rope(config)} if _rope(config)["rope_type"] != "default" else {})


def check_tokens(file: Path, question: dict[str, Any], answer: dict[str, Any], tokenizer: Any) -> str:
    """Compares the tokenizer that a fresh process has read with the run's, and says for people what was compared.

    Raises:
        CheckpointError: If they differ.
    """
    wanted = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in question["texts"]]
    for text, ids, right in zip(question["texts"], answer["ids"], wanted, strict=True):
        if ids != right:
            one, other = (tokenizer.convert_ids_to_tokens(row)[:40] for row in (ids, right))
            raise CheckpointError(f"{file}, read by transformers, makes the tokens {one} of {text!r}, not {other}.")
    same = {"chat template": _template(tokenizer), "bos token": tokenizer.bos_token, "eos token": tokenizer.eos_token}
    for name, value in same.items():
        if value is not None and answer[name] != value:
            raise CheckpointError(f"{file}, read by transformers, has another {name}: {answer[name]}, not {value}.")
    taken = ", ".join(question["config"])
    note = f" transformers' reader leaves out {taken}, which it was given." if taken else ""
    return f"Its tokenizer makes the same of {len(wanted)} texts, and ends them at {answer['eos token']}.{note}"
