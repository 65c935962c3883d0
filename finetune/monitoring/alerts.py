"""Alerts: tells a command or a webhook what happens to a run.

An alert changes nothing of a run: it is sent by a thread, within a bound, and one that cannot be sent is a warning. No
warning has the webhook's URL, which is a secret.
"""

import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from finetune.config.recipe_schema import Event, GuardSection
from finetune.utils.errors import RecipeError
from finetune.utils.exit_codes import ALERTED
from finetune.utils.quoting import to_stderr

# How long a webhook or command may take, and how long whoever waits for it does. Ranks that fail alike wait 10 s for
# rank 0 (`exit_codes`), which sends first.
_TIMEOUT_S, _PATIENCE_S = 8.0, 9.0
# An event that goes on, such as a full disk, is sent again after so long.
_REPEAT_S = 600.0
# Characters of a message. Discord takes no more.
_LONGEST = 2000

_under_way: list[threading.Thread] = []
_sent_at: dict[tuple[Event, Any], float] = {}


def check_alert(guard: GuardSection, env: Mapping[str, str]) -> None:
    """Raises a `RecipeError` for a command that a worker's `env` lacks, or a variable that holds no URL."""
    if guard.alert is None or env.get("RANK", "0") != "0" or _webhook(guard.alert, env) is not None:
        return
    command = shlex.split(guard.alert)[0]
    if shutil.which(os.path.expanduser(command), path=env.get("PATH")) is None:
        raise RecipeError(
            f"guard.alert: there is no command {command} that can be run here. Name one that is on PATH, or an "
            "executable file by its path; or leave guard.alert out."
        )


def send_alert(guard: GuardSection, event: Event, text: str, facts: Mapping[str, Any], *, wait: bool = False) -> None:
    """Sends an alert if the recipe asks for it; rank 0 calls it, or another rank that speaks for all, on any thread.

    It raises nothing. It returns at once, and sends the same event of a run every ten minutes at most; with `wait`, as
    before a process ends, it returns once all alerts are sent, or after 9 s. `facts` are `run`, the run directory, and
    more figures of the run, such as `step`; the host is added.
    """
    try:
        if guard.alert is not None and event in guard.alert_on and (wait or _is_due(event, facts.get("run"))):
            _under_way[:] = [thread for thread in _under_way if thread.is_alive()]
            sender = threading.Thread(target=_send, args=(guard.alert, event, text, dict(facts)), daemon=True)
            sender.start()
            _under_way.append(sender)
        until = time.monotonic() + _PATIENCE_S
        for sender in [*_under_way] if wait else ():
            sender.join(max(0.0, until - time.monotonic()))
            if sender.is_alive():
                warn_unsent(event, f"nothing answered within {_PATIENCE_S:g} s")
        if wait and ALERTED in os.environ:
            Path(os.environ[ALERTED]).touch()
    except Exception as error:
        warn_unsent(event, type(error).__name__)


def _is_due(event: Event, run: Any) -> bool:
    now, before = time.monotonic(), _sent_at.get((event, run), -math.inf)
    if now - before < _REPEAT_S:
        return False
    _sent_at[event, run] = now
    return True


def warn_unsent(event: Event, problem: str) -> None:
    """Says on stderr that an alert was not sent, which ends nothing."""
    to_stderr(f"guard.alert: '{event}' was not sent: {' '.join(problem.split())[:300]}. The run does not depend on it.")


def _send(alert: str, event: Event, text: str, facts: dict[str, Any]) -> None:
    host = socket.gethostname()
    message = f"{facts.get('run', 'a run')} on {host}: {event.replace('_', ' ')}. {' '.join(text.split())}"[:_LONGEST]
    figures = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}
    # Slack, Mattermost and Rocket.Chat read `text`, and Discord reads `content`.
    body = json.dumps({**figures, "event": event, "host": host, "text": message, "content": message}, default=str)
    try:
        if (url := _webhook(alert, os.environ)) is not None:
            # Discord refuses the name that Python gives itself.
            headers = {"Content-Type": "application/json", "User-Agent": "finetune"}
            request = urllib.request.Request(url, body.encode(), headers)
            urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_S).close()
        else:
            variables = {"FINETUNE_EVENT": event, "FINETUNE_TEXT": message, "FINETUNE_RUN": str(facts.get("run", ""))}
            _run_command(shlex.split(alert), body, variables)
    except urllib.error.HTTPError as error:
        warn_unsent(event, f"the webhook answers {error.code} {error.reason}")
    except (OSError, RecipeError) as error:
        warn_unsent(event, str(getattr(error, "reason", error)))
    except Exception as error:  # whose text may have the URL
        warn_unsent(event, type(error).__name__)


def _webhook(alert: str, env: Mapping[str, str]) -> str | None:
    """Returns the URL in the variable that an alert names; None if it is a command."""
    if not alert.startswith("$"):
        return None
    url, name = env.get(alert[1:], ""), alert[1:]
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.username is None
    except ValueError:
        whole = False
    if not whole or re.search(r"[^!-~]", url):
        raise RecipeError(
            f"guard.alert: {name} {'holds no URL of a webhook' if url else 'is not set'} in the environment of rank 0. "
            f"Set it where the run is launched: export {name}=https://…"
        )
    return url


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: followed, it would be asked without the message."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _run_command(words: list[str], body: str, variables: dict[str, str]) -> None:
    words[0] = os.path.expanduser(words[0])
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, **variables},
        start_new_session=True,  # Ctrl-C, of which it may tell, does not end it
    ) as process:
        try:
            stderr = process.communicate(body, timeout=_TIMEOUT_S)[1].strip()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise TimeoutError(f"{words[0]} has not ended within {_TIMEOUT_S:g} s") from None
    if process.returncode:
        last = f": {stderr.splitlines()[-1]}" if stderr else ""
        raise OSError(f"{words[0]} ended with exit code {process.returncode}{last}")
