"""GGUF exports are what was trained, for transformers' reader of GGUF and for llama.cpp itself."""

import json
import re
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import chats
import pytest
import torch
from exports import exported, opened_here
from inside import run_here
from recipes_for_tests import ARCHITECTURES, base
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from finetune.cli import main
from finetune.export import fresh_process, verify_export, write_gguf
from finetune.utils.errors import CheckpointError, RecipeError

pytestmark = [
    pytest.mark.xdist_group("gguf"),
    pytest.mark.skipif(find_spec("gguf") is None, reason="needs the extra [gguf]"),
]
needs_llama_cpp = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="needs xllamacpp")

SIDES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_SCALED = {"rope_theta": 10_000.0, "factor": 8.0}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
NETWORKS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3e5},
        "head_dim": 32,
    },
    "llama3": {"rope_parameters": {"rope_type": "llama3", **_SCALED, **_LLAMA3}},
    "linear": {"rope_parameters": {"rope_type": "linear", **_SCALED}},
    "mistral": {"model_type": "mistral", "sliding_window": 128},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "uneven": {"hidden_size": 40, "head_dim": 10, "intermediate_size": 75},
}
# Of hub models: Qwen 2, Llama 3, and the latter where a piece that is a token is still made of merges.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _BYTES])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS: dict[str, tuple[Any, bool]] = {
    "gpt-2": (_GPT2, False),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]), False),
    "qwen2": (_split(_WORDS + r"\p{N}" + _REST), False),
    "llama-bpe": (_split(_WORDS + r"\p{N}{1,3}" + _REST), True),
    "smaug-bpe": (_split(_WORDS + r"\p{N}{1,3}" + _REST), False),
}
TEXTS = (
    "It's 12345 past 7, and I'LL say: we'Ve 3.14 apples!!",
    "  two,   three\n\n\n\t tabs \r\n  ",
    "naïve Äpfel — 你好, Привет 🙂 <|im_start|>user\nHi<|im_end|>\n",
)


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    split, whole = SPLITS[name]
    made = Tokenizer(models.BPE(ignore_merges=whole))
    made.pre_tokenizer, made.decoder = split, decoders.ByteLevel()
    made.normalizer = normalizers.NFC() if name == "qwen2" else None
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(chats.SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<|begin_of_text|>",
        eos_token="</s>",
        additional_special_tokens=list(chats.SPECIALS),
    )


def network_of(name: str, size: int) -> PreTrainedModel:
    config = {"model_type": "llama", **SIDES, **NETWORKS[name]}
    made = AutoConfig.for_model(config.pop("model_type"), vocab_size=size, **config)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(made).float().eval()
    with torch.no_grad():  # first weights are so small that no layer matters, and biases are 0
        for weight in network.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return network


def written(folder: Path, network: PreTrainedModel, reader: Any, kind: str = "gguf-f16") -> Path:
    write_gguf.check_convertible(network.config, reader, folder, text=True)
    stops = [reader.eos_token_id, reader.convert_tokens_to_ids("<|im_end|>")]
    write_gguf.write_gguf(network, reader, folder / "model.gguf", kind, stops, add_bos=False)
    return folder / "model.gguf"


def ids_of(network: PreTrainedModel) -> torch.Tensor:
    return torch.randint(0, network.config.vocab_size - 3, (1, 60), generator=torch.Generator().manual_seed(0))


def question(file: Path, network: PreTrainedModel, reader: Any) -> dict[str, Any]:
    about = {"auto": "AutoModelForCausalLM", "base": None, "trust_remote_code": False}
    more = {"config": write_gguf.not_in_reader(network.config), "texts": write_gguf.check_texts(reader)}
    return {"folder": str(file.parent), "gguf": file.name, **about, **more}


# ---------------------------------------------------------------- one file


@pytest.mark.parametrize("kind", list(write_gguf.TYPES))
@pytest.mark.parametrize("name", list(NETWORKS))
def test_transformers_reads_what_was_written(tmp_path: Path, name: str, kind: str) -> None:
    reader = chats.tokenizer()
    network = network_of(name, len(reader) + 3)  # more rows than tokens, as many hub models have
    file = written(tmp_path, network, reader, kind)
    state = network.state_dict()
    found = dict(write_gguf.read_tensors(file, network.config, state))
    assert found.keys() == state.keys() - network.all_tied_weights_keys.keys()
    bound = 2**-11 if kind == "gguf-f16" or name == "uneven" else 1 / 200
    for key, tensor in found.items():
        assert (tensor - state[key]).abs().max() <= bound * state[key].abs().max()
    again, report = fresh_process._open(question(file, network, reader))
    assert not any(report.values())
    with torch.no_grad():
        logits, wanted = again(input_ids=ids_of(network)).logits, network(input_ids=ids_of(network)).logits
    assert (logits - wanted).abs().max() <= verify_export.TOLERANCE[write_gguf.ROUNDED[kind]][0] * wanted.abs().max()


