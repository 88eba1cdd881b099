"""By which address of this machine others of the cluster reach it."""

from __future__ import annotations

import re
import socket
from typing import Final

from gpurt.cluster.errors import InvalidName
from gpurt.cluster.security.loopback import is_loopback

LOOPBACK: Final = "127.0.0.1"
_HOST: Final = re.compile(r"[a-z]+:?/+(?:\[([^\]]+)\]|([^:/]+)):(\d+).*")
_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([^\s,/:?#\[\]]{1,253}))(?::(\d{1,5}))?")


def address_towards(endpoint: str) -> str:
    """The address that this machine has in the network of the hub at ``endpoint``. Looks up names: not for the event
    loop. Nothing is sent.

    Raises:
        OSError: there is no way to it.
    """
    match = _HOST.fullmatch(endpoint)
    if match is None or is_loopback(endpoint):
        return LOOPBACK
    found = socket.getaddrinfo(match[1] or match[2], int(match[3]), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, there = found[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(there)
        return str(towards.getsockname()[0])


def split_address(text: str) -> tuple[str, int]:
    """``HOST`` or ``HOST:PORT``, IPv6 in brackets; without a port, 0.

    Raises:
        InvalidName: malformed.
    """
    match = _ADDRESS.fullmatch(text)
    port = int(match[3] or 0) if match else -1
    if match is None or not 0 <= port <= 65535:
        raise InvalidName(f"address {text!r} is not valid", hint="give it as HOST or HOST:PORT")
    return match[1] or match[2], port
