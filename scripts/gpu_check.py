"""Runs on one GPU what no other machine can show, within minutes, and writes its findings after each part.

    python scripts/gpu_check.py --out runs/gpu                    # all parts; those that are done already are left out
    python scripts/gpu_check.py --out runs/gpu --parts tests runs --minutes 5
    python scripts/gpu_check.py --out /tmp/dry --tiny --fake      # on the fake device of tests/support/fake_cuda.py
    CUDA_VISIBLE_DEVICES= python scripts/gpu_check.py --out /tmp/dry --tiny        # on a CPU

`findings.json` has a list of rows a part. Each part is a process of its own, which is ended when its time is over; the
rows that it had by then stay.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

GROUPS = {
    "path_of_cpu": "not test_backends",
    "fsdp": "test_backends and fsdp- ",
    "fsdp_offload": "test_backends and fsdp_offload",
    "zero2": "test_backends and zero2",
    "zero3": "test_backends and zero3-",
    "zero3_offload": "test_backends and zero3_offload",
}
"""Of tests/training/test_gpu.py, each in a process beside the others."""

Row = dict[str, Any]
Say = Callable[[Row], None]


def main() -> int:
    """The command; returns 1 if a part has a row that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for findings.json, logs and runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all if left out")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which nothing is begun or goes on (9)")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script itself, also on a CPU")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="rows of `runs` and `benchmark`, by name")
    parser.add_argument("--fake", action="store_true", help="on a fake device, to try the script without a GPU")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    parsed.out.mkdir(parents=True, exist_ok=True)
    if parsed.part is not None:
        return _run_part(parsed)
    if parsed.fake:
        _fake_a_device(parsed.out)
    end = time.monotonic() + 60 * parsed.minutes
    for part in parsed.parts:
        if _rows(parsed.out, part) and all("error" not in row for row in _rows(parsed.out, part)):
            continue
        left = min(PARTS[part][1], end - time.monotonic())
        if left < 20:
            print(f"{part}: no time left", flush=True)
            continue
        words = [sys.executable, __file__, "--out", str(parsed.out), "--part", part, *["--tiny"] * parsed.tiny]
        words += ["--only", *parsed.only] if parsed.only else []
        began = time.monotonic()
        with (parsed.out / f"{part}.log").open("w") as log:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                process.wait(left)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                _add(parsed.out, part, {"error": f"ended after {left:.0f} s"})
        with suppress(OSError):
            os.killpg(process.pid, 9)  # what it has left behind
        rows = _rows(parsed.out, part)
        print(f"== {part}: {time.monotonic() - began:.0f} s", *map(json.dumps, rows), sep="\n   ", flush=True)
    return int(any("error" in row for part in parsed.parts for row in _rows(parsed.out, part)))


