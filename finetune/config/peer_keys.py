"""Keys of other tools' configs, and what each is called here: the table in `peer_keys.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from finetune.config.provenance import flat
from finetune.utils.yaml_files import FAST_LOADER, parse

CONVERTED = ("trl", "axolotl", "llama-factory", "torchtune")
"""Tools whose configs `finetune convert` reads."""

# They also take the arguments of transformers' Trainer.
_TRAINERS = ("trl", "llama-factory", "unsloth")
LAUNCH = "launch "
"""Prefix, in `PeerKey.here`, of a key of the launch file."""


@dataclass(frozen=True)
class PeerKey:
    """A row of the table; the file says what each column means."""

    keys: tuple[str, ...]
    of: tuple[str, ...]
    here: str = ""
    how: str = ""
    values: Mapping[Any, Any] | None = None
    rule: str = ""
    why: str = ""
    then: Literal["", "differs", "refused"] = ""

    def matches(self, key: str) -> bool:
        """Tells if this row is about a key."""
        return key in self.keys or any(fnmatchcase(key, name) for name in self.keys if "*" in name)

    def said(self, key: str) -> str:
        """Returns the sentence on a key that this row is about."""
        *others, last = (f"{name}'{'' if name.endswith('s') else 's'}" for name in map(tool_name, self.of))
        owners = f"{', '.join(others)} and {last}" if others else last
        if not self.here:
            return f"{owners} {key} is not here: {self.why}"
        pairs = [(theirs, ours) for theirs, ours in (self.values or {}).items() if isinstance(ours, str | bool)]
        values = ", ".join(f"{json_word(theirs)}: {json_word(ours)}" for theirs, ours in pairs)
        how = self.how or values
        our_key = f"{self.here.removeprefix(LAUNCH)} {'of the launch file' if self.here.startswith(LAUNCH) else 'here'}"
        return f"{owners} {key} is called {our_key}{f' ({how})' if how else ''}"


def json_word(value: Any) -> str:
    """Returns a value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@cache
def peer_table() -> dict[str, Any]:
    """Returns the table, with rows as `PeerKey`; the file says what each part means.

    Reading it takes a moment, so only what needs it calls this.
    """
    text = Path(__file__).with_name("peer_keys.yaml").read_text(encoding="utf-8")
    table = parse(text, FAST_LOADER)
    rows = [{**row, "keys": tuple(row["keys"].split()), "of": tuple(row["of"].split())} for row in table["keys"]]
    return {**table, "keys": [PeerKey(**row) for row in rows]}


def tool_name(tool: str) -> str:
    """Returns a tool's name as its makers write it."""
    return str(peer_table()["tools"][tool])


def find_peer_key(tool: str, key: str) -> PeerKey | None:
    """Returns the row about a tool's key; None if the table does not know the key."""
    rows: list[PeerKey] = peer_table()["keys"]
    own = [row for row in rows if tool in row.of]
    inherited = [row for row in rows if tool in _TRAINERS and "transformers" in row.of]
    return next((row for row in (*own, *inherited) if row.matches(key)), None)


def called_here(key: str) -> str | None:
    """Returns what the tools' key is called here, for each meaning that it has; None if no tool has it."""
    rows: list[PeerKey] = [row for row in peer_table()["keys"] if row.matches(key)]
    named = [row for row in rows if key in row.keys]
    return "; ".join(row.said(key) for row in named or rows) or None


def foreign_tool(tree: Mapping[Any, Any]) -> tuple[str, list[str]]:
    """Returns the tool beside `CONVERTED` of which a file has the most keys, and these keys."""
    given = {*map(str, tree), *flat({str(key): value for key, value in tree.items()})}
    foreign = {
        tool: PeerKey(tuple(names.replace('"', "").split()), ()) for tool, names in peer_table()["foreign"].items()
    }
    known = {tool: sorted(filter(row.matches, given)) for tool, row in foreign.items()}
    return max(known.items(), key=lambda pair: len(pair[1]))


def count_keys(tree: Mapping[Any, Any]) -> dict[str, list[str]]:
    """Returns the keys of a file that the configs of each tool in `CONVERTED` have."""
    matches: dict[str, list[str]] = {}
    for tool in CONVERTED:
        owners = {tool, *(("transformers",) if tool in _TRAINERS else ())}
        names = {name for row in peer_table()["keys"] if owners & {*row.of} for name in row.keys}
        matches[tool] = sorted(names & {*map(str, tree), *flat({str(key): value for key, value in tree.items()})})
    return matches
