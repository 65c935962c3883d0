"""Measures this toolkit against a hand-written loop and against other toolkits, in one run, turn by turn.

    python scripts/benchmark.py --quick                    # three minutes; needs no extra
    python scripts/benchmark.py --json runs/benchmark.json --plot docs/benchmarks.png --write docs/benchmarks.md

The other toolkits come with `pip install -e .[bench]`. docs/benchmarks.md says how to read the table.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
# The parent computes nothing that is measured, but makes weights and trains tokenizers between the cases.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil  # noqa: E402
from bench import material, parts, table, turns  # noqa: E402
from bench.cases import LIMIT, OURS, Case, cases, launch_of, quick, tiny  # noqa: E402
from bench.parts import Parts, PartsMeasured  # noqa: E402
from bench.spec import Spec  # noqa: E402
from bench.turns import VOID, Measured  # noqa: E402


def main() -> int:
    """The command; returns the exit code, which is 1 where losses differ."""
    parsed = _arguments().parse_args()
    chosen = _choose(parsed)
    if not chosen:
        every: list[Case | Parts] = [*cases(), *parts.parts()]
        names = ", ".join(row.name for row in every)
        print(f"No row is called so, with arms among {parsed.arms or 'all'}. There are: {names}.", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
    began, load = time.monotonic(), os.getloadavg()[0]
    rows: list[Measured | PartsMeasured] = []
    texts: list[str] = []
    try:
        for number, row in enumerate(chosen):
            say(f"[{number + 1}/{len(chosen)}, {_left(began, number, len(chosen))}] {row.name}")
            if isinstance(row, Case):
                if (missing := _too_large(row)) is not None:
                    texts.append(f"### {row.name}\n\nNot measured: {missing}\n")
                    print(texts[-1], flush=True)
                    continue
                one = _measure(row, parsed, folder, parsed.stories)
                rows.append(one)
                texts.append(table.text(one))
            else:
                whole = parts.measure(row, parsed.rounds, folder, parsed.stories, say)
                rows.append(whole)
                texts.append(table.parts_text(whole))
            print(texts[-1], flush=True)
            _publish(parsed, rows, texts, load, began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(_publish(parsed, rows, texts, load, began))
    compared = [result for row in rows if isinstance(row, Measured) for result in row.results]
    return 1 if any(result.problem.startswith(VOID) for result in compared) else 0


def _publish(
    parsed: argparse.Namespace,
    rows: list[Measured | PartsMeasured],
    texts: list[str],
    load: float,
    began: float,
) -> str:
    """Writes what was asked for; done after every row, so that nothing is lost when a long run is interrupted.

    Returns:
        The summary.
    """
    facts = table.header() | {
        "command": shlex.join(["python", "scripts/benchmark.py", *sys.argv[1:]]),
        "huge pages": {"": "for finetune's arms", "0": "for none"}.get(turns.HUGE_PAGES, "for all arms"),
        "load": f"{load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end",
        "minutes": f"{(time.monotonic() - began) / 60:.0f}",
    }
    summary = table.summary(rows, parsed.clock) + "".join(f"\n- {key}: {value}" for key, value in facts.items()) + "\n"
    if parsed.json:
        parsed.json.write_text(json.dumps({"facts": facts, "rows": [asdict(row) for row in rows]}, indent=1))
    if parsed.plot:
        from bench import plot

        plot.draw(rows, parsed.plot, parsed.clock)
    if parsed.write:
        picture = f"![time of each arm divided by ours]({parsed.plot.name})\n\n" if parsed.plot else ""
        table.write(parsed.write, picture + summary + "\n" + "\n".join(texts))
    return summary


def say(text: str) -> None:
    """Progress; the tables alone go to the standard output."""
    print(f"  {text}", file=sys.stderr, flush=True)


def _too_large(case: Case) -> str | None:
    """Why a case does not fit this machine now."""
    needed, free = case.gib * len(case.arms), psutil.virtual_memory().available / 2**30
    if needed <= free:
        return None
    return f"its {len(case.arms)} arms take up to {needed:.0f} GiB together, and {free:.0f} are free."


def _measure(case: Case, parsed: argparse.Namespace, folder: Path, file: Path | None) -> Measured:
    steps = case.steps(parsed.rounds)
    model = material.model_folder(folder, case, file)
    rows = material.rows_file(folder, case, steps + 1, file)
    own = Path(tempfile.mkdtemp(dir=folder))

    def make(arm: str) -> Spec:
        _, launch, processes = launch_of(arm)
        place = own / f"files-{arm}"
        place.mkdir()
        return Spec(
            case,
            arm,
            launch,
            processes,
            str(own / "socket"),
            str(model),
            str(rows),
            str(place),
            steps,
            spoil=arm == parsed.spoil,
        )

    return turns.measure(case, parsed.rounds, make, own, say)


def _choose(parsed: argparse.Namespace) -> list[Case | Parts]:
    found: list[Case | Parts] = [*cases(), *parts.parts()]
    if parsed.tiny:
        found = [*tiny(), *parts.tiny()]
    elif parsed.quick:
        found = [*quick()]
    if parsed.cases:
        words, names = parsed.cases.split(";"), {row.name for row in found}
        if not all(any(word in name for name in names) for word in words):
            return []
        # A whole name means that row only, though it may be a part of others.
        found = [r for r in found if any(r.name == word if word in names else word in r.name for word in words)]
    if parsed.arms:
        # Without the first arm there is nothing to compare losses with, and without ours no ratio.
        wanted = {LIMIT, OURS, *parsed.arms.split(",")}
        found = [replace(row, arms=tuple(arm for arm in row.arms if launch_of(arm)[0] in wanted)) for row in found]
    return found


def _left(began: float, done: int, total: int) -> str:
    if not done:
        return "time left unknown"
    return f"about {(time.monotonic() - began) / done * (total - done) / 60:.0f} min left"


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the thin slice")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--spoil", help=argparse.SUPPRESS)
    parser.add_argument("--cases", help="names or parts of them, with semicolons between")
    parser.add_argument("--arms", help="arms beside `bare` and `ours`, such as trainer,trl")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each arm that are timed")
    parser.add_argument(
        "--clock", choices=table.CLOCKS, default="wall", help="of the summary and the picture; `cpu` on a busy machine"
    )
    parser.add_argument("--stories", type=Path, help='a file of {"text": …} lines; else the built-in generator\'s')
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--plot", type=Path, help="a file for a picture of the ratios; needs the extra")
    parser.add_argument("--write", type=Path, help="the document whose results are replaced: docs/benchmarks.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
