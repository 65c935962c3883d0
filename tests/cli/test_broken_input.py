"""Each kind of broken input ends in one paragraph and exit code 2 on every rank; nothing is overwritten."""

import errno
import os
import pty
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import ROOT, RUN_S, command, environment, run
from ranks import (
    CONFIG,
    MODEL,
    PARAGRAPH,
    Here,
    Place,
    assert_refused,
    assert_said,
    by_finetune,
    by_launcher,
    lines,
    start,
)

from finetune.utils import exit_codes
from finetune.utils.errors import DataError

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is refused here runs on a GPU")


# ---------------------------------------------------------------- the recipe


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["optim.lrr=1e-3"], ["optim.lrr: unknown key, did you mean 'lr'?", "allowed: name, lr, "]),
        (["batch.micro_size=two"], ['batch.micro_size: got "two"; allowed are a whole number above 0']),
        (["batch.global_size=5"], ["batch.global_size 5 is not a multiple of the 2 processes", "(4, 6), or"]),
    ],
    ids=["unknown key", "wrong type", "batch for two ranks"],
)
def test_recipe(place: Place, overrides: list[str], says: list[str]) -> None:
    assert_refused(start(place, place.recipe(), *overrides), *says)
    assert not place.files()


def test_no_recipe(place: Place) -> None:
    ranks = start(place, place.folder / "nope.yaml")
    assert_refused(ranks, "nope.yaml", "No such file", "one of the recipes that ship: ")


# ---------------------------------------------------------------- the data


def spoil(place: Place, content: bytes | None) -> None:
    if content is None:
        (place.folder / "train.jsonl").unlink()
    else:
        place.write("train.jsonl", content)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, ["train.jsonl"]),
        (lines(3).encode() + b'{"text": "x"\n' + lines(3).encode(), ["line 4"]),
        (lines(1).encode(), ["fills 1 rows", "one global batch of 4", "batch.global_size to at most 1"]),
    ],
    ids=["missing", "malformed", "too little"],
)
def test_data(place: Place, content: bytes | None, says: list[str]) -> None:
    spoil(place, content)
    assert_refused(start(place, place.recipe()), *says)
    assert not place.files()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ["train.jsonl"]),
        (b'{"story": "x"}\n', ["'text'", "story", "text_field"]),
        (lines(3).encode() + b'{"text": "\xff\xfe"}\n', ["line 4", "UTF-8"]),
    ],
    ids=["empty", "no such field", "undecodable"],
)
def test_data_here(place: Place, here: Here, content: bytes | None, says: list[str]) -> None:
    spoil(place, content)
    here.assert_refused(place.recipe(), *says)
    assert not place.files()


# ---------------------------------------------------------------- the model


@needs_no_gpu
def test_fp16_on_cpu(place: Place) -> None:
    ranks = start(place, place.recipe(precision="fp16"))
    assert_refused(ranks, "precision fp16", "needs a GPU", "`precision: bf16`")


def test_tokenizer_larger_than_the_model(place: Place) -> None:
    recipe = place.recipe(model={"config": {**CONFIG, "vocab_size": 100}})
    assert_refused(start(place, recipe), "tokens up to 511", "vocabulary holds 100", "vocab_size")
    assert not place.files()


def test_rows_longer_than_the_model_reads(place: Place) -> None:
    recipe = place.recipe(model={"name": str(MODEL), "config": None}, data={"sequence_length": 1000})
    place.write("train.jsonl", lines(200))
    assert_refused(start(place, recipe, config="fsdp"), "sequence_length is 1000", "at most 512")
    assert not place.files()