def _fake_a_device(out: Path) -> None:
    """Has each process that is started from here on take a device for present."""
    support, folder = ROOT / "tests" / "support", out / "fake"
    (folder / "built").mkdir(parents=True, exist_ok=True)
    # Python imports it at each start.
    code = f"import fake_cuda, pathlib\nfake_cuda.install(pathlib.Path({str(folder / 'built')!r}))\n"
    (folder / "sitecustomize.py").write_text(code)
    paths = [str(folder), str(support), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _run_part(parsed: argparse.Namespace) -> int:
    (parsed.out / f"{parsed.part}.jsonl").unlink(missing_ok=True)
    _only.update(parsed.only)
    for row in PARTS[parsed.part][0](parsed.out, tiny=parsed.tiny):
        _add(parsed.out, parsed.part, row)
    return 0


def _add(out: Path, part: str, row: Row) -> None:
    with (out / f"{part}.jsonl").open("a") as file:
        file.write(json.dumps(row, default=str) + "\n")
    found = {name: _rows(out, name) for name in PARTS}
    (out / "findings.json").write_text(json.dumps({name: rows for name, rows in found.items() if rows}, indent=1))


def _rows(out: Path, part: str) -> list[Row]:
    file = out / f"{part}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


_only: set[str] = set()


def _each(jobs: dict[str, Callable[[], Row]]) -> Iterator[Row]:
    """A row a job; one that fails leaves its error, and the next goes on."""
    for name, job in jobs.items():
        if _only and name not in _only:
            continue
        began = time.monotonic()
        try:
            row = job()
        except BaseException as error:
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
        yield {"name": name, **row, "took_s": round(time.monotonic() - began, 1)}


# ---------------------------------------------------------------- parts


def machine(out: Path, *, tiny: bool) -> Iterator[Row]:
    """The device, and versions."""
    from importlib import metadata

    import torch

    row: Row = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    for name in ("torch", "transformers", "accelerate", "peft", "datasets", "deepspeed", "bitsandbytes", "torchao"):
        with suppress(metadata.PackageNotFoundError):
            row[name] = metadata.version(name)
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        row |= {"device": facts.name, "memory_gib": round(facts.total_memory / 2**30, 2)}
    yield row


def tests(out: Path, *, tiny: bool) -> Iterator[Row]:
    """tests/training/test_gpu.py, in several processes at once."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    running = {}
    for name, chosen in GROUPS.items():
        words = ["-m", "pytest", "-q", "-x" if tiny else "--maxfail=20", "-n", "0", "-p", "no:cacheprovider"]
        words += ["tests/training/test_gpu.py", "-k", chosen.strip(), f"--basetemp={out / 'pytest' / name}"]
        (out / "pytest").mkdir(exist_ok=True)
        with (out / f"tests-{name}.log").open("w") as log:
            pipes: Any = {"stdout": log, "stderr": subprocess.STDOUT}
            running[name] = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env, **pipes)
    for name, process in running.items():
        code = process.wait()
        lines = (out / f"tests-{name}.log").read_text().splitlines()
        failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR", "E   "))]
        row: Row = {"name": name, "says": lines[-1] if lines else "", "code": code}
        yield row | ({"error": failed[:12]} if code not in (0, 5) else {})


def _train(out: Path, name: str, tiny: bool, *overrides: str) -> Row:
    """A run of the recipe `sample` in this process, with what it came to."""
    import finetune

    folder = out / "runs" / name
    words = [f"output.dir={folder}", f"data.cache_dir={out / 'cache'}", "output.overwrite=true", "sample=null"]
    words += ["checkpoint.every_minutes=null", "checkpoint.at_end=false"]
    words += ["length.steps=6", "eval.every_steps=6", "schedule.warmup_steps=2"] if tiny else []
    run = finetune.train("sample", *words, *overrides, quiet=True)
    return _facts(Path(run.directory))


def _launch(out: Path, name: str, tiny: bool, *overrides: str) -> Row:
    """The same on one process of a launch file."""
    folder = out / "runs" / f"launch-{name}"
    words = [sys.executable, "-m", "finetune", "launch", "--config_file", name, "--num_processes", "1", "sample"]
    words += [f"output.dir={folder}", f"data.cache_dir={out / 'cache'}", "output.overwrite=true", "sample=null"]
    words += ["length.steps=6", "eval.every_steps=6", "schedule.warmup_steps=2"] if tiny else ["length.steps=40"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*words, *overrides], env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"error": done.stderr[-600:]}
    return _facts(folder)


def _facts(folder: Path) -> Row:
    facts = json.loads((folder / "run.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    memory = facts.get("peak_memory") or {}
    row: Row = {
        "device": facts["runs"]["device"],
        "first_loss": round(steps[0]["loss"], 5),
        "last_loss": round(steps[-1]["loss"], 5),
        "validation_loss": facts["results"].get("validation_loss"),
        "attention": facts["kernels"].get("attention"),
        "targets_per_s": round(statistics.median(line["tokens_per_s"] for line in steps[1:] if line["tokens_per_s"])),
        "step_ms": round(1e3 * statistics.median(line["step_s"] for line in steps[1:]), 2),
        "peak_measured_mib": round(memory["measured"] / 2**20, 1) if memory.get("measured") else None,
        "peak_predicted_mib": round(memory["predicted"] / 2**20, 1) if memory.get("predicted") else None,
        "weights": facts["results"].get("weights", {}).get("unmoved"),
    }
    mfu = [line["mfu"] for line in steps[1:] if line.get("mfu")]
    return row | ({"mfu": round(statistics.median(mfu), 4)} if mfu else {})


def runs(out: Path, *, tiny: bool) -> Iterator[Row]:
    """Runs of `sample` and of 15M parameters in every precision, with a GPU's own kernels, and under backends."""
    from functools import partial

    import torch

    jobs: dict[str, tuple[str, ...]] = {
        "fp32": ("precision=fp32",),
        "bf16": ("precision=bf16",),
        "bf16, masked attention": ("precision=bf16", "model.attention=sdpa"),
        "bf16, eager attention": ("precision=bf16", "model.attention=eager"),
        "lora bf16": ("precision=bf16", "lora={rank: 8}"),
        "checkpointed bf16": ("precision=bf16", "model.gradient_checkpointing=true"),
        "selective bf16": ("precision=bf16", "model.gradient_checkpointing=selective"),
        "activation offload bf16": ("precision=bf16", "model.activation_offload=true"),
        "compiled bf16": ("precision=bf16", "model.compile=true"),
    }
    if torch.cuda.is_available():
        jobs["fp16"] = ("precision=fp16",)
        jobs["micro_size auto"] = (
            "precision=bf16",
            "batch.micro_size=auto",
            "batch.global_size=512",
            "length.steps=20",
        )
        jobs["8-bit AdamW"] = ("precision=bf16", "optim.name=AdamW8bit", "optim.args={}")
        jobs["paged 8-bit AdamW"] = ("precision=bf16", "optim.name=PagedAdamW8bit", "optim.args={}")
    layers = "hidden_size: 288, intermediate_size: 768, num_hidden_layers: 6, num_attention_heads: 6"
    wide = (f"model.config={{model_type: llama, {layers}, max_position_embeddings: 256}}", "length.steps=30")
    for precision in ("fp32", "bf16", *(["fp16"] if torch.cuda.is_available() else [])):
        jobs[f"15M {precision}"] = (f"precision={precision}", *wide)
    folders = {name: name.replace(" ", "-").replace(",", "") for name in jobs}
    yield from _each({name: partial(_train, out, folders[name], tiny, *words) for name, words in jobs.items()})
    offloads = ("fsdp_offload", "zero3_offload", "zero3_nvme") if torch.cuda.is_available() else ()
    launches = ("ddp", "fsdp", "zero2", "zero3", *offloads)
    yield from _each({f"{name} x 1": partial(_launch, out, name, tiny, "precision=bf16") for name in launches})


# ---------------------------------------------------------------- benchmark

SHAPE = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 28, "num_attention_heads": 16}
SHAPE |= {"num_key_value_heads": 16, "vocab_size": 32000}
"""A Llama of 1.55 billion parameters."""
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 2, "vocab_size": 2048}
STEPS, SKIPPED = 14, 5


