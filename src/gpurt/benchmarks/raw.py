"""What gpurt is compared with: the same copies without it, blocking, on ordinary threads."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypeVar

from gpurt.benchmarks.clocks import Timed
from gpurt.errors import GPUError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

Direction = Literal["to device", "from device"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("to device", "from device")

T = TypeVar("T")
Blocking = Callable[[], Any]
"""One operation, ready to go: whatever can be prepared has been."""

_PIECE_BYTES: Final = 1 << 20
"""A thread that copies less than this costs more than it brings."""


class Way(NamedTuple):
    """One ordinary way to do something."""

    name: str
    call: Blocking


class Raw(ABC):
    """Memory of ``nbytes`` on a device, and on the host what the fastest copy needs. Any thread may call anything.

    Use it through :func:`opened`.
    """

    copy_name: str
    """The ordinary copy of ordinary host memory."""
    ceiling_name: str
    host_share: ClassVar[int] = 0
    """How often ``nbytes`` are taken from the host's memory."""
    ordinary_may_be_fastest: ClassVar[bool] = False
    """Where both are copies by the same processor, many threads are not always faster than one."""
    device_share: ClassVar[int] = 0
    """How often ``nbytes`` are taken from the device's memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def ceiling(self, figures: Mapping[str, float], fastest: str, ordinary: str | None) -> str:
        """Which of these two ways is the ceiling, by their rates."""
        if ordinary is None or not self.ordinary_may_be_fastest:
            return fastest
        return max(fastest, ordinary, key=lambda name: figures[name])

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Free everything, also after an ``open`` that failed half-way."""

    @abstractmethod
    def writer(self, src: memoryview) -> Blocking:
        """The ordinary copy of ``src`` to the device."""

    @abstractmethod
    def reader(self, dst: memoryview) -> Blocking:
        """The ordinary copy from the device into ``dst``."""

    @abstractmethod
    def fastest(self, direction: Direction, host: memoryview, total: int | None = None) -> Blocking:
        """The ceiling: ``total`` bytes (default: as many as ``host``; a multiple of it) as fast as the machine goes.
        ``host`` is used where the fastest way has no memory of its own."""

    @abstractmethod
    def both_ways(self, host: memoryview) -> Blocking:
        """Half of ``host`` to the device and half of it from there, at once, as fast as the machine goes."""

    @abstractmethod
    def device_copies(self, nbytes: int, *, across: bool) -> tuple[Way | None, Way]:
        """Within the device, or across to another: an ordinary copy if there is one, and the fastest. ``nbytes`` are
        half of the memory at most."""

    @abstractmethod
    def allocations(self, nbytes: int) -> list[Way]:
        """Ways to allocate and free, the plain one first."""

    @abstractmethod
    def synchronize(self) -> None: ...


class HostRaw(Raw):
    """NumPy and the threads of the host: for devices whose memory is the host's, and where nothing closer is known."""

    copy_name = "np.copyto"
    ordinary_may_be_fastest = True
    host_share = 1

    def open(self) -> None:
        from gpurt.sources.host import cpu_count

        self._memory = self._made_memory()
        self._count = cpu_count()
        self._pool = ThreadPoolExecutor(self._count)
        self.ceiling_name = f"memcpy, {self._count} thread{'s' if self._count > 1 else ''}"

    def close(self) -> None:
        if hasattr(self, "_pool"):
            self._pool.shutdown()

    def writer(self, src: memoryview) -> Blocking:
        import numpy as np

        return partial(np.copyto, self._memory[: len(src)], bytes_of(src))

    def reader(self, dst: memoryview) -> Blocking:
        import numpy as np

        return partial(np.copyto, bytes_of(dst), self._memory[: len(dst)])

    def fastest(self, direction: Direction, host: memoryview, total: int | None = None) -> Blocking:
        pairs = self._pieces(bytes_of(host), self._memory[: len(host)])
        if direction == "from device":
            pairs = [(to, of) for of, to in pairs]
        repeats = 1 if total is None else total // len(host)

        def copy() -> None:
            for _ in range(repeats):
                self._at_once(pairs)

        return copy

    def both_ways(self, host: memoryview) -> Blocking:
        half, array = len(host) // 2, bytes_of(host)
        out = self._pieces(array[:half], self._memory[:half])
        back = self._pieces(self._memory[half : 2 * half], array[half : 2 * half])
        return partial(self._at_once, [pair for pairs in zip(out, back, strict=True) for pair in pairs])

    def device_copies(self, nbytes: int, *, across: bool) -> tuple[Way | None, Way]:
        import numpy as np

        here, there = self._memory[:nbytes], self._memory[nbytes : 2 * nbytes]
        ordinary = Way(self.copy_name, partial(np.copyto, there, here))
        return ordinary, Way(self.ceiling_name, partial(self._at_once, self._pieces(here, there)))

    def allocations(self, nbytes: int) -> list[Way]:
        import numpy as np

        return [Way("np.empty", lambda: np.empty(nbytes, np.uint8).nbytes)]

    def synchronize(self) -> None: ...

    def _made_memory(self) -> Bytes:
        """``nbytes`` that have been written to: of others, reading finds one page again and again."""
        import numpy as np

        return np.ones(self.nbytes, np.uint8)

    def _pieces(self, of: Bytes, to: Bytes) -> list[tuple[Bytes, Bytes]]:
        """Source and target in as many pieces as there are threads, fewer where they would be small."""
        import numpy as np

        count = max(1, min(self._count, len(of) // _PIECE_BYTES))
        return list(zip(np.array_split(of, count), np.array_split(to, count), strict=True))

    def _at_once(self, pairs: list[tuple[Bytes, Bytes]]) -> None:
        import numpy as np

        if len(pairs) == 1:
            np.copyto(pairs[0][1], pairs[0][0])
            return
        for done in wait([self._pool.submit(np.copyto, to, of) for of, to in pairs]).done:
            done.result()


class Threads:
    """What ``asyncio.to_thread`` is, with threads that can be waited for: cancelled work still runs to its end.

    Whatever a library raises there is a :class:`~gpurt.errors.GPUError` here.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(min(32, (os.cpu_count() or 1) + 4))  # as many as asyncio's own

    def __call__(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        call = partial(contextvars.copy_context().run, _translated, function, *arguments)
        return asyncio.get_running_loop().run_in_executor(self._pool, call)

    def timed(self, call: Blocking) -> Timed:
        """Seconds of a blocking call alone, without the way to its thread and back."""

        def timed() -> float:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started

        return lambda: self(timed)

    def finish(self) -> None:
        """Blocks until nothing runs any more."""
        self._pool.shutdown(cancel_futures=True)


@asynccontextmanager
async def opened(raw: Raw) -> AsyncGenerator[Threads]:
    """``raw``, opened on threads of its own, and closed when none of them uses it any more, also on cancellation."""
    threads = Threads()

    def close() -> None:
        threads.finish()
        raw.close()

    try:
        await threads(raw.open)
        yield threads
    finally:
        await asyncio.get_running_loop().run_in_executor(None, close)


def _translated(function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except GPUError:
        raise
    except Exception as exc:  # some libraries' errors are nothing more special
        raise GPUError(f"what gpurt is compared with failed: {type(exc).__name__}: {exc}") from exc


def bytes_of(view: memoryview) -> Bytes:
    """``view`` as an array."""
    import numpy as np

    return np.frombuffer(view, np.uint8)
