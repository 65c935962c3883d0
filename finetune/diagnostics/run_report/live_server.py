"""`finetune report --live`: serves a run's page, which refreshes by itself.

Whoever has the address, with its random token, sees the run; it changes nothing. Requests whose Host is a name that is
not this machine's are refused: a web page elsewhere could have its own name resolve to this machine (DNS rebinding).
"""

import ipaddress
import json
import re
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from finetune.checkpoint.run_history import RunReader
from finetune.diagnostics.run_report import page
from finetune.diagnostics.run_report.one_run import predict_peak
from finetune.diagnostics.run_report.write_report import check_options, named_runs
from finetune.utils.errors import FinetuneError, RecipeError

LOOPBACK = "127.0.0.1"
REFRESH_S = 5.0
"""Between two looks at the run."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LiveServer(ThreadingHTTPServer):
    """Serves the page of runs, which are read again whenever someone asks; the `url` has the token."""

    def __init__(
        self, directories: Sequence[Path], *, price: float | None = None, host: str = LOOPBACK, port: int = 0
    ) -> None:
        """Binds an address, and a port; 0 is one that is free.

        Raises:
            FinetuneError: If a run cannot be read, or the address cannot be bound.
        """
        check_options(price)
        self.token = secrets.token_urlsafe(24)
        self._price = price
        self._lock = threading.Lock()
        self._readers = [(directory, RunReader(directory)) for directory in directories]
        self._prediction: str | int | None = None
        self.read_content()
        if not 0 <= port <= 65535:
            raise RecipeError(f"--port is {port}; give a number from 0 (one that is free) to 65535.")
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise RecipeError(
                f"--live: cannot serve on {host}:{port}: {error.strerror or error}. Give another --port, or an address "
                "of this machine as --host."
            ) from error
        shown = f"[{host}]" if self.address_family == socket.AF_INET6 else host
        self.url = f"http://{shown}:{self.server_port}/{self.token}/"

    def predict(self) -> None:
        """Computes the peak that a plan predicts; it takes seconds, and the page is there without it."""
        if len(self._readers) == 1:
            self._prediction = predict_peak(self._readers[0][1].read())

    def read_content(self) -> page.Content:
        """Reads the runs anew.

        Raises:
            FinetuneError: If a run cannot be read.
        """
        with self._lock:
            runs = named_runs([(directory, reader.read()) for directory, reader in self._readers])
            return page.content_of(runs, price=self._price, prediction=self._prediction, live=True)


def is_own_host(host: str) -> bool:
    """Returns True if the Host of a request names this machine: an address, `localhost`, or the machine's own name.

    A name that an attacker owns is none of them. The port is not compared, since tunnels have others.
    """
    if not re.fullmatch(r"[\w.:\[\]-]+", host):
        return False
    try:
        name = (urlsplit(f"//{host}").hostname or host).rstrip(".")
        if name not in ("localhost", socket.gethostname().lower()):
            ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    # A client that sends nothing does not hold a thread.
    timeout = 20
    server_version = "finetune"
    sys_version = ""

    def do_GET(self) -> None:
        given, _, what = self.path.removeprefix("/").partition("/")
        if not is_own_host(self.headers.get("Host", "")):
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "This server is not the one of that name.\n")
        elif not secrets.compare_digest(given.encode(), self.server.token.encode()) or what not in ("", "data"):
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "Not found. The address ends in /TOKEN/.\n")
        else:
            try:
                shown = self.server.read_content()
            except FinetuneError as error:
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
                return
            if what == "data":
                text = json.dumps({"body": shown.body, "data": shown.data}, allow_nan=False)
                self._send(HTTPStatus.OK, "application/json", text)
            else:
                self._send(HTTPStatus.OK, "text/html", page.page_of(shown, refresh_s=REFRESH_S))

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Silent: the address has the token."""


def serve_live(
    directories: list[Path], say: Callable[[str], None], *, price: float | None, host: str | None, port: int | None
) -> None:
    """Serves runs until Ctrl-C, or raises as `LiveServer` does; `say` prints the address."""
    with LiveServer(directories, price=price, host=host or LOOPBACK, port=port or 0) as server:
        threading.Thread(target=server.predict, name="prediction", daemon=True).start()
        say(f"{server.url}\nThe page refreshes every {REFRESH_S:g} s. Ctrl-C ends it.")
        if host in (None, LOOPBACK):
            say(
                f"From another machine: ssh -L {server.server_port}:{LOOPBACK}:{server.server_port} "
                f"{socket.gethostname()}, and open the address there."
            )
        else:
            say("Whoever can reach this address and knows its token can read the run, over a connection in the clear.")
        server.serve_forever(poll_interval=0.2)
