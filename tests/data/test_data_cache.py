"""The cache: whole or absent, built once, rebuilt after damage."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import filelock
import numpy as np
import pytest
from harness import RUN_S, read_lines

from finetune.config.recipe import validate_recipe
from finetune.data.prepare import PreparedData, prepare_data
from finetune.data.prepared_cache import STATE_VERSION, Cache
from finetune.data.rows.kinds import classes, documents
from finetune.data.sources import corpus
from finetune.data.tokenization import token_files, tokenizer
from finetune.utils.atomic_files import digest_of, file_digest
from finetune.utils.errors import DataError
from tests.support.ranks import Place

ROOT = Path(__file__).resolve().parents[2]


def sample(cache: Path, **keys: Any) -> PreparedData:
    tree = {
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"vocab_size": 300},
        "data": {"train": [{"sample": 100}], "sequence_length": 128, "cache_dir": str(cache), **keys},
        "length": {"steps": 1},
    }
    return prepare_data(validate_recipe(tree), quiet=True)


def signed(index: dict[str, Any]) -> str:
    """An index as somebody writes it who knows how: damage is found, and forgery is not."""
    return json.dumps({**index, "digest": digest_of({key: index[key] for key in ("files", "facts")})})


def folders(cache: Path, kind: str) -> list[Path]:
    return sorted(path for path in cache.glob(f"{kind}-*") if path.is_dir())


def test_a_second_run_reads_what_the_first_wrote(tmp_path: Path) -> None:
    first, second = sample(tmp_path), sample(tmp_path)
    assert (first.report.reused, second.report.reused) == (False, True)
    assert first.digest == second.digest
    assert first.report.train == second.report.train


def test_another_packing_keeps_the_tokens(tmp_path: Path) -> None:
    first, second = sample(tmp_path), sample(tmp_path, packing="padded")
    assert len(folders(tmp_path, "tokens")) == 1
    assert first.digest != second.digest


@pytest.mark.parametrize("how", ["parent", "absolute", "link", "linked folder"])
def test_a_cache_of_a_strangers_leads_nowhere_else(tmp_path: Path, how: str) -> None:
    """What is not in the folder itself is not read: it is made anew, and what lies elsewhere stays as it is."""
    cache, secret = tmp_path / "cache", tmp_path / "secret"
    first = sample(cache)
    folder = folders(cache, "tokens")[0]
    victim, index = folder / "train.tokens", json.loads((folder / "index.json").read_text())
    before = victim.read_bytes()
    if how == "linked folder":
        folder.rename(secret)
        folder.symlink_to(secret)
    else:
        victim.rename(secret)
        written = index["files"].pop("train.tokens")
        name = {"parent": "../../secret", "absolute": str(secret), "link": "train.tokens"}[how]
        victim.symlink_to(secret)
        (folder / "index.json").write_text(signed({**index, "files": {**index["files"], name: written}}))
    second = sample(cache)
    assert not second.report.reused
    assert second.digest == first.digest
    assert not folder.is_symlink()
    assert not victim.is_symlink()
    assert victim.read_bytes() == before
    assert (secret / "train.tokens" if how == "linked folder" else secret).read_bytes() == before


@pytest.mark.parametrize("what", ["tokens", "array", "facts"])
def test_a_cache_of_a_strangers_holds_numbers_only(tmp_path: Path, what: str) -> None:
    """No pickle is read, and no bytes are taken for Python's own objects."""
    sample(tmp_path)
    folder = folders(tmp_path, "tokens")[0]
    index = json.loads((folder / "index.json").read_text())
    if what == "array":
        file = folder / "train.offsets.npy"
        np.save(file, np.array([print, None], dtype=object), allow_pickle=True)
        index["files"][file.name] = {"bytes": file.stat().st_size, "xxh3_128": file_digest(file)}
    else:
        index["facts"]["dtype"] = {"tokens": "object", "facts": "float64"}[what]
    (folder / "index.json").write_text(signed(index))
    with pytest.raises(DataError, match=rf"The file {folder}/train.* of the data cache is damaged: .*Delete {folder}"):
        sample(tmp_path)


@pytest.mark.parametrize(
    "state",
    ["{", "[]", f'{{"version": {STATE_VERSION}}}', f'{{"version": {STATE_VERSION}, "sides": 3}}', '{"version": null}'],
)
def test_a_state_that_is_none_is_not_gone_on_from(tmp_path: Path, state: str) -> None:
    first = sample(tmp_path)
    folder = folders(tmp_path, "tokens")[0]
    part = folder.rename(folder.with_name(f"{folder.name}.part"))
    for file in part.iterdir():
        file.unlink()
    (part / "state.json").write_text(state)
    if f'"version": {STATE_VERSION}' in state:
        with pytest.raises(DataError, match="is damaged"):
            sample(tmp_path)
    assert sample(tmp_path).digest == first.digest
    assert not part.exists()


