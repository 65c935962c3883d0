"""What is written tensor by tensor, in any order, is the file that safetensors writes of them all."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from finetune.checkpoint.snapshot import _DTYPES, TensorFile

SPECS = st.dictionaries(
    st.text('ab./é"\\', min_size=1, max_size=6),
    st.tuples(st.sampled_from(sorted(_DTYPES, key=str)), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    min_size=1,
    max_size=6,
)


def filled(specs: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: (10 * torch.rand(shape, generator=generator)).to(dtype) for n, (dtype, shape) in specs.items()}


@settings(max_examples=80)
@given(specs=SPECS, data=st.data())
def test_it_is_the_librarys_file(tmp_path_factory: pytest.TempPathFactory, specs: dict[str, Any], data: Any) -> None:
    folder, tensors = tmp_path_factory.mktemp("file"), filled(specs)
    file = TensorFile(folder / "ours", specs)
    for name in data.draw(st.permutations(sorted(specs))):
        file.write(name, tensors[name].reshape(-1))
    file.close()
    save_file(tensors, folder / "theirs", metadata={"format": "pt"})
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()


def test_writes_that_take_a_part_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take less than it is given: always above 2 GiB, and on a disk that is nearly full."""
    tensor, write = torch.arange(1000.0), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, view, place: write(handle, view[:97], place))
    file = TensorFile(tmp_path / "ours", {"a": (torch.float32, (10, 100))})
    file.write("a", tensor)
    file.close()
    monkeypatch.undo()
    save_file({"a": tensor.reshape(10, 100)}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        TensorFile(Path("/dev/full"), {"a": (torch.float32, (1,))})
