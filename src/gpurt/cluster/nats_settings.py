"""How gpurt uses a NATS server: its address, its subjects, its limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from gpurt.cluster.errors import BusUnavailable, InvalidName
from gpurt.cluster.keys import ANY, EVENTS, ROOT, node_key, node_of

SCHEME: Final = "nats://"
TOKEN: Final = "token"
"""Nobody publishes under this leaf: a consumer of it stands for a process that is connected."""

_ENDPOINT = re.compile(r"nats://([^\s,/:?#@\[\]]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class NatsSettings:
    """Times in seconds. The stream's limits count only for who creates it; a stream that is there is used as it is."""

    lease_s: float = 2.0
    """A node that is silent for this long is gone; it beats four times as often. A process that dies is seen by its
    closed connection."""
    closed_s: float = 0.05
    """How long the server waits after the end of a connection before it tells that its node is gone."""
    retry_first_s: float = 0.1
    retry_longest_s: float = 1.0
    """Between two attempts to connect, doubling from the first to the longest."""
    connect_timeout_s: float = 2.0
    answer_timeout_s: float = 5.0
    """For the server's answer about a stream or an event; then it is asked again."""
    in_flight: int = 256
    """Events sent and not yet acknowledged."""
    backlog_events: int = 1024
    backlog_bytes: int = 32 << 20
    """Events that a node keeps while there is no server. The oldest are dropped then, and receivers see the hole."""
    inbox_events: int = 8192
    """Events that a subscriber may be behind before they are dropped."""
    stream_bytes: int = 64 << 20
    stream_age_s: float = 600.0
    stream_events_per_node: int = 1024
    """What the server keeps to repeat, at most: of all nodes, for how long, and of each node."""
    replicas: int = 1
    """Servers of a NATS cluster that keep the stream."""


def check_nats_endpoint(endpoint: str) -> str:
    """``endpoint`` itself when it has the form ``nats://HOST:PORT``.

    Raises:
        InvalidName: otherwise. Names and passwords in it, too: certificates say who somebody is.
    """
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise InvalidName(f"endpoint {endpoint!r} is not valid", hint="give it as nats://HOST:PORT, port 1 to 65535")
    return endpoint


def stream_name(cluster: str) -> str:
    """Of the stream with the events of every node."""
    return f"gpurt_{cluster}"


def subject(cluster: str, node: str, leaf: str) -> str:
    """What :func:`~gpurt.cluster.keys.node_key` is on zenoh.

    Raises:
        InvalidName: cluster or node.
    """
    return node_key(cluster, node, leaf).replace("/", ".")


def stream_subjects(cluster: str) -> list[str]:
    return [subject(cluster, ANY, EVENTS), subject(cluster, ANY, TOKEN)]


def who_subject(cluster: str) -> str:
    """Every node answers to it by a beat."""
    return f"{ROOT}/{cluster}/who".replace("/", ".")


def node_of_subject(of: str) -> str:
    """
    Raises:
        InvalidName: not a subject of a node.
    """
    if "/" in of:
        raise InvalidName(f"subject {of!r} does not belong to a node")
    return node_of(of.replace(".", "/"))


def header(message: Any, name: str) -> str:
    """Of a message; empty where it has none of that name."""
    headers: dict[str, str] | None = message.headers
    return headers.get(name, "") if headers else ""


def load_nats() -> Any:
    """The ``nats`` module with its parts.

    Raises:
        BusUnavailable: not installed, or it cannot be loaded here.
    """
    try:
        import nats
        import nats.aio.client  # pyright: ignore[reportUnusedImport]
        import nats.errors  # pyright: ignore[reportUnusedImport]
        import nats.js.api  # pyright: ignore[reportUnusedImport]
        import nats.js.errors  # pyright: ignore[reportUnusedImport]
    except ImportError as exc:
        raise BusUnavailable(f"nats cannot be imported: {exc}", hint="pip install 'gpurt[nats]'") from exc
    return nats
