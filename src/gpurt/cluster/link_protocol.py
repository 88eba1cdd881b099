"""What two nodes say to each other while one of them measures the way to the other. Pure.

::

    prober                            peer
    HELLO  pings, bytes       →
                              ←       status (1 byte: OK, BUSY, REFUSED)
    8 bytes                   →
                              ←       the same 8 bytes             (as often as announced)
    size (4 bytes), data      →                                    (as often as the prober likes)
    0 (4 bytes)               →
                              ←       bytes since the last mark    (8 bytes; as often as the prober likes)

The end of the connection is the end. Numbers are big-endian.
"""

from __future__ import annotations

import re
import struct
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from gpurt.cluster.errors import InvalidName
from gpurt.cluster.zenoh_settings import check_endpoint

HELLO: Final = struct.Struct("!8sHxxI")
MAGIC: Final = b"gpurtlk1"
SIZE: Final = struct.Struct("!I")
TOTAL: Final = struct.Struct("!Q")
PING_BYTES: Final = 8
CHUNK: Final = 256 << 10
"""Largest piece of data: about 0.1 ms of a loop's time, with encryption."""
OK: Final = b"\x00"
BUSY: Final = b"\x01"
REFUSED: Final = b"\x02"

MAX_PINGS: Final = 256
MIN_BYTES: Final = 64 << 10
MAX_BYTES: Final = 256 << 20
MAX_SECONDS: Final = 10.0
STEP_S: Final = 2.0
"""For connecting, a handshake, or an answer; besides the budget's own seconds."""

_ENDPOINT: Final = re.compile(r"(tcp|tls)/(?:\[([^\]]+)\]|([^:]+)):(\d+)")


class LinkBudget(BaseModel):
    """What one measurement may cost."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pings: int = Field(default=16, ge=1, le=MAX_PINGS, strict=True)
    bytes: int = Field(default=8 << 20, ge=MIN_BYTES, le=MAX_BYTES, strict=True)
    """Sent to the peer at most. The first eighth only opens the connection's window, and is not timed."""
    seconds: float = Field(default=1.0, gt=0, le=MAX_SECONDS, allow_inf_nan=False)
    """Of sending. What a slow link has not taken by then is not sent."""


def split_endpoint(endpoint: str) -> tuple[bool, str, int]:
    """Whether TLS is spoken, host, and port.

    Raises:
        InvalidName: not ``tcp/HOST:PORT`` or ``tls/HOST:PORT``.
    """
    check_endpoint(endpoint)
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        raise InvalidName(f"links are measured over tcp/HOST:PORT or tls/HOST:PORT, not {endpoint!r}")
    return match[1] == "tls", match[2] or match[3], int(match[4])


def join_endpoint(host: str, port: int, *, tls: bool) -> str:
    return f"{'tls' if tls else 'tcp'}/{f'[{host}]' if ':' in host else host}:{port}"
