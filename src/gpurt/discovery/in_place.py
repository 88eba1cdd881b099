"""A probe in this process: for ``cpu``, which has no vendor library, and where there are no child processes (iOS)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Set
from concurrent.futures import Future
from functools import partial

from gpurt.discovery.examine import Request, examine
from gpurt.discovery.line import ProbeLine
from gpurt.discovery.wire import Failure, ProbeOutcome, Transcript
from gpurt.errors import ReasonCode
from gpurt.runtime.lane import Lane


class InPlaceProber:
    """Probes backends on a daemon thread each. A crash cannot be contained here, a hang can."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, Future[None]] = {}

    async def probe(
        self, name: str, *, deadline: float, verified: Set[str] = frozenset(), known: Set[str] = frozenset()
    ) -> ProbeOutcome:
        """As :meth:`gpurt.discovery.probe.ChildProber.probe`; what hangs is left behind instead of killed."""
        started = self._clock()
        transcript = Transcript()
        running = self._running.get(name)
        if running is not None and not running.done():
            transcript.fail(Failure(ReasonCode.TIMEOUT, "the previous probe has still not returned from the driver"))
            return transcript.outcome(0.0)
        lines: list[ProbeLine] = []
        lane = Lane(f"gpurt:probe:{name}")
        look = partial(examine, name, lines.append, lambda: Request(verified, known), may_die=False)
        running = self._running[name] = lane.submit(look)
        lane.stop()
        await asyncio.wait({asyncio.wrap_future(running)}, timeout=deadline)
        for line in tuple(lines):
            transcript.add(line)
        if not running.done():
            text = f"no answer within {deadline:g} s while {transcript.doing}"
            transcript.fail(Failure(ReasonCode.TIMEOUT, text))
        elif not transcript.complete:
            text = f"the probe ended without an answer while {transcript.doing}: {running.exception()!r}"
            transcript.fail(Failure(ReasonCode.CRASHED, text))
        return transcript.outcome((self._clock() - started) * 1000)
