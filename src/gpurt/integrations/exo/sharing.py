"""One discovery for a whole process, however often its parts are started anew."""

from __future__ import annotations

import asyncio

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
        self._closing: set[asyncio.Task[None]] = set()

    async def acquire(self) -> GPUDiscoveryService:
        """The service; give it back with :meth:`release`."""
        loop = asyncio.get_running_loop()
        if self._users and self._loop is not loop:
            return GPUDiscoveryService()
        self._loop = loop
        self._users += 1
        if self._service is None:
            self._service = GPUDiscoveryService()
        try:
            ending = {task for task in self._closing if task.get_loop() is loop}
            if ending:
                await asyncio.wait(ending)
        except BaseException:
            self.release(self._service)
            raise
        return self._service

    def release(self, service: GPUDiscoveryService) -> None:
        """On the loop that acquired it. The last one has the service shut down by a task of its own, and waits for
        nothing: who is cancelled may not, and in a cancelled scope cannot."""
        if service is self._service:
            self._users -= 1
            if self._users:
                return
        task = asyncio.get_running_loop().create_task(service.shutdown(), name="gpurt-exo-discovery-shutdown")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


shared = SharedDiscovery()
