"""Times the whole data path against the tokenizer alone, and measures what memory it takes.

    python scripts/benchmark_data.py --megabytes 100              # speed; --tokenizer DIRECTORY for one of your own
    python scripts/benchmark_data.py --memory --megabytes 1000    # memory, beside a file of a tenth of that size
    python scripts/benchmark_data.py --check --megabytes 1000     # what it costs a start to check so many MB of tokens

Speed: bare `encode_batch` and `encode_batch_fast` of the `tokenizers` library take texts that lie in memory as lists,
on more than one core by the library's threads, and (`apart`) by a process of `encode_batch_fast` a core; `ours`
reads, splits, tokenises, writes and packs files. All have the same cores, each takes its turn in a fresh process, in
another order each round, and starting Python and importing is not counted. Memory is looked at every 20 ms: resident
(`VmRSS`, libraries and mapped files too), and anonymous (`RssAnon`, without these). Needs Linux.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.data.prepare import prepare_data
from finetune.data.prepared_cache import Cache
from finetune.data.sources.readers import Fields, read_file
from finetune.data.synthetic import story_generator
from finetune.data.tokenization.tokenizer import load_tokenizer, open_tokenizer, train_tokenizer

BARE_DOCUMENTS = 1000
OURS, BARE, APART, PART = "ours", ("encode_batch", "encode_batch_fast"), "apart", "part"
MIB = 1 << 20


def recipe(words: argparse.Namespace, file: Path, cache: Path) -> Recipe:
    data = {"train": [{"path": str(file)}], "cache_dir": str(cache), "num_workers": words.cores}
    config = {"model_type": "llama"}
    return validate_recipe(
        {"model": {"config": config}, "tokenizer": {"name": words.tokenizer}, "data": data, "length": {"steps": 1}}
    )


def texts_of(words: argparse.Namespace) -> list[str]:
    """Documents to repeat: those of a file, or stories."""
    if words.texts:
        return [document.text for document in read_file(words.texts, Fields("text", None))]
    return [story.text for story in story_generator.stories(5000)]


def generate(words: argparse.Namespace, file: Path, size: int) -> None:
    """Writes distinct documents, each behind its number."""
    texts = texts_of(words)
    written = number = 0
    with file.open("w", encoding="utf-8") as out:
        while written < size:
            text = f"{number} {texts[number % len(texts)]}"
            line = f"{text}\n<|endoftext|>\n" if file.suffix == ".txt" else json.dumps({"text": text}) + "\n"
            written += out.write(line)
            number += 1


def cpu_seconds() -> float:
    """Of this process and of those that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def memory() -> tuple[int, ...]:
    """Bytes of this process: resident, and of these such that no file backs."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(1024 * int(found.get(name, "0").split()[0]) for name in ("VmRSS", "RssAnon"))


class Watch:
    """Looks at the memory of this process until it is left."""

    def __enter__(self) -> "Watch":
        self.seen = [memory()]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._ended.wait(0.02):
            self.seen.append(memory())


def run_arm(words: argparse.Namespace) -> None:
    """One turn, in a process of its own; prints what it took as JSON."""
    file = Path(words.file)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: words.cores])
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = recipe(words, file, Path(folder))
        result = run_ours(made, watch=words.memory) if words.arm == OURS else run_bare(made, file, words)
    print(json.dumps(result))


def run_ours(made: Recipe, *, watch: bool) -> dict[str, Any]:
    load_tokenizer(made)  # imports
    began, used = time.perf_counter(), cpu_seconds()
    with Watch() if watch else contextlib.nullcontext() as seen:
        data = prepare_data(made, quiet=True)
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - used
    sides = [side for side in (data.report.train, data.report.validation) if side is not None]
    counts = {"documents": sum(s.documents for s in sides), "tokens": sum(s.tokens for s in sides)}
    return {"wall": seconds, "cpu": cpu, **counts, "seen": seen.seen if seen else []}


def run_bare(made: Recipe, file: Path, words: argparse.Namespace) -> dict[str, Any]:
    definition = load_tokenizer(made).backend_tokenizer.to_str()
    texts = [document.text.strip() for document in read_file(file, Fields("text", None))]
    if words.arm != APART:
        return encode(definition, words.arm, texts)
    # One process takes every second document, and so on: each has as much to do.
    parts = [[definition, texts[number :: words.cores]] for number in range(words.cores)]
    command = [sys.executable, __file__, "--arm", PART]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in parts]
    for other, part in zip(others, parts, strict=True):
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(json.dumps(part) + "\n")
        other.stdin.flush()
        other.stdout.readline()  # it is ready
    for other in others:
        assert other.stdin is not None
        other.stdin.write("begin\n")
        other.stdin.flush()
    found = [json.loads(other.communicate()[0]) for other in others]
    total = {key: sum(each[key] for each in found) for key in ("cpu", "documents", "tokens")}
    return {"wall": max(each["wall"] for each in found), **total}


def run_part() -> None:
    """One process of several: reads what to do, and waits until all have."""
    definition, texts = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(encode(definition, "encode_batch_fast", texts)))


def encode(definition: str, method: str, texts: list[str]) -> dict[str, Any]:
    bare = getattr(open_tokenizer(definition), method)
    began, used, tokens = time.perf_counter(), cpu_seconds(), 0
    for first in range(0, len(texts), BARE_DOCUMENTS):
        encodings = bare(texts[first : first + BARE_DOCUMENTS], add_special_tokens=False)
        tokens += sum(map(len, encodings)) + 2 * len(encodings)
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - used
    return {"wall": seconds, "cpu": cpu, "documents": len(texts), "tokens": tokens}


def turn(words: argparse.Namespace, arm: str, file: Path, cores: int) -> dict[str, Any]:
    """Runs an arm in a fresh process."""
    command = [sys.executable, __file__, "--arm", arm, "--file", str(file), "--cores", str(cores)]
    command += ["--tokenizer", words.tokenizer]
    command += ["--memory"] if words.memory else []
    threads = {"TOKENIZERS_PARALLELISM": "true" if cores > 1 and arm in BARE else "false"}
    environment = {**os.environ, **threads, "RAYON_NUM_THREADS": str(cores)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare_speed(words: argparse.Namespace, folder: Path) -> None:
    file = folder / "texts.jsonl"
    generate(words, file, words.megabytes * 1_000_000)
    size = file.stat().st_size / 1e6
    print(f"tokenizers {tokenizers.__version__}, transformers {transformers.__version__}, {size:.0f} MB")
    print(f"{'cores':>5} {'arm':18} {'wall s':>14} {'CPU s':>14} {'documents/s':>11} {'tokens/s':>10} {'MB/s':>6}")
    for cores in words.processes:
        arms = (OURS, *BARE, *([APART] if cores > 1 else []))
        turns = []
        for number in range(words.rounds):
            order = arms[number % len(arms) :] + arms[: number % len(arms)]
            turns.append({arm: turn(words, arm, file, cores) for arm in order})
        assert len({(found["documents"], found["tokens"]) for each in turns for found in each.values()}) == 1
        for arm in arms:
            wall, cpu = ([each[arm][unit] for each in turns] for unit in ("wall", "cpu"))
            middle = statistics.median(wall)
            rates = [turns[0][arm][what] / middle for what in ("documents", "tokens")]
            times = " ".join(f"{statistics.median(took):6.2f} ({min(took):5.2f})" for took in (wall, cpu))
            print(f"{cores:5} {arm:18} {times:>29} {rates[0]:11,.0f} {rates[1]:10,.0f} {size / middle:6.2f}")
        for arm in arms[1:]:
            shares = {
                unit: statistics.median(each[arm][unit] / each[OURS][unit] for each in turns)
                for unit in ("wall", "cpu")
            }
            print(f"{cores:5} ours has {shares['wall']:.1%} of {arm}'s speed by wall time, {shares['cpu']:.1%} by CPU")


def compare_memory(words: argparse.Namespace, folder: Path) -> None:
    file = folder / "texts.txt"
    for size in (words.megabytes // 10, words.megabytes):
        generate(words, file, size * 1_000_000)
        found = turn(words, OURS, file, words.processes[-1])
        wall, seen = found["wall"], [[part / MIB for part in each] for each in found["seen"]]
        resident, anonymous = (max(each) for each in zip(*seen, strict=True))
        tenths = [max(each[0] for each in seen[len(seen) * n // 10 : len(seen) * (n + 1) // 10]) for n in range(10)]
        print(
            f"{size} MB of text, {found['documents']:,} documents, {found['tokens']:,} tokens, "
            f"{words.processes[-1]} cores: {wall:.0f} s ({found['cpu']:.0f} of CPU), {size / wall:.2f} MB/s\n"
            f"  MiB at the peak: {resident:.0f} resident, {anonymous:.0f} anonymous ({seen[0][1]:.0f} before)\n"
            f"  MiB resident, the highest of each tenth of the time: {' '.join(f'{each:.0f}' for each in tenths)}",
            flush=True,
        )


def time_check(words: argparse.Namespace, folder: Path) -> None:
    """How long a start takes to check a cache that is there, and which part of it reading the file alone takes."""
    size = words.megabytes * 1_000_000

    def build(made: Path) -> dict[str, Any]:
        block = os.urandom(min(size, 1 << 24))
        with (made / "train.tokens").open("wb") as file:
            for first in range(0, size, len(block)):
                file.write(block[: size - first])
        return {}

    def check() -> None:
        assert cache.entry("tokens", build).reused

    def read() -> None:
        with tokens.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    cache, buffer = Cache(folder, quiet=True), bytearray(1 << 20)
    tokens = cache.entry("tokens", build).folder / "train.tokens"
    for place in ("in memory", "on disk"):
        for what, work in (("checked", check), ("read alone", read)):
            took, used = [], []
            for _ in range(words.rounds):
                if place == "on disk":
                    with tokens.open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                began, cpu = time.perf_counter(), cpu_seconds()
                work()
                took.append(time.perf_counter() - began)
                used.append(cpu_seconds() - cpu)
            wall = statistics.median(took)
            print(
                f"{words.megabytes} MB {place}, {what}: {wall:.3f} s ({min(took):.3f}), {size / wall / 1e9:.2f} GB/s, "
                f"{statistics.median(used):.3f} s of CPU"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the file that is generated")
    parser.add_argument("--tokenizer", help="a directory; without it one of at most 8,192 pieces is trained")
    parser.add_argument("--texts", type=Path, help="documents to repeat; without it built-in stories")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="cores to compare on")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--check", action="store_true", help="what it costs to check a cache of --megabytes")
    parser.add_argument("--folder", type=Path, help="where the files are written; removed afterwards")
    for hidden in ("--arm", "--file"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, default=1, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.arm == PART:
        run_part()
        return
    if words.arm:
        run_arm(words)
        return
    with tempfile.TemporaryDirectory(dir=words.folder) as folder:
        if words.check:
            time_check(words, Path(folder))
            return
        if words.tokenizer is None:
            words.tokenizer = f"{folder}/tokenizer"
            train_tokenizer(iter(texts_of(words)), 8192).save_pretrained(words.tokenizer)
        (compare_memory if words.memory else compare_speed)(words, Path(folder))


if __name__ == "__main__":
    main()
