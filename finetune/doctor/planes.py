"""Whether recipe, launch file and this machine agree, as a run would find out."""

from collections.abc import Iterable

from finetune.backend import devices
from finetune.backend.foresee import foresee
from finetune.backend.settle import agree, check_trackers
from finetune.doctor.finding import Asked, Finding, ok


def agreement(asked: Asked) -> Iterable[Finding]:
    """Recipe and launch; what contradicts is raised, as a run raises it."""
    if asked.recipe is None:
        yield ok("agreement", "not looked at; name a recipe with --recipe")
        return
    from finetune import optim

    foreseen = asked.foreseen or foresee(None, {}, asked.env)
    settled = agree(asked.recipe, foreseen.launch, devices.of_torch(), foreseen.env)
    check_trackers(asked.recipe)
    optim.check(asked.recipe, cut=foreseen.launch.cuts_state, flat=foreseen.launch.flattens)
    what = f"{foreseen.launch.kind} on {foreseen.launch.num_processes} process(es) in {settled.precision}"
    yield ok("agreement", f"{what}, {settled.accumulation} micro-batch(es) a step and process")
