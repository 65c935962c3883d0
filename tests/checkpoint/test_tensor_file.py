"""What is written tensor by tensor is the file that safetensors writes of them all, and is read as it reads it."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from finetune.checkpoint.checkpoint_store import CheckpointStore
from finetune.checkpoint.integrity import NewFile
from finetune.checkpoint.tensor_files import _DTYPES, TensorFile, TensorReader, file_order
from finetune.utils.atomic_files import file_digest

SPECS = st.dictionaries(
    st.text('ab./é"\\', min_size=1, max_size=6),
    st.tuples(st.sampled_from(sorted(_DTYPES, key=str)), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    min_size=1,
    max_size=6,
)


def filled(specs: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: (10 * torch.rand(shape, generator=generator)).to(dtype) for n, (dtype, shape) in specs.items()}


def written(folder: Path, specs: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[bytes, Any]:
    file = TensorFile(NewFile(CheckpointStore(folder), "step-00000001.staging", "model/ours"), specs)
    for name in sorted(specs, key=lambda name: file_order(specs[name][0], name)):
        file.append(tensors[name].reshape(-1))
    described = file.close()
    return (folder / "step-00000001.staging" / "model" / "ours").read_bytes(), described["model/ours"]


@settings(max_examples=80)
@given(specs=SPECS)
def test_it_is_the_librarys_file(tmp_path_factory: pytest.TempPathFactory, specs: dict[str, Any]) -> None:
    folder, tensors = tmp_path_factory.mktemp("file"), filled(specs)
    ours, described = written(folder, specs, tensors)
    save_file(tensors, folder / "theirs", metadata={"format": "pt"})
    assert ours == (folder / "theirs").read_bytes()
    assert described == {"bytes": len(ours), "xxh3_128": file_digest(folder / "theirs")}
    # Mapped, and in ranges.
    for opened in ((folder / "theirs").open("rb"), io.BytesIO(ours)):
        reader = TensorReader(opened)
        for name, tensor in tensors.items():
            torch.testing.assert_close(reader.read(name), tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, b"\xff" * 40, (99).to_bytes(8, "little") + b"{}", b"\2" + b"\0" * 7]
)
def test_what_is_no_such_file(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"header|it is"):
        TensorReader(io.BytesIO(content))


LIES = [
    {"data_offsets": [0, 400]},
    {"data_offsets": [-4, 12]},
    {"data_offsets": [4000, 4016]},
    {"shape": [5]},
    {"shape": [-2, -2]},
    {"shape": ["4"]},
    {"dtype": "X9"},
    {"dtype": None},
]


@pytest.mark.parametrize("lie", LIES, ids=str)
@pytest.mark.parametrize("mapped", [True, False])
def test_a_header_that_lies(tmp_path: Path, lie: dict[str, Any], mapped: bool) -> None:
    facts = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **lie}
    header = json.dumps({"a": facts}).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    reader = TensorReader((tmp_path / "file").open("rb") if mapped else io.BytesIO((tmp_path / "file").read_bytes()))
    with pytest.raises((ValueError, LookupError, TypeError)):
        reader.read("a")
    with pytest.raises(LookupError):
        reader.read("b")


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "step-00000001.staging").mkdir()
    (tmp_path / "step-00000001.staging" / "full").symlink_to("/dev/full")
    file = NewFile(CheckpointStore(tmp_path), "step-00000001.staging", "full")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        file.write(bytes(1 << 20))
