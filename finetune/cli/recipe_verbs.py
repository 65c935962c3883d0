"""Verbs of recipes: sft, dpo, init, convert, train, launch, explain, doctor, data, show, plan, schema."""

import argparse
import json
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.cli import arguments
from finetune.config import preference_losses
from finetune.training.entry_point import DRY_RUN_HELP, add_recipe_arguments, load_checked
from finetune.utils import hub_access
from finetune.utils.errors import DataError, RecipeError
from finetune.utils.hub_access import go_offline_if_unreachable
from finetune.utils.library_imports import quick_imports, silence_libraries
from finetune.utils.quoting import shell_command, to_stderr, to_stdout
from finetune.utils.shipped_files import launch_folder, recipe_file

if TYPE_CHECKING:
    from finetune.config.recipe_schema import Recipe
    from finetune.distributed.launch.predicted_environment import PredictedEnvironment

# Those of `peer_keys`, which is not imported before it is needed.
CONVERTED_TOOLS = ("trl", "axolotl", "llama-factory", "torchtune")
_EXAMPLES = ("lm", "chat", "classify")
TASKS = (*_EXAMPLES, *preference_losses.TASKS, "custom")
CLUSTERS = ("slurm", "k8s", "kubeflow", "sky")
_RECIPE = "a recipe, by name or path: sample, my/recipe.yaml"


def add_verbs(verbs: Any) -> None:
    """Adds the verbs of this file."""
    for run, tasks in ((sft, _EXAMPLES), (dpo, preference_losses.TASKS)):
        verb = arguments.add_verb(verbs, run)
        _add_project_arguments(verb, tasks, required=True)
        verb.add_argument("--output", metavar="DIR", help="the run directory (default: runs/MODEL-DATA)")
        verb.add_argument("overrides", nargs="*", metavar="key.key=value", help="a value for the recipe that is made")
        _add_start_arguments(verb, required=False)

    verb = arguments.add_verb(verbs, init)
    verb.add_argument("folder", nargs="?", default=".", metavar="DIR", help="its folder (default: the current one)")
    _add_project_arguments(verb, (*TASKS, "distill"), required=False)
    verb.add_argument(
        "--teacher", metavar="MODEL", help="the model that `distill` learns from, with the same tokenizer"
    )

    verb = arguments.add_verb(verbs, convert)
    verb.add_argument("file", type=os.path.expanduser, metavar="FILE", help="a config of one of these tools, in YAML")
    text = "the tool that it is for (default: told by its keys)"
    verb.add_argument("--from", dest="tool", choices=CONVERTED_TOOLS, help=text)
    verb.add_argument(
        "--output", dest="folder", default=".", metavar="DIR", help="folder of recipe.yaml (default: the current one)"
    )
    text = "processes of the run, which multiply the batch (default: what the config says, or 1)"
    verb.add_argument("--devices", type=int, metavar="N", help=text)
    text = "the task of a config of TRL, which does not name its trainer (default: told by its keys)"
    verb.add_argument("--task", choices=preference_losses.TASKS, help=text)

    for run in (train, launch):
        verb = arguments.add_verb(verbs, run)
        add_recipe_arguments(verb)
        _add_start_arguments(verb, required=run is launch)
    text = "print a job for a cluster that runs this command, instead of running it"
    verb.add_argument("--print-cluster", choices=CLUSTERS, metavar=f"{{{','.join(CLUSTERS)}}}", help=text)
    verb.add_argument("--image", default="", help="the image of the printed job's containers")

    verb = arguments.add_verb(verbs, explain)
    arguments.add_launch_arguments(verb, required=False)
    verb.add_argument("recipe", type=recipe_file, help=_RECIPE)
    verb.add_argument("words", nargs="*", metavar="KEY | key.key=value", help="a key to explain, or a value to replace")
    verb.add_argument("--all", action="store_true", help="also show default values")
    arguments.add_json_argument(verb)

    verb = arguments.add_verb(verbs, doctor)
    arguments.add_launch_arguments(verb, required=False)
    verb.add_argument("--recipe", type=recipe_file, help=_RECIPE)
    verb.add_argument("overrides", nargs="*", metavar="key.key=value", help="a value that replaces the recipe's")
    text = "check all machines together, and measure the links between them: run it on each at once"
    verb.add_argument("--machines", action="store_true", help=text)
    arguments.add_machine_arguments(verb)
    arguments.add_json_argument(verb)

    verb = arguments.add_verb(verbs, data)
    verb.add_argument("--show", type=int, metavar="N", help="also print N examples as tokens, the learned ones marked")
    add_recipe_arguments(verb)

    add_recipe_arguments(arguments.add_verb(verbs, show))

    verb = arguments.add_verb(verbs, plan)
    text = "a known GPU, or figures: memory=24,bf16=70,link=32 (default: the GPU of this machine, or an H100)"
    verb.add_argument("--gpu", help=text)
    verb.add_argument("--gpus", type=int, metavar="N", help="GPUs of a machine (default: those of this machine, or 8)")
    verb.add_argument("--nodes", type=int, default=1, metavar="N", help="number of machines (default: 1)")
    text = "bandwidth between machines, for each GPU (default: 50)"
    verb.add_argument("--network", type=float, default=50.0, metavar="GB/s", help=text)
    text = "bandwidths that `finetune comms --json FILE` has measured"
    verb.add_argument("--links", action="append", default=[], metavar="FILE", help=text)
    verb.add_argument("--mfu", type=float, default=0.4, metavar="SHARE", help="share of the peak rate (default: 0.4)")
    verb.add_argument("--host", type=float, metavar="GiB", help="host memory of a machine, for offloading")
    verb.add_argument("--price", type=float, metavar="MONEY", help="price of a GPU for an hour")
    verb.add_argument("--energy", action="store_true", help="also estimate the energy that the GPUs use")
    verb.add_argument("--stored", choices=("fp32", "bf16", "fp16"), help="dtype of weights that this machine lacks")
    verb.add_argument("--configs", metavar="DIR", help="folder of launch files (default: accelerate_configs/)")
    verb.add_argument("--write", metavar="FILE", help="write the recommended launch file to this file")
    text = "also trace a step with fake tensors: under the recommended launch file, those named, or `all`"
    verb.add_argument("--trace", nargs="?", const="recommended", metavar="A,B,…", help=text)
    arguments.add_json_argument(verb)
    add_recipe_arguments(verb)

    verb = arguments.add_verb(verbs, schema)
    verb.add_argument("--path", action="store_true", help="print the path of the installed schema file instead")


