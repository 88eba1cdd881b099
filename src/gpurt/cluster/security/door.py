"""A hub's door: what a connection has to show before it costs the hub anything, so that strangers keep no node out.

zenoh takes the connections of one listener in turn and pauses for 0.1 s after each TLS handshake that fails, so ten
failures a second are all that a listener can do, and nobody gets in beside them. Here zenoh listens on several ports of
loopback, the lanes, and this front listens where nodes connect. It passes bytes on without reading them: TLS stays
between zenoh and the node. What it does before that:

- a connection reaches a lane once it has sent a whole TLS ClientHello. One that sends nothing, something else or single
  bytes never gets so far, and where too many wait, the one that has waited longest is ended;
- each handshake goes to the lane that is free soonest. An address at which too many have failed may use only a share of
  the lanes, and no more of them than they can do in a second: the rest is turned away at once.

It runs on a thread of its own with a loop of its own, because a master's loop may be busy for longer than a node waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast

LANES: Final = 32
OPEN_LANES: Final = 8
"""Lanes that no address uses at which too many handshakes have failed."""
PAUSE_S: Final = 0.1
"""zenoh's pause after a handshake that failed; compiled into it (``TLS_ACCEPT_THROTTLE_TIME``)."""
BACKLOG_S: Final = 1.0
"""More than the lanes of a suspected address can do in this time is turned away."""
HELLO_S: Final = 3.0
"""How long a whole ClientHello may take."""
HANDSHAKE_S: Final = 5.0
"""How long it may take from there until the hub and the node are connected: some round trips."""
SUSPECT_HANDSHAKE_S: Final = 2.0
WAITING: Final = 512
"""Connections without a ClientHello, and of one address."""
WAITING_EACH: Final = 32
FAILURES: Final = 10.0
"""Failures of one address before it is suspected; one is forgiven each second."""
ADDRESSES: Final = 4096
MAX_HELLO: Final = 16 << 10
CHUNK: Final = 64 << 10
HUB_AWAY: Final = "hub away"
"""The reason of those that come while the hub opens its session anew."""
LOG_S: Final = 60.0
"""At least between two warnings."""

_log = logging.getLogger("gpurt.cluster.security")


def hello_complete(data: bytes | bytearray) -> bool | None:
    """Whether ``data`` begins with a whole ClientHello; None: it is none, whatever follows."""
    at, message = 0, 0
    need: int | None = None
    while True:
        head = bytes(data[at : at + 5])
        # Content type handshake, version 3.x; a record is never empty here and never longer than 2^14.
        if (head[:1] or b"\x16") != b"\x16" or (head[1:2] or b"\x03") != b"\x03":
            return None
        if len(head) < 5:
            return False
        length = int.from_bytes(head[3:5])
        if not 1 <= length <= MAX_HELLO:
            return None
        body = bytes(data[at + 5 : at + 5 + length])
        if at == 0 and body:
            if body[0] != 1:
                return None
            if length < 4:
                return None  # nobody cuts its first message there
            if len(body) >= 4:
                need = 4 + int.from_bytes(body[1:4])
                if need > MAX_HELLO:
                    return None
        if len(body) < length:
            return False
        message += length
        if need is not None and message >= need:
            return True
        at += 5 + length


@dataclass(slots=True)
class _Address:
    """What is known of those who connect from one address (of IPv6: one network of 64 bits)."""

    forgiven_at: float
    failures: float = 0.0
    waiting: OrderedDict[_Inner, None] = field(default_factory=OrderedDict["_Inner", None])

    def suspected(self, now: float) -> bool:
        self.failures = max(0.0, self.failures - (now - self.forgiven_at))
        self.forgiven_at = now
        return self.failures >= FAILURES


@dataclass(slots=True)
class _Lane:
    port: int
    free_at: float = 0.0
    handshakes: int = 0

    def backlog(self, now: float) -> float:
        """Seconds until it has done what it has, if all of that fails."""
        return max(0.0, self.free_at - now) + self.handshakes * PAUSE_S


