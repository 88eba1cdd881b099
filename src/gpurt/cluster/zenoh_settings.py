"""How a zenoh session is set up for gpurt: a star with the master's own process as its hub.

A full mesh of peers keeps more than one link per pair and four times the memory per node; a star has one link per
node, and the hub's end is everybody's end anyway, because it is the master's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpurt.cluster.bus import MAX_STATE_BYTES
from gpurt.cluster.errors import BusUnavailable, InvalidName

_ENDPOINT = re.compile(
    r"(tcp|tls|quic|udp)/([^\s,/:?#\[\]]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})([?#][^\s,]{1,512})?"
)
MAX_MESSAGE_BYTES: Final = MAX_STATE_BYTES + (64 << 10)
"""Of one message on a link, with its headers; zenoh drops a larger one while it is still putting it together."""

ACCEPT_TIMEOUT_MS: Final = 3000
"""For two round trips. zenoh's own default, 10 s, lets ten silent connections a second fill all places."""
ACCEPT_PENDING: Final = 4096
SLOW_READER_US: Final = 500_000
"""For how long a hub waits for room to one participant before it ends that connection. It is made again at once, and
what was missed comes with a snapshot."""
MAX_SESSIONS: Final = 4096
"""zenoh's own default, 1,000, leaves no room beside a thousand nodes for those who watch them."""

_SOCKET_FILE = re.compile(r"unixsock-stream/[^\s,]{1,512}")


@dataclass(frozen=True, slots=True)
class ZenohSettings:
    """Times in seconds. The defaults were measured with up to 200 nodes."""

    lease_s: float = 3.0
    """A peer that is silent for this long is gone. Twice in it each shows that it is there, so that one may be late by
    half of it; more often would only be work for the hub, since TCP loses nothing. zenoh's own default, 10 s, is how
    long a frozen host would stay unnoticed; a process that dies is seen at once, by its closed connection. Bytes that
    are lost or change places show only by the silence after them, and may look like one message more: half of it, the
    whole of it and a reconnection have to fit into 5 s."""
    retry_first_s: float = 0.1
    retry_longest_s: float = 1.0
    """Between two attempts to connect, doubling from the first to the longest."""
    connect_timeout_s: float = 0.5
    """One attempt to open a session. zenoh does not return from it earlier, not even for a cancellation."""
    cache_events: int = 1024
    """Events that a node keeps to repeat them; 512 s of a busy node."""
    heartbeat_s: float = 1.0
    """How long after an event a node says once more what its last one was, so that a loss at the end is noticed, too.
    Longer than :data:`gpurt.cluster.sequence.RECOVERY_WAIT_S` would hide events behind snapshots."""
    inbox_events: int = 8192
    """Events that a subscriber may be behind before they are dropped."""


def check_endpoint(endpoint: str) -> str:
    """``endpoint`` itself when it has the form ``tcp/HOST:PORT`` (or another protocol of zenoh).

    Raises:
        InvalidName: otherwise: a client would try for ever to reach it. Also for port 0, which zenoh would take
            without telling which port it got.
    """
    match = _ENDPOINT.fullmatch(endpoint)
    if not (1 <= int(match[3]) <= 65535 if match else _SOCKET_FILE.fullmatch(endpoint)):
        raise InvalidName(f"endpoint {endpoint!r} is not valid", hint="give it as tcp/HOST:PORT, port 1 to 65535")
    return endpoint


def plain(error: BaseException | None) -> str:
    """What zenoh says, without the places in its source and the lists of what it tried."""
    text = re.sub(r" at \S+\.rs:\d+\.?", "", str(error))
    system = re.search(r"[^:\[\]]+ \(os error \d+\)", text)
    return system[0].strip() if system else re.sub(r"^Unable to connect to any of \[.*\]\. ", "", text).rstrip("!.")


def load_zenoh() -> Any:
    """The ``zenoh`` module with its ``ext``.

    Raises:
        BusUnavailable: not installed, or it cannot be loaded here.
    """
    try:
        import zenoh
        import zenoh.ext  # pyright: ignore[reportUnusedImport]
    except ImportError as exc:
        raise BusUnavailable(f"zenoh cannot be imported: {exc}", hint="pip install 'gpurt[cluster]'") from exc
    return zenoh


def calm_runtime() -> None:
    """For a process whose work is to be a hub, before it uses zenoh: one thread reads all links. zenoh takes three by
    default, of which one wakes the others for each of the messages by which a thousand idle nodes show that they are
    there. Who sends keeps a thread of its own. What the user has set in ``ZENOH_RUNTIME`` stays."""
    os.environ.setdefault("ZENOH_RUNTIME", "(rx: (worker_threads: 1), acc: (handover: rx))")
    _more_files()


def _more_files() -> None:
    """As many open files as the system lets this process have: with certificates a node takes three."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def session_config(
    zenoh: Any,
    endpoint: str,
    *,
    listen: bool,
    settings: ZenohSettings,
    protection: Mapping[str, Any] | None = None,
    lanes: Sequence[int] = (),
) -> Any:
    """A configuration of ``zenoh`` for the hub (``listen``) or for one of its clients.

    Args:
        protection: more values: those of certificates and of access control.
        lanes: ports of loopback to listen on in place of ``endpoint`` (:mod:`gpurt.cluster.security.door`).
    """
    listening = [f"tls/127.0.0.1:{port}" for port in lanes] or [endpoint]
    millis = 1000
    values: dict[str, Any] = {
        "mode": "router" if listen else "client",
        "listen/endpoints": listening if listen else [],
        "connect/endpoints": [] if listen else [endpoint],
        # The hub must say so when its address is taken; a client is tried again by us, where it can be cancelled.
        "listen/exit_on_failure": True,
        "connect/exit_on_failure": False,
        "connect/timeout_ms": round(settings.connect_timeout_s * millis),
        "connect/retry": {
            "period_init_ms": round(settings.retry_first_s * millis),
            "period_max_ms": round(settings.retry_longest_s * millis),
            "period_increase_factor": 2,
        },
        "transport/link/tx/lease": round(settings.lease_s * millis),
        "transport/link/tx/keep_alive": 2,
        # A hub reads on one thread. It must not wait longer for an observer that reads too slowly than a node may be
        # silent: zenoh's own default is 5 s, within which every other connection would be given up.
        **({"transport/link/tx/queue/congestion_control/block/wait_before_close": SLOW_READER_US} if listen else {}),
        # Who has connected and says nothing holds one of the places for those who are just being let in.
        "transport/unicast/accept_timeout": ACCEPT_TIMEOUT_MS,
        "transport/unicast/accept_pending": ACCEPT_PENDING,
        "transport/unicast/max_sessions": MAX_SESSIONS,
        "transport/link/rx/max_message_size": MAX_MESSAGE_BYTES,
        # Between processes of one machine it would pass by the limit above, and by the encryption.
        "transport/shared_memory/enabled": False,
        # Nobody joins who was not told the address.
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "scouting/delay": 0,  # a hub has nobody to wait for
    }
    config = zenoh.Config()
    for key, value in {**values, **(protection or {})}.items():
        config.insert_json5(key, json.dumps(value))
    return config