def _add_project_arguments(verb: argparse.ArgumentParser, tasks: tuple[str, ...], *, required: bool) -> None:
    """Adds what a new recipe is made of; `required`: the model and the data must be given."""
    own = ("", "") if required else (" (default: a small model, from random weights)", " (default: built-in data)")
    usual = "dpo" if tasks == preference_losses.TASKS else "found from the data"
    verb.add_argument("--task", choices=tasks, help=f"what is learned (default: {usual})")
    verb.add_argument("--model", required=required, help=f"a directory or a name on the hub{own[0]}")
    verb.add_argument("--data", required=required, metavar="FILE", help=f"a file, glob or directory{own[1]}")
    adapters = verb.add_mutually_exclusive_group()
    for kind, what in (("lora", "train adapters"), ("qlora", "train adapters on a model in 4 bits")):
        adapters.add_argument(f"--{kind}", dest="adapters", action="store_const", const=kind, help=what)


def _add_start_arguments(verb: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds what starts a run; `required`: a launch file must be given."""
    arguments.add_launch_arguments(verb, required=required)
    arguments.add_machine_arguments(verb)
    verb.add_argument("--dry-run", action="store_true", help=DRY_RUN_HELP)
    verb.add_argument("--quiet", action="store_true", help="print errors only")


def sft(parsed: argparse.Namespace) -> None:
    """Fine-tune a model on your data in one command: the recipe is made, run, and kept in the run directory."""
    _make_and_run(parsed, parsed.task)


def dpo(parsed: argparse.Namespace) -> None:
    """Train a model on pairs of answers, of which one is preferred, in one command, as `sft` does on examples."""
    _make_and_run(parsed, parsed.task or preference_losses.TASKS[0])


def _make_and_run(parsed: argparse.Namespace, task: str | None) -> None:
    _check_project(parsed)
    from finetune.cli.new_project import Project, make_recipe
    from finetune.data.source_survey import UnknownColumns
    from finetune.utils import atomic_files
    from finetune.utils.temporary_folders import temporary_folder

    project = Project(task, parsed.model, parsed.data, parsed.adapters, parsed.output)
    try:
        made = make_recipe(project, parsed.overrides, quiet=parsed.quiet)
    except UnknownColumns as error:
        asked = DataError(f"{error} Name them behind the command: {error.keys}.")
        if error.overrides:
            command = shell_command(["finetune", *parsed.typed, *error.overrides])
            asked.lines = (f"{asked} By what they hold, this may be it:", f"  {command}")
        raise asked from error
    parsed.overrides = []
    if not parsed.quiet:
        to_stdout("\n".join(made.lines))
    _fill_in_launch(parsed, made.recipe)
    with temporary_folder() if parsed.dry_run else nullcontext(made.file.parent) as folder:
        file = folder / made.file.name
        with atomic_files.explain_unwritable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            atomic_files.write_text(file, made.text)
        if not (parsed.dry_run or parsed.quiet):
            again = shell_command(["finetune", "train", str(file), "output.dir=runs/NEW"])
            to_stdout(f"Recipe: {file}. To change it, edit it and run `{again}`.")
        parsed.recipe = str(file)
        _start(parsed)


def _check_project(parsed: argparse.Namespace) -> None:
    """Checks what a new recipe is made of, as far as its paths and keys tell, before libraries are imported."""
    from finetune.config import recipe_paths
    from finetune.config.recipe import check_overrides

    check_overrides({"data": {"train": [{"path": parsed.data or ""}]}}, getattr(parsed, "overrides", ()))
    go_offline_if_unreachable()
    hub_access.require_model(parsed.model, "--model")
    hub_access.require_model(getattr(parsed, "teacher", None), "--teacher")
    if parsed.data is not None:
        recipe_paths.find_files(os.path.expanduser(parsed.data))
    silence_libraries()


def init(parsed: argparse.Namespace) -> None:
    """Create a project that runs as it is: recipe, launch files, README."""
    _check_project(parsed)
    from finetune.cli.new_project import Project, write_project
    from finetune.data.source_survey import UnknownColumns

    if (parsed.task == "distill") != (parsed.teacher is not None):
        raise RecipeError("--task distill and --teacher MODEL go together: give both, or neither.")
    task = None if parsed.teacher is not None else parsed.task  # that of the data
    project = Project(task, parsed.model, parsed.data, parsed.adapters, teacher=parsed.teacher)
    try:
        lines = write_project(Path(parsed.folder), project)
    except UnknownColumns as error:
        advice = f"`finetune init` takes no names: call the columns {error.names} in the file, or use `finetune sft`."
        raise DataError(f"{error} {advice}") from error
    to_stdout("\n".join(lines))


def convert(parsed: argparse.Namespace) -> None:
    """Make a recipe of a config of TRL, Axolotl, LLaMA-Factory or torchtune."""
    from finetune.cli.convert_config import convert_config

    folder = Path(parsed.folder)
    to_stdout("\n".join(convert_config(Path(parsed.file), parsed.tool, folder, parsed.devices, parsed.task)))


def train(parsed: argparse.Namespace) -> None:
    """Train a recipe under the launch file that fits this machine, as `finetune plan` recommends it."""
    _fill_in_launch(parsed, load_checked(parsed))
    _start(parsed)


def _fill_in_launch(parsed: argparse.Namespace, recipe: "Recipe") -> None:
    """Fills in the launch file that fits, and what else that takes, unless the command line names one."""
    if parsed.config_file is not None:
        return
    from finetune.cli.choose_launch import choose_for_command

    silence_libraries()
    choice = choose_for_command(recipe, arguments.launch_options(parsed))
    parsed.config_file = choice.file
    parsed.overrides = [*parsed.overrides, *choice.changes]
    if choice.differs:
        parsed.num_processes = str(choice.num_processes)
    if not parsed.quiet:
        to_stdout(choice.line())


def launch(parsed: argparse.Namespace) -> None:
    """Check a recipe and a launch file, then train; or print a job that does so on a cluster."""
    if parsed.print_cluster is None:
        if parsed.image:
            raise RecipeError("--image is for a job that --print-cluster prints. Leave it out.")
        _start(parsed)
        return
    if parsed.dry_run:
        raise RecipeError("--print-cluster starts nothing, and --dry-run prints something else. Leave one of them out.")
    from finetune.cli.print_cluster_job import cluster_job

    recipe, options = arguments.load_named_recipe(parsed), arguments.launch_options(parsed)
    words = [*["--quiet"] * parsed.quiet, *parsed.overrides]
    files = (parsed.config_file, parsed.recipe)
    print(cluster_job(parsed.print_cluster, recipe, files, words, options, parsed.image), end="")


def _start(parsed: argparse.Namespace) -> None:
    from finetune.distributed.launch import rendezvous

    given, timeouts = arguments.launch_options(parsed), arguments.machine_timeouts(parsed)
    if not parsed.dry_run:
        with rendezvous.problems_told(parsed.config_file, given, "launch", timeouts, to_stderr):
            _start_workers(parsed, given)
        return
    recipe, foreseen = _load_both(parsed, given)
    arguments.prepare_libraries()
    from finetune.training.dry_run import describe

    to_stdout(describe(recipe, foreseen))


def _load_both(parsed: argparse.Namespace, given: dict[str, str]) -> "tuple[Recipe, PredictedEnvironment]":
    """Loads recipe and launch file, and checks them against each other, before libraries are imported."""
    from finetune.config import recipe_paths
    from finetune.distributed import device_selection
    from finetune.distributed.launch.predicted_environment import predict_environment
    from finetune.distributed.resolve_config import resolve_for_devices

    recipe = arguments.load_named_recipe(parsed)
    recipe_paths.check_paths(recipe)
    foreseen = predict_environment(parsed.config_file, given, os.environ)
    if foreseen.asked.nnodes is None:
        resolve_for_devices(recipe, foreseen.launch, device_selection.driver_gpus(), foreseen.env)
    return recipe, foreseen


def _start_workers(parsed: argparse.Namespace, given: dict[str, str]) -> None:
    recipe, foreseen = _load_both(parsed, given)
    if "nnodes" in given:
        _check_machines(parsed, recipe, foreseen)
    from finetune.distributed.launch.launcher import launch_workers

    options = [word for option, value in given.items() for word in (f"--{option}", value)]
    words = [*["--quiet"] * parsed.quiet, parsed.recipe, *parsed.overrides]
    launch_workers(
        parsed.config_file,
        options,
        words,
        grace_s=recipe.guard.grace_s,
        recipe=recipe.model_dump(mode="json"),
        timeouts=arguments.machine_timeouts(parsed),
    )


def _check_machines(parsed: argparse.Namespace, recipe: "Recipe", foreseen: "PredictedEnvironment") -> None:
    """Refuses an elastic launch that could come to a number of machines over which the batch is not even."""
    from finetune.distributed.launch.predicted_environment import elastic_launches
    from finetune.distributed.resolve_config import derive_accumulation

    for machines, launch in elastic_launches(foreseen):
        try:
            derive_accumulation(recipe, launch.data_ranks, launch.num_processes)
        except RecipeError as error:
            raise RecipeError(f"--nnodes {parsed.nnodes} allows {machines} machines, over which {error}") from error


def explain(parsed: argparse.Namespace) -> None:
    """Show where each value comes from, what it overrides, and what it means."""
    from finetune.diagnostics.explain import explain_values, select_values, value_as_json, value_page, values_table
    from finetune.utils.console import plain_console

    overrides = [word for word in parsed.words if "=" in word]
    keys = [word for word in parsed.words if "=" not in word]
    values = explain_values(parsed.recipe, overrides, parsed.config_file, arguments.launch_options(parsed), os.environ)
    chosen = [value for key in keys for value in select_values(values, key)]
    if not keys:
        chosen = [value for value in values if parsed.all or not value.is_default]
    if parsed.json:
        print(json.dumps([value_as_json(value) for value in chosen], indent=2, default=str))
    else:
        console = plain_console()
        console.print(value_page(chosen[0]) if len(chosen) == 1 else values_table(chosen, console.width))


def doctor(parsed: argparse.Namespace) -> int:
    """Check whether this machine, or several together, can run a recipe, and say what to fix."""
    from finetune.diagnostics.doctor.doctor import read_request, report_checks

    # The environment as the user has it: checks change it for themselves.
    options, env = arguments.launch_options(parsed), dict(os.environ)
    asked, problems = read_request(parsed.recipe, parsed.overrides, parsed.config_file, options, env)
    checks = None
    if parsed.machines:
        from finetune.diagnostics.doctor.several_machines import check_machines

        timeouts = arguments.machine_timeouts(parsed)
        # What cannot be read here is known before the others are waited for.
        checks = [] if problems else [partial(check_machines, timeouts=timeouts, say=to_stderr)]
    results = report_checks(asked, problems, quiet=parsed.json, checks=checks)
    if parsed.machines and problems and asked.foreseen is not None and asked.machines > 1:
        from finetune.distributed.launch import rendezvous

        plan = rendezvous.plan_machine(asked.foreseen, "doctor", {}, **timeouts)
        rendezvous.tell_problem(plan, " ".join(problem.found for problem in problems), to_stderr)
    if parsed.json:
        print(json.dumps([vars(result) for result in results], indent=2))
    return 1 if any(result.status == "failure" for result in results) else 0


def data(parsed: argparse.Namespace) -> None:
    """Prepare the data of a recipe and print a report on it."""
    from finetune.utils.console import plain_console

    recipe = load_checked(parsed)
    from finetune.tasks.build_task import without_validation
    from finetune.tasks.task_lookup import find_task

    silence_libraries()
    prepared = find_task(recipe).build_data(recipe, False)
    sides = {"train": prepared.train, "validation": prepared.validation}
    rows = [f"{name}: {len(rows):,} rows" for name, rows in sides.items() if rows is not None]
    lines = prepared.full_report or prepared.report_lines or rows
    to_stdout("\n".join([*lines, *without_validation(recipe, prepared)]))
    shown = prepared.train if prepared.train is not None else prepared.validation
    if parsed.show and shown is not None:
        from finetune.data.show_examples import examples

        console = plain_console()
        coloured = console.is_terminal and not console.no_color
        for line in examples(shown, prepared.tokenizer, prepared.label_names, parsed.show, coloured=coloured):
            console.print(line)


def show(parsed: argparse.Namespace) -> None:
    """Print the whole recipe, defaults included."""
    from finetune.config.recipe import dump_recipe

    print(dump_recipe(arguments.load_named_recipe(parsed)), end="")


def plan(parsed: argparse.Namespace) -> None:
    """Estimate memory, time, traffic and cost of a recipe under every launch file, without running it."""
    from finetune.distributed.gpu_specs import find_gpu
    from finetune.distributed.launch.launch_file import launch_files_in
    from finetune.distributed.link_speeds import read_links
    from finetune.utils.console import plain_console

    recipe = arguments.load_named_recipe(parsed)
    if parsed.gpu is not None:
        find_gpu(parsed.gpu)
    links, folder = read_links(parsed.links), Path(parsed.configs) if parsed.configs else launch_folder()
    launch_files_in(folder)
    go_offline_if_unreachable()
    with quick_imports():
        from finetune.planning import plan_report
        from finetune.planning.planner import count_rows, machines_of, make_plan, write_launch_file

        silence_libraries()

    plan = make_plan(recipe, machines_of(parsed, links), folder, parsed.stored, count_rows(recipe))
    console, traces = plain_console(), None
    if parsed.trace:
        from finetune.planning.trace import trace_launches

        say = to_stderr if sys.stderr.isatty() else lambda _: None
        traces = trace_launches.trace_all(plan, trace_launches.find_wanted(plan, parsed.trace), parsed.stored, say)
    if parsed.json:
        print(plan_report.as_json(plan, traces))
    else:
        plan_report.print_plan(plan, console, energy=parsed.energy)
        if traces is not None:
            plan_report.print_traced(traces, console)
    if parsed.write:
        write_launch_file(plan, Path(parsed.write))
        if not parsed.json:
            print(f"Written: {parsed.write}")


def schema(parsed: argparse.Namespace) -> None:
    """Print the JSON schema of recipes, for editors."""
    from finetune.config.recipe import SCHEMA_FILE, json_schema

    print(SCHEMA_FILE if parsed.path else json.dumps(json_schema(), indent=2))