def test_a_part_that_links_elsewhere_is_not_written_through(tmp_path: Path) -> None:
    cache, precious = tmp_path / "cache", tmp_path / "precious"
    precious.write_text("mine")
    sample(cache)
    folder = folders(cache, "tokens")[0]
    part = folder.rename(folder.with_name(f"{folder.name}.part"))
    (part / "train.tokens").unlink()
    (part / "train.tokens").symlink_to(precious)
    (part / "state.json").write_text(f'{{"version": {STATE_VERSION}}}')
    sample(cache)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("kind", ["tokens", "rows", "tokenizer"])
@pytest.mark.parametrize("damage", ["missing file", "short file", "no index", "broken index"])
def test_damage_is_repaired(tmp_path: Path, kind: str, damage: str) -> None:
    first = sample(tmp_path)
    folder = folders(tmp_path, kind)[0]
    victim = next(path for path in sorted(folder.iterdir()) if path.name != "index.json")
    if damage == "missing file":
        victim.unlink()
    elif damage == "short file":
        os.truncate(victim, victim.stat().st_size - 1)
    elif damage == "no index":
        (folder / "index.json").unlink()
    else:
        (folder / "index.json").write_text("{")
    second = sample(tmp_path)
    assert not second.report.reused
    assert second.digest == first.digest
    assert second.report.train == first.report.train
    assert sample(tmp_path).report.reused


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"text": "The cat of number {} sat on the mat."}, {}),
    "chat": (
        {"messages": [{"role": "user", "content": "Who is {}?"}, {"role": "assistant", "content": "It is {}."}]},
        {"chat": {"template": "plain"}},
    ),
    "classes": (
        {"text": "The cat of number {} sat on the mat.", "label": "yes"},
        {"task": {"name": "sequence_classification"}, "data": {"packing": "padded"}},
    ),
}


