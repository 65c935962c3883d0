"""`finetune generate` and `finetune eval` open runs, checkpoints, adapters and exports alike."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import logits_of, opened_here
from inside import run_here
from recipes_for_tests import MODEL, base, stories
from testdata import MADE
from transformers import AutoTokenizer

from finetune.cli import main
from finetune.export import find_weights, generate_text, load_model, merge, verify_export, write
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
    merged = merge.merged(found, found.recipe, TaskData(train=None, tokenizer=tokenizer), torch.float32)
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
    manner = generate_text.SamplingOptions(max_new_tokens=20, temperature=1.0, top_k=50, top_p=0.95, seed=1)
    text = generate_text.generate(place, "Once", manner, pieces.append)
    assert len([piece for piece in pieces if piece]) > 5
    assert "".join(pieces) == text
    assert generate_text.generate(place, "Once", manner, pieces.append) == text
    assert (
        generate_text.generate(place, "Once", generate_text.SamplingOptions(20, 1.0, 50, 0.95, seed=2), pieces.append)
        != text
    )


def test_it_stops_at_the_end_of_text(places: dict[str, Path]) -> None:
    """Of the generation config and of the tokenizer, which may be two."""
    place = load_model.load_model(str(places["merged"]))
    whole = generate_text.generate(place, "Once", generate_text.SamplingOptions(30), lambda text: None)
    ids = place.tokenizer.encode(whole, add_special_tokens=False)
    model: Any = place.network
    model.generation_config.eos_token_id = [2, ids[4]]
    cut = generate_text.generate(place, "Once", generate_text.SamplingOptions(30), lambda text: None)
    assert whole.startswith(cut.rstrip())
    assert len(cut) < len(whole)
    model.generation_config.eos_token_id = 2
    place.tokenizer.eos_token = place.tokenizer.convert_ids_to_tokens(ids[4])
    assert generate_text.generate(place, "Once", generate_text.SamplingOptions(30), lambda text: None).strip() in cut


def test_chat_needs_a_template(places: dict[str, Path]) -> None:
    place = load_model.load_model(str(places["adapter"]))
    with pytest.raises(DataError, match="--chat needs a tokenizer with a chat template, and this one has none"):
        generate_text.generate(place, "Hello", generate_text.SamplingOptions(3), lambda text: None, chat=True)
    place.tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    ids = prompts.turn(place.tokenizer, "Hello", {})
    # Its own begin-of-text is the only one.
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert place.tokenizer.decode(ids).endswith("A:")
    assert generate_text.generate(place, "Hello", generate_text.SamplingOptions(3), lambda text: None, chat=True)


def test_refusals(places: dict[str, Path], tmp_path: Path) -> None:
    place = load_model.load_model(str(places["merged"]))
    with pytest.raises(DataError, match=r"The prompt has \d+ tokens, and the model knows 512 positions"):
        generate_text.generate(place, "word " * 700, generate_text.SamplingOptions(3), lambda text: None)
    with pytest.raises(CheckpointError, match=r"holds no network: it has no recipe\.yaml"):
        load_model.load_model(str(tmp_path))
    with pytest.raises(CheckpointError, match="--step is for run directories"):
        load_model.load_model(str(places["merged"]), step=3)
    with pytest.raises(CheckpointError, match="--base is for adapters"):
        load_model.load_model(str(places["merged"]), base=MODEL)
    config = places["merged"] / "config.json"
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads(config.read_text()), "architectures": ["LlamaForSequenceClassification"]})
    )
    with pytest.raises(RecipeError, match="is no causal language model"):
        load_model.load_model(str(tmp_path))


def test_one_export_at_a_time_writes_a_folder(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one that begins while the first writes is refused, and the first is what it would have been."""
    monkeypatch.setattr(verify_export, "fresh", opened_here)
    target, refused = tmp_path / "out", []

    def again(_: str) -> None:
        if not refused:
            with pytest.raises(RecipeError) as caught:
                write.export(places["run"], "merged", lambda line: None, to=target)
            refused.append(str(caught.value))

    write.export(places["run"], "merged", again, to=target)
    assert refused == [f"{target} is being written by another export. Wait until it has ended, or choose another --to."]
    assert torch.equal(logits_of(target), logits_of(places["merged"]))
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["out"]
    with pytest.raises(RecipeError, match="is there already"):
        write.export(places["run"], "merged", lambda line: None, to=target)


@pytest.mark.parametrize("name", ["new", "model.staging", "checkpoints/step-00000009", "model/merged"])
def test_an_export_writes_nothing_among_a_runs_own_files(places: dict[str, Path], name: str) -> None:
    before = sorted(places["run"].rglob("*"))
    with pytest.raises(RecipeError, match=r"lies in the run directory .*, where a run writes and deletes"):
        write.export(places["run"], "merged", lambda line: None, to=places["run"] / name)
    assert sorted(places["run"].rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.jsonl"], "There is no file nowhere.jsonl"),
        (["{folder}/other.jsonl"], "the fields are words. Name one of them as --text-field"),
        (["{folder}/other.jsonl", "--chat"], "has no chat template. Open the run itself, which has one, or leave"),
    ],
)
def test_eval_names_its_own_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    (tmp_path / "other.jsonl").write_text('{"words": "Once upon a time"}\n')
    assert main.main(["eval", MODEL, "--data", *(word.format(folder=tmp_path) for word in words)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert not re.search(r"data\.(train|validation)|text_field|`path`|chat\.", said)