def _sizes(tiny: bool) -> tuple[dict[str, int], int, int]:
    """The shape, tokens a row, and rows a step."""
    return (TINY, 128, 2) if tiny else (SHAPE, 2048, 4)


def _bench_recipe(out: Path, name: str, tiny: bool, **changed: Any) -> Row:
    shape, length, rows = _sizes(tiny)
    tree: Row = {
        "model": {"config": {"model_type": "llama", "max_position_embeddings": length, **shape}},
        "tokenizer": {"vocab_size": 1024},
        "data": {
            "train": [{"sample": 4000}],
            "validation_fraction": 0.0,
            "sequence_length": length,
            "packing": "wrapped",
        },
        "batch": {"global_size": rows, "micro_size": rows},
        "length": {"steps": STEPS},
        "optim": {"lr": 1e-4},
        "log": {"every_steps": 1},
        "checkpoint": {"every_minutes": None, "at_end": False},
        "output": {"dir": str(out / "runs" / name), "overwrite": True, "save_model": False},
        "precision": "bf16",
    }
    tree["data"] |= {"cache_dir": str(out / "cache"), "packing": "wrapped"}
    for key, value in changed.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return tree


def _ours(out: Path, name: str, tiny: bool, **changed: Any) -> Row:
    import torch

    import finetune

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = finetune.train(_bench_recipe(out, name, tiny, **changed), quiet=True)
    folder = Path(run.directory)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line][SKIPPED:]
    _, length, rows = _sizes(tiny)
    seconds = statistics.median(line["step_s"] for line in steps)
    row = _facts(folder)
    kept = ("attention", "peak_measured_mib", "peak_predicted_mib", "mfu", "first_loss", "last_loss")
    return {**_speed(seconds, rows * length), **{key: row.get(key) for key in kept}}


def _speed(seconds: float, tokens: int) -> Row:
    import torch

    row: Row = {"step_ms": round(1e3 * seconds, 2), "tokens_per_s": round(tokens / seconds)}
    if torch.cuda.is_available():
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return row


