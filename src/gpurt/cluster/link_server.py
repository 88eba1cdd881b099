"""LinkServer: where other nodes measure their way to this one. It echoes, it swallows, and it counts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.loopback import check_protected
from gpurt.cluster.security.peers import PeerCredentials

MAX_CALLERS: Final = 16
"""Connections at once; all but one are told that the node is busy."""
LONGEST_S: Final = MAX_SECONDS + 3 * STEP_S
"""Of one measurement, whatever the other side does."""

_log = logging.getLogger("gpurt.cluster.links")


class Slot:
    """A node measures one way at a time, out or in: two at once would both be wrong."""

    def __init__(self) -> None:
        self._taken = False

    def take(self) -> bool:
        """False: it is taken."""
        free, self._taken = not self._taken, True
        return free

    def give_back(self) -> None:
        self._taken = False


class LinkServer:
    """
    Args:
        slot: shared with what measures the ways from here.
        credentials: None: no TLS.
    """

    def __init__(self, slot: Slot, credentials: PeerCredentials | None = None) -> None:
        self._slot, self._credentials = slot, credentials
        self._server: asyncio.Server | None = None
        self._callers: set[asyncio.Task[None]] = set()

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
        context = None if self._credentials is None else self._credentials.listening
        self._server = await asyncio.start_server(
            self._called,
            host,
            port,
            ssl=context,
            limit=CHUNK,
            ssl_handshake_timeout=None if context is None else STEP_S,
        )
        bound: int = self._server.sockets[0].getsockname()[1]
        return join_endpoint(host, bound, tls=tls)

    async def aclose(self) -> None:
        """Stop listening, and end the measurements that are under way. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        callers = tuple(self._callers)
        for caller in callers:
            caller.cancel()
        if callers:
            await asyncio.wait(callers)

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._server is None or len(self._callers) >= MAX_CALLERS:
            writer.transport.abort()
            return
        self._callers.add(task)
        try:
            async with asyncio.timeout(LONGEST_S):
                await self._serve(reader, writer)
        except (OSError, EOFError, TimeoutError) as exc:
            _log.info("a measurement from %s has ended early: %r", writer.get_extra_info("peername"), exc)
        except (_NotOurs, CredentialsRefused) as exc:
            _log.warning("a measurement from %s is refused: %s", writer.get_extra_info("peername"), exc)
        except asyncio.CancelledError:
            # Only by ``aclose``, which waits for this task; streams would log it as an error.
            pass
        finally:
            self._callers.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._credentials is not None:
            self._credentials.check(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        async with asyncio.timeout(STEP_S):
            magic, pings, size = HELLO.unpack(await reader.readexactly(HELLO.size))
        if magic != MAGIC:
            raise _NotOurs("it does not begin as one of ours")
        if pings > MAX_PINGS or size > MAX_BYTES:
            await _say(writer, REFUSED)
            raise _NotOurs(f"{pings} pings and {size} bytes are over the limits of {MAX_PINGS} and {MAX_BYTES}")
        if not self._slot.take():
            await _say(writer, BUSY)
            return
        try:
            await _say(writer, OK)
            for _ in range(pings):
                await _say(writer, await reader.readexactly(PING_BYTES))
            await self._swallow(reader, writer, size)
        finally:
            self._slot.give_back()

    async def _swallow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int) -> None:
        total = since_mark = 0
        with contextlib.suppress(asyncio.IncompleteReadError):  # the ordinary end
            while True:
                (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
                if size == 0:
                    await _say(writer, TOTAL.pack(since_mark))
                    since_mark = 0
                    continue
                total += size
                since_mark += size
                if size > CHUNK or total > budget:
                    raise _NotOurs(f"{total} bytes in pieces of {size}, where {budget} were announced")
                await reader.readexactly(size)


class _NotOurs(Exception):
    """The other side does not keep to the protocol."""


async def _say(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
