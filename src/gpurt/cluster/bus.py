"""EventEngine: the contract of a bus between nodes and those who watch them.

One engine object is one participant: a node (``join``, ``publish``, ``set_state``, ``publish_telemetry``,
``leave``), an observer (``subscribe``, ``follow_telemetry``, ``snapshot``, ``command``), or both.

What an engine promises: events of one node arrive in the order of publication, possibly more than once; those
that cannot be delivered are announced (``EventsDropped``) or visible as a gap in the sequence numbers, and then
``snapshot`` gives the state. There is no order between nodes. It never blocks a publisher for a slow subscriber of
the same process, and it looks into no payload.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, Self

MAX_STATE_BYTES: Final = 4 << 20
"""A node's snapshot: 1,000 devices take 1 MiB."""
MAX_COMMAND_BYTES: Final = 64 << 10

_HELD: Final = re.compile(rb"[0-9]{1,10}\.[0-9]{3}")

CommandHandler = Callable[[bytes], Awaitable[bytes]]
"""Runs on the node's loop; returns the reply. An exception is told to the caller as the error it is."""


OnAsked = Callable[[], None]
"""Called on the node's loop when somebody has asked for its state. It must not block, and must not raise."""

TakeReadings = Callable[[str, bytes], None]
"""Called on the loop with the node of the key and the payload. It must not block, and must not raise."""


@dataclass(frozen=True, slots=True)
class EventReceived:
    node: str
    """Of the key that it came under, not of what the payload says."""
    payload: bytes


@dataclass(frozen=True, slots=True)
class EventRefused:
    """An event larger than any event may be; its payload was not even copied."""

    node: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """This subscriber was too slow: events of ``node`` are missing from here on. Ask for the snapshot."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeUp:
    """The node has joined, or can be reached again. Also told for nodes that were there before."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeDown:
    """The node has left, died, or cannot be reached."""

    node: str
    left: bool = False
    """It called ``leave``. Not an event: a bus may tell the end of a node before its last events."""


@dataclass(frozen=True, slots=True)
class HubAway:
    """This participant has lost the hub (or the NATS server): it hears of no node, and knows nothing of any."""

    node: str = ""


@dataclass(frozen=True, slots=True)
class HubBack:
    """It is there again. A ``NodeUp`` follows for every node that is there, or comes back by itself."""

    node: str = ""


BusItem = EventReceived | EventRefused | EventsDropped | NodeUp | NodeDown | HubAway | HubBack


@dataclass(frozen=True, slots=True)
class StateReply:
    """What one live process answered to ``snapshot``."""

    node: str
    payload: bytes
    held_s: float = field(default=0.0, compare=False)
    """For how long it has held its name, by its own monotonic clock: of two that answer, the first holder keeps it."""


def held_text(since: float) -> bytes:
    """How long it is since ``since``, of the monotonic clock, as it goes with a state."""
    return f"{max(0.0, time.monotonic() - since):.3f}".encode()


def held_of(text: bytes | None) -> float:
    """What :func:`held_text` has made; 0 where another process says something else, or nothing."""
    match = _HELD.fullmatch(text or b"")
    return float(match[0]) if match else 0.0


class Subscription(Protocol):
    """Items of every node of the cluster, as of ``subscribe``. For one consumer. Ends after ``aclose``.

    A cancelled ``__anext__`` loses nothing.
    """

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> BusItem: ...

    @property
    def dropped(self) -> int:
        """Events that did not fit, so far."""
        ...

    async def aclose(self) -> None: ...


class EventEngine(Protocol):
    """The constructor does no I/O and binds no loop; ``start`` may follow ``close``, on any loop.

    Every method but ``start`` raises ``BusClosed`` outside ``start`` … ``close``, and ``BusUnavailable`` when the
    bus refuses an operation.
    """

    @property
    def cluster(self) -> str: ...

    on_return: Callable[[], None] | None
    """Called on the loop when the hub is there again after it was away."""
    on_quiet: Callable[[], None] | None
    """Called on the loop when a process of this node's name, perhaps this one, has looked who else uses the name."""

    async def start(self) -> None:
        """Open the bus. Waits, as long as it takes, until it can be reached; cancel to give up.

        Raises:
            BusUnavailable: it never will be: library missing, address in use.
        """
        ...

    async def close(self) -> None:
        """Leave, end every subscription, let go. Idempotent; takes 5 s at most."""
        ...

    # A node

    async def join(
        self, node: str, state: bytes, on_command: CommandHandler | None = None, on_asked: OnAsked | None = None
    ) -> None:
        """Appear under ``node``, with a first state: whoever sees the node can have its snapshot.

        Args:
            on_asked: readings published from then on reach who followed readings before it asked for the state.

        Raises:
            InvalidName: malformed. ClusterError: this engine has already joined.
        """
        ...

    async def leave(self) -> None:
        """Disappear. Does nothing when not joined."""
        ...

    async def set_state(self, state: bytes) -> None:
        """Replace the bytes that ``snapshot`` answers with.

        Raises:
            MalformedEvent: over ``MAX_STATE_BYTES``. ClusterError: not joined.
        """
        ...

    async def publish(self, payload: bytes) -> None:
        """Send one event. Submission is the call: concurrent calls go out in the order in which they began, and a
        cancelled one goes out all the same.

        Raises:
            MalformedEvent: over ``MAX_EVENT_BYTES``. ClusterError: not joined.
        """
        ...

    async def publish_telemetry(self, payload: bytes) -> None:
        """Send readings, best effort: never waits for the network, and what is dropped is not repeated.

        Raises:
            MalformedEvent: over ``MAX_READINGS_BYTES``. ClusterError: not joined.
        """
        ...

    # An observer

    async def follow_telemetry(self, take: TakeReadings) -> Callable[[], Awaitable[None]]:
        """Have ``take`` called with the readings of every node; of one node possibly only the newest. Returns what ends
        it; ``close`` does, too."""
        ...

    async def subscribe(self) -> Subscription:
        """Events and membership from now on, beginning with a ``NodeUp`` for every node that is there."""
        ...

    async def snapshot(self, node: str, *, timeout: float = 2.0, quiet: bool = False) -> tuple[StateReply, ...]:
        """The state of ``node``, or of every node with ``"*"``: one reply per live process, none for a node that
        is not there or does not answer within ``timeout`` seconds. Two replies for one node are two processes
        that use one name.

        Args:
            quiet: no node takes it for the question of somebody who watches (``on_asked``).
        """
        ...

    async def command(self, node: str, payload: bytes, *, timeout: float = 10.0) -> bytes:
        """Ask a node to do something; returns its reply.

        Raises:
            NoAnswer: not there, or no reply within ``timeout`` seconds. ClusterError: the node's own error.
        """
        ...
