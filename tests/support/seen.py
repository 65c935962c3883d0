"""Writes down what a rank sees of how it was started; what `test_forkserver.py` launches."""

import gc
import json
import logging
import os
import random
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import preloaded  # noqa: F401  # what a fork has imported
import torch

from finetune.utils import orphan_watch

SEEN = {
    "name": __name__,
    "argv": sys.argv,
    "path": sys.path[0],
    "cwd": os.getcwd(),
    "env": dict(os.environ),
    "flags": repr(sys.flags),
    "orphan": orphan_watch.parent_is_gone(),
    "stdin": os.readlink("/proc/self/fd/0"),
    "streams": [(s.isatty(), s.encoding, s.errors, s.write_through) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "limits": [resource.getrlimit(n) for n in range(16)],
    "mask": os.umask(0o22),
    "cores": sorted(os.sched_getaffinity(0)),
    "niceness": os.nice(0),
    "python_threads": threading.active_count(),
    "torch": [torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()],
    "precision": torch.get_float32_matmul_precision(),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
    "warnings": sorted({str(f) for f in warnings.filters}),
    "logging": [
        logging.getLogger(name).level for name in ("", "accelerate", "DeepSpeed", "transformers", "bitsandbytes")
    ],
    "gc": [gc.isenabled(), gc.get_threshold()],
}
Path(sys.argv[1], os.environ.get("RANK", "0")).write_text(json.dumps(SEEN, sort_keys=True, default=sorted))
draws = (random.random(), np.random.rand(), torch.rand(1).item())
for name, drawn in zip(("python", "numpy", "torch"), draws, strict=True):
    Path(sys.argv[1], f"{os.environ.get('RANK', '0')}.{name}").write_text(str(drawn))
