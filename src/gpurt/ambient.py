"""The backends of an event loop: for calls that nobody passed a backend to.

The first such call opens one; it serves all later ones of the loop and is shut down when the loop ends. Code that opens
backends itself passes them on and never comes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from gpurt.backend import GPUBackend
from gpurt.errors import OutOfRange
from gpurt.factory import GPUBackendFactory
from gpurt.settings import canonical_name


class _Ambient:
    """What was opened on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lock = asyncio.Lock()
        self.backends: dict[str | None, GPUBackend] = {}
        """By the name that was asked for; None is automatic choice."""
        self.keeper = self._until_the_loop_ends(loop)

    async def _until_the_loop_ends(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None]:
        # asyncio.run and its like close suspended asynchronous generators as their last act before they close the
        # loop (loop.shutdown_asyncgens): the only moment at which a library can still await.
        try:
            yield
        finally:
            _ambient.pop(loop, None)
            async with self.lock:  # what is just being opened is opened first
                await self.close()

    async def open(self, name: str | None) -> GPUBackend:
        """Under the lock."""
        backend = self.backends.get(name)
        if backend is None:
            backend = await GPUBackendFactory.create_backend(name)
            if name is None and backend.name in self.backends:  # asked for by its name before
                await backend.shutdown()
            same = self.backends.setdefault(name or backend.name, backend)
            backend = self.backends[name] = same
        await backend.initialize()  # does nothing, unless somebody shut it down all the same
        return backend

    async def close(self) -> None:
        backends = set(self.backends.values())
        self.backends.clear()
        await asyncio.gather(*(backend.shutdown() for backend in backends))


_ambient: dict[asyncio.AbstractEventLoop, _Ambient] = {}


async def default_backend(name: str | None = None) -> GPUBackend:
    """The backend ``name`` of the running loop, or the best one of this machine, opened when it is first asked for.

    Always the same instance until the loop ends or ``close_default_backends`` is called; automatic choice (see
    :meth:`gpurt.factory.GPUBackendFactory.create_backend`) is made once. It belongs to everybody on this loop: do not
    shut it down, and open a backend of your own where memory limits or other options are wanted.

    Raises:
        BackendUnavailable: it cannot be used on this machine. OutOfRange: ``name`` is no text.
    """
    if not (name is None or isinstance(name, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OutOfRange(f"a backend's name is a str, not {type(name).__name__}", operation="default_backend")
    loop = asyncio.get_running_loop()
    key = None if name is None else canonical_name(name)
    while True:
        ambient = _ambient.get(loop)
        if ambient is None:
            await _close_orphans()
            if loop not in _ambient:  # nobody else was quicker
                ambient = _ambient[loop] = _Ambient(loop)
                await anext(ambient.keeper)
            continue
        async with ambient.lock:
            if _ambient.get(loop) is ambient:  # not closed while this waited
                return await ambient.open(key)


async def _close_orphans() -> None:
    """A loop that was closed without its last act left its backends open, and nobody else can close them."""
    for loop in [each for each in list(_ambient) if each.is_closed()]:
        orphan = _ambient.pop(loop, None)
        if orphan is not None:
            await orphan.close()


async def close_default_backends() -> None:
    """Shut down what ``default_backend`` opened on the running loop. A later call opens anew."""
    ambient = _ambient.get(asyncio.get_running_loop())
    if ambient is not None:
        await ambient.keeper.aclose()
