"""Compares the peaks that `finetune plan` predicts with those of launched runs, and prints a Markdown table.

    python scripts/plan_accuracy.py                             # all 30 candidates, about 10 minutes on two cores
    python scripts/plan_accuracy.py --candidates lora:fsdp:on full   # some of them
    python scripts/plan_accuracy.py --candidates full:single:on --live 20    # and what the peak is made of

A candidate is a way to train (full, lora, qlora), a launch file of accelerate_configs/, and whether activations are
checkpointed. Each is a run of its own under `accelerate launch`: one process for `single`, else two. `measure_peak.py`
says what is measured; the device is the CPU, so predictions are made for it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from measure_peak import STEPS

# The project beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from finetune.config.recipe import validate_recipe
from finetune.distributed.gpu_specs import find_gpu
from finetune.distributed.launch.predicted_environment import launch_of_file
from finetune.planning import model_shapes
from finetune.planning.launch_candidates import Candidate, assess_candidate, setting_of

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
LIMIT_S = 600
WAYS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
LAUNCHES = {"single": 1, "ddp": 2, "fsdp": 2, "zero2": 2, "zero3": 2}
CELLS = [f"{way}:{launch}:{state}" for way in WAYS for launch in LAUNCHES for state in ("off", "on")]
# State and activations are each a good part of the peak.
MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}
TOKENS, ROWS = 512, 4


@dataclass(frozen=True)
class Compared:
    """A candidate, predicted and measured; bytes."""

    name: str
    predicted: int
    measured: int
    """Of the rank that takes the most, in a step after the first."""
    parts: dict[str, int]
    margin: float
    live: list[tuple[str, int]]
    """What the measured peak is made of."""
    inside: list[str]

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def recipe_of(
    name: str,
    folder: Path,
    *,
    model: dict[str, Any] = MODEL,
    tokens: int = TOKENS,
    rows: int = ROWS,
    accumulation: int = 1,
) -> dict[str, Any]:
    """The recipe of a candidate."""
    way, launch, checkpointed = name.split(":")
    return {
        "model": {
            "config": model,
            "gradient_checkpointing": checkpointed == "on",
            "quantization": "nf4" if way == "qlora" else None,
        },
        **({} if way == "full" else {"lora": {"rank": 16, "alpha": 32, "targets": "all-linear"}}),
        "tokenizer": {"vocab_size": 512},
        "data": {
            "train": [{"sample": 400}],
            "sequence_length": tokens,
            "packing": "wrapped",
            "cache_dir": str(folder / "cache"),
        },
        "batch": {"global_size": rows * accumulation * LAUNCHES[launch], "micro_size": rows},
        "length": {"steps": STEPS},
        "precision": "bf16",
        "output": {"dir": str(folder / name.replace(":", "-")), "overwrite": True},
    }


def predicted(name: str, recipe: dict[str, Any], each: bool | None = None) -> Candidate:
    """What the plan says of a candidate.

    Args:
        each: Whether FSDP2 reduce-scatters gradients after each micro-batch; None leaves it to the plan.
    """
    way, launch, _ = name.split(":")
    wanted = validate_recipe(recipe)
    variant = model_shapes.read_variants(wanted, kinds=[WAYS[way]])[WAYS[way]]
    assert not isinstance(variant, str), variant
    asked = launch_of_file(ROOT / "accelerate_configs" / f"{launch}.yaml", LAUNCHES[launch])
    asked = replace(asked, sync_each_batch=each)
    return assess_candidate(launch, asked, variant, setting_of(wanted), find_gpu("h100-80gb"), device="cpu")


def launched(config: str, *words: str, script: str, processes: int, env: dict[str, str]) -> tuple[int, str]:
    """`accelerate launch` of a shipped launch file; returns its exit code and what was printed."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command += ["--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", str(processes), script, *words]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    environment = {"HF_HUB_OFFLINE": "1", **environment, **env}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    return ended.returncode, ended.stdout + ended.stderr


