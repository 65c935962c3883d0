"""Tasks for lm-evaluation-harness, as files."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra [harness]")


def write_task(folder: Path, name: str, rows: Sequence[dict[str, Any]], **keys: Any) -> Path:
    """A task of rows with a `question`, and its file."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree | keys))
    return file


def metric(name: str) -> dict[str, Any]:
    return {"metric": name, "aggregation": "mean", "higher_is_better": True}


def ready(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Without its look at the machine, which takes 7 s, and with data sets cached in a folder."""
    import datasets
    import lm_eval.evaluator

    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
