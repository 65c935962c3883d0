"""The command line: `finetune <verb>`. `arguments` is what verbs take, `commands` what they do."""

import argparse
from collections.abc import Sequence
from functools import partial

from finetune.cli.arguments import build_parser
from finetune.cli.commands import COMMANDS
from finetune.utils.exit_codes import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """`finetune <verb> …`; returns the exit code."""
    parsed = _parse(build_parser(), arguments)
    return guarded(partial(COMMANDS[parsed.verb], parsed))


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; a recipe's overrides may also come behind options, which argparse takes amiss."""
    parsed, left = parser.parse_known_args(arguments)
    if left and (not hasattr(parsed, "overrides") or any(word.startswith("-") for word in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        parsed.overrides += left
    return parsed
