"""The cache: whole or absent, built once, rebuilt after damage."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest

from finetune.config.recipe import validate_recipe
from finetune.data.cache import Cache
from finetune.data.prepare import PreparedData, prepare_data
from finetune.utils.errors import DataError

ROOT = Path(__file__).resolve().parents[2]


def sample(cache: Path, **keys: Any) -> PreparedData:
    tree = {
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"vocab_size": 300},
        "data": {"train": [{"sample": 100}], "sequence_length": 128, "cache_dir": str(cache), **keys},
        "length": {"steps": 1},
    }
    return prepare_data(validate_recipe(tree), quiet=True)


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
        size = index["files"].pop("train.tokens")
        name = {"parent": "../../secret", "absolute": str(secret), "link": "train.tokens"}[how]
        victim.symlink_to(secret)
        (folder / "index.json").write_text(json.dumps({**index, "files": {**index["files"], name: size}}))
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
        np.save(folder / "train.offsets.npy", np.array([print, None], dtype=object), allow_pickle=True)
        index["files"]["train.offsets.npy"] = (folder / "train.offsets.npy").stat().st_size
    else:
        index["facts"]["dtype"] = {"tokens": "object", "facts": "float64"}[what]
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=rf"The file {folder}/train.* of the data cache is damaged: .*Delete {folder}"):
        sample(tmp_path)


@pytest.mark.parametrize("state", ["{", "[]", '{"version": 2}', '{"version": 2, "sides": 3}', '{"version": null}'])
def test_a_state_that_is_none_is_not_gone_on_from(tmp_path: Path, state: str) -> None:
    first = sample(tmp_path)
    folder = folders(tmp_path, "tokens")[0]
    part = folder.rename(folder.with_name(f"{folder.name}.part"))
    for file in part.iterdir():
        file.unlink()
    (part / "state.json").write_text(state)
    if '"version": 2' in state:
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
    (part / "state.json").write_text('{"version": 2}')
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
write = token_files.write
def slowly(*args, **keys):
    print("BUILD", flush=True)
    time.sleep(1.5)
    return write(*args, **keys)
token_files.write = slowly
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
        out, err = process.communicate(timeout=120)
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
        if timeout == 0:
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
