"""Reports at once that the hub, or a model on it, cannot be reached, instead of after a client's retries."""

import os
import re
import socket
import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlparse
from urllib.request import Request, urlopen

from finetune.utils.bounded_work import ends_within
from finetune.utils.errors import RecipeError

LIMIT_S = 5.0
"""Seconds to wait for an answer."""

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def go_offline_if_unreachable() -> None:
    """Sets HF_HUB_OFFLINE if the name of the hub does not resolve; call it before anything imports the hub's client.

    A client that retries takes most of a minute to fail, with many messages. Offline it uses its cache at once, and a
    missing name is a clear error.
    """
    if "HF_HUB_OFFLINE" in os.environ:
        return
    address = hub_address(os.environ)
    if address is not None and not ends_within(LIMIT_S, partial(socket.getaddrinfo, *address)):
        os.environ["HF_HUB_OFFLINE"] = "1"


def require_model(name: str | None, key: str | None = None) -> None:
    """Refuses a model that evidently cannot be loaded, a folder or one on the hub; `key` or option named it, if any.

    Raises:
        RecipeError: If there is no such folder, and the name cannot be the hub's, or only the hub could know it and
            cannot be asked.
    """
    if name is None or Path(name).exists() or is_cached(os.environ, "models", name):
        return
    start = f"{key}: there" if key else "There"
    if not _NAME.fullmatch(name):
        raise RecipeError(f"{start} is no folder {name}, and models on the hub are named OWNER/NAME. Correct the path.")
    if (problem := why_unreachable(os.environ)) is not None:
        raise RecipeError(
            f"{start} is no folder '{name}', the hub's cache holds no model of that name, and {problem}. Correct the "
            "name, or let the hub be reached."
        )


def why_unreachable(env: Mapping[str, str]) -> str | None:
    """Returns why the hub cannot be reached; None if it can."""
    if env.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return "the hub is not asked (HF_HUB_OFFLINE is set, or its name does not resolve)"
    host = urlparse(_url(env)).hostname
    if (address := hub_address(env)) is not None:
        return None if accepts_connections(address) else f"{host} cannot be reached"
    reached = ends_within(LIMIT_S, lambda: _ask_proxy(_url(env)))
    return None if reached else f"{host} cannot be reached through the proxy"


def accepts_connections(address: tuple[str, int]) -> bool:
    """Tells if something listens at an address."""
    return ends_within(LIMIT_S, lambda: socket.create_connection(address, timeout=LIMIT_S).close())


def is_cached(env: Mapping[str, str], kind: str, name: str) -> bool:
    """Tells if the hub's cache holds a revision of one of its `models` or `datasets`.

    Source: huggingface_hub's layout, `models--OWNER--NAME/snapshots/COMMIT`.
    """
    home = Path(env.get("HF_HOME", Path(env.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "huggingface"))
    cache = Path(env.get("HF_HUB_CACHE", env.get("HUGGINGFACE_HUB_CACHE", home / "hub")))
    folder = cache / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    return folder.is_dir() and any(folder.iterdir())


def hub_address(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Returns host and port of the hub; None behind a proxy, which resolves names itself."""
    if any(name in env for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return None
    url = urlparse(_url(env))
    return None if url.hostname is None else (url.hostname, url.port or 443)


def _url(env: Mapping[str, str]) -> str:
    return env.get("HF_ENDPOINT", "https://huggingface.co")


def _ask_proxy(url: str) -> None:
    try:
        urlopen(Request(url, method="HEAD"), timeout=LIMIT_S).close()
    except HTTPError:
        return  # an answer all the same
    except URLError as error:
        if not isinstance(error.reason, ssl.SSLError):  # certificates are the client's business
            raise
