"""Draws the losses of finished runs over each other, and how far each is from the first.

    finetune parity recipes/sample.yaml --on single,ddp,fsdp,zero2,zero3 --steps 100 --to runs/parity
    python scripts/plot_runs.py runs/parity/* --to docs/same-path.png

Needs matplotlib, which the extra [bench] installs.
"""

import argparse
import json
from pathlib import Path


def losses(run: Path) -> dict[int, float]:
    """The training loss by step, of the steps that were logged."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def draw(runs: list[Path], path: Path) -> None:
    """Losses above, relative differences to the first run below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 4.5), height_ratios=(3, 2), layout="constrained"
    )
    first = losses(runs[0])
    for number, run in enumerate(runs):
        values = losses(run)
        style = {"linewidth": 6 - 5 * number / max(1, len(runs) - 1), "alpha": 0.8, "label": run.name}
        above.plot(list(values), list(values.values()), **style)
        if number:
            common = [step for step in values if step in first]
            apart = [abs(values[step] - first[step]) / abs(first[step]) for step in common]
            below.plot(common, apart, linewidth=1.2, color=above.lines[-1].get_color())
    above.set_ylabel("training loss")
    above.legend(fontsize="small")
    below.set_yscale("log")
    below.set_ylim(1e-9, 1e-3)
    below.set_ylabel(f"difference to {runs[0].name}")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories; the first is the reference")
    parser.add_argument("--to", type=Path, required=True, help="the picture")
    parsed = parser.parse_args()
    draw(parsed.runs, parsed.to)


if __name__ == "__main__":
    main()
