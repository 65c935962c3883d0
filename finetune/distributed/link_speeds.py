"""Links between ranks: what a collective asks of them, and their measured speeds. Loads no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveInt, ValidationError

from finetune.utils.errors import RecipeError


@dataclass(frozen=True)
class Ring:
    """A collective as a ring does it."""

    hops: Callable[[int], float]
    """Number of transfers that follow one another, each with a link's latency, by `n`."""
    share: Callable[[int], float]
    """Bytes that each link carries for each of the collective's bytes, by `n`."""


# Bytes are those of the buffer that holds everything: of the input where it is reduced or
# exchanged, of the output of all-gather.
RINGS = {
    "broadcast": Ring(lambda n: n - 1, lambda n: 1.0),
    "all_reduce": Ring(lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    "all_gather": Ring(lambda n: n - 1, lambda n: (n - 1) / n),
    "reduce_scatter": Ring(lambda n: n - 1, lambda n: (n - 1) / n),
    "all_to_all": Ring(lambda n: n - 1, lambda n: (n - 1) / n),
    "reduce": Ring(lambda n: n - 1, lambda n: 1.0),
    "send": Ring(lambda n: 1, lambda n: 1.0),
}


@dataclass(frozen=True)
class Line:
    """A ring's link: `seconds = hops * latency_s + share * bytes / bandwidth`."""

    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    bandwidth: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Bytes a second."""

    def seconds(self, ring: Ring, processes: int, size: int) -> float:
        """Returns the seconds that a collective of so many bytes takes."""
        return ring.hops(processes) * self.latency_s + ring.share(processes) * size / self.bandwidth


class _Measured(BaseModel):
    """The part of the file that a plan reads."""

    format: Literal[1]
    machines: PositiveInt
    processes: Annotated[int, Field(gt=1)]
    collectives: dict[str, Line]


@dataclass(frozen=True)
class LinkSpeeds:
    """Measured links by the name of the collective; empty where nothing was measured."""

    within: dict[str, Line] = field(default_factory=dict)
    """Links on one machine."""
    between: dict[str, Line] = field(default_factory=dict)
    """Between machines."""


def read_links(names: Sequence[str]) -> LinkSpeeds:
    """Reads files of `finetune comms --json`: of one machine, of several, or one of each.

    Raises:
        RecipeError: If one is something else, or two are of the same kind.
    """
    speeds: dict[bool, dict[str, Line]] = {}
    for name in names:
        problem = f"--links: {name} is not what `finetune comms --json {name}` writes: "
        try:
            with RecipeError.explaining(f"--links: cannot read {name}", "", OSError):
                measured = _Measured.model_validate_json(Path(name).read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
            raise RecipeError(f"{problem}{reason}. Measure again.") from error
        # Files of earlier versions lack some; for all-to-all the data sheet's bandwidth is taken then.
        if missing := RINGS.keys() - {"all_to_all", "reduce", "send"} - measured.collectives.keys():
            raise RecipeError(f"{problem}it lacks {', '.join(sorted(missing))}. Measure again.")
        far = measured.machines > 1
        if far in speeds:
            kind = "several machines" if far else "one machine"
            raise RecipeError(f"--links: {' and '.join(names)} are both of {kind}. Give one of each at most.")
        speeds[far] = measured.collectives
    return LinkSpeeds(speeds.get(False, {}), speeds.get(True, {}))
