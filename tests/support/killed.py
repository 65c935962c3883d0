"""Tokenises in forks that kill themselves at chosen moments, and prints what they leave and what the next one does.

    python tests/support/killed.py FOLDER RECIPE WORKERS NUM_MOMENTS

A moment is a call of anything that changes the disk. One line of JSON comes for each, and before these one for the
build that nothing stops. `test_data_resume.py` judges them.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from finetune.config.recipe import validate_recipe
from finetune.data import prepared_cache
from finetune.data.chat.chat_encoder import ChatEncoder
from finetune.data.prepare import prepare_data
from finetune.data.rows.kinds import classes, documents
from finetune.data.tokenization import token_files, tokenizer
from finetune.data.tokenization.memmap import GrowingArray

token_files.SHARD_BYTES = 6000
tokenizer.BATCH_DOCUMENTS = 7
FOLDER = Path(sys.argv[1])
TREE = json.loads(sys.argv[2])


class Moments:
    """Counts moments, and ends the process at one of them."""

    def __init__(self, last: int | None) -> None:
        self.passed, self.last = 0, last

    def before(self, owner: Any, name: str) -> None:
        work: Callable[..., Any] = getattr(owner, name)

        def counted(*words: Any, **keys: Any) -> Any:
            if self.passed == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            self.passed += 1
            return work(*words, **keys)

        setattr(owner, name, counted)


def notes(log: Path) -> Callable[[bytes], object]:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return lambda text: os.write(handle, f"{xxhash.xxh3_64_hexdigest(text)} {len(text)}\n".encode())


def log_counted(log: Path) -> None:
    """Documents in the order that a state counts them, which is not the one that threads get them in."""
    note, advance = notes(log), token_files.Shards.advance

    def counted(self: Any, batch: Any) -> None:
        for item in batch:
            note(item.text)
        advance(self, batch)

    token_files.Shards.advance = counted  # type: ignore[method-assign]


def log_encoded(log: Path) -> None:
    note = notes(log)
    plain, conversation = tokenizer.Encoder.encode, ChatEncoder.encode

    def encode(self: Any, texts: Any) -> Any:
        for text in texts:
            note(text)
        return plain(self, texts)

    def encode_conversation(self: Any, document: bytes, where: str) -> Any:
        note(document)
        return conversation(self, document, where)

    tokenizer.Encoder.encode = encode  # type: ignore[method-assign]
    ChatEncoder.encode = encode_conversation  # type: ignore[method-assign]


def build(place: Path, log: Path, last: int | None, log_to: Callable[[Path], None] = log_encoded) -> int:
    """Prepares the data in a fork; returns the moments that it passed, or -1 if it was killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        moments = Moments(last)
        log_to(log)
        for name in ("append", "sync", "cut", "close"):
            moments.before(GrowingArray, name)
        for name in ("begin", "repeat", "finish", "clear"):
            moments.before(token_files.SplitWriter, name)
        moments.before(token_files, "write_json")
        moments.before(prepared_cache, "sync_to_disk")
        moments.before(prepared_cache.os, "rename")
        try:
            recipe = validate_recipe({**TREE, "data": {**TREE["data"], "cache_dir": str(place)}})
            prepare_data(recipe, classes.KIND if "task" in TREE else documents.KIND)
            os.write(writer, str(moments.passed).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        passed = stream.read()
    os.waitpid(pid, 0)
    return int(passed or -1)


def files(place: Path) -> dict[str, str]:
    found = sorted(path for path in place.glob("*/*") if path.parent.name.startswith(("tokens", "rows")))
    return {str(path.relative_to(place)): xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in found}


def encoded(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def main() -> None:
    TREE["data"]["num_workers"] = int(sys.argv[3])
    if sys.argv[3] == "1":
        # What a kill costs is bounded by a shard; what threads had read ahead of it comes on top.
        tokenizer.BATCHES_AHEAD = 0
    whole = FOLDER / "whole"
    total = build(whole, FOLDER / "whole.log", None, log_counted)
    print(json.dumps({"moments": total, "files": files(whole), "encoded": encoded(FOLDER / "whole.log")}), flush=True)
    wanted = int(sys.argv[4])
    for number in range(wanted):
        moment = (total - 1) * (number + 1) // wanted
        place, logs = FOLDER / f"at{moment}", [FOLDER / f"{moment}.{part}.log" for part in ("killed", "next")]
        assert build(place, logs[0], moment) == -1
        states = [json.loads(path.read_text()) for path in place.glob("*.part/state.json")]
        assert build(place, logs[1], None) >= 0
        found = {
            "moment": moment,
            "done": states[0]["all_documents"] if states else 0,
            "tokens_whole": bool(list(place.glob("tokens-*/index.json"))),
            "left": [path.name for path in place.iterdir() if path.suffix == ".part"],
            "files": files(place),
            "killed": encoded(logs[0]),
            "next": encoded(logs[1]),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
