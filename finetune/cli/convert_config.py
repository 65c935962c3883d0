"""Turns a config of TRL, Axolotl, LLaMA-Factory or torchtune into a recipe, and names the launch file that fits.

Keys are carried over as `config/peer_keys.yaml` says; functions here do it where a value is not taken as it is.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from finetune.config import peer_keys, preference_losses
from finetune.config.peer_keys import CONVERTED, PeerKey, find_peer_key, json_word, peer_table, tool_name
from finetune.config.provenance import flat
from finetune.config.recipe import RECIPE_FIELDS, RecipeLoader, dump_tree, validate_recipe
from finetune.config.recipe_paths import DATA_SUFFIXES
from finetune.config.recipe_schema import LogSection, PreferenceSection, Recipe
from finetune.data.sources.conversation_formats import ROLES
from finetune.distributed.launch.predicted_environment import launch_of_file
from finetune.distributed.resolve_config import resolve_for_devices
from finetune.tasks.task_lookup import BUILT_IN
from finetune.utils import json_files
from finetune.utils.atomic_files import explain_unwritable
from finetune.utils.errors import BackendError, RecipeError
from finetune.utils.file_formats import read_text
from finetune.utils.quoting import shell_word
from finetune.utils.shipped_files import launch_file
from finetune.utils.yaml_files import YamlProblem, parse

Values = dict[str, Any]

_TRACKERS = get_args(get_args(LogSection.model_fields["trackers"].annotation)[0])
# Tokens in a row where a tool has no limit.
_UNLIMITED = 2048
_TRL_LOOKS = (
    "TRL looks at the data, and this does not: chat.train_on is `all`, which is right for `messages`. Write "
    "`completions` if records are `prompt` and `completion`, and remove `chat` if they are plain text."
)
_TRL_LOOKS_AT_PAIRS = (
    "TRL looks at the data, and this does not: the chat template writes the answers. Remove `chat` if records are "
    "texts that follow each other as they are."
)
# Stages of LLaMA-Factory that learn preferences, and their tasks.
_STAGES = {"dpo": "dpo", "kto": "kto", "rm": "reward"}
_READERS = ("json", "csv", "parquet", "text")
# Sections whose keys change files and figures, and nothing that is learned.
_NOT_LEARNED = ("eval", "log", "output", "checkpoint", "resume", "launch ")
_HEADINGS = {
    "differs": "Not carried over, and what is learned may differ:",
    "": "Not carried over; files, figures, speed or memory may differ:",
    "unknown": "Not in the table of the tool's keys:",
}


class _NotCarried(Exception):
    """The reason why a value has no counterpart."""


@dataclass
class _Conversion:
    """A recipe in the making."""

    tool: str
    file: Path
    given: Values
    """Keys that the config has."""
    found: Values
    """Dotted keys of the recipe and their values; besides, `accumulation`, and `launch`, the launch file's name."""
    notes: list[str] = field(default_factory=list)
    left: dict[str, dict[str, list[str]]] = field(default_factory=lambda: {kind: {} for kind in _HEADINGS})
    """Keys that are not carried over, by kind and reason."""
    refusals: list[str] = field(default_factory=list)
    """Reasons why no recipe can be written, as sentences."""

    def leave(self, kind: str, key: str, why: str) -> None:
        """Notes a key that is not carried over, or without which no recipe can be written (`refused`)."""
        if kind == "refused":
            self.refusals.append(f"{key} is {json_word(self.given.get(key))[:60]}, and {why}.")
        else:
            self.left[kind].setdefault(why, []).append(key)

    def left_lines(self) -> list[str]:
        """Returns the keys that are not carried over, by kind and reason."""
        lines = []
        for kind, reasons in self.left.items():
            lines += [_HEADINGS[kind]] * bool(reasons)
            lines += [f"    {', '.join(keys)}: {why}" for why, keys in reasons.items()]
        return lines

    def carry(self, key: str, value: Any) -> None:
        """Carries over one key of the tool."""
        row = find_peer_key(self.tool, key)
        if row is None:
            self.leave("unknown", key, f"got {json_word(value)[:60]}")
        elif value is not None or row.rule == "length":
            try:
                self.found |= self._translated(row, key, value)
            except _NotCarried as reason:
                learned = row.here and not row.here.startswith(_NOT_LEARNED)
                self.leave(row.then or ("differs" if learned else ""), key, str(reason))
            except RecipeError as error:
                self.refusals.append(str(error))
            except (TypeError, ValueError, AttributeError, LookupError):
                self.leave("differs", key, f"{json_word(value)[:60]} is no value that {tool_name(self.tool)} takes")

    def _translated(self, row: PeerKey, key: str, value: Any) -> Values:
        """Returns what a value is here, by keys of the recipe.

        Raises:
            _NotCarried: If it is nothing here.
        """
        if row.values is not None:
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            if isinstance(value, str | float | int) and value in row.values:
                ours = row.values[value]
                return ours if isinstance(ours, dict) else {} if ours is None else {row.here: ours}
        if row.rule and row.rule != "same":
            return RULES[row.rule](self, key, row.here, value)
        if row.why and row.values is None and (not value or value == "none"):
            return {}  # it asks for nothing
        if row.why:
            raise _NotCarried(row.why)
        if row.values is not None and row.rule != "same":
            more = row.how or ", ".join(map(json_word, row.values))
            raise _NotCarried(f"{json_word(value)} has no counterpart in {row.here} ({more})")
        return {row.here: value}


