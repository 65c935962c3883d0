"""Files that are something else than their names say: each reader says what they are."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.config.recipe import load_recipe, validate_recipe
from finetune.data.chat.chat_templates import find_template
from finetune.data.tokenization.tokenizer import load_tokenizer
from finetune.distributed.launch.deepspeed_file import read_deepspeed_file
from finetune.distributed.launch.launch_file import read_launch_file
from finetune.models.pretrained_files import stored_dtype
from finetune.utils.errors import FinetuneError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


def tokenizer_of(file: Path) -> Any:
    (file.parent / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tree = {"model": {"name": str(file.parent)}, "data": {"train": [{"sample": 1}]}, "length": {"steps": 1}}
    return load_tokenizer(validate_recipe(tree))


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "recipe": ("recipe.yaml", load_recipe),
    "launch file": ("launch.yaml", lambda file: read_launch_file(str(file))),
    "DeepSpeed config": ("ds.json", lambda file: read_deepspeed_file(str(file), "launch.yaml")),
    "chat template": ("chat.jinja", lambda file: find_template(None, str(file), {})),  # type: ignore[arg-type]
    "weights": ("model.safetensors", lambda file: stored_dtype(file.parent)),
    "tokenizer": ("tokenizer.json", tokenizer_of),
}
CONTENTS = {
    "gzip-compressed": gzip.compress(b"seed: 1\n"),
    "text in UTF-16": "seed: 1\n".encode("utf-16"),
    "a Git LFS pointer": POINTER,
}


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_something_else(tmp_path: Path, reader: str, kind: str) -> None:
    name, read = READERS[reader]
    (tmp_path / name).write_bytes(CONTENTS[kind])
    with pytest.raises(FinetuneError) as caught:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert kind in str(caught.value)
