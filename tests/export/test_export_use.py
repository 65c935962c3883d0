"""`finetune generate` and `finetune eval` open runs, checkpoints, adapters and exports alike."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exports import logits_of, opened_here
from inside import run_here
from packaging.version import Version
from recipes_for_tests import MODEL, base, stories
from testdata import MADE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main
from finetune.export import export_weights, find_weights, load_model, merge, verify_export
from finetune.export.generate_text import generate_text
from finetune.export.sampling_options import SamplingOptions
from finetune.models import prompts
from finetune.tasks.task import TaskData
from finetune.utils.errors import CheckpointError, DataError, RecipeError

pytestmark = [
    pytest.mark.xdist_group("export"),
]
FILE = str(MADE / "stories" / "endoftext.txt")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What one LoRA run leaves, in every form."""
    root = tmp_path_factory.mktemp("use")
    tree = base(
        data={
            "train": stories("train", limit=40),
            "validation": [{"path": FILE}],
            "sequence_length": 512,
            "cache_dir": str(root / "cache"),
        },
        batch={"global_size": 4, "micro_size": 2},
        length={"steps": 2},
        checkpoint={"every_steps": 2},
        output={"dir": str(root / "run")},
        lora={"rank": 2},
    )
    run_here({**tree, "model": {"name": MODEL}})
    found = find_weights.find_weights(root / "run")
    tokenizer = AutoTokenizer.from_pretrained(found.weights)
    merged = merge.build_merged(found, found.recipe, TaskData(train=None, tokenizer=tokenizer), torch.float32)
    merged.save_pretrained(root / "merged")
    tokenizer.save_pretrained(root / "merged")
    step = root / "run" / "checkpoints" / "step-00000002"
    return {"run": root / "run", "checkpoint": step, "adapter": root / "run" / "model", "merged": root / "merged"}


def test_eval_gives_the_runs_own_figure_everywhere(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    results = json.loads((places["run"] / "run.json").read_text())["results"]
    for place in places.values():
        assert main.main(["eval", str(place), "--data", FILE]) == 0
        said = capsys.readouterr().out
        assert f"validation loss {results['validation_loss']:.5f}, perplexity" in said
        assert f"over {results['validation_targets']:,.0f} targets in rows of 512 tokens" in said


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [False, True])
def test_eval_says_what_it_is_at(
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
) -> None:
    """A line before each thing that takes a while; a bar of rows on a terminal only. Figures stay alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    facts = json.loads((places["run"] / "run.json").read_text())
    rows = facts["data"]["validation"]["rows"]
    shown = Terminal()
    if terminal:
        monkeypatch.setattr("sys.stderr", shown)
    assert main.main(["eval", str(places["merged"]), "--data", FILE, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    said = shown.getvalue() if terminal else captured.err
    assert f"Opening {places['merged']}.\n" in said
    assert f"Evaluating {rows} rows of 512 tokens, {found['targets']:,.0f} targets.\n" in said
    assert said.index("Opening") < said.index("Evaluating")
    assert ("\x1b" in said) == terminal
    assert (f"{rows}/{rows}" in said) == terminal


def test_all_write_the_same(places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = []
    for place in places.values():
        assert main.main(["generate", str(place), "--prompt", "Once upon a time", "--max-new-tokens", "12"]) == 0
        words.append(capsys.readouterr().out)
    assert words[0].startswith("Once upon a time ")
    assert words == [words[0]] * 4


def test_it_streams_and_samples_by_seed(places: dict[str, Path]) -> None:
    place = load_model.load_model(str(places["merged"]))
    pieces: list[str] = []
    manner = SamplingOptions(max_new_tokens=20, temperature=1.0, top_k=50, top_p=0.95, seed=1)
    text = generate_text(place, "Once", manner, pieces.append)
    assert len([piece for piece in pieces if piece]) > 5
    assert "".join(pieces) == text
    assert generate_text(place, "Once", manner, pieces.append) == text
    assert generate_text(place, "Once", SamplingOptions(20, 1.0, 50, 0.95, seed=2), pieces.append) != text


def test_it_stops_at_the_end_of_text(places: dict[str, Path]) -> None:
    """Of the generation config and of the tokenizer, which may be two."""
    place = load_model.load_model(str(places["merged"]))
    whole = generate_text(place, "Once", SamplingOptions(30), lambda text: None)
    ids = place.tokenizer.encode(whole, add_special_tokens=False)
    model: Any = place.network
    model.generation_config.eos_token_id = [2, ids[4]]
    cut = generate_text(place, "Once", SamplingOptions(30), lambda text: None)
    assert whole.startswith(cut.rstrip())
    assert len(cut) < len(whole)
    model.generation_config.eos_token_id = 2
    place.tokenizer.eos_token = place.tokenizer.convert_ids_to_tokens(ids[4])
    assert generate_text(place, "Once", SamplingOptions(30), lambda text: None).strip() in cut


def test_chat_needs_a_template(places: dict[str, Path]) -> None:
    place = load_model.load_model(str(places["adapter"]))
    with pytest.raises(DataError, match="--chat needs a tokenizer with a chat template, and this one has none"):
        generate_text(place, "Hello", SamplingOptions(3), lambda text: None, chat=True)
    place.tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    ids = prompts.prompt_tokens(place.tokenizer, "Hello", variables={})
    # Its own begin-of-text is the only one.
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert place.tokenizer.decode(ids).endswith("A:")
    assert generate_text(place, "Hello", SamplingOptions(3), lambda text: None, chat=True)


def test_refusals(places: dict[str, Path], tmp_path: Path) -> None:
    place = load_model.load_model(str(places["merged"]))
    with pytest.raises(DataError, match=r"The prompt has \d+ tokens, and the model knows 512 positions"):
        generate_text(place, "word " * 700, SamplingOptions(3), lambda text: None)
    with pytest.raises(CheckpointError, match=r"holds no network: it has no recipe\.yaml"):
        load_model.load_model(str(tmp_path))
    with pytest.raises(CheckpointError, match="--step is for run directories"):
        load_model.load_model(str(places["merged"]), step=3)
    with pytest.raises(CheckpointError, match="--base is for adapters"):
        load_model.load_model(str(places["merged"]), base=MODEL)
    config = places["merged"] / "config.json"
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads(config.read_text()), "architectures": ["LlamaForImageClassification"]})
    )
    with pytest.raises(RecipeError, match="is no language model and no classifier of documents or words"):
        load_model.load_model(str(tmp_path))


def test_one_export_at_a_time_writes_a_folder(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one that begins while the first writes is refused, and the first is what it would have been."""
    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)
    target, refused = tmp_path / "out", []

    def again(_: str) -> None:
        if not refused:
            with pytest.raises(RecipeError) as caught:
                export_weights.export_weights(places["run"], "merged", lambda line: None, to=target)
            refused.append(str(caught.value))

    export_weights.export_weights(places["run"], "merged", again, to=target)
    assert refused == [f"{target} is being written by another export. Wait until it has ended, or choose another --to."]
    assert torch.equal(logits_of(target), logits_of(places["merged"]))
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["out"]
    with pytest.raises(RecipeError, match="is there already"):
        export_weights.export_weights(places["run"], "merged", lambda line: None, to=target)


