"""Gloo groups have one worker thread, since torch's two race; what else of gloo ends with a signal is refused."""

import json
import sys
from contextlib import nullcontext

import pytest
import torch
from harness import command, environment, run
from ranks import Here, Place

from finetune.config.recipe import load_recipe
from finetune.diagnostics.doctor import machine_checks
from finetune.diagnostics.doctor.check_result import Asked
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.distributed.strategies import refusals
from finetune.training.dry_run import describe
from finetune.utils.errors import BackendError

NOT_IN_DETAIL = torch.__version__.startswith(("2.11.", "2.12."))
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


# Alone in its groups: the default one, two by `new_group`, and a mesh's.
GROUPS = """
import contextlib, json, os, time
from datetime import timedelta
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from finetune.utils.compat import torch_private
torch_private.start_gloo_with_one_worker()
torch_private.start_gloo_with_one_worker()
limit = timedelta(seconds=77)
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=limit)
groups = {distributed.group.WORLD, distributed.new_group([0]), distributed.new_group([0], backend="gloo")}
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("one", "other"))
groups |= {mesh[name].get_group() for name in mesh.mesh_dim_names}
for group in groups:
    distributed.all_reduce(torch.ones(1), group=group)
# Threads name themselves when they begin: counted when there are enough, and the number has been the same for a while.
counts, enough = [], int(os.environ.get("EACH", "1")) * len(groups)
while len(counts) < 50 or len(set(counts[-50:])) > 1 or counts[-1] < enough:
    time.sleep(0.01)
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append(open(f"/proc/self/task/{task}/comm").read().strip())
    counts.append(names.count("pt_gloo_runloop"))
backend = distributed.group.WORLD._get_backend(torch.device("cpu"))
backend = getattr(backend, "wrapped_pg", backend)
found = {
    "each": counts[-1] / len(groups),
    "read": torch_private.gloo_worker_threads(),
    "timeout_s": backend.options._timeout.total_seconds(),
}
print("found", json.dumps(found))
"""


@pytest.mark.parametrize(("debug", "each"), [("OFF", 1), ("DETAIL", 2)])
def test_a_gloo_group_has_one_worker_thread(debug: str, each: int) -> None:
    """Debugged in detail, a group has another one beside it."""
    code, output = run([sys.executable, "-c", GROUPS], env=environment(TORCH_DISTRIBUTED_DEBUG=debug, EACH=str(each)))
    assert code == 0, output
    found = json.loads(output.partition("found ")[2].splitlines()[0])
    assert found == {"each": each, "read": 1, "timeout_s": 77}


@pytest.mark.parametrize("interfaces", ["no-such-one", "lo,no-such-one"])
def test_gloo_still_listens_where_it_is_told(interfaces: str) -> None:
    code, output = run([sys.executable, "-c", GROUPS], env=environment(GLOO_SOCKET_IFNAME=interfaces))
    assert code == 1
    assert "Unable to find address for: no-such-one" in output
    code, output = run([sys.executable, "-c", GROUPS], env=environment(GLOO_SOCKET_IFNAME="lo"))
    assert code == 0, output


# ---------------------------------------------------------------- debugged in detail

SAYS = "TORCH_DISTRIBUTED_DEBUG is DETAIL, under which (DDP on gloo .* signal 11|this torch .* no model is written)"


@needs_no_gpu
@pytest.mark.parametrize(("kind", "refused"), [("ddp", True), ("tp", True), ("sp", True), ("fsdp", NOT_IN_DETAIL)])
def test_dry_run_and_doctor_refuse_what_would_end_with_a_signal(place: Place, kind: str, refused: bool) -> None:
    recipe, file = load_recipe(place.recipe()), str(place.launch_file(kind))
    debugged = predict_environment(file, {}, {"TORCH_DISTRIBUTED_DEBUG": "detail"})
    for check in (
        lambda foreseen: describe(recipe, foreseen),
        lambda foreseen: list(machine_checks.gpus(Asked(None, foreseen, foreseen.env))),
    ):
        with pytest.raises(BackendError, match=SAYS) if refused else nullcontext():
            check(debugged)
        check(predict_environment(file, {}, {"TORCH_DISTRIBUTED_DEBUG": "INFO"}))


@needs_no_gpu
@pytest.mark.parametrize(("version", "refused"), [("2.11.0+cu130", True), ("2.13.0", False)])
def test_fsdp_in_detail_depends_on_torch(
    place: Place, monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    monkeypatch.setattr(refusals, "installed", {"torch": version}.get)
    debugged = predict_environment(str(place.launch_file("fsdp")), {}, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    with pytest.raises(BackendError, match="no model is written") if refused else nullcontext():
        refusals.check_devices(debugged.launch, 0, debugged.env)


@needs_no_gpu
def test_a_worker_refuses_it_too(place: Place, here: Here) -> None:
    here.monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    here.assert_refused(place.recipe(), "TORCH_DISTRIBUTED_DEBUG is DETAIL")


@needs_no_gpu
@pytest.mark.skipif(NOT_IN_DETAIL, reason="this torch gathers nothing over gloo in detail")
def test_what_is_advised_runs_in_detail(place: Place) -> None:
    code, output = run(command("fsdp", str(place.recipe())), env=environment(TORCH_DISTRIBUTED_DEBUG="DETAIL"))
    assert code == 0, output
    assert json.loads((place.folder / "run" / "run.json").read_text())["runs"]["gloo_threads"] == 1
