"""What the commands `export`, `generate` and `eval` take, and what they do."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.artefacts.opened import Opened


def add(verbs: Any) -> None:
    """Adds the three commands to a parser's."""
    verb = verbs.add_parser(
        "export", help="write a run's adapter or merged model, and prove that it is what was trained"
    )
    verb.add_argument("run", help="a run directory, such as runs/sample, or one of its checkpoints")
    verb.add_argument("--as", dest="kind", required=True, choices=("adapter", "merged", "merged-16bit"))
    verb.add_argument("--to", metavar="DIR", help="the new folder; RUN/exports/KIND if left out")
    verb.add_argument("--shard-size", default="5GB", help="most that one file takes, such as 5GB")
    verb.add_argument("--push-to", metavar="NAME", help="then upload it to the hub, as a private model of this name")
    _place(verb)
    verb = verbs.add_parser("generate", help="let a run, checkpoint, adapter or export write")
    verb.add_argument("run", help="a run, checkpoint, adapter, export, model directory or hub name")
    verb.add_argument("--prompt", required=True, help="what it writes on from, or with --chat answers")
    verb.add_argument("--chat", action="store_true", help="put the prompt into the tokenizer's chat template")
    verb.add_argument("--max-new-tokens", type=int, default=200)
    verb.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    verb.add_argument("--top-k", type=int)
    verb.add_argument("--top-p", type=float)
    verb.add_argument("--seed", type=int, default=0)
    _place(verb)
    _trust(verb)
    verb = verbs.add_parser("eval", help="loss and perplexity of a run, checkpoint, adapter or export on files")
    verb.add_argument("run", help="a run, checkpoint, adapter, export, model directory or hub name")
    verb.add_argument("--data", required=True, nargs="+", metavar="FILE", help="what the recipe's `path` may be")
    verb.add_argument("--text-field", help="the field that holds the text, if not that of the run's data, or `text`")
    verb.add_argument("--chat", action="store_true", help="the files hold conversations; runs on such know it")
    _place(verb)
    _trust(verb)


def _place(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--step", type=int, help="of a run, the checkpoint's step; the last one if left out")
    verb.add_argument("--base", help="where the base lies now, if not where the run or adapter says")


def _trust(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that ships with the model; a run's recipe says it",
    )


def export(parsed: argparse.Namespace, write: Callable[[str], None]) -> None:
    """`finetune export`."""
    from finetune.artefacts import push
    from finetune.artefacts.write import export as run

    if parsed.push_to is not None:
        push.check(parsed.push_to)  # before the work, not after it
    to = Path(parsed.to) if parsed.to else None
    options = {"to": to, "step": parsed.step, "base": parsed.base, "shard_size": parsed.shard_size}
    folder = run(Path(parsed.run), parsed.kind, lambda line: write(line + "\n"), **options)
    if parsed.push_to is not None:
        write(f"Uploaded: {push.push(folder, parsed.push_to)}\n")


def generate(parsed: argparse.Namespace, write: Callable[[str], None], say: Callable[[str], None]) -> None:
    """`finetune generate`.

    Args:
        say: Is told what must not stand among the text.
    """
    from finetune.artefacts import talk

    manner = talk.Manner(parsed.max_new_tokens, parsed.temperature, parsed.top_k, parsed.top_p, parsed.seed)
    place = _open(parsed, say)
    if not parsed.chat:
        write(parsed.prompt)
    talk.generate(place, parsed.prompt, manner, write, chat=parsed.chat)
    write("\n")


def evaluate(parsed: argparse.Namespace, write: Callable[[str], None], say: Callable[[str], None]) -> None:
    """`finetune eval`.

    Args:
        say: Is told what is no result.
    """
    from finetune.artefacts import score

    place = _open(parsed, say, exact=True)
    with score.told_in_flags():
        recipe = score.recipe_of(place, parsed.data, text_field=parsed.text_field, chat=parsed.chat)
        found = score.score(place, recipe)
    write(
        f"validation loss {found['loss']:.5f}, perplexity {found['perplexity']:.4f}, over {found['targets']:,} targets "
        f"in rows of {recipe.data.sequence_length} tokens\n"
    )


def _open(parsed: argparse.Namespace, say: Callable[[str], None], *, exact: bool = False) -> "Opened":
    from finetune.artefacts.opened import open_place

    trusted = parsed.trust_remote_code
    place = open_place(parsed.run, step=parsed.step, base=parsed.base, exact=exact, trust_remote_code=trusted)
    for line in place.lines:
        say(line)
    return place
