"""Prints what a rank sees of how it was started; what `test_nursery.py` launches."""

import gc
import importlib
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import torch
from forked import IMPORTED

from finetune import parent
from finetune.backend import launch

for module in IMPORTED:
    importlib.import_module(module)
names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]

SEEN = {
    "name": __name__,
    "argv": sys.argv,
    "path": sys.path,
    "cwd": os.getcwd(),
    "env": dict(os.environ),
    "flags": repr(sys.flags),
    "launcher": vars(launch._launcher_arguments()),
    "threads_for_rank": launch._threads(launch._launcher_arguments()),
    "orphan": parent.gone(),
    "leads_session": os.getsid(0) == os.getpid(),
    "leads_group": os.getpgrp() == os.getpid(),
    "in_launchers_session": os.getsid(0) == os.getsid(os.getppid()),
    "stdin": os.readlink("/proc/self/fd/0"),
    "streams": [(s.isatty(), s.encoding, s.errors, s.write_through) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "open": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "signals": {n: repr(signal.getsignal(n)) for n in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "limits": [resource.getrlimit(n) for n in range(16)],
    "mask": os.umask(0o22),
    "cores": sorted(os.sched_getaffinity(0)),
    "niceness": os.nice(0),
    "python_threads": threading.active_count(),
    # Of Arrow's allocator, which does without in a fork.
    "threads": [name for name in names[1:] if name != "jemalloc_bg_thd"],
    "torch": [torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()],
    "precision": torch.get_float32_matmul_precision(),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
    "warnings": sorted({str(f) for f in warnings.filters}),
    "logging": [
        logging.getLogger(name).level for name in ("", "accelerate", "DeepSpeed", "transformers", "bitsandbytes")
    ],
    "gc": [gc.isenabled(), gc.get_threshold()],
    "processes": multiprocessing.get_start_method(allow_none=True),
}
Path(sys.argv[1], os.environ.get("RANK", "0")).write_text(json.dumps(SEEN, sort_keys=True, default=sorted))
draws = (random.random(), np.random.rand(), torch.rand(1).item())
for name, drawn in zip(("python", "numpy", "torch"), draws, strict=True):
    Path(sys.argv[1], f"{os.environ.get('RANK', '0')}.{name}").write_text(str(drawn))