def test_model_without_weights(place: Place) -> None:
    hollow = place.folder / "hollow"
    shutil.copytree(MODEL, hollow, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    recipe = place.recipe(model={"name": str(hollow), "config": None})
    assert_refused(start(place, recipe, config="fsdp"), str(hollow), "safetensors")
    assert not place.files()


# ---------------------------------------------------------------- the launch plane


@needs_no_gpu
def test_offload_that_needs_a_gpu(place: Place) -> None:
    ranks = start(place, place.recipe(), config="fsdp_offload")
    assert_refused(ranks, "needs a GPU", "fsdp.yaml", "zero3_offload.yaml")
    assert not place.files()


CONTEXT_PARALLEL = {
    "parallelism_config_cp_size": 2,
    "parallelism_config_dp_shard_size": 1,
    "parallelism_config_dp_replicate_size": 1,
}


@pytest.mark.parametrize(
    ("base", "keys", "says"),
    [
        ("fsdp", {"fsdp_config": {"fsdp_version": 1}}, ["FSDP version 1", "`fsdp_version: 2`"]),
        ("hsdp", {"parallelism_config": CONTEXT_PARALLEL}, ["cp_size 2", "Leave cp_size at 1"]),
        ("hsdp", {}, ["2 copies of 2 shards", "takes 4 processes", "2 run"]),
        ("ddp", {"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}, ["which only FSDP reads"]),
        ("ddp", {"parallelism_config": {"parallelism_config_sp_size": 3}}, ["split over 3", "3 processes", "2 run"]),
        (
            "hsdp",
            {"parallelism_config": {"parallelism_config_sp_size": 2, "parallelism_config_dp_replicate_size": 2}},
            ["sp_size 2", "2 copies", "Leave dp_replicate_size at 1"],
        ),
        (
            "fsdp",
            {"fsdp_config": {"fsdp_activation_checkpointing": True}},
            ["fsdp_activation_checkpointing", "model.gradient_checkpointing"],
        ),
    ],
    ids=[
        *("version 1", "context parallel", "too few for the mesh", "copies without shards", "too few for the rows"),
        *("copies of split rows", "activation checkpointing"),
    ],
)
def test_launch_file_that_cannot_run(
    place: Place, here: Here, base: str, keys: dict[str, Any], says: list[str]
) -> None:
    here.assert_refused(place.recipe(), *says, config=place.launch_file(base, num_processes=2, **keys))
    assert not place.files()


def test_stage_0(place: Place, here: Here) -> None:
    config = place.ds_launch_file({"zero_optimization": {"stage": 0}})
    says = ("ZeRO stage 0", "ds.json", "accelerate_configs/ddp.yaml")
    here.assert_refused(place.recipe(), *says, config=config)


def test_ds_config_that_is_none(place: Place, here: Here) -> None:
    config = place.ds_launch_file({})
    place.write("ds.json", "{")
    here.assert_refused(place.recipe(), "ds.json cannot be read as JSON", config=config)
    place.write("ds.json", '{"zero_optimization": {"stage": 2, "stage": 3}}')
    here.assert_refused(place.recipe(), "ds.json cannot be read as JSON: key 'stage' is given twice", config=config)
    place.write("ds.json", '{"a": [' + "0, " * 400_000 + "0]}")
    says = "ds.json cannot be read as JSON: it has 1,200,010 characters, and a configuration at most 1,000,000."
    here.assert_refused(place.recipe(), says, config=config)
    place.write("ds.json", '{"zero_optimization": {"stage": 2, "offload_optimizer": 3}}')
    says = "zero_optimization.offload_optimizer: must hold keys and values, not 3"
    here.assert_refused(place.recipe(), says, config=config)
    (place.folder / "ds.json").unlink()
    here.assert_refused(place.recipe(), f"ds.json, and there is none in {place.folder}.", config=config)


def test_ds_config_that_contradicts(place: Place) -> None:
    config = place.ds_launch_file(
        {
            "gradient_clipping": 5.0,
            "train_batch_size": 64,
            "optimizer": {"type": "Adam"},
            "scheduler": {"type": "WarmupLR"},
            "bf16": {"enabled": True},
        }
    )
    ranks = start(place, place.recipe(), config=config)
    assert [rank.code for rank in ranks] == [2, 2]
    (spoken,) = (rank.stderr.strip() for rank in ranks if rank.stderr.strip())
    head, *problems, advice = spoken.splitlines()
    assert head == "Error: The DeepSpeed config contradicts the recipe and has 5 problems:"
    for says in (
        "the recipe's optim.clip_norm makes it 1.0.",
        "ds.json says train_batch_size: 64, the recipe's batch.global_size makes it 4.",
        "ds.json says bf16.enabled: True, the recipe's precision makes it False.",
        "which the recipe's optim and schedule decide; the same in the recipe: optim: {name: AdamW}.",
        "schedule: {name: constant} (whose warm-up is linear, not logarithmic).",
    ):
        assert sum(line.startswith("  ") and line.endswith(says) for line in problems) == 1, spoken
    assert 'write "auto"' in advice
    assert not place.files()


# ---------------------------------------------------------------- the output folder


def test_output_below_a_file(place: Place) -> None:
    file = place.write("file", "mine")
    ranks = start(place, place.recipe(output={"dir": f"{file}/run"}))
    assert_refused(ranks, f"output.dir: cannot write to {file}/run", "Choose a folder")
    assert file.read_text() == "mine"


@pytest.mark.parametrize("target", ["file", "/proc/nothing/run"])
def test_output_that_cannot_be_written(place: Place, here: Here, target: str) -> None:
    file = place.write("file", "mine")
    target = str(place.folder / target)  # an absolute one stays
    here.assert_refused(place.recipe(output={"dir": target}), f"output.dir: cannot write to {target}")
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ('{"identity": {"seed": 99}, "starts": []}', "holds a run whose mathematics differ from this recipe's"),
        ("precious", "run.json cannot be read"),
    ],
)
def test_output_that_holds_another_run(place: Place, written: str, says: str) -> None:
    (place.folder / "run" / "model").mkdir(parents=True)
    for name in ("metrics.jsonl", "recipe.yaml", "model/model.safetensors"):
        place.write(f"run/{name}", f"precious {name}")
    place.write("run/run.json", written)
    before = place.files()
    ranks = start(place, place.recipe())
    assert_refused(ranks, str(place.folder / "run"), says, "another output.dir")
    assert place.files() == before


# ---------------------------------------------------------------- who says it


def test_said_by_whoever_meets_it_first(place: Place) -> None:
    """A launcher ends rank 0 when rank 1 has ended: then rank 1 must have said why."""
    ranks = start(place, place.recipe(), "optim.lrr=1", in_turn=True)
    assert_refused(ranks, "optim.lrr: unknown key")
    assert "Error: " in ranks[1].stderr


LATE = """
import sys, time
from datetime import timedelta
from torch import distributed
from finetune.utils import exit_codes
from finetune.utils.compat.torch_private import start_gloo_with_one_worker
from finetune.utils.errors import RecipeError
start_gloo_with_one_worker()
distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
if distributed.get_rank() == 1:
    time.sleep(2)
    distributed.distributed_c10d._get_default_store().add("still there", 1)
exit_codes.print_error(RecipeError("both fail"))
exit_codes.exit_with(exit_codes.USER_ERROR)
"""


def test_ranks_that_fail_alike_wait_for_each_other(place: Place) -> None:
    """Rank 0 holds what the others still need; gone too early, they would end in a traceback."""
    script = str(place.write("late.py", LATE))
    assert_refused(start(place, place.recipe(), script=script), "both fail")


def test_different_errors_are_all_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, text in ((1, "one\n  thing"), (0, "another"), (2, "one thing")):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        exit_codes.print_error(DataError(text))
    assert capsys.readouterr().err == "\nError: one thing\n\nError: another\n"


def test_a_rank_that_is_ended_for_another_ones_error_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its request to stop comes from the launcher, which has seen the other one end."""
    said = []
    for rank in (0, 1, 0):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        if rank == 0:
            assert exit_codes.run_guarded(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 128 + signal.SIGTERM
        else:
            exit_codes.print_error(DataError("one thing"))
        said.append(capsys.readouterr().err)
    assert said == ["\nStopped by SIGTERM.\n", "\nError: one thing\n", ""]


def test_without_a_launcher_local_rank_0_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        exit_codes.print_error(DataError(rank))
    assert capsys.readouterr().err == "\nError: 0\n"


# ---------------------------------------------------------------- through the launchers themselves


@pytest.mark.parametrize(
    ("config", "overrides", "says"),
    [
        ("fsdp", ["optim.lrr=1"], "optim.lrr: unknown key"),
        ("ddp", [], "MULTI_CPU is not needed"),
        ("single", ["data.train.0.text_field=story"], "story"),
    ],
    ids=["recipe", "launch file", "data"],
)
def test_accelerate_launch_says_what_is_wrong(place: Place, config: str, overrides: list[str], says: str) -> None:
    file = config if overrides else place.launch_file(config, distributed_type="MULTI_CPU")
    code, output = run(command(file, str(place.recipe()), *overrides))
    assert_first(code, output, says)
    assert not place.files()


def assert_first(code: int, output: str, says: str) -> None:
    assert code != 0
    assert output.strip().startswith("Error: "), output
    assert says in output.strip().splitlines()[0]
    assert len(PARAGRAPH.findall(output)) == 1
    # Above the launcher's traceback for a single process, else at its end.
    said = output.strip().splitlines()
    assert "`finetune launch` takes the same launch file and recipe" in "".join([said[1], *said[-2:]])


def test_finetune_launch_says_it_alone(place: Place) -> None:
    code, output = run(by_finetune("single", str(place.recipe()), "data.train.0.text_field=story"))
    assert code == 2, output
    assert_said(output, "story", "text_field")
    assert not place.files()


def test_finetune_launch_sees_the_launch_file(place: Place) -> None:
    """Before it starts anything; a contradiction names the file as the user did."""
    file = place.ds_launch_file({"gradient_clipping": 5.0})
    tree = {**yaml.safe_load(file.read_text()), "use_cpu": True}
    file.write_text(yaml.safe_dump(tree))
    code, output = run(by_finetune(file, str(place.recipe())))
    assert code == 2, output
    assert_said(output, f"{file} asks for DEEPSPEED on 2 processes and also for `use_cpu`")


def test_finetune_launch_checks_first(place: Place) -> None:
    """The recipe, then the launch file, then everything else."""
    nowhere = place.folder / "nope.yaml"
    code, output = run(by_finetune(nowhere, str(place.recipe()), "optim.lrr=1"))
    assert code == 2
    assert_said(output, "optim.lrr: unknown key")
    code, output = run(by_finetune(nowhere, str(place.recipe())))
    assert code == 2
    assert_said(output, f"Cannot read the launch file {nowhere}: No such file", "one of the launch files that ship: ")
    code, output = run(by_finetune(place.launch_file("ddp", num_gpus=2), str(place.recipe())))
    assert code == 2
    assert_said(output, "launch.yaml:", "num_gpus: unknown key")


WORKER = """
import os, sys
rank, what = os.environ.get("RANK", "0"), sys.argv[1]
if what == "raise" and rank == "0":
    raise ValueError("a real crash")
if what == "kill" and rank == "0":
    os.kill(os.getpid(), 9)
if what == "show":
    print(f"rank {rank} on a terminal: {sys.stderr.isatty()}", flush=True)
"""


def with_worker(place: Place) -> dict[str, str]:
    """The environment in which `worker` is a package that can be run, and has something to tell of its failure."""
    (place.folder / "worker").mkdir()
    place.write("worker/__main__.py", WORKER)
    tells = "def send_alert_of_failure(arguments, text): print('told', arguments, text)\n"
    place.write("worker/launch_failed.py", tells)
    env = environment()
    return {**env, "PYTHONPATH": f"{env['PYTHONPATH']}:{place.folder}"}


@pytest.mark.parametrize(
    ("config", "what", "code", "says"),
    [
        ("ddp", "raise", 1, "told ['raise'] The worker of rank 0 ended with exit code 1; its output says more."),
        ("ddp", "kill", 137, "told ['kill'] The worker of rank 0 was ended by SIGKILL"),
        ("single", "raise", 1, "told ['raise'] The worker ended with exit code 1; its output says more."),
        ("single", "kill", 137, "told ['kill'] The worker was ended by SIGKILL"),
    ],
)
def test_launcher_shows_a_crash_and_hides_its_own(place: Place, config: str, what: str, code: int, says: str) -> None:
    got, output = run(by_launcher(config, what, module="worker"), env=with_worker(place))
    assert got == code, output
    assert says in output
    assert output.count("told") == 1
    assert ("\nThe worker" in output) == (what == "kill")
    assert output.count("Traceback") == output.count("ValueError: a real crash") == (what == "raise")
    for own in ("ChildFailedError", "CalledProcessError", "torch/distributed/elastic"):
        assert own not in output


def test_launcher_leaves_workers_the_terminal(place: Place) -> None:
    """A progress bar draws itself only on a terminal."""
    ours, theirs = pty.openpty()
    words = by_launcher("ddp", "show", module="worker")
    process = subprocess.Popen(words, cwd=ROOT, env=with_worker(place), stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(ours)
    assert process.wait(RUN_S) == 0
    assert b"told" not in seen
    assert b"rank 0 on a terminal: True" in seen
    assert b"rank 1 on a terminal: True" in seen


@pytest.mark.parametrize("wrapped", [False, True])
def test_too_few_open_files_are_said(capsys: pytest.CaptureFixture[str], wrapped: bool) -> None:
    """Also where a library, or an error of our own, has made something else of it."""

    def verb() -> int:
        try:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except OSError as error:
            if wrapped:
                raise DataError("The cache directory cannot be used. Set data.cache_dir.") from error
            raise

    assert exit_codes.run_guarded(verb) == 2
    (said,) = PARAGRAPH.findall(capsys.readouterr().err)
    assert said.startswith("Error: Too many open files: a process here may have ")
    assert "(`ulimit -n 4096`)" in said


@pytest.mark.parametrize("limit", [10, 14, 27])
def test_too_few_open_files_for_a_launch(place: Place, limit: int) -> None:
    """torch's store waited for ever with 14 or 15, before a worker was started."""
    words = shlex.join(by_finetune("ddp", str(place.recipe())))
    code, output = run(["bash", "-c", f"ulimit -n {limit}; exec {words}"])
    assert code == 2, output
    assert_said(output, f"Too many open files: a process here may have {limit} open")
    assert not place.files()


def test_an_interface_that_is_not_there(place: Place) -> None:
    with place.fork_server.start("ddp", place.folder, str(place.recipe()), env={"GLOO_SOCKET_IFNAME": "ib7"}) as ranks:
        assert ranks.wait() == [2, 2]
        assert_said(
            ranks.output(), "GLOO_SOCKET_IFNAME is ib7, an interface that this machine does not have. There are"
        )
