"""A store of checkpoints as object storage has them: keys and bytes, no folders, no renames, no locks of files."""

import io
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.checkpoint.checkpoint_store import MANIFEST, UNSEALED, sealed_name, step_of
from finetune.utils.errors import CheckpointError


class _Upload(io.BytesIO):
    """What is written appears, whole, once it is closed."""

    def __init__(self, objects: dict[str, bytes], key: str) -> None:
        super().__init__()
        self._objects, self._key = objects, key

    def write(self, content: object) -> int:
        assert self.tell() == len(self.getvalue()), "objects are written from their begin to their end"
        return super().write(content)  # type: ignore[arg-type]

    def close(self) -> None:
        if not self.closed:
            self._objects[self._key] = self.getvalue()
        super().close()


class MemoryCheckpointStore:
    """A checkpoint is sealed by its manifest's key."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._times: dict[str, float] = {}
        self._held: Counter[str] = Counter()

    def _files(self, name: str) -> dict[str, bytes]:
        prefix = f"{sealed_name(name)}/"
        return {key.removeprefix(prefix): content for key, content in self.objects.items() if key.startswith(prefix)}

    def address(self, name: str = "", file: str = "", *, absolute: bool = False) -> str:
        return "/".join(("memory:", *filter(None, (sealed_name(name), file))))

    def list_names(self) -> list[str]:
        found = [key.partition("/")[0] for key in self.objects if key.endswith(f"/{MANIFEST}")]
        return sorted(found, key=lambda name: step_of(name) or 0, reverse=True)

    def list_unsealed(self) -> list[str]:
        return [name + UNSEALED for name in {key.partition("/")[0] for key in self.objects} - set(self.list_names())]

    def list_files(self, name: str) -> dict[str, int | str]:
        return {file: len(content) for file, content in self._files(name).items()}

    def open_file(self, name: str, file: str) -> io.BufferedIOBase:
        try:
            return io.BytesIO(self._files(name)[file])
        except KeyError as error:
            raise FileNotFoundError(self.address(name, file)) from error

    def create_file(self, name: str, file: str) -> io.BufferedIOBase:
        if sealed_name(name) in self.list_names():
            self.delete(sealed_name(name))
        self._times[sealed_name(name)] = time.time()
        return _Upload(self.objects, f"{sealed_name(name)}/{file}")

    def delete_file(self, name: str, file: str) -> None:
        del self.objects[f"{sealed_name(name)}/{file}"]

    def seal(self, name: str) -> None:
        assert sealed_name(name) in self.list_names()

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        if MANIFEST not in self._files(name):
            raise CheckpointError(f"{self.address(name)} has no {MANIFEST}, so it was never finished")
        self._held[name] += 1
        try:
            yield
        finally:
            self._held[name] -= 1

    def delete(self, name: str) -> None:
        if not self._held[name]:
            for file in sorted(self._files(name), key=lambda file: file != MANIFEST):
                self.delete_file(name, file)

    def delete_remains(self) -> None:
        for name in self.list_unsealed():
            for file in self._files(name):
                self.delete_file(name, file)

    def written_at(self, name: str) -> float:
        return self._times[name]

    def local_folder(self, name: str) -> Path:
        raise AssertionError(f"{name}: keys and bytes have no folder, and nothing here may ask for one")
