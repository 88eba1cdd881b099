"""Blocks on their way from files to devices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gpurt.backend import GPUBackend
from gpurt.errors import GPUError
from gpurt.runtime.files import FileChanged
from gpurt.runtime.progress import tell_progress
from gpurt.types import MemoryHandle
from gpurt.weights.plan import Block, Gather, Run, plan_transfers
from gpurt.weights.quiet import drop
from gpurt.weights.sources import Source
from gpurt.weights.work import Work

log = logging.getLogger("gpurt.weights")


@dataclass(slots=True)
class Fill:
    """A block on its way: where from, where to."""

    source: Source
    device_id: str
    block: Block
    handle: MemoryHandle | None = None

    @property
    def target(self) -> MemoryHandle:
        assert self.handle is not None, "filled before it was allocated"
        return self.handle


class Filling:
    """Fills the blocks of one load, some at a time."""

    def __init__(
        self,
        backend: GPUBackend,
        work: Work,
        fills: Sequence[Fill],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._backend = backend
        self._work = work
        self._fills = fills
        self._on_progress = on_progress
        self._progress_failure: BaseException | None = None
        self._done_bytes = 0
        self._total_bytes = 0

    async def run(self, max_concurrent: int) -> None:
        self._total_bytes = await self._work.do(self._count_bytes)
        self._tell()
        try:
            await self._fill_all(max_concurrent)
        finally:
            self._progress_failure = None  # frames of its traceback have this object: they would keep each other

    async def _fill_all(self, max_concurrent: int) -> None:
        waiting = iter(_in_turns(self._fills))
        error: BaseException | None = None
        other: BaseException | None = None
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(max_concurrent, len(self._fills))):
                    tasks.append(group.create_task(self._fill_blocks(waiting), name=self._work.name))
        except asyncio.CancelledError as exc:
            # Up to Python 3.12 a frame of the group is in its traceback and holds it: they would keep each other.
            raise exc.with_traceback(None)  # noqa: B904 (it is the same)
        except BaseExceptionGroup as failures:
            failures.__traceback__ = None  # as above
            # The first is the cause; what follows it in other tasks is the same trouble seen again.
            error = failures.exceptions[0]
            for other in failures.exceptions[1:]:
                if other is not error:
                    log.warning("also, while weights were loaded: %s", other)
        if self._progress_failure is not None:
            error = self._progress_failure
        if error is None and any(task.cancelled() for task in tasks):
            error = asyncio.CancelledError()  # by somebody else; the group takes that for an end like any other
        try:
            if error is not None:
                raise error
        finally:
            del error, other, tasks  # this frame is in their tracebacks

    async def _fill_blocks(self, waiting: Iterator[Fill]) -> None:
        for fill in waiting:
            for transfer in await self._work.make(len(fill.block.placed), partial(plan_transfers, fill.block)):
                if isinstance(transfer, Gather):
                    await self._gather(fill, transfer)
                else:
                    await self._stream(fill, transfer)

    async def _gather(self, fill: Fill, gather: Gather) -> None:
        def pack() -> tuple[bytearray, int]:
            packed = fill.source.gather(gather)
            nbytes = sum(run.size_bytes for run in gather.runs)
            drop(gather.runs)
            return packed, nbytes

        packed, nbytes = await self._work.do(pack)
        await self._backend.copy_to_device(packed, fill.target, gather.block_offset)
        self._advance(nbytes)

    async def _stream(self, fill: Fill, run: Run) -> None:
        reported = 0

        def report(done: int) -> None:
            nonlocal reported
            if done > reported:
                more, reported = done - reported, done
                self._advance(more)

        try:
            await self._backend.load_file(
                fill.source.opened,
                fill.target,
                file_offset=run.file_offset,
                size_bytes=run.size_bytes,
                handle_offset=run.block_offset,
                on_progress=report,
            )
        except FileChanged as exc:
            await self._work.do(fill.source.check_unchanged)
            # It was, and is again what it was before.
            raise fill.source.changed(exc.message) from exc
        except GPUError:
            # A range that was inside the file and is not any more: say so, rather than what came of it.
            await self._work.do(fill.source.check_unchanged)
            raise
        else:
            report(run.size_bytes)
        finally:
            reported = run.size_bytes  # reports that are still on their way come too late

    def _advance(self, nbytes: int) -> None:
        if self._progress_failure is not None:
            raise self._progress_failure  # told once; every other task ends here, too
        self._done_bytes += nbytes
        try:
            self._tell()
        except BaseException as exc:
            self._progress_failure = exc
            raise

    def _tell(self) -> None:
        if self._on_progress is not None:
            tell_progress(self._on_progress, self._done_bytes, self._total_bytes)

    def _count_bytes(self) -> int:
        return sum(each.tensor.size_bytes for fill in self._fills for each in fill.block.placed)


def _in_turns(fills: Iterable[Fill]) -> list[Fill]:
    """One block of each device after the other, so that every device's link is busy from the start."""
    turn: dict[str, int] = {}
    numbered: list[tuple[int, Fill]] = []
    for fill in fills:
        turn[fill.device_id] = turn.get(fill.device_id, -1) + 1
        numbered.append((turn[fill.device_id], fill))
    return [fill for _, fill in sorted(numbered, key=lambda item: item[0])]
