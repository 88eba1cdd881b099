"""Mailbox: finished jobs on their way back to an event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from gpurt.job import Job


class Mailbox:
    """Finished jobs on their way to one event loop; one wake-up is in flight, as a rule.

    Setting results one ``call_soon_threadsafe`` at a time costs a self-pipe write and a GIL hand-over each;
    batched, 64 concurrent calls cost half.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._jobs: deque[Job] = deque()
        # No lock: deques are atomic, and both sides look twice. A job is appended before the flag is read, and the
        # flag is lowered before the deque is emptied, so that one of the two sees the other. At worst two threads
        # wake the loop at once.
        self._waking = False

    def post(self, job: Job) -> None:
        """Any thread."""
        self._jobs.append(job)
        if self._waking and not self.loop.is_closed():  # closed before it woke, it never will
            return
        self._waking = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody will ever look, so own the outcomes here
            self._disown()

    def _deliver(self) -> None:
        self._waking = False
        jobs = self._jobs
        # As many as there are now: what comes meanwhile has its own wake-up, and the loop its turn.
        for _ in range(len(jobs)):
            future = jobs.popleft().future
            if future is not None and not future.done():
                future.set_result(None)

    def _disown(self) -> None:
        self._waking = False
        while self._jobs:
            try:
                undo = self._jobs.popleft().abandon()
            except IndexError:  # another lane was quicker
                return
            if undo is not None:
                undo()
