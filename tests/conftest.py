import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Launcher
from hypothesis import settings
from nursery import Nursery
from ranks import Here, Place, lines

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# On a busy machine an example can take any time; speed is the benchmark's business.
settings.register_profile("project", deadline=None)
settings.load_profile("project")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory, worker_id: str, nursery: Nursery) -> Launcher:
    """Launches runs, shared by all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    # Each xdist worker has a folder of its own below one that they share.
    return Launcher((base if worker_id == "master" else base.parent) / "launched", nursery.run)


@pytest.fixture
def place(tmp_path: Path, nursery: Nursery) -> Place:
    made = Place(tmp_path, nursery)
    made.write("train.jsonl", lines(60))
    return made


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capsys)
