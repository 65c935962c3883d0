"""Writes the report of runs, the page and pictures beside it, or serves the page while they go.

Whoever has the address that `finetune report --live` prints, with its random token, sees the runs; it changes nothing.
Requests whose Host is a name that is not this machine's are refused: a web page elsewhere could have its own name
resolve to this machine (DNS rebinding).
"""

import ipaddress
import json
import math
import re
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from finetune.checkpoint.run_history import RunHistory, RunReader, read_run
from finetune.diagnostics.run_report import page
from finetune.diagnostics.run_report.charts import Chart, Style
from finetune.diagnostics.run_report.run_summary import predict_peak
from finetune.utils import atomic_files
from finetune.utils.errors import FinetuneError, RecipeError

EXTRA = ("plotly", "matplotlib")

# Runs that a folder is named after; a name may have 255 bytes.
_MOST_NAMES = 4
_LINES: dict[Style, dict[str, Any]] = {
    "line": {},
    "faint": {"linewidth": 0.8, "alpha": 0.35},
    "points": {"marker": "o", "markersize": 5},
    "cross": {"linestyle": "", "marker": "x"},
    "dashed": {"linestyle": "--"},
}

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


def write_report(directories: Sequence[Path], to: Path | None = None, *, price: float | None = None) -> list[Path]:
    """Writes the report of one run, or of several over each other.

    Args:
        to: The page; if left out, `RUN/report/report.html` for one run, for several `report.html` in a folder here
            that is named after them.
        price: Price of a GPU (or a process on CPUs) and hour.

    Returns:
        The files, the page first.

    Raises:
        FinetuneError: If a run cannot be read, or the page not be written.
    """
    check_options(price)
    runs = named_runs([(directory, read_run(directory)) for directory in directories])
    names = [run.name for _, run in runs]
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES - 1 :] = [f"{len(names) - _MOST_NAMES + 1}-more"]
    folder = directories[0] / "report" if len(runs) == 1 else Path("-".join(["report", *names]))
    file = to or folder / "report.html"
    _check_file(file)
    prediction = predict_peak(runs[0][1]) if len(runs) == 1 else None
    shown = page.content_of(runs, price=price, prediction=prediction)
    with RecipeError.explaining(f"--to: cannot write {file}", "Name another file by --to FILE.html.", OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_text(file, page.page_of(shown))
        name = runs[0][0] if len(runs) == 1 else f"{len(runs)} runs"
        pictures = [(c, file.with_name(f"{file.stem}-{c.key}.png")) for c in shown.charts if not c.axis]
        for chart, picture in pictures:
            _draw_picture(chart, name, picture)
    return [file, *(picture for _, picture in pictures)]


def _draw_picture(chart: Chart, name: str, file: Path) -> None:
    """Writes a chart over steps as PNG, for slides, papers and messages."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.2), dpi=130, layout="constrained")
    axes: Any = figure.add_subplot()
    if stacked := [curve for curve in chart.curves if curve.style == "stacked"]:
        labels, colors = [curve.name for curve in stacked], [curve.color for curve in stacked]
        axes.stackplot(stacked[0].steps, *(np.nan_to_num(c.y) for c in stacked), labels=labels, colors=colors)
    for curve in chart.curves:
        if curve.style != "stacked" and np.isfinite(curve.y).any():
            style = _LINES["points" if len(curve.y) == 1 and curve.style == "line" else curve.style]
            axes.plot(curve.steps, curve.y, color=curve.color, label=curve.name, **style)
    for mark in chart.marks:
        axes.axvline(mark.step, color="grey", linewidth=0.8, linestyle=":")
    # A dollar sign would begin a formula.
    axes.set_title(f"{chart.title} – {name}".replace("$", r"\$"))
    axes.set(xlabel="step", ylabel=chart.unit)
    axes.grid(visible=True)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if len(chart.curves) > 1:
        axes.legend()
    figure.savefig(file)


def named_runs(runs: Sequence[tuple[Path, RunHistory]]) -> list[tuple[str, RunHistory]]:
    """Returns runs with the names of their directories, or their paths where two are named alike."""
    unique = len({run.name for _, run in runs}) == len(runs)
    return [(run.name if unique else str(directory), run) for directory, run in runs]


def check_options(price: float | None) -> None:
    """Raises RecipeError if a library that draws is not installed, or a price is no number from 0 on."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise RecipeError(
            f"finetune report needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed. Install the extra: pip install 'finetune[report]'. `finetune watch` and `finetune runs` work "
            "without it."
        )
    if price is not None and not (math.isfinite(price) and price >= 0.0):
        raise RecipeError(f"--price is {price}; give what a GPU, or a process on CPUs, costs an hour, such as 2.5.")


def _check_file(file: Path) -> None:
    """Raises RecipeError if a file is there that is no report."""
    if file.is_dir() or file.suffix.lower() not in (".html", ".htm"):
        raise RecipeError(f"--to: {file} is not the name of a page. Give a file that ends in .html.")
    try:
        with file.open("rb") as there:
            head = there.read(1024).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecipeError(f"--to: {file} cannot be read: {error.strerror}. Name another file.") from error
    if page.GENERATOR not in head:
        raise RecipeError(f"--to: {file} is there, and is no report of this toolkit. Name another file, or remove it.")


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
        advice = "Give another --port, or an address of this machine as --host."
        with RecipeError.explaining(f"--live: cannot serve on {host}:{port}", advice, OSError):
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Handler)
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
