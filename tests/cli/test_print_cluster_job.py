"""Jobs that `finetune launch --print-cluster` prints: Slurm runs one, and the others' own schemas accept theirs."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from chaos import Moment, Victim, straight
from external_commands import needs
from forkserver import ForkServer, until
from harness import ROOT, RUN_S, environment, run
from ranks import Here, assert_said
from slurm_cluster import needs_slurm, slurm_cluster

from finetune.cli import main
from finetune.distributed.launch.launch_config import launch_of_environment
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.utils.errors import BackendError

IMAGE = ("--image", "registry.example/finetune:gpu")
MICRO = "batch.micro_size=1"

# Keys of `get_task_schema`, `get_resources_schema` and `get_storage_schema` in sky/utils/schemas.py of skypilot 0.14.1,
# which brings a hundred packages along; as far as a job here has a use for them.
SKY = {
    "": {"name", "workdir", "num_nodes", "resources", "file_mounts", "volumes", "setup", "run", "envs", "secrets"},
    "resources": {
        "infra",
        "image_id",
        "accelerators",
        "cpus",
        "memory",
        "disk_size",
        "use_spot",
        "job_recovery",
        "any_of",
    },
    "resources.job_recovery": {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"},
    "file_mounts./outputs": {"name", "source", "store", "mode", "persistent"},
}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.main(["launch", *words]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def documents(text: str) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


# ---------------------------------------------------------------- Slurm


def write_command(folder: Path, text: str) -> None:
    """The `finetune` that jobs find on PATH."""
    folder.mkdir(exist_ok=True)
    (folder / "finetune").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "finetune").chmod(0o755)


# A run that is stopped at once, and ends at once where it is started again.
STOPPED = (
    "[ $SLURM_RESTART_COUNT ] && exit 0; trap 'exit 75' TERM; touch ran.$SLURM_NODEID; while :; do sleep 0.1; done"
)


@needs_slurm
def test_slurm_preempts_a_job_and_requeues_it_but_does_not_requeue_what_is_cancelled(
    fork_server: ForkServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    undisturbed, victim = straight(fork_server, tmp_path / "straight"), Victim(tmp_path / "victim")
    shipped = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp_2nodes.yaml").read_text())
    del shipped["fsdp_config"]
    launch = {**shipped, "distributed_type": "MULTI_GPU", "num_processes": 2, "main_process_ip": "replaced"}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(launch))
    words = ("--config_file", str(tmp_path / "two.yaml"), str(victim.recipe), "--print-cluster", "slurm")
    script, commands = tmp_path / "job.sbatch", tmp_path / "bin"
    script.write_text(printed(capsys, *words))
    write_command(commands, f'exec {sys.executable} -m finetune "$@"')
    with slurm_cluster(tmp_path / "slurm", 2, str(commands)) as cluster:
        cluster.env["TROUBLE"] = json.dumps({"wait_s": 0.05, **victim.held_after(1)})
        job = cluster.submit(str(script))
        assert Moment(1, 0.0).wait(victim, lambda: cluster.over(job)), cluster.output(job)
        # All cores of both nodes.
        urgent = cluster.submit("--partition=urgent", "--nodes=2", "--cpus-per-task=64", "--wrap=true")
        # Slurm looks for what to preempt when it has the time.
        victim.let_go(once_asked=True)
        until(lambda: cluster.over(urgent), RUN_S, lambda: cluster.output(job))
        assert 3 <= victim.newest() < victim.steps
        until(lambda: cluster.over(job), RUN_S, lambda: cluster.output(job))
        found = cluster.state(job)
        assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), cluster.output(job)
        assert "(SIGTERM), saved in" in cluster.output(job)
        victim.check_end(undisturbed)
        assert len(victim.facts()["starts"]) == 2
        assert victim.facts()["runs"]["world_size"] == 2

        write_command(commands, STOPPED)
        job = cluster.submit(str(script))
        until(lambda: len([*cluster.folder.glob("ran.*")]) == 2, RUN_S, lambda: cluster.output(job))
        cluster.ask("scancel", job)
        until(lambda: cluster.over(job), RUN_S, lambda: cluster.output(job))
        assert cluster.state(job)["JobState"] == "CANCELLED"
        assert "exit code 75" in cluster.output(job)


# ---------------------------------------------------------------- Kubernetes, Kubeflow, SkyPilot


def same(found: Any, given: Any) -> bool:
    """Tells if all that was given came through a model, which drops the keys that it does not know."""
    if isinstance(given, dict):
        return isinstance(found, dict) and all(same(found.get(key), value) for key, value in given.items())
    if isinstance(given, list):
        return len(found) == len(given) and all(map(same, found, given))
    return bool(found == given)


@pytest.mark.parametrize("config", ["single", "fsdp_2nodes"])
@pytest.mark.parametrize("kind", ["k8s", "kubeflow"])
def test_kubernetes_accepts_the_job(kind: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "needs the schemas of Kubernetes and Kubeflow (kubernetes-validate, kubernetes, kubeflow-trainer-api)"
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=reason)
    client = pytest.importorskip("kubernetes.client", reason=reason)
    kubeflow = pytest.importorskip("kubeflow_trainer_api.models", reason=reason)
    api, checked = client.ApiClient(), 0

    def check(document: dict[str, Any]) -> None:
        kubernetes_validate.validate(document, "1.34", strict=True)
        model = api.deserialize(SimpleNamespace(data=json.dumps(document)), f"V1{document['kind']}")
        assert same(api.sanitize_for_serialization(model), document)

    for document in documents(
        printed(capsys, "--config_file", config, "sample", MICRO, "--print-cluster", kind, *IMAGE)
    ).values():
        if not document["apiVersion"].startswith("trainer.kubeflow.org"):
            check(document)
        else:
            model = getattr(kubeflow, f"TrainerV1alpha1{document['kind']}")
            assert same(model.from_dict(document).to_dict(), document)
        if document["kind"] == "TrainingRuntime":
            (part,) = document["spec"]["template"]["spec"]["replicatedJobs"]
            check(
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": part["template"]["spec"]}
            )
        checked += 1
    assert checked == (3 if kind == "kubeflow" or config != "single" else 2)


@needs("bash")
def test_what_a_kubernetes_job_asks_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files that ship are elsewhere in the image: they go by their names.
    monkeypatch.chdir(tmp_path)
    words = ("--config_file", "fsdp_2nodes", "sample", MICRO, "guard.grace_s=200", "--print-cluster", "k8s", *IMAGE)
    found = documents(printed(capsys, *words))
    job = found["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    rules = job["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule["onExitCodes"]["values"]) for rule in rules[:2]] == [
        ("Ignore", [75]),
        ("FailJob", [2]),
    ]
    assert pod["terminationGracePeriodSeconds"] > 200
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert container["image"] == IMAGE[1]
    (name,) = {document["metadata"]["name"] for document in found.values()}
    assert (pod["subdomain"], pod["volumes"][0]["persistentVolumeClaim"]["claimName"]) == (name, name)
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    (*_, script) = container["command"]
    assert f"launch --config_file fsdp_2nodes sample {MICRO} guard.grace_s=200 " in script
    # What the container runs, with a command that shows what it is given.
    env = environment(JOB_COMPLETION_INDEX="1")
    shown = 'getent() { true; }; finetune() { echo "$@"; };' + script.replace("exec finetune", "finetune")
    code, output = run(["bash", "-euc", shown], env=env)
    assert code == 0
    assert output.split()[-6:] == [
        *("--machine_rank", "1", "--main_process_ip", f"{name}-0.{name}", "--main_process_port", "29500"),
    ]


@needs("bash")
@pytest.mark.parametrize("config", ["single", "fsdp_2nodes"])
def test_a_sky_task_has_keys_that_skypilot_knows(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--config_file", config, "sample", MICRO, "--print-cluster", "sky", *IMAGE)
    task = yaml.safe_load(text)
    for place, known in SKY.items():
        section = task
        for name in filter(None, place.split(".")):
            section = section.get(name, {})
        assert set(section) <= known
    several = config != "single"
    assert task["num_nodes"] == (2 if several else 1)
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert set(task["resources"]["accelerators"].values()) == {8 if several else 1}
    assert ("volumes" in task, "file_mounts" in task) == (several, not several)
    shown = 'finetune() { echo "$@"; };' + task["run"]
    code, output = run(
        ["bash", "-euc", shown], env=environment(SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_NODE_RANK="1")
    )
    assert code == 0
    assert f"recipes/sample.yaml {MICRO} output.dir=/outputs/runs/sample" in output
    assert ("--machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 29500" in output) is several


@pytest.mark.parametrize("config", ["single", "fsdp_2nodes"])
@pytest.mark.parametrize("kind", ["slurm", "k8s", "kubeflow", "sky"])
def test_names_and_values_are_no_lines_of_the_job(
    kind: str, config: str, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line ends of YAML's too: the command gets them as they are, and neither YAML nor a shell sees one."""
    monkeypatch.chdir(tmp_path)
    recipe, prompt = "a\ntouch pwned\n'b.yaml", "sample.prompt=one\n  two '\u2028\x85{{ name }}"
    (tmp_path / recipe).write_text((ROOT / "recipes" / "sample.yaml").read_text())
    output = "output.dir=runs/x\ntouch pwned"
    words = ("--config_file", config, recipe, MICRO, prompt, output, "--print-cluster", kind)
    text = printed(here.capsys, *words, *(IMAGE if kind != "slurm" else ()))
    assert not any(line.startswith(("touch", "  two")) for line in text.splitlines())
    script = text
    if kind == "sky":
        script = yaml.safe_load(text)["run"]
    elif kind != "slurm":
        found = documents(text)
        job = found["Job"]["spec"] if kind == "k8s" else None
        if job is None:
            (part,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
            job = part["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        (*_, script) = container["command"]
    # A command that shows what it is given; srun, and a shell's exec, start it.
    shown = "finetune() { printf '%s\\0' \"$@\"; }; getent() { true; }; scontrol() { :; }; "
    shown += 'srun() { while [ "$1" != finetune ]; do shift; done; "$@"; }; exec() { "$@"; }\n'
    env = environment(SLURM_CPUS_PER_TASK="1", SLURM_JOB_ID="1", SLURM_JOB_NODELIST="a", SKYPILOT_NODE_IPS="a")
    done = subprocess.run(["bash", "-c", shown + script], env=env, capture_output=True, check=False)
    given = done.stdout.decode().split("\0")
    assert [recipe, MICRO, prompt, output] == given[3:7], done.stderr
    assert not (tmp_path / "pwned").exists()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("fsdp_2nodes", "sample", MICRO, "--print-cluster", "slurm", *IMAGE), "--image is for containers"),
        (("fsdp_2nodes", "sample", MICRO, "--print-cluster", "k8s"), "name their image by --image"),
        (("fsdp_2nodes", "sample", MICRO, *IMAGE), "--image is for a job that --print-cluster prints"),
        (("single", "sample", "--dry-run", "--print-cluster", "slurm"), "--print-cluster starts nothing"),
        (("fsdp_2nodes", "sample", MICRO, "--machine_rank", "1", "--print-cluster", "slurm"), "--machine_rank differs"),
        (("fsdp_2nodes", "sample", "batch.global_size=2", "--print-cluster", "slurm"), "is not a multiple of"),
        (
            ("fsdp_2nodes", "sample", "--num_processes", "3", "--print-cluster", "slurm"),
            "Make it a multiple of num_machines",
        ),
        (("single", "sample", "output.dir=/runs/a", "--print-cluster", "k8s", *IMAGE), "output.dir is /runs/a"),
        (("single", "sample", "output.dir=../a", "--print-cluster", "sky", *IMAGE), "output.dir is ../a"),
    ],
)
def test_contradictions_are_one_paragraph(here: Here, words: tuple[str, ...], says: str) -> None:
    assert main.main(["launch", "--config_file", *words]) == 2
    said = here.capsys.readouterr()
    assert said.out == ""
    assert_said(said.err, says)