def measured(
    name: str,
    recipe: dict[str, Any],
    folder: Path,
    each: bool | None = None,
    launch: Callable[..., tuple[int, str]] = launched,
) -> list[dict[str, Any]]:
    """What each rank of a launched run found; see `measure_peak.py`.

    Args:
        launch: Runs the script as `launched` does.

    Raises:
        RuntimeError: With the run's output, if it failed.
    """
    config = name.split(":")[1]
    place = folder / "found" / name.replace(":", "-")
    place.mkdir(parents=True)
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    code, output = launch(
        config,
        *(str(place / "recipe.yaml"), str(place)),
        script="scripts/measure_peak.py",
        processes=LAUNCHES[config],
        env={"FSDP_SYNC_EACH_BATCH": "auto" if each is None else str(each).lower()},
    )
    if code:
        raise RuntimeError(f"{name} ended with {code}: {output[-4000:]}")
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(LAUNCHES[config])]


def compare(
    name: str,
    folder: Path,
    *,
    each: bool | None = None,
    launch: Callable[..., tuple[int, str]] = launched,
    **sizes: Any,
) -> Compared:
    """Predicts and measures a candidate.

    Args:
        folder: For what the run writes.
        each: See `predicted`.
        launch: See `measured`.
        sizes: See `recipe_of`.
    """
    recipe = recipe_of(name, folder, **sizes)
    made = predicted(name, recipe, each)
    assert made.parts is not None, made.reason
    ranks = measured(name, recipe, folder, each, launch)
    fullest = max(ranks, key=lambda rank: int(rank["peak"]))
    return Compared(name, made.peak, fullest["peak"], made.parts, made.margin, fullest["live"], fullest["inside"])


def table(found: Sequence[Compared]) -> str:
    """Markdown."""
    lines = ["| candidate | predicted MiB | measured MiB | ratio |", "|---|---|---|---|"]
    lines += [f"| {c.name} | {c.predicted / MIB:,.1f} | {c.measured / MIB:,.1f} | {c.ratio:.3f} |" for c in found]
    return "\n".join(lines)


def chosen(words: Sequence[str]) -> list[str]:
    """The candidates that have all parts of one of the words."""
    return [name for name in CELLS if any(set(word.split(":")) <= set(name.split(":")) for word in words)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--candidates", nargs="+", default=[""], help="some of the candidates, by their parts: lora, zero3:on"
    )
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step and process")
    parser.add_argument("--each", action="store_true", help="FSDP2 reduce-scatters gradients after each micro-batch")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a row")
    parser.add_argument("--rows", type=int, default=ROWS, help="of a micro-batch")
    parser.add_argument("--model", type=json.loads, default={}, help="other sizes: '{\"vocab_size\": 512}'")
    parser.add_argument("--live", type=int, default=0, help="show so many lines of what a peak is made of")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    names = CELLS if words.candidates == [""] else chosen(words.candidates)
    if not names:
        parser.error(f"no such candidate; there are {', '.join(CELLS)}")
    found = []
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            one = compare(
                name,
                Path(place),
                model={**MODEL, **words.model},
                tokens=words.tokens,
                rows=words.rows,
                accumulation=words.accumulation,
                each=words.each or None,
            )
            found.append(one)
            print(
                f"{name}: predicted {one.predicted / MIB:,.1f}, measured {one.measured / MIB:,.1f} MiB, "
                f"ratio {one.ratio:.3f}",
                file=sys.stderr,
                flush=True,
            )
            if words.live:
                print("  predicted:", {k: round(v / MIB, 1) for k, v in one.parts.items()}, file=sys.stderr)
                print("  fullest within:", " < ".join(one.inside), file=sys.stderr)
                for what, size in one.live[: words.live]:
                    print(f"  {size / MIB:10,.2f} {what}", file=sys.stderr)
    print(json.dumps([asdict(one) for one in found]) if words.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
