"""One measurement of the way from this node to another: its round trip, and how many bytes a second go there."""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from dataclasses import dataclass
from typing import Final

from gpurt.cluster.errors import ClusterError, MalformedEvent
from gpurt.cluster.link_protocol import (
    BUSY,
    CHUNK,
    HELLO,
    MAGIC,
    OK,
    PING_BYTES,
    SIZE,
    STEP_S,
    TOTAL,
    LinkBudget,
    split_endpoint,
)
from gpurt.cluster.link_wire import Wire
from gpurt.cluster.security.errors import InsecureEndpoint
from gpurt.cluster.security.loopback import check_protected
from gpurt.cluster.security.peers import Credentials
from gpurt.runtime.lane import off_loop

WARM_UP: Final = 1 / 8
"""Of the bytes: sent first and not timed, while TCP finds out how much may be under way."""

_CHUNK: Final = SIZE.pack(CHUNK) + bytes(CHUNK)


@dataclass(frozen=True, slots=True)
class LinkSample:
    """What one measurement has found."""

    round_trip_s: float
    """Median of the pings."""
    bandwidth: float
    """Bytes/s, of what the other side has counted."""
    bytes: int
    """That were timed."""


class PeerBusy(ClusterError):
    """The other node measures something else just now."""


async def probe_link(
    peer: str,
    endpoint: str,
    budget: LinkBudget,
    *,
    credentials: Credentials | None = None,
    insecure: bool = False,
) -> LinkSample:
    """Measure the way to node ``peer``, which listens at ``endpoint``; on a thread, which the loop does not slow down.

    Takes ``budget.seconds`` and the steps around it, ``STEP_S`` each, at most. Cancelled, it returns and ends the
    connection at once.

    Raises:
        PeerBusy: try again later. InsecureEndpoint: it would leave this machine unencrypted. CredentialsRefused: it is
            not ``peer`` that listens there. ClusterError: not there, or not one of ours.
    """
    tls, host, port = split_endpoint(endpoint)
    if credentials is None and tls:
        raise InsecureEndpoint(f"{peer} at {endpoint} asks for a certificate, and this node has none")
    check_protected(endpoint, tls=credentials is not None, insecure=insecure)
    call = _Call(peer, host, port, budget, credentials)
    try:
        return await off_loop("link", call.run)
    except (OSError, EOFError) as exc:
        raise ClusterError(f"node {peer} cannot be measured at {endpoint}: {exc or type(exc).__name__}") from exc
    except asyncio.CancelledError:
        call.abort()
        raise


class _Call:
    """One measurement; ``run`` on a thread, ``abort`` from any other."""

    def __init__(self, peer: str, host: str, port: int, budget: LinkBudget, credentials: Credentials | None) -> None:
        self._peer, self._host, self._port = peer, host, port
        self._budget, self._credentials = budget, credentials
        self._wire: Wire | None = None
        self._aborted = False

    def abort(self) -> None:
        self._aborted = True
        if self._wire is not None:
            self._wire.abort()

    def run(self) -> LinkSample:
        connection = socket.create_connection((self._host, self._port), STEP_S)
        wire = self._wire = Wire(connection, self._budget.seconds + 3 * STEP_S)
        try:
            if self._aborted:
                raise EOFError
            if self._credentials is not None:
                credentials = self._credentials()
                credentials.check(wire.protect(credentials.calling, listening=False), name=self._peer)
            return self._measure(wire)
        finally:
            wire.close()

    def _measure(self, wire: Wire) -> LinkSample:
        budget = self._budget
        wire.send(HELLO.pack(MAGIC, budget.pings, budget.bytes))
        status = wire.read(1)
        if status == BUSY:
            raise PeerBusy(f"node {self._peer} measures something else just now")
        if status != OK:
            raise ClusterError(f"node {self._peer} refuses a measurement of {budget.bytes} bytes")
        round_trip = _pings(wire, budget.pings)
        end = time.monotonic() + budget.seconds
        warm_up = int(budget.bytes * WARM_UP)
        _send(wire, warm_up, end)
        start = time.perf_counter()
        counted = _send(wire, budget.bytes - warm_up, end)
        seconds = time.perf_counter() - start
        # The count comes back on the same way, and so one round trip is not the bytes' own. Where it is most of the
        # time, there were too few bytes for a rate, and half of the time is as much as can be taken off.
        return LinkSample(round_trip, counted / max(seconds - round_trip, seconds / 2), counted)


def _pings(wire: Wire, count: int) -> float:
    times: list[float] = []
    for number in range(count):
        ping = number.to_bytes(PING_BYTES, "big")
        start = time.perf_counter()
        wire.send(ping)
        if wire.read(PING_BYTES) != ping:
            raise MalformedEvent("the echo of a measurement is not what was sent")
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _send(wire: Wire, size: int, end: float) -> int:
    """Send so many bytes, fewer when ``end`` comes first; returns what the other side has counted."""
    sent = 0
    while sent < size and (sent == 0 or time.monotonic() < end):
        piece = min(CHUNK, size - sent)
        wire.send(_CHUNK if piece == CHUNK else SIZE.pack(piece) + bytes(piece))
        sent += piece
    wire.send(SIZE.pack(0))
    (counted,) = TOTAL.unpack(wire.read(TOTAL.size))
    if counted != sent:
        raise MalformedEvent(f"the other side of a measurement has counted {counted} bytes of {sent}")
    return sent