def prepared(folder: Path, kind: str, source: Path | None = None) -> PreparedData:
    """A little of one kind of data, with a part held out."""
    record, more = KINDS[kind]
    file = source or folder / "data.jsonl"
    if not file.exists():
        labels = ["yes", "no"]
        lines = [json.dumps({**record, "label": labels[n % 2]}).replace("{}", str(n)) for n in range(60)]
        file.write_text("\n".join(lines))
    data = {
        "train": [{"path": str(file)}],
        "sequence_length": 64,
        "cache_dir": str(folder / "cache"),
        "validation_fraction": 0.2,
    }
    tree = {
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"vocab_size": 300},
        "length": {"steps": 1},
        **more,
        "data": data | more.get("data", {}),
    }
    return prepare_data(validate_recipe(tree), classes.KIND if kind == "classes" else documents.KIND, quiet=True)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/*")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_in_any_file_is_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """Sizes stay as they are: only what is in a file tells."""
    first = prepared(tmp_path, kind)
    before = files_of(tmp_path / "cache")
    suffixes = {"text": {"tokens"}, "chat": {"mask", "targets"}, "classes": {"labels"}}[kind]
    assert all(any(wanted in name for name in before) for wanted in suffixes)
    capsys.readouterr()
    for name, content in before.items():
        victim = tmp_path / "cache" / name
        changed = bytearray(content)
        changed[len(content) // 2] ^= 1
        victim.write_bytes(changed)
        found = prepared(tmp_path, kind)
        (line,) = capsys.readouterr().err.splitlines()
        assert str(victim.parent) in line, name
        assert "damaged" in line, name
        assert f"({victim.name} " in line, name
        assert line.endswith("it is made again."), name
        assert not found.report.reused, name
        assert files_of(tmp_path / "cache") == before, name
    assert prepared(tmp_path, kind).report.reused
    assert prepared(tmp_path, kind).digest == first.digest
    assert capsys.readouterr().err == ""


def test_a_file_that_was_not_written_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer is made of all files of its folder."""
    sample(tmp_path)
    (folder,) = folders(tmp_path, "tokenizer")
    (folder / "added_tokens.json").write_text('{"<more>": 300}')
    capsys.readouterr()
    assert "<more>" not in sample(tmp_path).tokenizer.get_vocab()
    assert f"{folder} is damaged (added_tokens.json was not written there)" in capsys.readouterr().err


def test_a_cache_of_an_earlier_version_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has sizes, but no digests, so that nobody can say whether it is whole."""
    first = sample(tmp_path)
    (folder,) = folders(tmp_path, "tokens")
    index = json.loads((folder / "index.json").read_text())
    sizes = {name: written["bytes"] for name, written in index["files"].items()}
    (folder / "index.json").write_text(json.dumps({"files": sizes, "facts": index["facts"]}))
    capsys.readouterr()
    assert sample(tmp_path).digest == first.digest
    assert f"{folder} was written by an earlier version" in capsys.readouterr().err
    assert sample(tmp_path).report.reused


@pytest.mark.parametrize("checked", [False, True])
def test_of_the_processes_that_want_a_folder_at_once_one_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """A check that ends while this process waits for the lock counts; one that ended before it came does not."""

    def build(folder: Path) -> dict[str, Any]:
        (folder / "numbers").write_text("1, 2, 3")
        return {}

    folder = Cache(tmp_path, quiet=True).entry("a", build).folder
    assert Cache(tmp_path, quiet=True).entry("a", build).reused

    class Waiting(filelock.FileLock):
        """A lock that another process holds, and meanwhile checks the folder."""

        def acquire(self, timeout: float | None = None, **options: Any) -> Any:
            if checked:
                os.utime(folder / "index.json", ns=(1, 1))
            return super().acquire(timeout, **options)

    read: list[Path] = []
    monkeypatch.setattr(filelock, "FileLock", Waiting)
    monkeypatch.setattr(
        "finetune.data.prepared_cache.file_digest", lambda path: (read.append(path), file_digest(path))[1]
    )
    assert Cache(tmp_path, quiet=True).entry("a", build).reused
    assert read == ([] if checked else [folder / "numbers"])


def test_a_cache_that_can_only_be_read_is_checked_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = sample(tmp_path)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("finetune.data.prepared_cache.why_unlockable", refuse)
    assert sample(tmp_path).digest == first.digest
    folder = folders(tmp_path, "rows")[0]
    victim = folder / "starts.npy"
    victim.write_bytes(victim.read_bytes()[:-1] + b"\1")
    with pytest.raises(DataError, match=r"cannot be used: Read-only file system"):
        sample(tmp_path)
    assert "starts.npy is not what was written" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_report_from_the_cache_names_the_files_that_are_there(tmp_path: Path, kind: str) -> None:
    """They hold the same as others that were prepared, which lay elsewhere."""
    old, new = tmp_path / "old" / "a.jsonl", tmp_path / "new" / "b.jsonl"
    for file in (old, new):
        file.parent.mkdir()
    prepared(tmp_path, kind, old)
    lines = old.read_text().splitlines()
    nul, broken = json.dumps(KINDS[kind][0]).replace("{}", "\\u0000 it"), json.dumps({"messages": []})
    old.write_text("\n".join([nul, *([broken] if kind == "chat" else []), *lines]))
    checks = {"checks": {"max_broken": 0.5}} if kind == "chat" else {}

    def report_of(file: Path) -> Any:
        data = {"train": [{"path": str(file)}], "cache_dir": str(tmp_path / "cache"), "sequence_length": 64}
        more = {**KINDS[kind][1], **checks}
        tree = {"model": {"config": {"model_type": "llama"}}, "tokenizer": {"vocab_size": 300}, "data": data, **more}
        return prepare_data(validate_recipe({**tree, "length": {"steps": 1}}), quiet=True).report

    one = report_of(old)
    old.rename(new)
    other = report_of(new)
    assert other.reused
    written = json.dumps(asdict(one) | {"reused": True, "seconds": other.seconds})
    assert f"{old}, line 1: " in written
    assert ("line 2" in written) == (kind == "chat")
    assert json.dumps(asdict(other)) == written.replace(str(old), str(new))


@pytest.mark.parametrize(
    ("kind", "killed"), [(".jsonl", True), *((kind, False) for kind in (".jsonl", ".csv", ".parquet", ".txt", "saved"))]
)
def test_a_file_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, killed: bool
) -> None:
    """Overwritten in place and put back, with its times: its digest is what it was, and what was read is not."""
    texts = datasets.Dataset.from_dict({"text": [f"Once there were {number} foxes." for number in range(300)]})
    file = tmp_path / f"texts{kind}"
    if kind == "saved":
        texts.save_to_disk(file)
    elif kind == ".txt":
        file.write_text("\n".join(texts["text"]))
    else:
        {".jsonl": texts.to_json, ".csv": texts.to_csv, ".parquet": texts.to_parquet}[kind](file)
    held = file if file.is_file() else next(file.glob("*.arrow"))
    content, times = held.read_bytes(), held.stat()
    readings: list[Path] = []
    states: list[Path] = []
    monkeypatch.setattr(token_files, "write_json", lambda path, _: states.append(path))
    if killed:  # a build would go on with each document
        monkeypatch.setattr(token_files, "SHARD_BYTES", 1)
        monkeypatch.setattr(tokenizer, "BATCH_DOCUMENTS", 1)

    def disturbed(read: Any) -> Any:
        def documents(*arguments: Any) -> Iterator[Any]:
            readings.append(held)
            if len(readings) == 1:  # for the tokenizer
                yield from read(*arguments)
                return
            held.write_bytes(content.replace(b"foxes", b"geese"))
            yield from read(*arguments)
            held.write_bytes(content)
            os.utime(held, ns=(times.st_atime_ns, times.st_mtime_ns))

        return documents

    source = [{"path": str(file)}]
    for name in ("read_file", "_read_dataset"):
        monkeypatch.setattr(corpus, name, disturbed(getattr(corpus, name)))
    with pytest.raises(DataError, match=f"{held.name} was changed while it was read"):
        sample(tmp_path / "cache", train=source)
    assert not folders(tmp_path / "cache", "tokens")
    assert states == []
    monkeypatch.undo()
    assert sample(tmp_path / "cache", train=source).report.train is not None


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, quiet=True)

    def fail(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("x")
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        cache.entry("a", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]
    (tmp_path / "a.part").mkdir()
    (tmp_path / "a.part" / "left by a killed run").write_text("x")
    entry = cache.entry("a", lambda folder: {"fine": True})
    assert entry.facts == {"fine": True}
    assert [path.name for path in entry.folder.iterdir()] == ["index.json"]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache directory .* cannot be used: .*Set data.cache_dir"):
        sample(tmp_path / "file" / "cache")


PROGRAM = """
import json, sys, time
from finetune.config.recipe import validate_recipe
from finetune.data.prepare import prepare_data
from finetune.data.tokenization import token_files
write = token_files.write_tokens
def slowly(*args, **keys):
    print("BUILD", flush=True)
    time.sleep(1.5)
    return write(*args, **keys)
token_files.write_tokens = slowly
tree = json.loads(sys.argv[1])
print("READY", flush=True)
sys.stdin.readline()
data = prepare_data(validate_recipe(tree))
print("DONE", data.digest, data.report.reused, flush=True)
"""


def test_cold_processes_build_once(tmp_path: Path) -> None:
    tree = {
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"vocab_size": 300},
        "data": {"train": [{"sample": 100}], "cache_dir": str(tmp_path / "c")},
        "length": {"steps": 1},
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(tree)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "READY\n"
    outputs, errors = [], []
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        out, err = process.communicate(timeout=RUN_S)
        assert process.returncode == 0, err
        outputs.append(out)
        errors.append(err)
    assert sum("BUILD" in out for out in outputs) == 1
    done = [out.split("DONE ")[1].split() for out in outputs]
    assert done[0][0] == done[1][0]
    waits = [err.count("Waiting for another process") for err in errors]
    # There are several things to build in turn, so each may wait for the other, but says so once.
    assert max(waits) <= 1


class Taken(filelock.FileLock):
    """A lock that another process holds until it is waited for."""

    def acquire(self, timeout: float | None = None, **options: Any) -> Any:
        if timeout is not None:
            raise filelock.Timeout(str(self.lock_file))
        return super().acquire(timeout, **options)


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_of_the_ranks_that_wait_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, lines: int
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(filelock, "FileLock", Taken)
    entry = Cache(tmp_path, quiet=False).entry("rows", lambda folder: {"rows": len(list(folder.iterdir()))})
    assert entry.facts == {"rows": 0}
    assert capsys.readouterr().err.count("Waiting for another process") == lines


def test_ranks_agree_that_a_cache_is_damaged(place: Place) -> None:
    """One of them makes it again, and all train on what was prepared."""

    def losses(name: str) -> tuple[list[float], str]:
        recipe = place.recipe(output={"dir": str(place.folder / name)})
        code, said = place.fork_server.launch("ddp", recipe)
        assert code == 0, said
        return [line["loss"] for line in read_lines(place.folder / name / "metrics.jsonl") if "loss" in line], said

    expected, said = losses("one")
    assert "it is made again" not in said
    (folder,) = folders(place.folder / "cache", "tokens")
    tokens = np.fromfile(folder / "train.tokens", np.uint16)
    (tokens ^ 1).tofile(folder / "train.tokens")
    found, said = losses("other")
    assert found == expected
    (line,) = (line for line in said.splitlines() if "it is made again" in line)
    assert f"{folder} is damaged (train.tokens is not what was written)" in line
    assert (np.fromfile(folder / "train.tokens", np.uint16) == tokens).all()


def test_ctrl_c_while_another_process_prepares_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(self: filelock.FileLock, timeout: float = -1) -> None:
        raise KeyboardInterrupt if timeout < 0 else filelock.Timeout(self.lock_file)

    monkeypatch.setattr(filelock.FileLock, "acquire", held)
    with pytest.raises(KeyboardInterrupt) as raised:
        Cache(tmp_path, quiet=True).entry("tokens", lambda folder: {})
    assert raised.value.__notes__ == [f"The parts of the data that were finished are kept in {tmp_path}."]
