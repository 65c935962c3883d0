"""Verbs that take weights: export, generate, chat, predict, eval."""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.cli import arguments
from finetune.export.sampling_options import SamplingOptions
from finetune.utils import hub_access
from finetune.utils.compat.library_versions import require_installed, untested_versions
from finetune.utils.errors import CheckpointError, RecipeError
from finetune.utils.hub_access import go_offline_if_unreachable
from finetune.utils.library_imports import silence_libraries
from finetune.utils.quoting import to_stderr, to_stdout, visible

if TYPE_CHECKING:
    from finetune.export.load_model import LoadedModel

_EXPORTS = ("adapter", "merged", "merged-16bit", "gguf", "gguf-f16", "gguf-q8_0")
_ANY_MODEL = "a run, checkpoint, adapter, export, model directory or hub name"
# Options of --harness, and the least number that each takes.
_HARNESS_OPTIONS = {"num_fewshot": 0, "limit": 1, "batch_size": 1}

# Models that read the fields which flags name.
_READERS = {
    "pair_field": "classifiers of documents, regression and the targets that `eval` reads",
    "label_field": "classifiers of documents or words and regression",
    "field": "language models, which read conversations",
}


def add_verbs(verbs: Any) -> None:
    """Adds the verbs of this file."""
    verb = arguments.add_verb(verbs, export)
    verb.add_argument("run", help="a run directory, such as runs/sample, or one of its checkpoints")
    text = "what is written; gguf is gguf-f16"
    verb.add_argument("--as", dest="kind", required=True, choices=_EXPORTS, help=text)
    verb.add_argument("--to", metavar="DIR", help="the new folder (default: RUN/exports/KIND)")
    verb.add_argument("--shard-size", default="5GB", help="maximum size of a file (default: 5GB)")
    verb.add_argument("--push-to", metavar="NAME", help="then upload it to the hub, as a private model of this name")
    arguments.add_weights_arguments(verb)

    verb = arguments.add_verb(verbs, generate)
    verb.add_argument("run", help=_ANY_MODEL)
    verb.add_argument("--prompt", required=True, help="the text to continue, or with --chat to answer")
    verb.add_argument("--chat", action="store_true", help="apply the chat template of the tokenizer to the prompt")
    _add_sampling_arguments(verb)
    arguments.add_weights_arguments(verb)

    verb = arguments.add_verb(verbs, chat)
    verb.add_argument("run", help=_ANY_MODEL)
    verb.add_argument("--against", metavar="MODEL", help="a second model, which answers each turn as well")
    verb.add_argument("--system", metavar="TEXT", help="begin the conversation with a system prompt")
    _add_sampling_arguments(verb)
    arguments.add_weights_arguments(verb)

    verb = arguments.add_verb(verbs, predict)
    verb.add_argument("run", help=_ANY_MODEL)
    text = "documents or prompts, as the recipe's `path` takes them; their columns are also in the output"
    verb.add_argument("file", type=os.path.expanduser, help=text)
    text = "write to this file, .jsonl or .csv by its ending (default: JSON lines on stdout)"
    verb.add_argument("--output", type=os.path.expanduser, metavar="FILE", help=text)
    _add_field_arguments(verb)
    verb.add_argument("--batch-size", type=int, default=32, metavar="N", help="documents a forward pass (default: 32)")
    text = "tokens of a text that is written, at most (default: 200)"
    verb.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help=text)
    arguments.add_weights_arguments(verb)

    verb = arguments.add_verb(verbs, evaluate, "eval")
    verb.add_argument("run", help=_ANY_MODEL)
    on = verb.add_mutually_exclusive_group(required=True)
    text = "compute loss and perplexity, or figures of each class, on files, as the recipe's `path` takes them"
    on.add_argument("--data", nargs="+", type=os.path.expanduser, metavar="FILE", help=text)
    text = "run tasks of lm-evaluation-harness: names, task files or folders"
    on.add_argument("--harness", nargs="+", type=os.path.expanduser, metavar="TASK", help=text)
    _add_field_arguments(verb)
    text = "the field that holds the class of a document (default: that of the data of the run, or `label`)"
    verb.add_argument("--label-field", metavar="NAME", help=text)
    text = "with --data: the files hold conversations (known for runs on such); with --harness: apply the chat template"
    verb.add_argument("--chat", action="store_true", help=text)
    verb.add_argument("--num-fewshot", type=int, metavar="N", help="with --harness: examples before each question")
    verb.add_argument("--limit", type=int, metavar="N", help="with --harness: use the first N questions of each task")
    verb.add_argument("--batch-size", type=int, metavar="N", help="with --harness: texts a forward pass (default: 8)")
    arguments.add_json_argument(verb)
    arguments.add_weights_arguments(verb)


