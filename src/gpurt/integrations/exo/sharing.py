"""One discovery for a whole process, however often its parts are started anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from gpurt.discovery.service import GPUDiscoveryService


class SharedDiscovery:
    """Counts who uses one service and shuts it down after the last.

    exo makes its worker anew at every election, and all its parts with it. What was found stays with the service, so
    whoever comes next has it at once. A service belongs to one event loop at a time; while one loop uses it, another
    gets one of its own.
    """

    def __init__(self) -> None:
        self._service: GPUDiscoveryService | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._users = 0
        self._closing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def use(self) -> AsyncGenerator[GPUDiscoveryService, None]:
        """The service. Leaving waits for nothing: the service is shut down by a task of its own."""
        loop = asyncio.get_running_loop()
        if self._users and self._loop is not loop:
            async with GPUDiscoveryService() as own:
                yield own
            return
        self._users += 1
        self._loop = loop
        try:
            if self._service is None:
                self._service = GPUDiscoveryService()
            if self._closing is not None and self._closing.get_loop() is loop:
                await asyncio.wait({self._closing})
            yield self._service
        finally:
            self._users -= 1
            if not self._users and self._service is not None:
                # Nobody who is cancelled may wait here, and under a cancelled scope nobody can.
                self._closing = loop.create_task(self._service.shutdown(), name="gpurt-exo-discovery-shutdown")


shared = SharedDiscovery()
