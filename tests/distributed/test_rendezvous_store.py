"""Notes between ranks that have no process group yet."""

import gc
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import free_port
from torch.distributed import TCPStore

from finetune.distributed import rendezvous_store
from finetune.distributed.rank_notes import RankNotes
from finetune.utils.errors import BackendError

PATIENCE = timedelta(seconds=300)


def test_who_is_ahead_finds_the_store_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has read its last note may look for the process group before rank 0 opens its store."""
    port = free_port()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    notes = RankNotes(0, 2, "board", PATIENCE)
    notes.write("made", 1)
    del notes
    gc.collect()
    ahead = TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE, wait_for_workers=False)
    main = TCPStore("127.0.0.1", port, is_master=True, timeout=PATIENCE, wait_for_workers=False, multi_tenant=True)
    main.set("word", "heard")
    assert ahead.get("word") == b"heard"


def test_ranks_whose_inputs_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank of a machine has read is compared between such ranks; what all have, between all."""
    whole = {"data": {"data.train.0": "a", "the prompts": "b"}, "base": {"model.safetensors": "c"}}
    notes: dict[str, Any] = {"1": ["rank 1", {"data": {**whole["data"]}}]}
    board = SimpleNamespace(write=notes.__setitem__, wait_for=notes.__getitem__, rank=0, world_size=4)
    monkeypatch.setattr(rendezvous_store, "open_board", lambda: board)
    monkeypatch.setattr(rendezvous_store, "from_main", lambda make: make())
    notes["2"] = ["rank 2", whole]
    notes["3"] = ["rank 3", {"data": whole["data"], "base": {"model.safetensors": "c"}}]
    assert rendezvous_store.check_inputs(whole) == whole
    notes["1"][1]["data"]["the prompts"] = "other"
    notes["3"][1]["base"] = {f"model-{number}.safetensors": "c" for number in range(6)}
    with pytest.raises(BackendError) as raised:
        rendezvous_store.check_inputs(whole)
    assert str(raised.value) == (
        "The ranks do not start from the same inputs, and nothing was trained: rank 1 has other content than rank 0 in "
        "the prompts; rank 3 has other content than rank 0 in model.safetensors, model-0.safetensors, "
        "model-1.safetensors, model-2.safetensors and 3 more. Copy the same files to every machine, and let nothing "
        "change them while a run starts."
    )
