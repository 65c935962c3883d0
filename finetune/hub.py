"""Says early that there is no model hub, instead of waiting through a client's retries."""

import os
import socket
from collections.abc import Mapping
from urllib.parse import urlparse


def go_offline_if_unreachable() -> None:
    """Sets HF_HUB_OFFLINE where the hub's name does not resolve; call it before anything imports the hub's client.

    A client that keeps asking takes most of a minute to fail, and says so many times; offline it looks into its
    cache at once, and a missing name is a clear error.
    """
    if "HF_HUB_OFFLINE" in os.environ:
        return
    if (address := endpoint(os.environ)) is None:
        return
    try:
        socket.getaddrinfo(*address)
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"


def endpoint(env: Mapping[str, str]) -> tuple[str, int] | None:
    """The hub's host and port; None behind a proxy, which resolves names itself."""
    if any(name in env for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return None
    url = urlparse(env.get("HF_ENDPOINT", "https://huggingface.co"))
    return None if url.hostname is None else (url.hostname, url.port or 443)
