"""Link speeds as measured by `finetune comms --json`, in place of a data sheet's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveInt, ValidationError

from finetune.distributed.measure_bandwidth import RINGS, Line
from finetune.utils.errors import RecipeError


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

    def line(self, collective: str, *, far: bool) -> Line | None:
        """The link for a collective; None if it was not measured there."""
        return (self.between if far else self.within).get(collective)


def read_links(names: Sequence[str]) -> LinkSpeeds:
    """Reads files of `finetune comms --json`: of one machine, of several, or one of each.

    Raises:
        RecipeError: If one is something else, or two are of the same kind.
    """
    found: dict[bool, dict[str, Line]] = {}
    for name in names:
        measured = _of_file(Path(name))
        far = measured.machines > 1
        if far in found:
            kind = "several machines" if far else "one machine"
            raise RecipeError(f"--links: {' and '.join(names)} are both of {kind}. Give one of each at most.")
        found[far] = measured.collectives
    return LinkSpeeds(found.get(False, {}), found.get(True, {}))


def _of_file(file: Path) -> _Measured:
    problem = f"--links: {file} is not what `finetune comms --json {file}` writes: "
    try:
        measured = _Measured.model_validate_json(file.read_bytes())
    except OSError as error:
        raise RecipeError(f"--links: cannot read {file}: {error.strerror or error}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
        raise RecipeError(f"{problem}{reason}. Measure again.") from error
    # Files of earlier versions lack some; for all-to-all the data sheet's bandwidth is taken then.
    if missing := RINGS.keys() - {"all_to_all", "reduce", "send"} - measured.collectives.keys():
        raise RecipeError(f"{problem}it lacks {', '.join(sorted(missing))}. Measure again.")
    return measured
