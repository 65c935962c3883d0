"""A build of tokens that is killed resumes where it was, and ends as if nothing had happened."""

import io
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, python
from rich.console import Console

from finetune.config.recipe import validate_recipe
from finetune.data import prepared_cache
from finetune.data.prepare import prepare_data
from finetune.data.prepared_cache import STATE
from finetune.data.progress_bar import Bar, documents_bar
from finetune.data.synthetic import story_generator
from finetune.data.tokenization import token_files, tokenizer
from finetune.data.tokenization.token_files import SplitWriter
from finetune.utils.atomic_files import digest_of
from finetune.utils.errors import DataError

SHARD_BYTES = 6000  # as in killed.py
NUM_MOMENTS = 7


def texts(folder: Path, name: str, first: int, last: int) -> dict[str, Any]:
    stories = [{"text": story.text, "label": story.label} for story in story_generator.stories(last)]
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in stories[first:]))
    return {"path": str(folder / name)}


def chats(folder: Path) -> dict[str, Any]:
    records: list[dict[str, Any]] = [item._asdict() for item in story_generator.conversations(120)]
    for number in (3, 50, 51, 110):
        records[number] = {"messages": [{"role": "nobody" if number != 50 else "user", "content": "x"}]}
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"path": str(folder / "chats.jsonl")}


def tree(folder: Path, kind: str) -> dict[str, Any]:
    data: dict[str, Any] = {"sequence_length": 64, "validation_fraction": 0.1}
    made: dict[str, Any] = {"model": {"config": {"model_type": "llama"}}, "tokenizer": {"vocab_size": 300}}
    if kind == "conversations":
        data |= {"train": [{**chats(folder), "weight": 2.0}], "sequence_length": 512}
        made |= {"chat": {"template": "plain"}, "checks": {"max_broken": 0.5}}
    else:
        first, second = texts(folder, "a.jsonl", 0, 60), texts(folder, "b.jsonl", 60, 100)
        data["train"] = [{**first, "weight": 2.5}, second]
    if kind == "labels":
        made["task"] = {"name": "sequence_classification"}
        data["packing"] = "padded"
    return {**made, "data": data, "length": {"steps": 0}}


@pytest.mark.parametrize(("kind", "workers"), [("texts", 2), ("labels", 1), ("conversations", 1)])
def test_a_killed_build_goes_on(tmp_path: Path, kind: str, workers: int) -> None:
    words = [str(tmp_path), json.dumps(tree(tmp_path, kind)), str(workers), str(NUM_MOMENTS)]
    output, said = python(str(ROOT / "tests" / "support" / "killed.py"), *words)
    whole, *killed = [json.loads(line) for line in output.splitlines()]
    assert any(name.endswith("train.tokens") for name in whole["files"])
    documents = whole["encoded"]
    went_on = 0
    for found in killed:
        assert found["files"] == whole["files"], f"moment {found['moment']} of {whole['moments']}"
        assert found["left"] == []
        went_on += found["done"] > 0
        if found["killed"] and not found["next"]:
            assert found["tokens_whole"]  # killed behind the last document
            continue
        # No document of a finished shard is tokenised again, and all others are, once.
        assert sorted(found["next"]) == sorted(documents[found["done"] :])
        if workers == 1:
            lost = sum(int(line.split()[1]) for line in found["killed"][found["done"] :])
            assert lost <= SHARD_BYTES + 7 * max(int(line.split()[1]) for line in documents)
    assert went_on >= NUM_MOMENTS // 2
    assert "Resuming at document" in said


def tiny(folder: Path, *, quiet: bool = True) -> Any:
    data = {"train": [{"sample": 100}], "cache_dir": str(folder), "num_workers": 1}
    made = {"model": {"config": {"model_type": "llama"}}, "tokenizer": {"vocab_size": 300}, "data": data}
    return prepare_data(validate_recipe({**made, "length": {"steps": 0}}), quiet=quiet)


def left_behind(folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[Path]:
    """What a build that ends behind its last document leaves."""
    monkeypatch.setattr(token_files, "SHARD_BYTES", 1)
    with monkeypatch.context() as patch:

        def stop(self: Any, *_: Any) -> None:
            raise error

        patch.setattr(SplitWriter, "repeat", stop)
        with pytest.raises((KeyboardInterrupt, DataError), match=error.args[-1] if error.args else None):
            tiny(folder)
    return list(folder.glob("*.part"))


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(28, "No space left on device"), DataError("a bad line")]
)
def test_what_can_go_on_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """After Ctrl-C or on a full disk; not where something is wrong with the data."""
    left = left_behind(tmp_path, monkeypatch, error)
    assert [(part / STATE).exists() for part in left] == ([] if isinstance(error, DataError) else [True])
    tiny(tmp_path)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("damage", ["shorter", "other numbers", "other counts", "other text"])
