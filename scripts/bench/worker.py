"""An arm's process: `worker.py SPEC.json`, alone or under a launcher, once on each rank."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Accelerate's launch puts the script's folder first, where modules have names that others have too.
sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).resolve().parent]


def main() -> None:
    """Runs the loop of the arm that the file names, until there are no more turns."""
    import transformers.models.llama.modeling_llama  # noqa: F401, of all arms, so that they begin at the same memory

    from bench.cases import AS_TEXTS, DPO, LIMIT, OURS
    from bench.gate import Gate
    from bench.spec import Spec

    spec = Spec.read(Path(sys.argv[1]))
    name = spec.arm.partition("@")[0]
    if name in (OURS, AS_TEXTS):
        from bench.arms.ours import run
    elif spec.case.kind == DPO and name == LIMIT:
        from bench.arms.preferences import run_bare as run
    elif spec.case.kind == DPO:
        from bench.arms.preferences import run_trl as run
    elif name in ("bare", "bare+") and spec.processes > 1:
        from bench.arms.bare_many import run
    elif name in ("bare", "bare+"):
        from bench.arms.bare import run
    elif name == "litgpt":
        from bench.arms.litgpt import run
    else:
        from bench.arms.trainer import run
    run(spec, Gate(spec.address, spec.arm, int(os.environ.get("RANK", "0"))))


if __name__ == "__main__":
    main()