def _bare(tiny: bool, *, compiled: bool) -> Row:
    """A loop by hand: autocast, fused AdamW over fp32 weights, clipped gradients; rows without boundaries."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape, length, rows = _sizes(tiny)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.for_model("llama", max_position_embeddings=length, **shape)
    with torch.device(device):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    step = torch.compile(network) if compiled else network
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        ids = torch.randint(0, 1024, (rows, length))
        ids = ids.pin_memory() if device == "cuda" else ids
        _wait()
        began = time.perf_counter()
        ids = ids.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            loss = step(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait()
        times.append(time.perf_counter() - began)
    return _speed(statistics.median(times[SKIPPED:]), rows * length)


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _trainer(out: Path, tiny: bool) -> Row:
    """transformers' Trainer, as its documentation sets it up for bf16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    shape, length, rows = _sizes(tiny)
    config = AutoConfig.for_model("llama", max_position_embeddings=length, **shape)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = torch.randint(0, 1024, (STEPS * rows, length))
    data = [{"input_ids": row, "labels": row} for row in ids]
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            _wait()
            times.append(-time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _wait()
            times[-1] += time.perf_counter()

    cpu = not torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(out / "runs" / "trainer"),
        per_device_train_batch_size=rows,
        max_steps=STEPS,
        learning_rate=1e-4,
        bf16=True,
        use_cpu=cpu,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        optim="adamw_torch_fused",
    )
    if not cpu:
        torch.cuda.reset_peak_memory_stats()
    Trainer(model=network, args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    return _speed(statistics.median(times[SKIPPED:]), rows * length)


def benchmark(out: Path, *, tiny: bool) -> Iterator[Row]:
    """A step of 1.5B parameters in bf16, rows of 2,048 tokens: ours, by hand, and Trainer; each in its own process."""
    from functools import partial

    arms: dict[str, Callable[[], Row]] = {
        "ours": partial(_ours, out, "bench", tiny),
        "by hand": partial(_bare, tiny, compiled=False),
        "Trainer": partial(_trainer, out, tiny),
        "ours, compiled": partial(_ours, out, "bench-compiled", tiny, model={"compile": True}),
        "by hand, compiled": partial(_bare, tiny, compiled=True),
        "ours, packed documents": partial(_ours, out, "bench-packed", tiny, data={"packing": "documents"}),
        "ours, checkpointed": partial(_ours, out, "bench-checkpointed", tiny, model={"gradient_checkpointing": True}),
        "ours, fp8": partial(_ours, out, "bench-fp8", tiny, model={"fp8": True}),
    }
    yield from _apart(arms)


def _apart(arms: dict[str, Callable[[], Row]]) -> Iterator[Row]:
    """Each arm in a fork: what one has left on the device is gone."""
    for name, arm in arms.items():
        if _only and name not in _only:
            continue
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            (row,) = _each({name: arm})
            os.write(write, json.dumps(row, default=str).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        yield json.loads(said) if said else {"name": name, "error": "its process ended"}


def qlora(out: Path, *, tiny: bool) -> Iterator[Row]:
    """An 8B Llama of random weights in 4 bits, with adapters."""
    from functools import partial

    yield from _apart({"8B, nf4": partial(_qlora, out, tiny)})


def _qlora(out: Path, tiny: bool) -> Row:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    big = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    big |= {"num_key_value_heads": 8, "vocab_size": 128256}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder, length = out / "8b", _sizes(tiny)[1]
    config = AutoConfig.for_model("llama", max_position_embeddings=length, **(TINY if tiny else big))
    with torch.device(device):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    network.save_pretrained(folder)
    del network
    changed: Row = {
        "model": {"config": None, "name": str(folder), "quantization": "nf4", "gradient_checkpointing": True}
    }
    changed |= {"lora": {"rank": 16}}
    return _ours(out, "qlora", tiny, **changed)


# Each with the seconds that it may take.
PARTS: dict[str, tuple[Callable[..., Iterator[Row]], float]] = {
    "machine": (machine, 60),
    "runs": (runs, 210),
    "tests": (tests, 170),
    "benchmark": (benchmark, 240),
    "qlora": (qlora, 120),
}

if __name__ == "__main__":
    sys.exit(main())
