"""A terminal of the tests' own: what a command prints there, keys that are pressed, and the window that closes."""

import fcntl
import os
import pty
import subprocess
import termios
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from forkserver import until
from harness import ROOT, RUN_S, environment


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A command in the foreground of a terminal of 80 columns; it is killed at the end, with its process group."""

    def __init__(self, words: list[str], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> None:
        self._master, end = pty.openpty()
        termios.tcsetwinsize(end, (24, 80))
        self.process = subprocess.Popen(
            words,
            cwd=cwd,
            env=dict(env or environment()),
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(end)
        self._read = bytearray()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._closing = threading.Event()
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        self.close()

    def _listen(self) -> None:
        os.set_blocking(self._master, False)
        while not self._closing.wait(0.005):
            try:
                while piece := os.read(self._master, 65536):
                    self._read += piece
            except BlockingIOError:
                continue
            except OSError:  # all that had it open have ended
                return

    @property
    def output(self) -> str:
        return self._read.decode(errors="replace").replace("\r\n", "\n")

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.output or self.process.poll() is not None, RUN_S, lambda: self.output)
        assert text in self.output, self.output[-4000:]

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def press_ctrl_c(self) -> None:
        self.press("\x03")

    def close(self) -> None:
        """Closes the window: the kernel tells the foreground, and whoever writes there fails."""
        if not self._closing.is_set():
            self._closing.set()
            self._reader.join()
            os.close(self._master)

    def end(self) -> int:
        """Waits for the command's end, and reads the last that it has printed; returns its exit code."""
        code = self.process.wait(RUN_S)
        if not self._closing.is_set():
            self._reader.join(RUN_S)
        return code
