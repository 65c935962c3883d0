"""The ratios of all rows as a picture."""

from collections.abc import Sequence
from pathlib import Path

from bench import table
from bench.parts import PartsMeasured
from bench.turns import Measured


def draw(rows: Sequence[Measured | PartsMeasured], path: Path, clock: str) -> None:
    """One line a row, one dot an arm: the time it takes divided by ours, with quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = table.headline(rows, clock)
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.45 * len(lines)), layout="constrained")
    arms = [arm for arm in table.NAMES if arm != "ours"]
    for number, arm in enumerate(arms):
        points = [
            (line, value)
            for line, (_, cells) in enumerate(lines)
            for name, value in cells.items()
            if name.partition("@")[0] == arm and not isinstance(value, str)
        ]
        if not points:
            continue
        spread = [[value[0] - value[1] for _, value in points], [value[2] - value[0] for _, value in points]]
        axes.errorbar(
            [value[0] for _, value in points],
            [line + (number - len(arms) / 2) * 0.08 for line, _ in points],
            xerr=spread,
            fmt="o",
            markersize=5,
            label=table.NAMES[arm],
        )
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(lines)), [name for name, _ in lines])
    axes.invert_yaxis()
    what = {"wall": "time", "cpu": "processor time"}[clock]
    axes.set_xlabel(f"{what} it takes ÷ {what} that finetune takes (right of the line: finetune is faster)")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
