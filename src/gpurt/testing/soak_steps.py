"""The random steps of a soak: what is done, cancelled and compared."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import anyio

from gpurt.errors import GPUError, OutOfMemory
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.soak_model import Expected, Fate, Slot, Write

LARGEST: Final = 8 << 20
_HOT: Final = 8
"""So few allocations get a third of all copies, so that several are under way on each of them."""


class Wrong(Exception):
    """The backend did what it must not."""


class Steps:
    """Random steps over an open backend, any number of them at once. Arguments as for
    :class:`gpurt.testing.soak_run.Soak`."""

    def __init__(
        self,
        backend: DriverBackend,
        *,
        seed: int,
        keep_buffers: int,
        max_handles: int,
        largest: int,
        expected: Callable[[GPUError], bool],
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.slots: list[Slot] = []
        self._backend = backend
        self._keep_buffers = keep_buffers
        self._max_handles = max_handles
        self._largest = largest
        self._expected = expected
        self._devices = [device.device_id for device in backend.devices if device.usable]
        generator = random.Random(seed)
        self._draw = generator.random
        self._content = bytearray(generator.randbytes(2 * largest))
        """What is written is taken from here."""
        self._let_go: deque[tuple[bytearray, bytearray]] = deque()
        """Buffers of cancelled reads, and what was in them when the call had returned."""
        self._started = 0

    async def one(self) -> None:
        """A step, which is cancelled in one case of ten.

        Raises:
            Wrong: says in which step and what.
        """
        if self._draw() < 0.1:
            await self._cancelled_step()
        else:
            await self._step()

    def check_let_go(self) -> None:
        """Nobody may have written to the buffers of cancelled reads since."""
        while self._let_go:
            self._check_oldest()

    def check_sources(self) -> None:
        """Everything is over: nobody may hold what was copied from. No step may follow."""
        try:
            self._content.clear()
        except BufferError as exc:
            raise Wrong("a copy that is over still holds its source") from exc

    async def check_and_free(self, slot: Slot) -> None:
        """The end of an allocation that is no longer in ``slots``."""
        expected = slot.expect(0, slot.size)
        while True:
            try:
                content = await self._backend.copy_from_device(slot.handle)
                break
            except GPUError as exc:
                if not self._expected(exc):
                    raise
        await _compare(slot, expected, content)
        await self._backend.deallocate(slot.handle)

    async def _cancelled_step(self) -> None:
        """One step that is cancelled at a random moment: before it begins, while it is under way, too late."""
        draw = self._draw
        after_s = draw() * 0.0005 if draw() < 0.5 else 0.0
        match int(draw() * 4):
            case 0:
                try:
                    async with asyncio.timeout(after_s):
                        await self._step()
                except TimeoutError:
                    pass
            case 1:
                with anyio.move_on_after(after_s):
                    await self._step()
            case _:
                task = asyncio.create_task(self._step())
                for _ in range(int(draw() * 6)):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.result()

    async def _step(self) -> None:
        """What is chosen, and what the model says to it, is settled before the first suspension, like the submission
        itself: so the model's order is the backend's."""
        self._started += 1
        number, operation = self._started, self._choose()
        outcome = "wrong"
        try:
            outcome = await operation()
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception as exc:
            if not (isinstance(exc, GPUError) and self._expected(exc)):
                what = str(exc) if isinstance(exc, Wrong) else f"{type(exc).__name__}: {exc}"
                raise Wrong(f"step {number:,} ({operation.__name__[1:]}): {what}") from exc
            outcome = "failed as told"
        finally:
            self.outcomes[outcome] += 1

    def _choose(self) -> Callable[[], Coroutine[Any, Any, str]]:
        count, lot = len(self.slots), self._draw()
        if count < _HOT or (lot < 0.18 and count < self._max_handles):
            return self._allocate
        if lot < 0.28:
            return self._deallocate
        if lot < 0.56:
            return self._write
        if lot < 0.72:
            return self._read
        if lot < 0.86:
            return self._read_into
        return self._copy if lot < 0.999 else self._trim

    # Operations

    def _pick(self) -> Slot:
        """Often one of few, so that several operations on it are under way at once."""
        count = len(self.slots)
        if count > _HOT and self._draw() < 0.3:
            return self.slots[-1 - int(self._draw() * _HOT)]
        return self.slots[int(self._draw() * count)]

    def _range(self, size: int) -> tuple[int, int]:
        """All of it or a part: start and size."""
        draw = self._draw
        if draw() < 0.4:
            return 0, size
        start = int(draw() * size)
        return start, 1 + int(draw() * (size - start))

    def _source(self, size: int) -> tuple[memoryview, Any]:
        """Random bytes, and an object of some kind that holds them."""
        import numpy as np

        start = int(self._draw() * (len(self._content) - size))
        content = memoryview(self._content)[start : start + size]
        match int(self._draw() * 4):
            case 0:
                return content, bytes(content)
            case 1:
                return content, content
            case 2:
                return content, bytearray(content)
            case _:
                array = np.frombuffer(content, np.uint8)
                return content, array.view(np.float32).reshape(2, -1) if size % 8 == 0 else array

    async def _allocate(self) -> str:
        draw, backend = self._draw, self._backend
        lot, scale = draw(), draw()
        most = 4096 if lot < 0.8 else 1 << 16 if lot < 0.96 else 1 << 20 if lot < 0.997 else LARGEST
        size = min(1 + int(scale * (most - 1)), self._largest)
        device_id = self._devices[int(draw() * len(self._devices))]
        usage = backend.ledger.usage(device_id)
        fits = usage.limit_bytes is None or usage.committed_bytes + size <= usage.limit_bytes
        try:
            handle = await backend.allocate(device_id, size)
        except OutOfMemory as exc:
            # Other threads only give back meanwhile.
            if fits:
                raise
            if exc.requested_bytes != size or exc.limit_bytes != usage.limit_bytes:
                raise Wrong(f"the refusal of {size:,} bytes tells other numbers: {exc.fields()}") from exc
            return "refused for the limit"
        if not fits and backend.ledger.usage(device_id).peak_bytes > (usage.limit_bytes or 0):
            raise Wrong(f"{size:,} bytes were allocated over the limit: {usage}")
        slot = Slot(handle)
        self.slots.append(slot)
        if draw() < 0.8:  # the rest stays as it is: nobody knows what it holds
            await self._fill(slot, 0, size)
        return "allocated"

    async def _deallocate(self) -> str:
        slots = self.slots
        at = int(self._draw() * len(slots))
        slot, slots[at] = slots[at], slots[-1]
        slots.pop()
        await self._backend.deallocate(slot.handle)
        return "freed"

    async def _write(self) -> str:
        slot = self._pick()
        await self._fill(slot, *self._range(slot.size))
        return "written"

    async def _fill(self, slot: Slot, start: int, size: int) -> None:
        content, source = self._source(size)
        write = slot.write(start, content)
        await self._settle(write, self._backend.copy_to_device(source, slot.handle, start))

    async def _copy(self) -> str:
        source, target = self._pick(), self._pick()
        if source is target:
            half = source.size // 2
            if not half:
                return "nothing to copy"
            (source_start, size), start = self._range(half), half
        else:
            source_start, size = self._range(min(source.size, target.size))
            start = int(self._draw() * (target.size - size + 1))
        write = target.copy(start, source, source_start, size)
        call = self._backend.copy_device_to_device(
            source.handle, target.handle, size, src_offset_bytes=source_start, dst_offset_bytes=start
        )
        await self._settle(write, call)
        return "copied"

    async def _settle(self, write: Write, call: Awaitable[None]) -> None:
        try:
            await call
        except BaseException:
            write.fate = Fate.UNKNOWN
            raise
        write.fate = Fate.DONE

    async def _read(self) -> str:
        slot = self._pick()
        start, size = self._range(slot.size)
        expected = slot.expect(start, size)
        return await _compare(slot, expected, await self._backend.copy_from_device(slot.handle, start, size))

    async def _read_into(self) -> str:
        slot = self._pick()
        start, size = self._range(slot.size)
        expected, buffer = slot.expect(start, size), bytearray(size)
        try:
            await self._backend.copy_into(slot.handle, buffer, start)
        except asyncio.CancelledError:
            self._let_go.append((buffer, bytearray(buffer)))
            raise
        if len(self._let_go) > self._keep_buffers:
            self._check_oldest()
        return await _compare(slot, expected, buffer)

    def _check_oldest(self) -> None:
        buffer, content = self._let_go.popleft()
        if buffer != content:
            raise Wrong(f"a cancelled copy_into wrote to its {len(buffer):,} bytes after it had returned")

    async def _trim(self) -> str:
        await self._backend.trim()
        return "trimmed"


async def _compare(slot: Slot, expected: Expected, actual: bytes | bytearray) -> str:
    # The wake-up of a read may come before that of the write before it.
    while expected.pending:  # noqa: ASYNC110
        await asyncio.sleep(0)
    difference = expected.difference(actual)
    if difference is not None:
        raise Wrong(f"{slot.handle}: {difference}")
    return "read and known" if expected.known else "read and known in part"
