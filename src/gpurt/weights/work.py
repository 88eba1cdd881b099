"""The thread of one load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from gpurt.errors import GPUError
from gpurt.runtime.job import clear_frames
from gpurt.runtime.lane import Lane
from gpurt.weights.quiet import quiet

T = TypeVar("T")


class Work:
    """A lane of its own: reading a slow disk holds up neither the event loop nor other loads.

    Args:
        what: for the thread's name.
    """

    def __init__(self, what: str) -> None:
        self._lane = Lane(f"gpurt:weights:{what[:40]}")

    @property
    def name(self) -> str:
        return self._lane.name

    async def do(self, call: Callable[[], T]) -> T:
        """Run it there.

        Raises:
            GPUError: there can be no thread. And whatever it raises.
        """
        # No local holds the future: with an error they would keep each other.
        return await asyncio.wrap_future(self._submit(call))

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        def cleared() -> T:
            try:
                return call()
            except BaseException as exc:
                clear_frames(exc)  # whoever keeps it need not keep the document that is wrong
                raise

        try:
            return self._lane.submit(cleared)
        except GPUError:
            raise
        except RuntimeError as exc:
            raise GPUError(
                f"no thread can be started to read the files: {exc}",
                operation="load_safetensors",
                hint="end threads or processes of this user, or raise ulimit -u or the container's limit of pids",
            ) from exc

    async def make(self, objects: int, call: Callable[[], T]) -> T:
        """Run there what makes about so many objects and waits for nothing."""

        def quietly() -> T:
            with quiet(objects):
                return call()

        return await self.do(quietly)

    async def end(self, last: Callable[[], None]) -> None:
        """Run ``last`` there after everything else, whatever became of that, and let the thread end."""
        try:
            future = self._lane.submit(last)
        except RuntimeError:  # no thread was ever there, and nothing was done that takes long to undo
            last()
            return
        finally:
            self._lane.stop()
        # Shielded: a cancelled future would be dropped before it ran, and the files left open.
        await asyncio.shield(asyncio.wrap_future(future))
