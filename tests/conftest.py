import os

import pytest
from harness import Launcher

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Launcher:
    """Launches runs, shared by all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    # Each xdist worker has a folder of its own below one that they share.
    return Launcher((base if worker_id == "master" else base.parent) / "launched")