# ---------------------------------------------------------------- other starters


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_as_many_starts_as_machines(name: str) -> None:
    """Tasks of srun or mpirun that know nothing of each other would all train the same run."""
    with pytest.raises(BackendError, match=f"started this command 2 times .{name}., and the launch is on 1 machine"):
        launch_of_environment({name: "2"}, 1, None)
    with pytest.raises(BackendError, match=f"env -u {name}"):
        predict_environment("accelerate_configs/ddp.yaml", {}, {name: "2"})
    with pytest.raises(BackendError, match=r"4 times .*, and the launch is on 2 machine"):
        predict_environment("accelerate_configs/fsdp_2nodes.yaml", {}, {name: "4"})
    for tasks in ("1", "2"):
        assert predict_environment("accelerate_configs/fsdp_2nodes.yaml", {}, {name: tasks}).launch.kind == "fsdp"


def test_the_deepspeed_launcher_is_refused(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.training import entry_point

    assert entry_point.train_main(["sample", "--local_rank=0"]) == 2
    assert_said(here.capsys.readouterr().err, "without ZeRO", "finetune launch --config_file zero2 recipes/sample.yaml")
    # As `deepspeed --num_gpus 4 scripts/train.py RECIPE --deepspeed X.json` starts each rank.
    config = str(ROOT / "ds_configs" / "zero3.json")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for words in (["--local_rank=0", "sample", "--deepspeed", config], ["sample", "--deepspeed_config", config]):
        assert entry_point.train_main(words) == 2
        said = here.capsys.readouterr().err
        assert_said(
            said, "finetune launch --config_file zero3 --num_processes 4 recipes/sample.yaml", "zero3.json itself"
        )