def test_what_does_not_fit_its_state_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    (left,) = left_behind(tmp_path, monkeypatch, KeyboardInterrupt())
    if damage == "shorter":
        os.truncate(left / "train.tokens", 2)
    elif damage == "other numbers":
        tokens = (left / "train.tokens").read_bytes()
        (left / "train.tokens").write_bytes(bytes([tokens[0] ^ 1]) + tokens[1:])
    else:
        state = json.loads((left / STATE).read_text())
        del state["digest"]
        if damage == "other text":
            state["last"] ^= 1
            state["digest"] = digest_of(state)
        else:
            state["all_documents"] += 1
        (left / STATE).write_text(json.dumps(state))
    with pytest.raises(DataError, match="Start again"):
        tiny(tmp_path)
    tiny(tmp_path)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("version", [None, prepared_cache.STATE_VERSION + 1])
def test_what_another_version_has_left_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: int | None
) -> None:
    (left,) = left_behind(tmp_path / "a", monkeypatch, KeyboardInterrupt())
    (left / "train.other").write_text("a file that this version does not know")
    (left / STATE).write_text(json.dumps({"version": version, "what": "it means nothing here"}))
    capsys.readouterr()
    tiny(tmp_path / "a", quiet=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"is of version {version or 0}, and this one reads {prepared_cache.STATE_VERSION}: it is made anew" in line
    tiny(tmp_path / "b")
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / n).glob("tokens-*/*")} for n in "ab")
    assert one
    assert one == other


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_bar_counts_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far ahead the reader is, and up to the files' sizes."""
    path = Path(texts(tmp_path, "a.jsonl", 0, 60)["path"])
    ends = list(itertools.accumulate(map(len, path.read_bytes().splitlines(keepends=True))))
    seen: list[tuple[int, int]] = []
    advance = Bar.advance
    monkeypatch.setattr(Bar, "advance", lambda self, *words: (seen.append(words), advance(self, *words))[1])
    monkeypatch.setattr(tokenizer, "BATCH_DOCUMENTS", 7)
    trained = tiny(tmp_path / "c").tokenizer
    trained.save_pretrained(str(tmp_path / "t"))
    seen.clear()
    data = {"train": [{"path": str(path)}], "cache_dir": str(tmp_path / "d"), "num_workers": 2}
    made = {"model": {"config": {"model_type": "llama"}}, "tokenizer": {"name": str(tmp_path / "t")}, "data": data}
    prepare_data(validate_recipe({**made, "length": {"steps": 0}}), quiet=True)
    done = list(itertools.accumulate(documents for documents, _ in seen))
    assert len(done) == 9
    assert [read for _, read in seen] == [ends[number - 1] for number in done]
    assert ends[-1] == path.stat().st_size


@pytest.mark.parametrize("known", [True, False])
def test_the_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "150")
    with documents_bar("tokenising", [600, 400 if known else None], quiet=False) as bar:
        bar.say("Resuming at document 7.")
        bar.start(500)
        bar.advance(30, 750)
        assert bar._display is not None
        bar._display.refresh()
    written = terminal.getvalue()
    assert "Resuming at document 7." in written
    assert "30 documents" in written
    assert ("75%" in written) == ("left" in written) == known


@pytest.mark.parametrize("title", ["tokenising", "training the tokenizer"])
def test_the_bar_is_one_line_of_80_columns(monkeypatch: pytest.MonkeyPatch, title: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    with documents_bar(title, [10**12], quiet=False) as bar:
        bar.advance(12_345_678, 10**11)
        shown = Console(width=80, file=io.StringIO())
        with shown.capture() as captured:
            shown.print(bar._display.get_renderable())
    (line,) = captured.get().splitlines()
    assert title in line
    assert re.search(r"12,345,678 documents, [\d,]+/s +10% .*\S+ left$", line)


def test_a_log_gets_lines_and_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (False, True):
        with documents_bar("tokenising", [5], quiet=quiet) as bar:
            bar.advance(1, 5)
            bar.say("Going on.")
    assert capsys.readouterr().err == "Going on.\n"
