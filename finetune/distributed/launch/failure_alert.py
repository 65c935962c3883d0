"""An alert of a launch that has failed before rank 0 could send one: it was killed, or hung for a rank that was."""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from finetune.utils.exit_codes import ALERTED


class FailureAlert:
    """Knows if rank 0 has told how a run ended, and tells it in its place."""

    def __init__(self, module: str | None, arguments: Sequence[str], folder: Path) -> None:
        """
        Args:
            module: The package that the workers run, if it is one. Its module `launch_failed`, if there is one, sends
                alerts.
            arguments: What the workers are given.
            folder: For a file by which rank 0 says that it has sent one.
        """
        self._module, self._arguments, self._file = module, list(arguments), folder / "alerted"
        self._sent = False
        os.environ[ALERTED] = str(self._file)

    def workers_ended(self) -> None:
        """Notes if rank 0 has sent an alert. Workers that are started again may fail again."""
        self._sent = self._file.exists()
        self._file.unlink(missing_ok=True)

    def send(self, text: str) -> None:
        """Sends an alert, within 9 s, unless rank 0 has or the recipe asks for none."""
        if self._module is None or self._sent or self._file.exists():
            return
        spec = importlib.util.find_spec(self._module)
        name = f"{self._module}.launch_failed"
        if spec is not None and spec.submodule_search_locations and importlib.util.find_spec(name) is not None:
            importlib.import_module(name).send_alert_of_failure(self._arguments, text)
