"""HotChangeWatcher: says soon after a change that there was one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpurt.hotchange.cause import Cause
from gpurt.hotchange.marks import Marks, changes, read_marks
from gpurt.hotchange.sleep import SleepClock
from gpurt.hotchange.uevents import UeventSocket
from gpurt.runtime.lane import off_loop

DEBOUNCE_S: Final = 0.25
"""A card that is plugged in makes a dozen events, and its driver needs a moment."""
GAP_S: Final = 2.0
"""Between two reports: a card that resets itself in a loop must not keep every driver busy."""
TICK_S: Final = 2.0
"""How often marks and clocks are compared. Containers of another user namespace get no events of the kernel."""

_log = logging.getLogger("gpurt.hotchange")

OnChange = Callable[[frozenset[Cause]], None]


class HotChangeWatcher:
    """Watches from ``start`` to ``close``, on one event loop at a time.

    Args:
        on_change: called on the loop, 0.25 s after the first of several changes, with all their causes, and not
            again for 2 s. It must not block, and must not raise.
        root: where ``/dev``, ``/proc`` and ``/sys`` are found; events of the kernel are heard with ``/`` only.
        wanted: asked at each tick; False closes the watcher, for nobody listens any more.
        sleep: notices that the machine has slept; None is one with the system's clocks.
        tick_s: see :data:`TICK_S`.
    """

    def __init__(
        self,
        on_change: OnChange,
        *,
        root: Path = Path("/"),
        wanted: Callable[[], bool] = lambda: True,
        sleep: SleepClock | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        self._on_change = on_change
        self._root = root
        self._wanted = wanted
        self._sleep = sleep
        self._tick_s = tick_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: UeventSocket | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._reading: asyncio.Task[None] | None = None
        self._causes: set[Cause] = set()
        self._told_at = float("-inf")
        self._marks: Marks | None = None
        self._clock: SleepClock | None = None

    @property
    def hears_kernel(self) -> bool:
        """Whether changes come by themselves; else they are seen at the next tick."""
        return self._socket is not None

    def start(self) -> None:
        """Begin on the running loop. Does nothing when that has been done."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self.close()
        self._loop = loop
        self._clock = self._sleep or SleepClock()
        self._clock.slept_s()  # what was before is nobody's business
        if self._root == Path("/"):
            try:
                self._socket = UeventSocket(lambda: self._note(Cause.KERNEL))
            except OSError as exc:
                _log.info("the kernel's events cannot be heard (%s); device nodes are compared every %g s", exc, TICK_S)
        self._tick()

    def close(self) -> None:
        """Idempotent; may be called when the loop is closed."""
        if self._socket is not None:
            self._socket.close()
        for timer in (self._ticking, self._telling):
            if timer is not None:
                timer.cancel()
        if self._reading is not None and not self._reading.get_loop().is_closed():
            self._reading.cancel()
        self._loop = self._socket = self._ticking = self._telling = self._reading = None
        self._marks = None
        self._causes.clear()

    def _tick(self) -> None:
        if not self._wanted():
            self.close()
            return
        assert self._loop is not None
        assert self._clock is not None
        if self._clock.slept_s():
            self._note(Cause.RESUMED)
        if self._reading is None:
            self._reading = self._loop.create_task(self._compare(), name="gpurt hot changes")
        self._ticking = self._loop.call_later(self._tick_s, self._tick)

    async def _compare(self) -> None:
        try:
            marks = await off_loop("marks", lambda: read_marks(self._root))
        finally:
            if self._reading is asyncio.current_task():
                self._reading = None
        if self._marks is not None:
            for cause in changes(self._marks, marks):
                self._note(cause)
        self._marks = marks

    def _note(self, cause: Cause) -> None:
        if self._loop is None:
            return
        self._causes.add(cause)
        if self._telling is None:
            delay = max(DEBOUNCE_S, self._told_at + GAP_S - self._loop.time())
            self._telling = self._loop.call_later(delay, self._tell)

    def _tell(self) -> None:
        assert self._loop is not None
        self._telling, self._told_at = None, self._loop.time()
        causes, self._causes = frozenset(self._causes), set()
        _log.info("looking again: %s", ", ".join(sorted(causes)))
        self._on_change(causes)