class Door:
    """
    Args:
        host, port: where to listen.
    """

    def __init__(self, host: str, port: int) -> None:
        self.refused: Counter[str] = Counter()
        """Connections that did not become a participant, by reason."""
        self._host, self._port = host, port
        self._lanes: list[_Lane] = []
        self._addresses: OrderedDict[str, _Address] = OrderedDict()
        self._waiting: OrderedDict[_Inner, None] = OrderedDict()
        self._connections: set[_Inner] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ending: asyncio.Event | None = None
        self._told_at = float("-inf")
        self._told: Counter[str] = Counter()

    @property
    def ports(self) -> list[int]:
        return [lane.port for lane in self._lanes]

    def open(self, ports: Sequence[int]) -> None:
        """Listen. Blocks for a moment.

        Args:
            ports: of loopback, where zenoh listens, or will in a moment.

        Raises:
            OSError: the address is in use, or none of this machine's.
        """
        self._lanes = [_Lane(each) for each in ports]
        listening = [
            socket.create_server(
                address[:2],
                family=family,
                backlog=1024,
                dualstack_ipv6=self._host == "::" and socket.has_dualstack_ipv6(),
            )
            for family, address in _addresses(self._host, self._port)
        ]
        ready = threading.Event()

        async def serve() -> None:
            self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
            servers = [await self._loop.create_server(lambda: _Inner(self), sock=each) for each in listening]
            ready.set()
            await self._ending.wait()
            for server in servers:
                server.close()
            await asyncio.sleep(0)
            for each in tuple(self._connections):
                each.end()
            # What zenoh has said last is still to go out, but nobody is waited for.
            for _ in range(20):
                if not self._connections:
                    break
                await asyncio.sleep(0.01)
            for each in tuple(self._connections):
                each.abort()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), name="gpurt:door", daemon=True)
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        """Let nobody in any more and end every connection. Blocks for 0.2 s at most."""
        if self._thread is None or self._loop is None or self._ending is None:
            return
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()
        self._thread = None

    # On the door's own loop

    def arrived(self, connection: _Inner) -> None:
        """Somebody has connected, and has to say something."""
        self._connections.add(connection)
        address = self._address(connection.address)
        for queue, limit in ((address.waiting, WAITING_EACH), (self._waiting, WAITING)):
            if len(queue) >= limit:
                next(iter(queue)).refuse("slow")
            queue[connection] = None

    def greeted(self, connection: _Inner) -> _Lane | None:
        """It has sent a ClientHello: the lane to use. None: it is turned away."""
        self._no_more_waiting(connection)
        now = connection.loop.time()
        connection.suspected = self._address(connection.address).suspected(now)
        lanes = self._lanes[min(OPEN_LANES, len(self._lanes) - 1) :] if connection.suspected else self._lanes
        lane = min(lanes, key=lambda each: each.backlog(now))
        if connection.suspected and lane.backlog(now) > BACKLOG_S:
            return None
        lane.handshakes += 1
        return lane

    def connected(self, lane: _Lane) -> None:
        """Both sides know each other."""
        lane.handshakes -= 1

    def failed(self, connection: _Inner, reason: str) -> None:
        """It ends without having become a participant."""
        self._no_more_waiting(connection)
        now = connection.loop.time()
        if connection.lane is not None:
            connection.lane.handshakes -= 1
            connection.lane.free_at = max(now, connection.lane.free_at) + PAUSE_S
        self.refused[reason] += 1
        if reason == HUB_AWAY:
            return  # nothing that they have done
        address = self._address(connection.address)
        address.suspected(now)
        address.failures = min(2 * FAILURES, address.failures + 1)
        if address.failures >= FAILURES and now >= self._told_at + LOG_S:
            news = self.refused - self._told
            self._told_at, self._told = now, Counter(self.refused)
            _log.warning(
                "%d connections did not become participants of the cluster (%s), the last one from %s: "
                "strangers, or a node whose certificate is refused",
                news.total(),
                ", ".join(f"{count} {each}" for each, count in news.most_common()),
                connection.address,
            )

    def gone(self, connection: _Inner) -> None:
        self._connections.discard(connection)

    def _no_more_waiting(self, connection: _Inner) -> None:
        self._waiting.pop(connection, None)
        self._address(connection.address).waiting.pop(connection, None)

    def _address(self, name: str) -> _Address:
        known = self._addresses.get(name)
        if known is None:
            if len(self._addresses) >= ADDRESSES:
                idle = next((old for old, each in self._addresses.items() if not each.waiting), None)
                del self._addresses[idle or next(iter(self._addresses))]
            known = self._addresses[name] = _Address(asyncio.get_running_loop().time())
        self._addresses.move_to_end(name)
        return known


