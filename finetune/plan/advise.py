"""The cheapest change that makes a cell fit, and the simplest launch file that fits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from finetune.backend import Launch, choice
from finetune.plan.cells import Cell, Setting
from finetune.plan.networks import KINDS, Variant
from finetune.recipe import Recipe, divisors

Make = Callable[[str, str, Setting], Cell]
"""A cell, of a launch file's name, a way to train and a setting."""


@dataclass(frozen=True)
class Advice:
    """What to launch."""

    cell: Cell | None
    """None if nothing fits."""
    changes: tuple[str, ...]
    """To the recipe, as they are written on the command line."""
    reason: str


def changes(cell: Cell, recipe: Recipe) -> tuple[str, ...]:
    """What a cell changes of a recipe, as `key=value`."""
    found = []
    if cell.setting.checkpointed != (recipe.model.gradient_checkpointing is True):
        found.append(f"model.gradient_checkpointing={str(cell.setting.checkpointed).lower()}")
    if cell.setting.micro != recipe.batch.rows:
        found.append(f"batch.micro_size={cell.setting.micro}")
    lora, packed = recipe.lora is not None, recipe.model.quantization
    if cell.kind == "full" and lora:
        found.append("lora=null")
    if cell.kind != "full" and not lora:
        found.append("lora.rank=16")
        if recipe.model.fp8:
            found.append("model.fp8=false")
    if (cell.kind == "QLoRA") != (packed is not None):
        found.append("model.quantization=" + ("nf4" if cell.kind == "QLoRA" else "null"))
    return tuple(found)


def settings(recipe: Recipe, ranks: int) -> Iterator[Setting]:
    """The recipe's own setting and what makes it smaller, the cheapest change first."""
    micro, checkpointed = recipe.batch.rows, recipe.model.gradient_checkpointing is True
    share = recipe.batch.global_size // ranks if recipe.batch.global_size % ranks == 0 else 0
    smaller = [size for size in sorted(divisors(share), reverse=True) if size < micro] if share else []
    if smaller and share % micro:
        micro, *smaller = smaller
    yield Setting(micro, checkpointed)
    if not checkpointed:
        yield Setting(micro, True)
    for size in smaller:
        yield Setting(size, checkpointed)
    if not checkpointed:
        yield from (Setting(size, True) for size in smaller)


def cheapest(cell: Cell, recipe: Recipe, names: Sequence[str], variants: dict[str, Variant | str], make: Make) -> str:
    """The cheapest change that makes a cell fit: to the recipe, else to the next launch file, else to the way."""
    for setting in settings(recipe, cell.launch.num_processes):
        other = make(cell.name, cell.kind, setting)
        if other.verdict == "fits":
            return " ".join(c for c in changes(other, recipe) if c not in changes(cell, recipe))
    for name in names[names.index(cell.name) + 1 :]:
        for setting in settings(recipe, cell.launch.num_processes):
            other = make(name, cell.kind, setting)
            if other.verdict == "fits":
                more = [c for c in changes(other, recipe) if c not in changes(cell, recipe)]
                return " ".join([name, *more])
    for kind in KINDS[KINDS.index(cell.kind) + 1 :]:
        if isinstance(variants[kind], str):
            continue
        for setting in settings(recipe, cell.launch.num_processes):
            if make(cell.name, kind, setting).verdict == "fits":
                return " ".join([kind, *changes(make(cell.name, cell.kind, setting), recipe)])
    return "nothing offered"


def recommend(recipe: Recipe, kind: str, launches: dict[str, Launch], make: Make) -> Advice:
    """The simplest launch that fits: cut rather than recompute, recompute rather than rest in host memory."""
    near = [name for name, launch in launches.items() if launch.offload_params == "none"]
    far = [name for name in launches if name not in near]
    for names in (near, far):
        ranks = {launches[name].num_processes for name in names}
        for setting in settings(recipe, max(ranks, default=1)):
            for name in names:
                cell = make(name, kind, setting)
                if cell.verdict == "fits":
                    return Advice(cell, changes(cell, recipe), choice.reason(cell.launch))
    for other in KINDS[KINDS.index(kind) + 1 :]:
        for name in launches:
            for setting in settings(recipe, launches[name].num_processes):
                cell = make(name, other, setting)
                if cell.verdict == "fits":
                    why = f"nothing fits as the recipe is; with {other}: {choice.reason(cell.launch)}"
                    return Advice(cell, changes(cell, recipe), why)
    return Advice(None, (), f"nothing fits. {choice.NONE_LEFT}.")