@pytest.mark.parametrize("name", list(SPLITS))
def test_tokenizers_are_read_back(tmp_path: Path, name: str) -> None:
    reader = tokenizer_of(name)
    assert write_gguf.split_of(reader) == name
    network = network_of("llama", len(reader))
    ask = question(written(tmp_path, network, reader), network, reader)
    assert "the same of 5 texts" in write_gguf.check_tokens(tmp_path, ask, fresh_process.read_tokens(ask), reader)


def llama_cpp(file: Path) -> Any:
    """Serves a file by llama.cpp; returns what asks it."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(file), 256, 1, False
    server = xllamacpp.Server(params)

    def ask(path: str, **body: Any) -> dict[str, Any]:
        address = f"{server.listening_address}/{path}"
        with urllib.request.urlopen(address, json.dumps(body).encode() if body else None) as answer:
            return dict(json.loads(answer.read()))

    return ask


def assert_llama_cpp_agrees(ask: Any, network: Any, reader: Any) -> None:
    """Tokens are equal, and so are the likeliest next tokens behind 60 others."""
    for text in TEXTS:
        wanted = reader(text, add_special_tokens=False)["input_ids"]
        assert ask("tokenize", content=text, add_special=False, parse_special=True)["tokens"] == wanted
    with torch.no_grad():
        wanted = network(input_ids=ids_of(network)).logits[0, -1].log_softmax(-1)
    # Only of a token that is a whole letter it says how likely others were, by the logits as they are.
    bias = [[reader.convert_tokens_to_ids("a"), 1000.0]]
    found = ask("completion", prompt=ids_of(network)[0].tolist(), n_predict=1, n_probs=20, logit_bias=bias)
    top = found["completion_probabilities"][0]["top_logprobs"]
    assert len(top) == 20
    assert max(abs(one["logprob"] - float(wanted[one["id"]])) for one in top) < 0.05


@needs_llama_cpp
@pytest.mark.parametrize("name", list(NETWORKS))
def test_llama_cpp_computes_the_same(tmp_path: Path, name: str) -> None:
    reader = chats.tokenizer()
    network = network_of(name, len(reader) + 3)
    assert_llama_cpp_agrees(llama_cpp(written(tmp_path, network, reader)), network, reader)


@needs_llama_cpp
@pytest.mark.parametrize("name", list(SPLITS))
def test_llama_cpp_makes_the_same_tokens(tmp_path: Path, name: str) -> None:
    reader = tokenizer_of(name)
    network = network_of("llama", len(reader))
    assert_llama_cpp_agrees(llama_cpp(written(tmp_path, network, reader)), network, reader)


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run that learns conversations in ChatML."""
    root = tmp_path_factory.mktemp("gguf")
    reader = chats.tokenizer()
    network: Any = network_of("llama", len(reader))
    network.generation_config.eos_token_id = reader.eos_token_id
    network.save_pretrained(root / "base")
    reader.chat_template = chats.CHATML
    reader.save_pretrained(root / "base")
    reader.chat_template = None
    talk = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "Four."}]
    (root / "talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
    talks = [{"path": str(root / "talks.jsonl")}]
    data = {"train": talks, "validation": talks, "sequence_length": 128, "packing": "padded"}
    tree = base(
        data={**data, "cache_dir": str(root / "cache")},
        tokenizer={"name": None},
        chat={},
        length={"steps": 3},
        lora={"rank": 4},
        output={"dir": str(root / "run")},
    )
    run_here({**tree, "model": {"name": str(root / "base")}})
    return root / "run"


@pytest.mark.parametrize("kind", list(write_gguf.TYPES))
def test_a_run_is_exported(run: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them is opened in a real fresh process."""
    from gguf import GGUFReader

    if kind != next(iter(write_gguf.TYPES)):
        monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)
    folder, said = exported(run, kind, tmp_path)
    name = f"model-{kind.removeprefix('gguf-')}.gguf"
    assert {file.name for file in folder.iterdir()} >= {name, "Modelfile", "README.md", "export.json"}
    assert not list(folder.glob("*.safetensors"))
    assert f"(allowed for {'float16' if kind == 'gguf-f16' else 'q8_0'}: " in said
    assert "Its tokenizer makes the same of 5 texts, and ends them at </s>." in said
    fields = GGUFReader(folder / name).fields
    reader = chats.tokenizer()
    for key, token in (("eos", "</s>"), ("eot", "<|im_end|>"), ("bos", "<|begin_of_text|>")):
        assert fields[f"tokenizer.ggml.{key}_token_id"].contents() == reader.convert_tokens_to_ids(token)
    assert fields["tokenizer.chat_template"].contents() == chats.CHATML
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False  # as the template writes none
    assert (folder / "Modelfile").read_text() == (
        f"FROM ./{name}\n"
        'TEMPLATE """{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n'
        '{{ end }}<|im_start|>assistant\n"""\n'
        'PARAMETER stop "</s>"\nPARAMETER stop "<|im_end|>"\n'
    )


@needs_llama_cpp
def test_llama_cpp_ends_answers(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes the conversation as the template does, and stops at what ends a turn."""
    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)
    merged, _ = exported(run, "merged", tmp_path)
    folder, _ = exported(run, "gguf-f16", tmp_path)
    ask, reader = llama_cpp(folder / "model-f16.gguf"), chats.tokenizer()
    assert_llama_cpp_agrees(ask, AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32), reader)
    messages = [{"role": "user", "content": "What is two and two?"}]
    prompt = "<|im_start|>user\nWhat is two and two?<|im_end|>\n<|im_start|>assistant\n"
    assert ask("apply-template", messages=messages)["prompt"] == prompt
    for token in ("</s>", "<|im_end|>"):
        bias = [[reader.convert_tokens_to_ids(token), 1000.0]]
        found = ask("completion", prompt=prompt, n_predict=5, logit_bias=bias, temperature=0.0)
        assert (found["stop_type"], found["tokens_predicted"]) == ("eos", 1)


# ---------------------------------------------------------------- what is seen, what is refused


def test_what_differs_is_seen(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gguf import GGUFWriter

    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)
    with monkeypatch.context() as patch:  # both ways: only what opens it elsewhere sees that
        patch.setattr(write_gguf, "_permuted", lambda name, rows, config, first: rows)
        with pytest.raises(CheckpointError, match="gives logits that differ by"):
            exported(run, "gguf-f16", tmp_path)
    assert (tmp_path / "gguf-f16.failed" / "model-f16.gguf").is_file()
    with monkeypatch.context() as patch:
        write = GGUFWriter.add_token_merges
        patch.setattr(GGUFWriter, "add_token_merges", lambda self, merges: write(self, merges[:20]))
        with pytest.raises(CheckpointError, match=r"makes the tokens \[.*\] of '  two spaces"):
            exported(run, "gguf-f16", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(GGUFWriter, "add_chat_template", lambda self, value: None)
        with pytest.raises(CheckpointError, match="has another chat template: None"):
            exported(run, "gguf-f16", tmp_path)
    assert not (tmp_path / "gguf-f16").exists()


def test_other_networks_are_refused(tmp_path: Path) -> None:
    """With the two commands, and before anything is written."""
    shape = ARCHITECTURES["gpt2"]["model"]
    tree = base(length={"steps": 1}, output={"dir": str(tmp_path / "run")})
    run_here({**tree, "model": shape})
    with pytest.raises(RecipeError, match="llama, mistral, qwen2, qwen3 are written here, and this is gpt2") as error:
        exported(tmp_path / "run", "gguf-f16", tmp_path)
    assert re.search(r"`pip install -r .*`, then `python convert_hf_to_gguf.py FOLDER", str(error.value))
    assert not list(tmp_path.glob("gguf*"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_bias": True}, "attention_bias False, and this one has True"),
        ({"hidden_act": "gelu"}, "hidden_act silu, and this one has gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "and these are dynamic"),
    ],
)
def test_other_shapes_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    config = AutoConfig.for_model("llama", **SIDES, **changes)
    with pytest.raises(RecipeError, match=problem):
        write_gguf.check_convertible(config, chats.tokenizer(), tmp_path, text=True)


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **SIDES)
    others = [Tokenizer(models.BPE()), Tokenizer(models.BPE(byte_fallback=True)), Tokenizer(models.WordLevel())]
    others[0].pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for made in others:
        reader = PreTrainedTokenizerFast(tokenizer_object=made)
        with pytest.raises(RecipeError, match=r"As GGUF, .*convert_hf_to_gguf"):
            write_gguf.check_convertible(config, reader, tmp_path, text=True)
    with pytest.raises(RecipeError, match="that continue a text"):
        write_gguf.check_convertible(config, chats.tokenizer(), tmp_path, text=False)


def test_numbers_beyond_fp16_are_refused(tmp_path: Path) -> None:
    reader = chats.tokenizer()
    network = network_of("llama", len(reader))
    with torch.no_grad():
        network.get_input_embeddings().weight[5, 5] = 70_000.0
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight holds numbers that are not finite, or beyond fp16"):
        written(tmp_path, network, reader)


def test_modelfiles_say_what_templates_say(tmp_path: Path) -> None:
    """A default system prompt is kept; a template of another format is left to Ollama."""
    reader = chats.tokenizer()
    default = "{%- if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    try:
        for template, expected in (
            (default + chats.CHATML, ["TEMPLATE", 'SYSTEM """Be kind."""']),
            (chats.LLAMA3, ["TEMPLATE"]),
            (chats.MISTRAL, []),
            (None, []),
        ):
            reader.chat_template = template
            assert write_gguf.write_modelfile(tmp_path, "model.gguf", reader, []) == bool(expected)
            words = (tmp_path / "Modelfile").read_text()
            assert [part for part in ("TEMPLATE", 'SYSTEM """Be kind."""') if part in words] == expected
    finally:
        reader.chat_template = None


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind in ("gguf-f16", "gguf"):
        assert main.main(["export", "runs/run", "--as", kind]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "--as gguf-f16 needs gguf" in said
        assert "pip install 'finetune[gguf]'" in said
