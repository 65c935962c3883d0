"""Says early that there is no model hub, instead of waiting through a client's retries."""

import os
import socket
from urllib.parse import urlparse


def go_offline_if_unreachable() -> None:
    """Sets HF_HUB_OFFLINE where the hub's name does not resolve; call it before anything imports the hub's client.

    A client that keeps asking takes most of a minute to fail, and says so many times; offline it looks into its
    cache at once, and a missing name is a clear error.
    """
    if "HF_HUB_OFFLINE" in os.environ:
        return
    endpoint = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    proxied = any(name in os.environ for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if proxied or endpoint.hostname is None:
        return
    try:
        socket.getaddrinfo(endpoint.hostname, endpoint.port or 443)
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
