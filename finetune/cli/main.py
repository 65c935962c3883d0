"""The command line: `finetune <verb>`. The files of verbs hold their arguments and functions."""

import argparse
from collections.abc import Sequence
from functools import partial

from finetune import __version__
from finetune.cli import completion
from finetune.cli.machine_verbs import add_machine_verbs
from finetune.cli.model_verbs import add_model_verbs
from finetune.cli.recipe_verbs import add_recipe_verbs
from finetune.cli.run_verbs import add_run_verbs
from finetune.utils.exit_codes import run_guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `finetune <verb> …`, and returns the exit code."""
    parser = build_parser()
    completion.answer_shell(parser)
    parsed = parse_arguments(parser, arguments)
    return run_guarded(partial(parsed.run_verb, parsed))


def parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; items of a list may also follow options, which argparse does not allow."""
    parsed, left = parser.parse_known_args(arguments)
    lists = (getattr(parsed, name, None) for name in ("overrides", "words", "run"))
    more = next((words for words in lists if isinstance(words, list)), None)
    if left and (more is None or any(word.startswith("-") for word in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if more is not None:
        more += left
    return parsed


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all verbs."""
    parser = completion.PathParser(prog="finetune", description="Fine-tune models on every backend of Accelerate.")
    parser.add_argument("--version", action="version", version=f"finetune {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for add_verbs in (add_recipe_verbs, add_model_verbs, add_run_verbs, add_machine_verbs):
        add_verbs(verbs)
    return parser
