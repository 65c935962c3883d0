"""The model card of exported weights: base, recipe, data, figures, licence."""

import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load

from finetune.checkpoint import row_ledger
from finetune.config.recipe import dump_recipe
from finetune.export import loss_plot
from finetune.export.find_weights import WeightSource
from finetune.models.heads import Head

_ON_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FIGURES = ("train_loss", "validation_loss", "validation_perplexity", "validation_accuracy", "train_s")


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
    if (plot := loss_plot.write_loss_plot(folder, source.run, source.step)) is not None:
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
    facts: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
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
    """The licence that the base's card names."""
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
    written = {"adapter": "as an adapter", "merged": "merged, in fp32", "merged-16bit": "merged, in 16 bits"}.get(kind)
    end = f" Written {written}." if written else ""
    return f"{how} {base}, trained for {source.step} steps with finetune.{end}"


def _place(origin: Any) -> str:
    if origin.sample is not None:
        return f"the built-in sample of {origin.sample}"
    return f"`{origin.path or origin.hub}`" + (f", the first {origin.limit}" if origin.limit else "")
