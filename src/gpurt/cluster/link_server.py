"""LinkServer: where other nodes measure their way to this one. It echoes, it swallows, and it counts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from typing import Final

from gpurt.cluster.link_protocol import (
    BUSY,
    CHUNK,
    HELLO,
    MAGIC,
    MAX_BYTES,
    MAX_PINGS,
    MAX_SECONDS,
    OK,
    PING_BYTES,
    REFUSED,
    SIZE,
    STEP_S,
    TOTAL,
    join_endpoint,
)
from gpurt.cluster.link_wire import Wire
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.loopback import check_protected
from gpurt.cluster.security.peers import Credentials
from gpurt.runtime.lane import off_loop

MAX_CALLERS: Final = 8
"""Connections at once, a thread each; all but one are told that the node is busy."""
LONGEST_S: Final = MAX_SECONDS + 3 * STEP_S
"""Of one measurement, whatever the other side does. Who does not say what it wants is waited for for two steps."""

_log = logging.getLogger("gpurt.cluster.links")


class Slot:
    """A node measures one way at a time, out or in: two at once would both be wrong. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self) -> bool:
        """False: it is taken."""
        return self._lock.acquire(blocking=False)

    def give_back(self) -> None:
        self._lock.release()


class LinkServer:
    """
    Args:
        slot: shared with what measures the ways from here.
        credentials: of the node, asked for each connection; None: no TLS.
    """

    def __init__(self, slot: Slot, credentials: Credentials | None = None) -> None:
        self._slot, self._credentials = slot, credentials
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._callers: dict[Wire, asyncio.Task[None]] = {}

    async def start(self, host: str, port: int = 0, *, insecure: bool = False) -> str:
        """Listen at an address that others know this node by; returns the endpoint for them.

        Args:
            port: 0: one that is free.

        Raises:
            InsecureEndpoint: others could reach it without certificates, and nobody has said that this is wanted.
            OSError: it is no address of this machine, or in use.
        """
        tls = self._credentials is not None
        check_protected(join_endpoint(host, port or 1, tls=tls), tls=tls, insecure=insecure)
        self._listener = await off_loop("link", lambda: _listen(host, port))
        self._accepting = asyncio.create_task(self._accept(self._listener), name="gpurt-cluster-links")
        return join_endpoint(host, self._listener.getsockname()[1], tls=tls)

    async def aclose(self) -> None:
        """Stop listening, and end the measurements that are under way. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is None or self._accepting is None:
            return
        self._accepting.cancel()
        await asyncio.wait({self._accepting})
        listener.close()
        for wire in self._callers:
            wire.abort()
        if self._callers:
            await asyncio.wait(self._callers.values())

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as exc:  # it was gone before it was taken, or there are too many open files
                _log.warning("a measurement could not be taken: %s", exc)
                await asyncio.sleep(STEP_S)
                continue
            if len(self._callers) >= MAX_CALLERS:
                connection.close()
                continue
            wire = Wire(connection, 2 * STEP_S)
            task = asyncio.create_task(self._called(wire, str(address[0])), name="gpurt-cluster-link")
            self._callers[wire] = task

    async def _called(self, wire: Wire, address: str) -> None:
        try:
            await off_loop("link", lambda: self._serve(wire))
        except (_NotOurs, CredentialsRefused) as exc:
            _log.warning("a measurement from %s is refused: %s", address, exc)
        except (OSError, EOFError) as exc:
            _log.info("a measurement from %s has ended early: %r", address, exc)
        finally:
            del self._callers[wire]
            wire.abort()

    # On a thread

    def _serve(self, wire: Wire) -> None:
        try:
            if self._credentials is not None:
                credentials = self._credentials()
                credentials.check(wire.protect(credentials.listening, listening=True))
            magic, pings, size = HELLO.unpack(wire.read(HELLO.size))
            if magic != MAGIC:
                raise _NotOurs("it does not begin as one of ours")
            wire.allow(LONGEST_S)
            if pings > MAX_PINGS or size > MAX_BYTES:
                wire.send(REFUSED)
                raise _NotOurs(f"{pings} pings and {size} bytes are over the limits of {MAX_PINGS} and {MAX_BYTES}")
            if not self._slot.take():
                wire.send(BUSY)
                return
            try:
                wire.send(OK)
                for _ in range(pings):
                    wire.send(wire.read(PING_BYTES))
                _swallow(wire, size)
            finally:
                self._slot.give_back()
        finally:
            wire.close()


def _swallow(wire: Wire, budget: int) -> None:
    total = since_mark = 0
    with contextlib.suppress(EOFError):  # the ordinary end
        while True:
            (size,) = SIZE.unpack(wire.read(SIZE.size))
            if size == 0:
                wire.send(TOTAL.pack(since_mark))
                since_mark = 0
                continue
            total += size
            since_mark += size
            if size > CHUNK or total > budget:
                raise _NotOurs(f"{total} bytes in pieces of {size}, where {budget} were announced")
            wire.swallow(size)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=MAX_CALLERS)
    listener.setblocking(False)
    return listener


class _NotOurs(Exception):
    """The other side does not keep to the protocol."""