# ---- rules of single values: what a value is here, by keys of the recipe; `here` is the table's key


def _whole_steps(_: _Conversion, key: str, here: str, value: Any) -> Values:
    if type(value) is not int or value < 1:
        raise _NotCarried(f"{here} is a whole number of steps, got {json_word(value)}")
    return {here: value}


def _every(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    section, found = here.partition(".")[0], conversion.found
    if 0 < value < 1 and found.get("length.steps"):
        value = math.ceil(value * found["length.steps"])  # a share of the run
    if value >= 1:
        return {here: int(value), f"{section}.per_epoch": None}
    return {here: None, f"{section}.per_epoch": 1 / (value * found["length.epochs"])}


def _length(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    if value is not None:
        return {here: value}
    conversion.notes.append(
        f"{tool_name(conversion.tool)} cuts nothing where {key} is null. Here rows have a length: data.sequence_length "
        f"is {_UNLIMITED}, and checks.max_too_long 0 ends a run whose data has a longer document, with its length."
    )
    return {here: _UNLIMITED, "checks.max_too_long": 0.0}


def _trackers(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    names = set(conversion.found.get(here, []))
    for word in value if isinstance(value, list) else [value]:
        own = next((name for name in _TRACKERS if name in f"{key} {word}".lower()), None)
        if own is None and word not in ("none", False) and "Disk" not in str(word) and "Stdout" not in str(word):
            conversion.leave("", key, f"{word} has no counterpart in {here} ({', '.join(_TRACKERS)})")
        elif own is not None:
            names = names | {own} if word else names - {own}
    if key == "wandb_project":
        conversion.notes.append(f"Weights & Biases: `export WANDB_PROJECT={shell_word(value)}` names the project.")
    return {here: sorted(names)}


def _share(_: _Conversion, key: str, here: str, value: Any) -> Values:
    if value >= 1:
        raise _NotCarried(f"{here} is a share of the documents, got {value} documents; 0.01 is held out")
    return {here: value}


def _names(_: _Conversion, key: str, here: str, value: Any) -> Values:
    if isinstance(value, str) and value.replace(",", "").replace(" ", "").isidentifier():
        return {here: [name.strip() for name in value.split(",")]}
    return {here: "all-linear" if value in ("all-linear", ["all-linear"]) else value}


def _warmup(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    if key == "warmup_ratio" or 0 < value < 1:
        return {"schedule.warmup_fraction": value}
    # Without steps, transformers takes the ratio.
    keeps_ratio = not value and conversion.given.get("warmup_ratio")
    return {} if keeps_ratio else {here: int(value), "schedule.warmup_fraction": None}


def _stage(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    if value not in ("sft", "pt", *_STAGES):
        why = "next tokens and preferences are learned, which are the stages `sft`, `pt`, `dpo`, `kto` and `rm`"
        conversion.leave("refused", key, why)
    if value in _STAGES:
        return {here: _STAGES[value]}
    cut = value == "pt" and conversion.given.get("packing") is not False
    return {"data.packing": "wrapped", "data.remainder": "drop"} if cut else {}


def _losses(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    names, task = [value] if isinstance(value, str) else value, conversion.found.get("task.name")
    if task is None:
        conversion.leave("differs", key, "the loss is that of the next token; your own is named by task.loss")
        return {}
    known = preference_losses.LOSSES.get(task, (task,))
    if unknown := [name for name in names if name not in known]:
        raise _NotCarried(f"{', '.join(map(str, unknown))} is no loss of {task} here ({', '.join(known)})")
    return {here: names} if task in preference_losses.LOSSES else {}


def _smoothing(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    task, losses = conversion.found.get("task.name", ""), conversion.found.get("preference.loss")
    given = {"label_smoothing": value, **({"loss": losses} if losses else {})}
    if value and (problems := preference_losses.problems(task, given)):
        raise _NotCarried(problems[0].partition(": ")[0].replace("preference.", ""))
    return {here: value} if value else {}


def _of_tokens(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    task = conversion.found.get("task.name")
    if value and task in BUILT_IN and BUILT_IN[task].rows.judged:
        raise _NotCarried(f"{task} learns answers, whose loss it does not change")
    if value:
        conversion.notes.append(f"{key}: evaluations here report the loss without it.")
    return {here: value} if value else {}


def _with_sft(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    found = conversion.found
    if not value:
        return {}
    if conversion.tool == "llama-factory":
        why = "there it is a mean of each answer's mean, and here of all tokens of chosen answers"
        conversion.leave("differs", key, why)
    if found.get("task.name") in ("kto", "reward"):
        raise _NotCarried(f"{found['task.name']} has no cross-entropy beside its loss")
    if found.get("task.name") in ("orpo", "simpo"):
        return {"preference.sft_weight": value + (found["task.name"] == "orpo")}
    losses = found.get(here, ["sigmoid"])
    return {
        here: [*losses, "sft"],
        "preference.loss_weights": [*found.get("preference.loss_weights", [1.0] * len(losses)), value],
    }


def _argument(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    arguments = conversion.found.get(here, {})
    first, second = arguments.get("betas", (0.9, 0.999))
    betas = {"adam_beta1": [value, second], "adam_beta2": [first, value]}
    name = "betas" if key in betas else "eps" if key.startswith("adam_eps") else key.rpartition(".")[2]
    return {here: {**arguments, name: betas.get(key, value)}}


def _template(_: _Conversion, key: str, here: str, value: Any) -> Values:
    if Path(str(value)).is_file() or str(value).endswith(".jinja"):
        return {here: value}
    raise _NotCarried(f"the tokenizer's own template is taken; where it has another or none, give {here}")


def _special_tokens(_: _Conversion, key: str, here: str, value: Any) -> Values:
    if set(value) - {"pad_token"}:  # padding is never seen
        raise _NotCarried("the tokenizer's own special tokens are taken")
    return {}


def _torchtune_model(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    name = value.rpartition(".")[2]
    if "vision" in value or "classifier" in name:
        conversion.leave("refused", key, "language models alone are trained, on text")
    return ({here: True} if "lora_" in name else {}) | ({"model.quantization": "nf4"} if "qlora_" in name else {})


def _torchtune_targets(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    given = conversion.given
    names = ["o_proj" if name == "output_proj" else name for name in given.get("model.lora_attn_modules", [])]
    names += ["gate_proj", "up_proj", "down_proj"] * bool(given.get("model.apply_lora_to_mlp"))
    return {here: names + ["lm_head"] * bool(given.get("model.apply_lora_to_output"))}


def _deepspeed(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    file = next((f for f in (Path(str(value)), conversion.file.parent / str(value)) if f.is_file()), None)
    if isinstance(value, dict) or file is not None:
        text = read_text(file) if file is not None else json.dumps(value)
        stage, offload = re.search(r'"stage"\s*:\s*([0-3])', text), re.search(r'"device"\s*:\s*"(cpu|nvme)"', text)
    else:
        stage, offload = re.search("z(?:ero)?_?([0-3])", value.lower()), re.search("offload", value)
        conversion.notes.append(f"There is no file {value}: the launch file is chosen by its name.")
    if stage is None:
        raise _NotCarried(f"{json_word(value)[:60]} says no stage of ZeRO; name the launch file zero1, zero2 or zero3")
    if offload and stage[1] != "3":
        conversion.leave("", key, "offloading below stage 3 is written into a copy of ds_configs/zero2.json")
    suffix = "" if not offload or stage[1] != "3" else "_nvme" if "nvme" in offload[0] else "_offload"
    return {"launch": f"zero{stage[1]}{suffix}" if stage[1] != "0" else "ddp"}


def _fsdp(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    config = {str(k).removeprefix("fsdp_"): v for k, v in (value.items() if isinstance(value, dict) else ())}
    words = f"{config.get('sharding_strategy', '')} {config.get('reshard_after_forward', '')} {'' if config else value}"
    name = conversion.found.get("launch", "fsdp")
    if config.get("offload_params") or "offload" in words:
        name = "fsdp_offload"
    elif re.search("grad_op|false", words.lower()):
        name = "fsdp_grad_op"
    elif "hybrid" in words.lower():
        name = "hsdp"
    known = {"version", "offload_params", "activation_checkpointing", "reshard_after_forward", "sharding_strategy"}
    if rest := sorted(config.keys() - known):
        conversion.leave("", key, f"the launch file that ships decides {', '.join(rest)}")
    recompute = {"model.gradient_checkpointing": True} if config.get("activation_checkpointing") else {}
    return {"launch": name, **recompute} if value else {}


# ---- sources of data


def _datasets(conversion: _Conversion, key: str, here: str, value: Any) -> Values:
    if isinstance(value, dict) and "datasets" in value:  # of TRL's and of recipes built on it
        if value.get("test_split_size"):
            conversion.found |= _share(conversion, key, "data.validation_fraction", value["test_split_size"])
        value = value["datasets"]
    if isinstance(value, str):
        value = value.split(",") if conversion.tool == "llama-factory" else [value]
    sources = []
    for number, entry in enumerate(value if isinstance(value, list) else [value]):
        try:
            sources += _SOURCES[conversion.tool](conversion, f"{key}.{number}", entry)
        except _NotCarried as reason:
            conversion.leave("differs", f"{key}.{number}", str(reason))
    return {here: sources, **({"data.packing": "wrapped"} if key == "pretraining_dataset" else {})}


def _places(name: str, entry: Mapping[str, Any], **more: Any) -> list[Values]:
    """Returns sources for a path or a name on the hub, with what its entry says of subset, split and files."""
    files = entry.get("data_files") or []
    if files and name not in _READERS:
        raise _NotCarried(f"data_files of {name}: name the files themselves as sources, or a configuration of it")
    if files or name.startswith((".", "/", "~")) or name.endswith(DATA_SUFFIXES) or Path(name).exists():
        if "[" in (entry.get("split") or ""):
            raise _NotCarried(f"{entry['split']} of {name}: a part of local files is not read; write it to a file")
        paths = [files] if isinstance(files, str) else files or [name]
        return [{"path": path, **more} for path in paths]
    subset = entry.get("name") or entry.get("subset")
    given = {"hub": name, "hub_config": subset, "revision": entry.get("revision"), "split": entry.get("split")}
    return [{key: value for key, value in given.items() if value is not None} | more]


def _leave_rest(conversion: _Conversion, path: str, entry: Mapping[str, Any], used: str) -> None:
    """Notes keys of an entry that are not among those used, and say something."""
    for name in sorted(entry.keys() - set(used.split())):
        if entry[name] is not None:
            conversion.leave("differs", f"{path}.{name}", "sources of data have no such key")


def _of_turns(role: str, content: str | None) -> Values:
    """Returns the format of conversations whose turns have these fields, and the names of fields that it lacks."""
    kind, usual = ("sharegpt", "value") if role == "from" else ("messages", "content")
    named = {"role": role if role not in ("role", "from") else None, "content": content if content != usual else None}
    return {"format": kind, "fields": {key: name for key, name in named.items() if name}}


def _add_roles(conversion: _Conversion, roles: Mapping[str, str]) -> None:
    if new := {name: role for name, role in roles.items() if ROLES.get(name) != role}:
        conversion.found["chat.roles"] = {**conversion.found.get("chat.roles", {}), **new}


def _trl_source(conversion: _Conversion, place: str, entry: Any) -> list[Values]:
    given = conversion.given
    if isinstance(entry, str):
        entry = {"path": entry, "name": given.get("dataset_config"), "split": given.get("dataset_train_split")}
        if given.get("eval_strategy", "no") not in ("no", False):
            test = {**entry, "split": given.get("dataset_test_split", "test")}
            places = [place for place in _places(test["path"], test) if "hub" in place]
            conversion.found |= {"data.validation": places} if places else {}
    _leave_rest(conversion, place, entry, "path id name config split data_files columns weight")
    entry = {"path": entry.get("id"), "name": entry.get("config"), **entry}
    more = {} if entry.get("weight") is None else {"weight": entry["weight"]}
    if "task.name" in conversion.found:
        conversion.notes += [_TRL_LOOKS_AT_PAIRS] if _TRL_LOOKS_AT_PAIRS not in conversion.notes else []
        return _places(entry["path"], entry, **more)
    columns = set(entry.get("columns") or ())
    if "dataset_text_field" in given:
        return _places(entry["path"], entry, text_field=given["dataset_text_field"], **more)
    more["format"] = "messages" if "messages" in columns else "prompt" if "completion" in columns else "auto"
    if not {"assistant_only_loss", "completion_only_loss"} & given.keys():
        conversion.found["chat.train_on"] = "completions" if more["format"] == "prompt" else "all"
        conversion.notes += [_TRL_LOOKS] * (more["format"] == "auto")
    return _places(entry["path"], entry, **more)


def _axolotl_source(conversion: _Conversion, place: str, entry: Mapping[str, Any]) -> list[Values]:
    data_type: Any = entry.get("type") or "pretrain"
    used = "path type split name data_files revision ds_type trust_remote_code"
    kind = "fields" if isinstance(data_type, dict) else re.split("[:.]", data_type)[0]
    if "task.name" in conversion.found:
        form = data_type if isinstance(data_type, dict) else entry
        names = ("messages", "prompt", "system", "chosen", "rejected", "completion", "label")
        fields = {name: form[f"field_{name}"] for name in names if form.get(f"field_{name}")}
        words, pairs = str(data_type), conversion.found["task.name"] != "kto"
        if words.endswith("argilla") and pairs:
            fields = {"chosen": "chosen_response", "rejected": "rejected_response"}
        if kind in ("chatml", "llama3"):
            conversion.found["chat.template"] = kind
        elif kind not in ("chat_template", "bradley_terry", "orpo", "user_defined", "fields", "passthrough"):
            raise _NotCarried(f"data of type {data_type} is not read; write it as pairs of messages")
        mapped, roles = entry.get("message_property_mappings") or {}, entry.get("roles") or {}
        turns = {*mapped.values(), entry.get("message_field_role"), entry.get("message_field_content")}
        if others := turns - {None, "role", "content", "from", "value"}:
            raise _NotCarried(
                f"turns have the fields {', '.join(sorted(map(str, others)))}; call them role and content"
            )
        _add_roles(conversion, {name: role for role, names in roles.items() for name in names})
        used += f" {' '.join(f'field_{name}' for name in names)} message_property_mappings roles"
        _leave_rest(conversion, place, entry, f"{used} message_field_role message_field_content")
        fields = {ours: name for ours, name in fields.items() if ours != name}
        return _places(str(entry["path"]), entry, **({"fields": fields} if fields else {}))
    if kind == "fields":
        theirs = {"user": "instruction", "input": "input", "assistant": "output", "system": "system"}
        fields = {ours: data_type[f"field_{name}"] for ours, name in theirs.items() if data_type.get(f"field_{name}")}
        more: Values = {"format": "pairs", "fields": fields}
    elif kind in ("chat_template", "sharegpt"):
        used += " field_messages message_property_mappings message_field_role message_field_content roles"
        mapped = entry.get("message_property_mappings") or {}
        role, content = (mapped.get(key) or entry.get(f"message_field_{key}") for key in ("role", "content"))
        usual, who = ("conversations", "from") if kind == "sharegpt" else ("messages", "role")
        more = _of_turns(role or who, content)
        more["fields"] |= {"messages": entry.get("field_messages") or usual}
        _add_roles(conversion, {name: role for role, names in (entry.get("roles") or {}).items() for name in names})
    elif kind == "alpaca":
        more = {"format": "alpaca"}
    elif kind in ("completion", "pretrain"):
        used += " field text_column"
        more = {"text_field": entry.get("field") or entry.get("text_column") or "text"}
        conversion.found["data.long_documents"] = "split"
    else:
        raise _NotCarried(f"data of type {data_type} is not read; write it as messages")
    if kind in ("fields", "alpaca"):
        conversion.leave("differs", f"{place}.type", "records are written by chat.template, in other words")
    usual_values = {"roles_to_train": ["assistant"], "train_on_eos": "turn", "shards": 1}
    rest = {name: value for name, value in entry.items() if usual_values.get(name) != value}
    _leave_rest(conversion, place, rest, used)
    return _places(str(entry["path"]), entry, **more)


def _factory_source(conversion: _Conversion, place: str, name: str) -> list[Values]:
    given, beside, name = conversion.given, conversion.file.parent, name.strip()
    folder = Path(str(given.get("dataset_dir", "data")))
    files = [parent / "dataset_info.json" for parent in (folder, beside / folder, beside)]
    info = next((file for file in files if file.is_file()), None)
    if info is None and given.get("dataset_dir") != "ONLINE":
        raise RecipeError(
            f"{conversion.file} names the data set {name}, and there is none of {', '.join(map(str, files))}, where "
            "LLaMA-Factory looks it up. Copy dataset_info.json beside the config, or name its folder as dataset_dir."
        )
    with RecipeError.explaining(f"{info} cannot be read", "Mend the file."):
        entry: Any = {"hf_hub_url": name} if info is None else json_files.read(info).get(name)
    if entry is None:
        raise _NotCarried(f"{info} has no {name}")
    tags, listed = entry.get("tags", {}), entry.get("formatting") in ("sharegpt", "openai")
    columns = entry.get("columns") or ({"messages": "conversations"} if listed else {})
    prefers, labelled = "task.name" in conversion.found, conversion.found.get("task.name") == "kto"
    pairs, labels = bool(entry.get("ranking")), "kto_tag" in columns
    if {"images", "videos", "audios"} & columns.keys() or (pairs, labels) != (prefers and not labelled, labelled):
        lacks = "preferences, images or sound, and only text is read"
        lacks = "no answers with a kto_tag" if labelled else "no pairs of answers" if prefers else lacks
        raise _NotCarried(f"{name} has {lacks}")
    more = _number_of_samples(conversion, name, entry, info)
    if prefers:
        # An answer with its prompt is read as for fine-tuning: Alpaca's fields, or turns.
        ours = {"conversations": "messages"} if listed else {"instruction": "prompt", "input": "query"}
        ours |= {"output": "response"} if labelled and not listed else {}
        ours |= {word: word for word in ("system", "tools", "history", "chosen", "rejected", "kto_tag")}
        fields = {key: columns[word] for key, word in ours.items() if columns.get(word, key) != key}
        more |= {"fields": fields} if fields else {}
    elif given.get("stage") == "pt":
        more["text_field"] = columns.get("prompt", "instruction")
    else:
        theirs = {"messages": "messages"} if listed else {"user": "prompt", "input": "query", "assistant": "response"}
        theirs |= {"system": "system", "tools": "tools", "history": "history"}
        fields = {ours: columns[column] for ours, column in theirs.items() if column in columns}
        if listed:
            turns = _of_turns(tags.get("role_tag") or "from", tags.get("content_tag"))
            more |= turns | {"fields": fields | turns["fields"]}
            whose = {"user": "user", "assistant": "assistant", "observation": "tool", "system": "system"}
            _add_roles(conversion, {tags[f"{tag}_tag"]: role for tag, role in whose.items() if tags.get(f"{tag}_tag")})
            if (tag := tags.get("function_tag", "function_call")) != "function_call":
                conversion.leave("differs", f"{place}.tags", f"calls are read of the role `function_call`, not {tag}")
        else:
            more |= {"format": "pairs" if columns else "alpaca"} | ({"fields": fields} if fields else {})
    if "hf_hub_url" in entry:
        return _places(entry["hf_hub_url"], entry, **more)
    if info is None or "file_name" not in entry:
        raise _NotCarried(f"{name} is neither a file nor a data set on the Hugging Face hub")
    return [{"path": str(info.parent / entry["file_name"]), **more}]


def _number_of_samples(conversion: _Conversion, name: str, entry: Mapping[str, Any], info: Path | None) -> Values:
    """Returns `limit`, or `weight` where documents are drawn again since there are fewer of them."""
    drawn, most = entry.get("num_samples"), conversion.given.get("max_samples")
    if not drawn:
        return {} if most is None else {"limit": most}
    number, file = min(drawn, most or drawn), info and info.parent / str(entry.get("file_name"))
    if file and file.suffix in (".json", ".jsonl") and file.is_file():
        text = read_text(file)
        size = len(json_files.parse(text)) if file.suffix == ".json" else sum(map(bool, text.split("\n")))
        if number >= size:
            return {} if number == size else {"weight": round(number / size, 6)}
    why = (
        "there samples are random, and drawn again where the data has fewer; here they are the first; `weight` repeats"
    )
    conversion.leave("differs", f"{name}.num_samples", why)
    return {"limit": number}


def _torchtune_source(conversion: _Conversion, place: str, entry: Mapping[str, Any]) -> list[Values]:
    builder, builders = str(entry.get("_component_")).rpartition(".")[2], peer_table()["torchtune_data"]
    if builder not in builders:
        raise _NotCarried(f"{builder} is not read; known are {', '.join(builders)}")
    usual, columns = builders[builder], entry.get("column_map") or {}
    more: Values = {"format": usual["format"]}
    if more["format"] == "text":
        more = {"text_field": entry.get("column", "text")}
    elif more["format"] == "pairs":
        more["fields"] = {"user": columns.get("input", "input"), "assistant": columns.get("output", "output")}
    elif more["format"] == "messages":
        more["format"] = "sharegpt" if entry.get("conversation_style") == "sharegpt" else "messages"
        more["fields"] = {"messages": entry.get("conversation_column")}
    elif usual["format"] == "alpaca":
        why = "the tokenizer's own template writes instruction and input, and no words of Alpaca's around them"
        conversion.leave("differs", f"{place}._component_", why)
    learned = {True: "all", False: "assistant", None: usual["train_on"]}[entry.get("train_on_input")]
    packed = "documents" if entry.get("packed") else "padded"
    conversion.found |= {"chat.train_on": learned, "data.packing": packed} if place.startswith("dataset.") else {}
    used = "_component_ source column column_map conversation_style conversation_column train_on_input packed split"
    _leave_rest(conversion, place, entry, used + " name subset data_files")
    return _places(str(entry.get("source", usual.get("source"))), entry, **more)


_SOURCES: dict[str, Callable[..., list[Values]]] = {
    "trl": _trl_source,
    "axolotl": _axolotl_source,
    "llama-factory": _factory_source,
    "torchtune": _torchtune_source,
}
RULES: dict[str, Callable[[_Conversion, str, str, Any], Values]] = {
    "accumulation": lambda _, key, here, value: {"accumulation": int(value)},
    "argument": _argument,
    "datasets": _datasets,
    "deepspeed": _deepspeed,
    "device_rows": lambda c, key, here, value: {"accumulation": value // (c.given.get("micro_batch_size") or 1)},
    "every": _every,
    "fsdp": _fsdp,
    "in_place_of_epochs": lambda _, key, here, value: {here: value, "length.epochs": None},
    "length": _length,
    "losses": _losses,
    "names": _names,
    "of_tokens": _of_tokens,
    "rank": lambda _, key, here, value: {here: value, "lora.alpha": 2 * value},
    "share": _share,
    "smoothing": _smoothing,
    "special_tokens": _special_tokens,
    "stage": _stage,
    "steps_of_epochs": lambda c, key, here, value: {here: value * c.given.get("epochs", 1), "length.epochs": None},
    "template": _template,
    "torchtune_model": _torchtune_model,
    "torchtune_targets": _torchtune_targets,
    "trackers": _trackers,
    "used": lambda *_: {},  # the rule of another key reads it
    "warmup": _warmup,
    "whole": _whole_steps,
    "with_name": lambda c, key, here, value: {here: {"name": value}},
    "with_sft": _with_sft,
}
"""Functions that carry over values, by the names that the table has for them."""


# ---- the whole config


def convert_config(
    file: Path, tool: str | None, folder: Path, devices: int | None, task: str | None = None
) -> list[str]:
    """Writes `recipe.yaml` to a folder, from another tool's config.

    Args:
        tool: One of `CONVERTED`; None to tell it by the keys.
        devices: Processes of the run; None for what the config says, or one.
        task: The task of a config of TRL, which does not name its trainer; None to tell it by the keys.

    Returns:
        Lines with what was written, what was assumed, and every key that is not carried over.

    Raises:
        RecipeError: If the config cannot be read, no valid recipe can be made of it, or there is a recipe already.
    """
    tree = _read_config(file)
    tool = tool or _recognise(file, tree)
    given = tree
    if tool == "torchtune":
        given = flat({key: value for key, value in tree.items() if key not in ("dataset", "dataset_val")})
        given |= {key: tree[key] for key in ("dataset", "dataset_val") if key in tree}
    conversion = _Conversion(tool, file, given, {**peer_table()["fixed"][tool]})
    usual = peer_table()["defaults"][tool]
    if tool == "trl" and (task := task or _trl_task(given)):
        usual = {**usual, **peer_table()["preference_defaults"][tool]}
        usual |= peer_table()["reward_defaults"][tool] if task == "reward" else {}
        conversion.found["task.name"] = task
        conversion.notes.append(f"TRL's config does not name its trainer. The task is {task}; --task names another.")
    own = {key: value for key, value in usual.items() if given.get(key) is None}
    rows = {key: find_peer_key(tool, key) for key in (*given, *own)}
    # Of lengths, null is a value.
    given_keys = {
        row.here for key, row in rows.items() if row and (given.get(key) or (key in given and row.rule == "length"))
    }
    defaults = {key: value for key, value in own.items() if (row := rows[key]) and row.here not in given_keys}
    values = {**given, **defaults}
    for key in sorted(values, key=lambda key: peer_table()["keys"].index(row) if (row := rows[key]) else -1):
        conversion.carry(key, values[key])
    num_processes = given.get("num_processes")
    devices = devices or (num_processes if isinstance(num_processes, int) else 1)
    batch = _complete(conversion, devices)
    launch, recipe = conversion.found.pop("launch"), _nested(conversion.found)
    try:
        if conversion.refusals:
            advice = "Convert a config of fine-tuning, pre-training or preferences, on text."
            raise RecipeError(" ".join([*conversion.refusals, advice]))
        _check_launch(validate_recipe(recipe, None, BUILT_IN), launch, devices)
    except (RecipeError, BackendError) as error:
        rest = "; ".join(line.strip() for line in conversion.left_lines()).replace(":;", ":")
        raise RecipeError(
            f"{file}, a config of {tool_name(tool)}, makes no valid recipe, and nothing is written. Mend the config: "
            f"{' '.join(str(error).split())}{f' {rest}.' if rest else ''}"
        ) from error
    target = folder / "recipe.yaml"
    if target.exists():
        raise RecipeError(f"{target} is there already, and nothing is overwritten. Name another folder with --output.")
    count = "" if launch == "single" else f" --num_processes {devices}"
    command = f"finetune launch --config_file {launch}{count} {shell_word(str(target))}"
    with explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        head = f"# From {shell_word(file.name)}, a config of {tool_name(tool)}.\n# {command}\n"
        target.write_text(f"{head}{dump_tree(recipe)}", "utf-8")
    taken = [
        f"{key} {json_word(defaults[key])}" for key in defaults if (row := rows[key]) and row.here in conversion.found
    ]
    lines = [f"{file} is a config of {tool_name(tool)}. Written: {target}", "Next:", f"    {command}", batch]
    if taken:
        lines.append(f"Taken for keys that the config leaves out, as {tool_name(tool)} does: {', '.join(taken)}.")
    return [*lines, *conversion.notes, *conversion.left_lines()]


def _check_launch(recipe: Recipe, name: str, devices: int) -> None:
    """Refuses a recipe that a launch file of ours cannot run, whatever this machine has, as a dry run there does."""
    launch = launch_of_file(Path(launch_file(name)), devices)
    resolve_for_devices(recipe, launch, devices, {})
    if launch.cuts_state:
        from finetune.optim.optimizers import check_optimizer  # imports torch

        check_optimizer(recipe.optim, launch)


def _read_config(file: Path) -> Values:
    with RecipeError.explaining(f"The config {file} cannot be read", "Name a YAML file."):
        text = read_text(file)
    try:
        tree = parse(text, RecipeLoader)
        if isinstance(tree, dict) and "${" in text:  # torchtune's references, which may name others
            known = flat({str(key): value for key, value in tree.items()})
            for _ in range(2):
                text = re.sub(r"\$\{([\w.]+)\}", lambda named: str(known.get(named[1], named[0])), text)
            tree = parse(text, RecipeLoader)
    except YamlProblem as error:
        raise RecipeError(f"{error.at(file)}: the config is not valid YAML: {error}. Mend it.") from error
    if not isinstance(tree, dict) or not tree:
        raise RecipeError(f"{file} must hold the keys and values of a config, as YAML. Name another file.")
    return {str(key): value for key, value in tree.items()}


def _recognise(file: Path, tree: Values) -> str:
    hits = {tool: len(keys) for tool, keys in peer_keys.count_keys(tree).items()}
    foreign, keys = peer_keys.foreign_tool(tree)
    if len(keys) > 1 and len(keys) >= max(hits.values()) / 2:
        raise RecipeError(
            f"{file} is a config of {foreign} ({', '.join(keys[:4])}), which is not read; those of "
            f"{', '.join(map(tool_name, CONVERTED))} are. `finetune init --model MODEL --data FILE` makes a recipe to "
            "begin with; in it, an unknown key of another tool is answered with its name here."
        )
    best = [tool for tool, number in hits.items() if number == max(hits.values())]
    if len(best) > 1 or hits[best[0]] < 2:
        raise RecipeError(
            f"{file} could be a config of {' or '.join(map(tool_name, best))}: of its {len(tree)} keys, each knows "
            f"{hits[best[0]]}. Say which by --from, one of {', '.join(CONVERTED)}."
        )
    return best[0]


def _trl_task(given: Values) -> str | None:
    """Returns the task of a config of TRL by keys that one of its trainers of preferences has; None for fine-tuning."""
    losses = given.get("loss_type") or []
    losses = {losses} if isinstance(losses, str) else {*losses}
    if losses & {*preference_losses.LOSSES["kto"]} or {"desirable_weight", "undesirable_weight"} & given.keys():
        return "kto"
    if "center_rewards_coefficient" in given:
        return "reward"
    if "simpo" in losses or {"cpo_alpha", "simpo_gamma"} & given.keys():
        return "simpo" if "simpo" in losses else "cpo"
    keys = {"beta", "loss_weights", "label_smoothing", "f_divergence_type", "discopop_tau", "precompute_ref_log_probs"}
    return "dpo" if losses - {"nll", "chunked_nll", "dft"} or keys & given.keys() else None


def _complete(conversion: _Conversion, devices: int) -> str:
    """Adds what follows from several keys, and removes what is not in force; returns the sentence on the batch."""
    values, given, tool = conversion.found, conversion.given, conversion.tool
    micro, accumulation = values.get("batch.micro_size", 1), values.pop("accumulation", 1)
    rows = micro if isinstance(micro, int) else 1
    total = values.setdefault("batch.global_size", rows * accumulation * devices)
    values.setdefault("launch", "single" if devices == 1 else "fsdp" if tool == "torchtune" else "ddp")
    if given.get("eval_strategy") == "steps" and not given.get("eval_steps"):
        values["eval.every_steps"] = given.get("logging_steps", 10 if tool == "trl" else 500)
    for key, name in (("eval.patience", "early_stopping_patience"), ("output.model", "load_best_model_at_end")):
        if key in values and not (values.get("eval.every_steps") or values.get("eval.per_epoch")):
            conversion.leave("differs", name, "nothing is evaluated before the end of the run")
            del values[key]
    sources = values.get("data.train", []) + values.get("data.validation", [])
    formats = {source["format"] for source in sources if "format" in source}
    prefers = "task.name" in values
    values["chat"] = prefers or bool(formats)
    if prefers:
        values["data.packing"] = "padded" if values["task.name"] == "reward" else "documents"
        values.pop("chat.train_on", None)  # answers alone are learned
        defaults = PreferenceSection().model_dump()
        keys = {key: values[f"preference.{key}"] for key in defaults if f"preference.{key}" in values}
        keys = {key: value for key, value in keys.items() if value != defaults[key]}
        for name, sentence in preference_losses.unread(values["task.name"], keys).items():
            conversion.leave("differs", f"preference.{name}", sentence.removeprefix("preference."))
            del values[f"preference.{name}"]
        if tool != "llama-factory" and values["task.name"] == "simpo":
            values.setdefault("preference.sft_weight", 1.0)
    elif tool == "axolotl" and not formats & {"messages", "sharegpt"}:
        values["chat.template"] = "alpaca" if formats == {"alpaca"} else "plain"
    for source in sources:
        source |= {"format": "text"} if values["chat"] and "text_field" in source else {}
    if values["chat"] and values.get("data.packing") == "wrapped":
        values["data.packing"] = "documents"
        conversion.leave("differs", "packing", "data.packing `wrapped` would cut through conversations")
    for section, on in (("lora", "lora"), ("chat", "chat"), ("preference", "task.name")):
        for key in [key for key in values if key.partition(".")[0] == section and not values.get(on)]:
            del values[key]
    product = f"{rows} rows a device x {accumulation} accumulation x {devices} device{'s' * (devices > 1)}"
    return f"Global batch: {product} = {total} rows. For another number of devices, convert with --devices N."


def _nested(values: Values) -> Values:
    """Returns the tree of dotted keys, in the schema's order."""
    tree: Values = {}
    for key in (key for key in RECIPE_FIELDS if key in values):
        section, _, name = key.partition(".")
        if not name:
            tree[section] = values[key]
        elif values[key] is not None or RECIPE_FIELDS[key].default is not None:
            inner = tree.get(section)
            tree[section] = {**(inner if isinstance(inner, dict) else {}), name: values[key]}
    return tree
