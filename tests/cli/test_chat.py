"""`finetune chat`: turns, commands and two models, by lines from a pipe and in a terminal."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from chats import CHATML
from chats import tokenizer as chat_tokenizer
from terminal import Terminal
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.cli import main
from finetune.export.generate_text import generate_text
from finetune.export.load_model import load_model
from finetune.export.sampling_options import SamplingOptions
from finetune.utils.errors import RecipeError
from finetune.utils.quoting import visible

pytestmark = pytest.mark.xdist_group("chat")


def write_model(folder: Path, seed: int, template: str | None = CHATML) -> Path:
    tokenizer = chat_tokenizer()
    sides = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=2, vocab_size=len(tokenizer), max_position_embeddings=256, **sides
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = None
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {"one": write_model(root / "one", 1), "two": write_model(root / "two", 2)}
    made["plain"] = write_model(root / "plain", 3, template=None)
    return {name: str(path) for name, path in made.items()}


def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *lines: str, words: list[str]) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    capsys.readouterr()
    assert main.main(["chat", "--max-new-tokens", "8", *words]) == 0
    said = capsys.readouterr()
    return said.out + "\n--\n" + said.err


def clean(text: str) -> str:
    """What is shown of a text, whose control characters are shown as escapes."""
    return visible(text).strip()


def answer(model: str, *texts: str, system: str | None = None) -> str:
    """What `generate_text` says to a conversation that begins with these turns."""
    opened = load_model(model)
    turns = [{"role": "system", "content": system}] if system else []
    turns += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return generate_text(opened, turns, SamplingOptions(8), lambda text: None).strip()


def test_each_turn_has_the_ones_before(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "talk.jsonl"
    lines = ["Hello", "And then?", f"/save {file}", "/new", "Hello", "/system Be brief.", "Hello"]
    said = talk(monkeypatch, capsys, *lines, words=[models["one"]]).partition("\n--\n")[0]
    first = answer(models["one"], "Hello")
    second = answer(models["one"], "Hello", first, "And then?")
    brief = answer(models["one"], "Hello", system="Be brief.")
    assert len({first, second, brief}) == 3
    places = [said.replace(f"Written: {file}\n", "")]
    for text in (first, second, first, brief):
        before, found, after = places[-1].partition(clean(text))
        assert found, (text, said)
        assert not before.strip()
        places.append(after)
    (line,) = file.read_text().splitlines()
    contents = [turn["content"] for turn in json.loads(line)["messages"]]
    assert contents == ["Hello", first, "And then?", second]


def test_two_models_answer_with_histories_of_their_own(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [models["one"], "--against", models["plain"]]
    said = talk(monkeypatch, capsys, "Hello", "And then?", words=words)
    assert said.count(f"[{models['one']}]") == said.count(f"[{models['plain']}]") == 2
    assert f"{models['plain']} has no chat template; that of {models['one']} is used." in said
    first = answer(models["one"], "Hello")
    assert clean(answer(models["one"], "Hello", first, "And then?")) in said


def test_sampling_is_set_by_commands(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["/temperature 1.5", "/top-k 50", "/top-k none", "/seed 4", "/settings", "Hello", "/retry"]
    said = talk(monkeypatch, capsys, *lines, words=[models["one"]])
    assert said.splitlines()[0] == "max-new-tokens 8, temperature 1.5, top-k none, top-p none, seed 4"
    opened = load_model(models["one"])
    turns = [{"role": "user", "content": "Hello"}]
    for seed in (4, 5):
        assert clean(generate_text(opened, turns, SamplingOptions(8, 1.5, seed=seed), lambda _: None)) in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/temperature warm", "/temperature takes a number, not 'warm'."),
        ("/top-k 0", "top_k is 0; give 1 or more."),
        ("/top-p 2", "top_p is 2.0; give more than 0, and 1 at the most."),
        ("/top-k many", "/top-k takes a whole number or none, not 'many'."),
        ("/retry", "There is no turn to answer again yet."),
        ("/save", "/save takes the name of a file that is not there yet."),
        ("/sing", "/sing is no command; /help lists them."),
        ("word " * 400, "The prompt has"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_talk_goes_on(
    models: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    says: str,
) -> None:
    said = talk(monkeypatch, capsys, line, "Hello", words=[models["one"]])
    assert says in said
    assert clean(answer(models["one"], "Hello")) in said


def test_a_model_without_a_template_is_refused(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["chat", models["plain"]]) == 2
    assert "has no chat template, so that it was not trained on conversations" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}])
def test_sampling_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=next(iter(options))):
        SamplingOptions(**options)  # type: ignore[arg-type]


def test_in_a_terminal(models: dict[str, str]) -> None:
    """A prompt is shown; Ctrl-C ends an answer only, as often as it comes, and Ctrl-D the talk."""
    words = [sys.executable, "-m", "finetune", "chat", models["one"], "--max-new-tokens", "200"]
    with Terminal(words) as terminal:
        terminal.wait_for("/quit ends.\n> ")
        for number in (1, 2):
            terminal.press(f"Hello {number}\n")
            terminal.wait_for(f"Hello {number}\n")
            terminal.press_ctrl_c()
            terminal.press(f"/settings\n/seed {number}\n/settings\n")
            terminal.wait_for(f", seed {number}")
        terminal.press("\x04")
        assert terminal.end() == 0
    assert "Traceback" not in terminal.output
