"""Checks of all machines of a launch together: that they meet, agree and reach each other."""

import os
from collections.abc import Callable, Iterable, Mapping

from finetune.diagnostics.doctor.check_result import Asked, CheckResult, failure, ok, warning
from finetune.distributed.launch import machine_facts, rendezvous
from finetune.utils.errors import BackendError


def check_machines(asked: Asked, timeouts: Mapping[str, float], say: Callable[[str], None]) -> Iterable[CheckResult]:
    """Checks what machines of one launch need of each other; each of them runs this at the same time.

    `timeouts` are those of `rendezvous.MachinePlan`.

    Raises:
        BackendError: If the machines do not meet.
    """
    if asked.foreseen is None or asked.machines == 1:
        named = "no launch file" if asked.foreseen is None else "a launch file of one machine"
        raise BackendError(
            f"--machines checks several machines together, got {named}. Give --config_file a launch file whose "
            "num_machines is above 1, and run the same command on each machine with its own --machine_rank."
        )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    recipe = {} if asked.recipe is None else asked.recipe.model_dump(mode="json")
    plan = rendezvous.plan_machine(asked.foreseen, "doctor", recipe, **timeouts)
    meeting = rendezvous.Meeting(plan, say, go_on=True)
    try:
        met = meeting.hold()
    except BackendError:
        meeting.tell_late_ones()
        raise
    rendezvous.leave(met)
    for facts in met.machines:
        devices = ", ".join(dict.fromkeys(facts.devices)) or "no GPU"
        count = f"{len(facts.devices)} x " if facts.devices else ""
        yield ok("machines", f"{facts.place} at {facts.interface or 'an interface without a name'}, {count}{devices}")
    for problem in met.problems:
        yield failure("machines", problem)
    if not met.problems:
        yield ok("agreement", "same launch file, recipe, code and versions; each machine reaches each other")
    for text in met.warnings:
        yield warning("machines", text)
    apart = max(abs(link.clock_s) for row in met.links.values() for link in row.values())
    if apart <= machine_facts.CLOCK_S:
        yield ok("clocks", f"at most {apart:.2f} s apart")
    for one, row in sorted(met.links.items()):
        for other, link in sorted(row.items()):
            if one < other and not link.problem:
                yield ok("link", f"{one} to {other}: {link.latency_s * 1e3:.2f} ms there and back")
