"""A TCP connection that can be cut like a cable: the bytes stop, and nobody is told."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

CHUNK_BYTES = 64 << 10


class StallingProxy:
    """``async with StallingProxy(target) as proxy``: who connects to ``proxy.port`` talks to port ``target`` of this
    machine, except between ``stall`` and ``resume``. Then connections stay open and are even accepted, and what is
    sent waits, as behind a switch that has lost its power for a moment.

    Args:
        delay_s: how long every piece takes, in each direction.
    """

    def __init__(self, target: int, *, delay_s: float = 0.0) -> None:
        self.port = 0
        self._delay_s = delay_s
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        self.drop()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stall(self) -> None:
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def drop(self) -> None:
        """End every connection, as a router does that has forgotten them."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):  # of either side: the other one's connection ends, too
                target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self._target)
                self._writers.add(target_writer)
                try:
                    async with asyncio.TaskGroup() as group:
                        there = group.create_task(self._pump(reader, target_writer))
                        back = group.create_task(self._pump(target_reader, writer))
                        await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
                        there.cancel()
                        back.cancel()
                finally:
                    self._writers.discard(target_writer)
                    target_writer.transport.abort()
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._flowing.wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                writer.write(data)
                await writer.drain()