def _add_field_arguments(verb: argparse.ArgumentParser) -> None:
    text = "the field that holds the text (default: that of the data of the run, or `text`)"
    verb.add_argument("--text-field", metavar="NAME", help=text)
    text = "the field that holds the second text of a pair, or the target (default: that of the data of the run)"
    verb.add_argument("--pair-field", metavar="NAME", help=text)
    text = "a field of conversations, as the recipe's `fields` has it: user=Question; may be repeated"
    verb.add_argument("--field", action="append", metavar="KEY=NAME", help=text)


def _add_sampling_arguments(verb: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of `generate_text.SamplingOptions`."""
    verb.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default: 200")
    verb.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, the most likely token")
    verb.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens only")
    verb.add_argument("--top-p", type=float, metavar="P", help="sample only from the most likely tokens that make up P")
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (default: 0)")


def _sampling_options(parsed: argparse.Namespace) -> SamplingOptions:
    return SamplingOptions(parsed.max_new_tokens, parsed.temperature, parsed.top_k, parsed.top_p, parsed.seed)


def export(parsed: argparse.Namespace) -> None:
    """Write the adapter, merged model or GGUF file of a run, and verify it."""
    parsed.kind = "gguf-f16" if parsed.kind == "gguf" else parsed.kind
    if parsed.kind.startswith("gguf"):
        require_installed("gguf", f"--as {parsed.kind}", extra="gguf")
    from finetune.config.recipe import load_recipe
    from finetune.export import find_weights

    run, _, _ = find_weights.locate(Path(parsed.run), parsed.step)
    find_weights.check_kind(run, load_recipe(run / "recipe.yaml"), parsed.kind)
    arguments.prepare_libraries()
    from finetune.export import export_weights

    if parsed.push_to is not None:
        export_weights.check_login(parsed.push_to)  # before the work, not after it
    to = Path(parsed.to) if parsed.to else None
    options = {name: getattr(parsed, name) for name in ("step", "base", "shard_size", "trust_remote_code")}
    folder = export_weights.export_weights(Path(parsed.run), parsed.kind, to_stdout, to=to, **options)
    if parsed.push_to is not None:
        print(f"Uploaded: {export_weights.push_folder(folder, parsed.push_to)}")


def generate(parsed: argparse.Namespace) -> None:
    """Generate text with a run, checkpoint, adapter or export."""
    options = _sampling_options(parsed)
    _prepare_opening(parsed)
    from finetune.export.generate_text import generate_text

    # A file gets the text as it is.
    write = partial(to_stdout if sys.stdout.isatty() else print, end="")
    opened = _open(parsed)
    if opened.writes_text and not parsed.chat:
        write(parsed.prompt)
    generate_text(opened, parsed.prompt, options, write, chat=parsed.chat)
    write("\n")


def chat(parsed: argparse.Namespace) -> None:
    """Talk in the terminal with a run, checkpoint, adapter or export."""
    options = _sampling_options(parsed)
    _prepare_opening(parsed)
    from finetune.cli.chat_session import ChatSession

    models = {parsed.run: _open(parsed)}
    if parsed.against is not None:
        # --step and --base are of the first.
        other = argparse.Namespace(**{**vars(parsed), "run": parsed.against, "step": None, "base": None})
        models[parsed.against if parsed.against != parsed.run else "again"] = _open(other)
    for opened in models.values():
        opened.require_text()
    ChatSession(models, options, parsed.system).talk()


def predict(parsed: argparse.Namespace) -> None:
    """Predict a class or number for each document of a file, tag its words, write its target, or answer each prompt."""
    from finetune.config import recipe_paths

    target = Path(parsed.output) if parsed.output is not None else None
    for flag, number in (("batch-size", parsed.batch_size), ("max-new-tokens", parsed.max_new_tokens)):
        if number < 1:
            raise RecipeError(f"--{flag} is {number}; give 1 or more.")
    if target is not None:
        if target.suffix not in (".jsonl", ".csv"):
            raise RecipeError(f"--output {target} ends in '{target.suffix}'. Name a file that ends in .jsonl or .csv.")
        if not target.absolute().parent.is_dir() or target.is_dir():
            raise RecipeError(f"--output {target} cannot be written: name a file in a folder that is there.")
        if target.exists() and target.resolve() == Path(parsed.file).resolve():
            raise RecipeError(f"--output {target} is the file that is read. Name another.")
    recipe_paths.find_files(parsed.file)
    opened = _open(parsed, exact=True)
    opened.require_predictions()
    from finetune.export import evaluate_files, predict_files
    from finetune.utils.atomic_files import write_text

    with evaluate_files.told_in_flags():
        chat = opened.recipe is None and opened.writes_text and bool(opened.tokenizer.chat_template)
        recipe = evaluate_files.recipe_of(opened, [parsed.file], fields=_fields(parsed, opened), chat=chat)
        predictions = predict_files.predict_files(opened, recipe, parsed.batch_size, parsed.max_new_tokens)
        to_csv = target is not None and target.suffix == ".csv"
        lines_of_table = predict_files.span_csv_lines if opened.task.rows.labels == "tag" else predict_files.csv_lines
        written = (lines_of_table if to_csv else predict_files.json_lines)(predictions)
        if target is None:
            sys.stdout.writelines(map(visible, written) if sys.stdout.isatty() else written)
            return
        lines = list(written)
    with CheckpointError.explaining(f"--output {target} cannot be written", "", OSError):
        write_text(target, "".join(lines))
    what = "spans" if to_csv and opened.task.rows.labels == "tag" else "documents"
    to_stderr(f"Written: {len(lines) - to_csv:,} {what} into {target}.")


def _given_fields(parsed: argparse.Namespace) -> dict[str, Any]:
    fields = {name: getattr(parsed, name, None) for name in ("text_field", "pair_field", "label_field", "field")}
    return {name: value for name, value in fields.items() if value is not None}


def _fields(parsed: argparse.Namespace, opened: "LoadedModel") -> dict[str, Any]:
    """Keys of a source that the command line gives, each of which a model reads."""
    rows, fields = opened.task.rows, _given_fields(parsed)
    read = {"text_field": True, "label_field": bool(rows.labels), "field": opened.writes_text}
    read["pair_field"] = (rows.labels and rows.takes_pairs is None) or (rows.reads_source and parsed.verb == "eval")
    if unread := [name for name in fields if not read[name]]:
        flag, readers = unread[0].replace("_", "-"), _READERS[unread[0]]
        raise RecipeError(f"--{flag} is for {readers}, and {parsed.run} is none. Leave it out.")
    pairs = {}
    for word in fields.pop("field", ()):
        key, equals, name = word.partition("=")
        if not (key and equals and name):
            raise RecipeError(f"--field {word} is not of the form KEY=NAME, such as user=Question.")
        pairs[key] = name
    return fields | ({"fields": pairs} if pairs else {})


def evaluate(parsed: argparse.Namespace) -> None:
    """Evaluate a run, checkpoint, adapter or export on files or benchmarks."""
    if parsed.harness:
        _evaluate_harness(parsed)
        return
    for option in _HARNESS_OPTIONS:
        if getattr(parsed, option) is not None:
            raise RecipeError(f"--{option.replace('_', '-')} is for --harness. Leave it out.")
    from finetune.config import recipe_paths

    for file in parsed.data:
        recipe_paths.find_files(file)
    opened = _open(parsed, exact=True)
    from finetune.export import evaluate_files

    with evaluate_files.told_in_flags():
        recipe = evaluate_files.recipe_of(opened, parsed.data, fields=_fields(parsed, opened), chat=parsed.chat)
        results = evaluate_files.evaluate_files(opened, recipe, to_stderr)
    if parsed.json:
        print(json.dumps(results))
        return
    if "classes" in results:
        _print_classes(results)
        return
    known = (name for name in opened.task.rows.figures or () if name in results)
    figures = "".join(f", {name} {results[name]:{'.7g' if name == 'perplexity' else '.4f'}}" for name in known)
    each = ", a document each" * (recipe.data.packing == "padded")
    print(
        f"validation loss {results['loss']:.5f}{figures}, over {results['targets']:,} targets in rows of "
        f"{recipe.data.sequence_length} tokens{each}"
    )


def _print_classes(scores: dict[str, Any]) -> None:
    from finetune.tasks.class_tables import classes_table, confusion_table
    from finetune.utils.console import plain_console, plain_table

    known = {"accuracy": "accuracy", "recall_macro": "macro recall", "f1_macro": "macro F1"}
    known |= {"precision": "precision", "recall": "recall", "f1": "F1"}
    figures = ", ".join(f"{name} {scores[key]:.4f}" for key, name in known.items() if key in scores)
    what = "documents" if "confusions" in scores else "words"
    print(f"validation loss {scores['loss']:.5f}, {figures}, over {scores['targets']:,} {what}")
    tables = [classes_table(scores["classes"])]
    if "confusions" in scores:
        tables.append(confusion_table(scores["confusions"], [*scores["classes"]]))
    for head, *rows in tables:
        table = plain_table(*head, right=tuple(head[1:]))
        for row in rows:
            table.add_row(*row)
        print()
        plain_console().print(table)


def _evaluate_harness(parsed: argparse.Namespace) -> None:
    from finetune.utils.console import plain_console

    for name in _given_fields(parsed):
        raise RecipeError(f"--{name.replace('_', '-')} is for --data. Leave it out.")
    options = {option: getattr(parsed, option) for option in _HARNESS_OPTIONS}
    for option, value in options.items():
        if value is not None and value < (least := _HARNESS_OPTIONS[option]):
            raise RecipeError(f"--{option.replace('_', '-')} is {value}; give {least} or more.")
    require_installed("lm_eval", "--harness", extra="harness")
    opened = _open(parsed, exact=True)
    opened.require_text()
    from finetune.export import evaluate_harness

    if opened.home is not None:
        evaluate_harness.read_results(opened.home)  # before the work, not after it
    rows = evaluate_harness.evaluate_harness(opened, parsed.harness, chat=parsed.chat, **options)
    if parsed.json:
        print(json.dumps(rows, indent=2))
    else:
        plain_console().print(evaluate_harness.results_table(rows))
    if opened.home is not None:
        to_stderr(f"Written: {evaluate_harness.add_results(opened.home, rows)}")


def _prepare_opening(parsed: argparse.Namespace) -> None:
    """Checks that what `run` and `base` name can be had, and tells libraries to be silent before they are imported."""
    go_offline_if_unreachable()
    hub_access.require_model(parsed.run, None)
    hub_access.require_model(parsed.base, "--base")
    silence_libraries()


def _open(parsed: argparse.Namespace, *, exact: bool = False) -> "LoadedModel":
    """Opens what `run` and `base` name; says so, since it takes a while."""
    if text := untested_versions():
        to_stderr(text)
    to_stderr(f"Opening {parsed.run}.")
    _prepare_opening(parsed)
    from finetune.export.load_model import load_model

    trusted = parsed.trust_remote_code
    opened = load_model(parsed.run, step=parsed.step, base=parsed.base, exact=exact, trust_remote_code=trusted)
    for line in opened.lines:
        to_stderr(line)
    return opened
