"""`own_task:mlp` in trouble: recipes in tests name it as `troubled_task:mlp`.

The variable TROUBLE is JSON and says what goes wrong. Keys that name rows hit the same rows on every backend:
  loss, gradient    {row: "nan" | "inf" | "-inf"}: the loss, or the gradient alone, of the row is that
The others say on which rank, and at which of its micro-batches (counted from 0 in this process):
  hold              {"rank", "at", "file"}: waits there until the file exists; `file`.reached says that it waits. With
                    "takes" it then removes the file, so that whoever comes there next waits again
  hang, raise, memory, kill, stop
                    {"rank", "at"}: waits forever; raises; asks for more memory than there is; SIGKILLs itself
  collective, lock  {"rank", "at"}: waits in a collective that other ranks do not begin; keeps Python's lock for ever.
                    Both in the forward pass; `file` says that it is there
  late              {"rank", "s"}: computes that much longer in each forward pass
Each happens once if it has a "once": a file that is made when it has happened.
`asked` is a file that is made when this process has been asked to stop.
`compared_s` is how often the work of ranks is compared, `answer_s` how long whoever ends a stalled run waits,
`lost_s` how long one that has lost another waits for its launcher, `same_s` how long all requests to stop are one,
`hung_s` how long Ctrl-C waits for a rank that comes no further, `alike_s` how long ranks have to fail as another did.
`validation` is how many rows there are to evaluate on, `wait_s` makes each micro-batch take that long.
"""

import ctypes
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import own_task
import torch

from finetune.monitoring import rank_watch
from finetune.monitoring.shutdown import ShutdownHandler
from finetune.tasks.task import Task, TaskData
from finetune.utils import exit_codes, signals

_LIMITS = {
    "compared_s": (rank_watch, "_COMPARED_S"),
    "answer_s": (rank_watch, "_ANSWER_S"),
    "hung_s": (rank_watch, "_HUNG_S"),
    "alike_s": (rank_watch, "_ALIKE_S"),
    "lost_s": (exit_codes, "_LOST_PATIENCE_S"),
    "same_s": (signals, "SAME_REQUEST_S"),
}


def _trouble() -> dict[str, Any]:
    return json.loads(os.environ.get("TROUBLE", "{}"))


class TroubledRows(own_task.Points):
    """Rows, of which some spoil what is computed from them."""

    def __init__(self, count: int, seed: int, *, training: bool) -> None:
        super().__init__(count, seed)
        self.trouble = _trouble() if training else {}
        self.spoiled = {}
        for kind, neutral in (("loss", 0.0), ("gradient", 1.0)):
            self.spoiled[kind] = torch.full((count, 1), neutral)
            for row, value in self.trouble.get(kind, {}).items():
                self.spoiled[kind][int(row)] = float(value)
        # The first row is also what is rehearsed with, before the first step.
        self.number = -1
        self.training = training

    def batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        if self.training:
            self._suffer()
        spoiled = {kind: values[rows] for kind, values in self.spoiled.items()}
        return {**super().batch(rows), **spoiled}

    def _suffer(self) -> None:
        number, self.number = self.number, self.number + 1
        time.sleep(self.trouble.get("wait_s", 0.0))
        for kind in ("hold", "hang", "raise", "memory", "kill"):
            one = self.trouble.get(kind)
            if one is None or one["rank"] != int(os.environ.get("RANK", "0")) or one["at"] != number:
                continue
            if "once" in one:
                if Path(one["once"]).exists():
                    continue
                Path(one["once"]).touch()
            getattr(self, f"_{kind}")(one)

    def _hold(self, one: dict[str, Any]) -> None:
        Path(f"{one['file']}.reached").touch()
        while not Path(one["file"]).exists():
            time.sleep(0.002)
        if one.get("takes"):
            Path(one["file"]).unlink()

    def _hang(self, one: dict[str, Any]) -> None:
        if "file" in one:
            Path(one["file"]).touch()
        while True:
            time.sleep(3600)

    def _raise(self, one: dict[str, Any]) -> None:
        raise RuntimeError("the task has had enough")

    def _memory(self, one: dict[str, Any]) -> None:
        torch.empty(1 << 58)

    def _kill(self, one: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class _SpoilGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def _note_requests(file: str) -> None:
    request = ShutdownHandler._request

    def noted(self: ShutdownHandler, reason: str, code: int) -> None:
        request(self, reason, code)
        Path(file).touch()

    ShutdownHandler._request = noted  # type: ignore[method-assign]


class _Slow:
    """What goes wrong in the forward pass of a rank."""

    def __init__(self) -> None:
        self.trouble, self.number = _trouble(), -1
        for key, (module, name) in _LIMITS.items():
            setattr(module, name, self.trouble.get(key, getattr(module, name)))

    def suffer(self) -> None:
        # The first passes are rehearsals.
        number, self.number = self.number, self.number + 1
        rank = int(os.environ.get("RANK", "0"))
        if (late := self.trouble.get("late")) and late["rank"] == rank:
            end = time.thread_time() + late["s"]
            while time.thread_time() < end:
                pass
        for kind, wait in (("collective", self._wait_for_others), ("lock", self._keep_lock)):
            if (one := self.trouble.get(kind)) and one["rank"] == rank and one["at"] == number:
                if "file" in one:
                    Path(one["file"]).touch()
                wait()

    def _wait_for_others(self) -> None:
        torch.distributed.barrier()

    def _keep_lock(self) -> None:
        ctypes.PyDLL(None).sleep(3600)


def mlp(rows: int = 200, validation: int = 33, **options: Any) -> Task:
    whole, slow = own_task.mlp(**options), _Slow()
    if "asked" in slow.trouble:
        _note_requests(slow.trouble["asked"])

    def loss_sum(network: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        slow.suffer()
        output = _SpoilGradient.apply(network(batch["inputs"]).float(), batch["gradient"])
        return torch.nn.functional.mse_loss(output, batch["targets"], reduction="sum") + batch["loss"].sum()

    return replace(
        whole,
        build_data=lambda recipe, quiet: TaskData(
            train=TroubledRows(rows, 1, training=True), validation=TroubledRows(validation, 2, training=False)
        ),
        loss_sum=loss_sum,
    )
