"""Notes between ranks that have no process group yet."""

import gc
from datetime import timedelta

import pytest
from ranks import free_port
from torch.distributed import TCPStore

from finetune.distributed import rendezvous_store

PATIENCE = timedelta(seconds=300)


def test_who_is_ahead_finds_the_store_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has read its last note may look for the process group before rank 0 opens its store."""
    port = free_port()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    notes = rendezvous_store.RendezvousStore(0, 2, PATIENCE)
    notes.write("made", 1)
    del notes
    gc.collect()
    ahead = TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE, wait_for_workers=False)
    main = TCPStore("127.0.0.1", port, is_master=True, timeout=PATIENCE, wait_for_workers=False, multi_tenant=True)
    main.set("word", "heard")
    assert ahead.get("word") == b"heard"