class _Side(asyncio.Protocol):
    """One end of a connection that is passed on."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=CHUNK)
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            with contextlib.suppress(RuntimeError):  # it is closing
                self.other.transport.resume_reading()


class _Outer(_Side):
    """The end towards zenoh."""

    def __init__(self, inner: _Inner) -> None:
        super().__init__()
        self.other = self.inner = inner

    def data_received(self, data: bytes) -> None:
        self.inner.answered()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.inner.end()


class _Inner(_Side):
    """The end towards who has connected."""

    def __init__(self, door: Door) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.address = "?"
        self.lane: _Lane | None = None
        self.suspected = False
        self._door = door
        self._hello = bytearray()
        self._answers, self._asked = 0, True
        self._known = self._over = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self.address = _network(peer[0]) if peer else "?"
        self._deadline = self.loop.call_later(HELLO_S, self.refuse, "slow")
        self._door.arrived(self)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self._asked = True
            super().data_received(data)
            return
        if self._over:
            return
        self._hello += data
        if self.lane is not None:
            if len(self._hello) > CHUNK and self.transport is not None:
                self.transport.pause_reading()  # until zenoh's end is there
            return
        complete = hello_complete(self._hello)
        if complete is None:
            self.refuse("no TLS")
        elif complete:
            self._reach()

    def answered(self) -> None:
        """zenoh has sent something. It does so for the third time in turn only when TLS has let the other side in: its
        own part of the handshake, its part of opening a session, and the end of that."""
        if self._asked and not self._known:
            self._asked = False
            self._answers += 1
            if self._answers == 3 and self.lane is not None:
                self._known = True
                self._no_deadline()
                self._door.connected(self.lane)

    def refuse(self, reason: str) -> None:
        if not self._over:
            self._fail(reason)
            self.abort()

    def end(self) -> None:
        """zenoh has ended it, or the door is closed: what zenoh has said last goes out."""
        if not self._over:
            self._fail("handshake failed")
        if self.transport is not None:
            self.transport.close()
            self.loop.call_later(1.0, self.transport.abort)

    def abort(self) -> None:
        for side in (self, self.other):
            if side is not None and side.transport is not None:
                side.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._over:
            self._fail("left" if self.lane is None else "handshake failed")
        self._door.gone(self)
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()
            self.loop.call_later(1.0, self.other.transport.abort)

    def _fail(self, reason: str) -> None:
        self._over = True
        self._no_deadline()
        if not self._known:
            self._door.failed(self, reason)

    def _no_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _reach(self) -> None:
        self._no_deadline()
        lane = self._door.greeted(self)
        if lane is None:
            self.refuse("too many")
            return
        self.lane = lane
        seconds = SUSPECT_HANDSHAKE_S if self.suspected else HANDSHAKE_S
        self._deadline = self.loop.call_later(seconds, self.refuse, "handshake slow")
        task = self.loop.create_task(self._connect(lane))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _connect(self, lane: _Lane) -> None:
        try:
            transport, outer = await self.loop.create_connection(lambda: _Outer(self), "127.0.0.1", lane.port)
        except OSError:
            self.refuse(HUB_AWAY)
            return
        if self._over or self.transport is None:
            transport.abort()
            return
        self.other = outer
        transport.write(bytes(self._hello))
        self._hello.clear()
        self.transport.resume_reading()


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, cast("tuple[str, int]", address[:2])) for family, _, _, _, address in found))


def _network(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
