import os
from pathlib import Path

import pytest
from harness import Launcher
from hypothesis import settings
from ranks import Here, Place, lines

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# On a busy machine an example can take any time; speed is the benchmark's business.
settings.register_profile("project", deadline=None)
settings.load_profile("project")


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Launcher:
    """Launches runs, shared by all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    # Each xdist worker has a folder of its own below one that they share.
    return Launcher((base if worker_id == "master" else base.parent) / "launched")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.write("train.jsonl", lines(60))
    return made


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capsys)
