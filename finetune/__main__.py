"""The command `finetune VERB …`, also as `python -m finetune`, by which launchers start verbs on several processes."""

from collections.abc import Sequence

from finetune.utils.platforms import check_or_exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb, and returns the exit code."""
    check_or_exit()
    from finetune.cli.main import main as run

    return run(arguments)


if __name__ == "__main__":
    check_or_exit()
    from finetune.utils.exit_codes import exit_with

    exit_with(main())
