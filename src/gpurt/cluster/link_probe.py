"""One measurement of the way from this node to another: its round trip, and how many bytes a second go there."""

from __future__ import annotations

import asyncio
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
from gpurt.cluster.security.errors import InsecureEndpoint
from gpurt.cluster.security.loopback import check_protected
from gpurt.cluster.security.peers import PeerCredentials

WARM_UP: Final = 1 / 8
"""Of the bytes: sent first and not timed, while TCP finds out how much may be under way."""

_DATA: Final = bytes(CHUNK)


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
    credentials: PeerCredentials | None = None,
    insecure: bool = False,
) -> LinkSample:
    """Measure the way to node ``peer``, which listens at ``endpoint``.

    Takes ``budget.seconds`` and the steps around it, ``STEP_S`` each, at most. Cancelled, it lets go at once.

    Raises:
        PeerBusy: try again later. InsecureEndpoint: it would leave this machine unencrypted. CredentialsRefused: it is
            not ``peer`` that listens there. ClusterError: not there, or not one of ours.
    """
    tls, host, port = split_endpoint(endpoint)
    if credentials is None and tls:
        raise InsecureEndpoint(f"{peer} at {endpoint} asks for a certificate, and this node has none")
    check_protected(endpoint, tls=credentials is not None, insecure=insecure)
    context = None if credentials is None else credentials.calling
    try:
        async with asyncio.timeout(STEP_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, TimeoutError) as exc:
        raise ClusterError(f"node {peer} cannot be reached at {endpoint}: {exc or type(exc).__name__}") from exc
    try:
        if credentials is not None:
            credentials.check(writer.get_extra_info("ssl_object").getpeercert(binary_form=True), name=peer)
        async with asyncio.timeout(budget.seconds + 3 * STEP_S):
            return await _measure(peer, reader, writer, budget)
    except (OSError, EOFError, TimeoutError) as exc:
        raise ClusterError(f"the measurement to node {peer} at {endpoint} has failed: {exc!r}") from exc
    finally:
        writer.transport.abort()


async def _measure(
    peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: LinkBudget
) -> LinkSample:
    writer.write(HELLO.pack(MAGIC, budget.pings, budget.bytes))
    async with asyncio.timeout(STEP_S):
        status = await reader.readexactly(1)
    if status == BUSY:
        raise PeerBusy(f"node {peer} measures something else just now")
    if status != OK:
        raise ClusterError(f"node {peer} refuses a measurement of {budget.bytes} bytes")
    round_trip = await _pings(reader, writer, budget.pings)
    end = time.monotonic() + budget.seconds
    warm_up = int(budget.bytes * WARM_UP)
    await _send(reader, writer, warm_up, end)
    start = time.perf_counter()
    counted = await _send(reader, writer, budget.bytes - warm_up, end)
    seconds = time.perf_counter() - start
    # The count comes back on the same way, and so one round trip is not the bytes' own. Where it is most of the time,
    # there were too few bytes for a rate, and half of the time is as much as can be taken off.
    return LinkSample(round_trip, counted / max(seconds - round_trip, seconds / 2), counted)


async def _pings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: int) -> float:
    times: list[float] = []
    for number in range(count):
        ping = number.to_bytes(PING_BYTES, "big")
        start = time.perf_counter()
        writer.write(ping)
        if await reader.readexactly(PING_BYTES) != ping:
            raise MalformedEvent("the echo of a measurement is not what was sent")
        times.append(time.perf_counter() - start)
    return statistics.median(times)


async def _send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int, end: float) -> int:
    """Send so many bytes, fewer when ``end`` comes first; returns what the other side has counted."""
    sent = 0
    while sent < size and (sent == 0 or time.monotonic() < end):
        piece = min(CHUNK, size - sent)
        writer.write(SIZE.pack(piece))
        writer.write(_DATA[:piece] if piece < CHUNK else _DATA)
        await writer.drain()
        sent += piece
    writer.write(SIZE.pack(0))
    (counted,) = TOTAL.unpack(await reader.readexactly(TOTAL.size))
    if counted != sent:
        raise MalformedEvent(f"the other side of a measurement has counted {counted} bytes of {sent}")
    return sent
