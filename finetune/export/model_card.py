"""The model card of exported weights: base, recipe, data, figures, licence, and a small plot of the losses."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from huggingface_hub import metadata_load

from finetune.checkpoint import row_ledger
from finetune.checkpoint.run_history import Series, loss_curves, read_run
from finetune.config.recipe import dump_recipe
from finetune.export.find_weights import WeightSource
from finetune.models.heads import Head
from finetune.utils.errors import FinetuneError

_ON_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FIGURES = ("train_loss", "validation_loss", "validation_perplexity", "validation_accuracy", "train_s")

# Pixels: the picture, and what is left around the curves for their scales.
_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 40
_TICKS = 5

# Colours that can be told apart on white and on black.
_COLORS, _GREY = ("#4c8dff", "#e07b00"), "#8a929c"


def write_model_card(
    folder: Path, source: WeightSource, kind: str, proof: list[str], base_folder: Path | None, head: Head | None
) -> None:
    """Writes README.md, and a plot of the losses beside it.

    Args:
        kind: Kind of the export; `model` for what a run writes.
        proof: Lines that say what was verified.
        base_folder: Folder of the base, whose own card names the licence.
        head: Head of the network; None leaves out what the hub reads, for only the task can open it.

    Raises:
        OSError: If it cannot be written.
    """
    recipe, facts = source.recipe, source.facts
    front = [] if head is None else ["---", *_front_matter(source, kind, base_folder, head), "---", ""]
    lines = [*front, f"# {source.run.resolve().name}", ""]
    lines += [_origin(source, kind), ""]
    lines += ["## Data", "", *[f"- {_place(s)}" for s in recipe.data.train], ""]
    counts = (facts.get("data", {}).get("train") or {}).items()
    lines += [f"- {key}: {value}" for key, value in counts if type(value) in (int, float)]
    lines += ["", "## Figures", ""]
    if (plot := write_loss_plot(folder, source.run, source.step)) is not None:
        lines += [f"![Losses over steps]({plot})", ""]
    results = facts.get("results", {})
    lines += [f"- {key}: {results[key]:.5g}" for key in _FIGURES if isinstance(results.get(key), (int, float))]
    lines += [f"- {key}: {facts[key]}" for key in ("precision", "finished") if key in facts]
    skipped = [step for step in row_ledger.read_skipped(source.run) if source.step is None or step.step <= source.step]
    if skipped:
        lines += ["", "## Skipped steps", "", "They changed no weight, since a loss or gradient was not finite.", ""]
        lines += [f"- {step.line()}" for step in skipped]
    if proof:
        lines += ["", "## Proof", "", *[f"- {line}" for line in proof]]
    lines += ["", "## Recipe", "", "```yaml", dump_recipe(recipe).rstrip(), "```", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _front_matter(source: WeightSource, kind: str, base_folder: Path | None, head: Head) -> list[str]:
    adapter = kind == "adapter" or (kind == "model" and source.recipe.lora is not None)
    library = "sentence-transformers" if head.bare else "transformers"
    library = "peft" if adapter else "gguf" if kind.startswith("gguf") else library
    facts: dict[str, Any] = {"library_name": library}
    name, notes = source.recipe.model.name, []
    # The hub refuses a card whose base is a folder of somebody's machine.
    if name is not None and _ON_HUB.fullmatch(name) and not Path(name).exists():
        facts["base_model"] = name
    elif name is not None:
        notes.append("# base_model: say which; the run took it from a folder")
    facts["pipeline_tag"] = head.pipeline_tag
    licence = _licence(base_folder)
    if not licence:
        notes.append("# license: say which" + ("; the base's card names none" if name is not None else ""))
    return [*yaml.safe_dump({**facts, **licence}, sort_keys=False).rstrip().splitlines(), *notes]


def _licence(base_folder: Path | None) -> dict[str, Any]:
    card = None if base_folder is None else base_folder / "README.md"
    if card is None or not card.is_file():
        return {}
    try:
        facts = metadata_load(card) or {}
    except (ValueError, yaml.YAMLError):
        return {}
    return {key: facts[key] for key in ("license", "license_name", "license_link") if key in facts}


def _origin(source: WeightSource, kind: str) -> str:
    recipe = source.recipe
    own = (recipe.model.config or {}).get("model_type") or f"`{recipe.task.name}`"
    base = f"`{recipe.model.name}`" if recipe.model.name else f"a {own} network"
    how = "All weights of" if recipe.lora is None else f"A LoRA adapter of rank {recipe.lora.rank} for"
    if recipe.model.quantization is not None:
        how = f"A QLoRA adapter of rank {recipe.lora.rank if recipe.lora else 0} ({recipe.model.quantization}) for"
    written = {
        "adapter": "as an adapter",
        "merged": "merged, in fp32",
        "merged-16bit": "merged, in 16 bits",
        "gguf-f16": "merged, as GGUF in fp16",
        "gguf-q8_0": "merged, as GGUF in 8 bits (Q8_0)",
    }.get(kind)
    end = f" Written {written}." if written else ""
    return f"{how} {base}, trained for {source.step} steps with finetune.{end}"


def _place(origin: Any) -> str:
    if origin.sample is not None:
        return f"the built-in sample of {origin.sample}"
    return f"`{origin.path or origin.hub}`" + (f", the first {origin.limit}" if origin.limit else "")


def write_loss_plot(folder: Path, run: Path, last_step: int | None) -> str | None:
    """Writes `loss.svg` up to a step, and returns its name; None if the run has no two losses to draw."""
    try:
        history = read_run(run)
    except FinetuneError:
        return None  # weights of which no history is left
    most = math.inf if last_step is None else last_step
    curves = [(name, steps[steps <= most], losses[steps <= most]) for name, steps, losses in loss_curves(history)]
    curves = [curve for curve in curves if len(curve[1])]
    if not curves or len(curves[0][1]) < 2:
        return None
    (folder / "loss.svg").write_text("\n".join(_svg(curves)) + "\n", encoding="utf-8")
    return "loss.svg"


def _svg(curves: Sequence[tuple[str, Series, Series]]) -> Iterator[str]:
    every_x, every_y = (np.concatenate([curve[axis] for curve in curves]) for axis in (1, 2))
    last, low, high = float(every_x.max()), float(every_y.min()), float(every_y.max())
    high = high if high > low else low + 1.0

    def x(step: float) -> float:
        return _LEFT + step / last * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _TOP + (high - loss) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    for tick in np.linspace(low, high, _TICKS):
        yield f'<path d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}" stroke="{_GREY}" opacity="0.3"/>'
        yield f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="{_GREY}">{tick:.3g}</text>'
    for tick in np.linspace(0, last, _TICKS).round():
        yield f'<text x="{x(tick):.1f}" y="{_HEIGHT - 18}" text-anchor="middle" fill="{_GREY}">{tick:,.0f}</text>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end" fill="{_GREY}">step</text>'
    for number, ((name, steps, losses), color) in enumerate(zip(curves, _COLORS, strict=False)):
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in zip(steps, losses, strict=True))
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
        yield f'<circle cx="{x(steps[-1]):.1f}" cy="{y(losses[-1]):.1f}" r="3" fill="{color}"/>'
        legend = f"{name}, {losses[-1]:.4g} at the end"
        yield f'<text x="{_LEFT + number * 260}" y="18" fill="{color}">{legend}</text>'
    yield "</svg>"