@pytest.mark.parametrize("name", ["new", "model.staging", "checkpoints/step-00000009", "model/merged"])
def test_an_export_writes_nothing_among_a_runs_own_files(places: dict[str, Path], name: str) -> None:
    before = sorted(places["run"].rglob("*"))
    with pytest.raises(RecipeError, match=r"lies in the run directory .*, where a run writes and deletes"):
        export_weights.export_weights(places["run"], "merged", lambda line: None, to=places["run"] / name)
    assert sorted(places["run"].rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.jsonl"], "There is no file nowhere.jsonl"),
        (["{folder}/other.jsonl"], "the fields are words. Name one of them as --text-field"),
        (["{folder}/body.jsonl"], "as --text-field, such as --text-field body."),
        (["{folder}/spaced.jsonl"], "as --text-field, such as --text-field 'Body '."),
        (["{folder}/chats.jsonl"], "as --text-field, or add --chat if these are conversations."),
        (["{folder}/asked.csv"], "or write these as a list `messages` and add --chat if they are conversations. The"),
        (["{folder}/other.jsonl", "--chat"], "has no chat template. Open the run itself, which has one, or leave"),
    ],
)
def test_eval_names_its_own_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    (tmp_path / "other.jsonl").write_text('{"words": "Once upon a time"}\n')
    (tmp_path / "body.jsonl").write_text('{"body": "Once upon a time"}\n')
    (tmp_path / "spaced.jsonl").write_text('{"Body ": "Once upon a time"}\n')
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    (tmp_path / "asked.csv").write_text("Query,The reply,reply\na,b,c\n")
    assert main.main(["eval", MODEL, "--data", *(word.format(folder=tmp_path) for word in words)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert not re.search(r"data\.(train|validation)|text_field|`path`|chat\.", said)


# Tiny, and each lets documents in one row see each other: positions by distance alone, a state, or a sink.
SIZES = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    "gpt_oss": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}


def opened_by_itself(folder: Path, model_type: str, **more: Any) -> Any:
    """Writes a model whose attention matters, with a tokenizer, and returns both."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = AutoConfig.for_model(model_type, **SIZES.get(model_type, {}), vocab_size=len(tokenizer), **more)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return network, tokenizer


@pytest.mark.parametrize("model_type", SIZES)
def test_eval_of_documents_that_would_see_each_other_is_that_of_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_type: str
) -> None:
    monkeypatch.chdir(tmp_path)
    network, tokenizer = opened_by_itself(tmp_path / "model", model_type)
    texts = [f"Once there was a {word} who {verb} all day." for word in ("cat", "dog") for verb in ("sang", "slept")]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    loss, targets = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = network(input_ids=ids[:, :-1]).logits[0].float()
        loss += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        targets += ids.shape[1] - 1
    assert main.main(["eval", "model", "--data", "some.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["targets"] == targets
    assert found["loss"] == pytest.approx(loss / targets, abs=2e-5)
    # Packed where it can be: in falcon since transformers 5.24.
    packs = {"llama", *(["falcon"] if Version(transformers.__version__) >= Version("5.24") else [])}
    assert main.main(["eval", "model", "--data", "some.jsonl"]) == 0
    assert ("a document each" in capsys.readouterr().out) == (model_type not in packs)


@pytest.mark.parametrize("command", [["eval", "--data", "some.jsonl"], ["generate", "--prompt", "Once"]])
def test_what_sees_its_targets_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    opened_by_itself(tmp_path / "model", "bert", **sizes)
    (tmp_path / "some.jsonl").write_text('{"text": "Once there was a cat."}\n')
    assert main.main([command[0], "model", *command[1:]]) == 2
    assert "tokens see those behind them" in capsys.readouterr().err
