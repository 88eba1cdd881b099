"""One probe of one backend: a child process with a deadline, whatever happens in it.

A driver call may hang for ever or crash the process, so first contact is made by somebody who can be killed. The
child has its own session, and all of it is killed at the end, because libraries fork. What the child printed on
stderr is kept for the report.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Final

from gpurt.discovery.conversation import Conversation, Sighted
from gpurt.discovery.probe_process import (
    EarlyProbe,
    child_environment,
    is_alive,
    kill_tree,
    new_token,
    probe_command,
)
from gpurt.discovery.wire import Failure, ProbeOutcome, Transcript
from gpurt.errors import ReasonCode
from gpurt.runtime.lane import off_loop
from gpurt.sources.nvidia_traces import NO_NVIDIA_DRIVER, has_nvidia_traces

CLOSE_GRACE_S: Final = 1.0
"""How long a child that has answered may take to close its driver and exit."""
DRAIN_S: Final = 0.25
"""How long after the child's exit its answer may still be in the pipe. A grandchild may hold the pipe for ever."""
REAP_S: Final = 0.5
"""How long to wait for a killed child. One in uninterruptible sleep (state D) does not die until its driver lets go."""


def has_child_processes(platform: str) -> bool:
    """Whether a probe can be a child: not on iOS, nor where ``sys.executable`` is not an interpreter."""
    return platform != "ios" and bool(sys.executable) and not getattr(sys, "frozen", False)


def _no_trace_of_nvidia(environ: Mapping[str, str]) -> Failure | None:
    """What the probe of cuda would say, where the file system says it: no process is needed for that."""
    if sys.platform != "linux" or has_nvidia_traces(Path("/"), environ):
        return None
    reason, message, hint = NO_NVIDIA_DRIVER
    if importlib.util.find_spec("cupy") is None and importlib.util.find_spec("cupy_backends") is None:
        from gpurt.backends.cupy.runtime import CUDA_INSTALL_HINT

        message, hint = f"{message}; CuPy for CUDA is not installed", f"{hint}; {CUDA_INSTALL_HINT}"
    return Failure(reason, message, hint)


class ChildProber:
    """Probes backends in child processes, never more than one of a backend at a time.

    Args:
        command: backend name → command line. Tests put scripts here.
        clock: seconds, monotonic; measures ``elapsed_ms``.
    """

    def __init__(
        self,
        *,
        command: Callable[[str], Sequence[str]] = probe_command,
        clock: Callable[[], float] = time.monotonic,
        kill: Callable[[int], None] | None = None,
    ) -> None:
        self._command = command
        self._clock = clock
        self._kill = kill or kill_tree
        self._alive: dict[str, int] = {}
        self._prepared: dict[str, Conversation] = {}

    async def prepare(self, name: str, environ: Mapping[str, str]) -> None:
        """Start the process of the next probe of ``name`` with this environment now.

        It looks at NVML and waits to be asked before it opens anything. It ends with the probe, with this process,
        or by :meth:`discard`; whatever it does meanwhile is the probe's answer.

        Raises:
            OSError, NotImplementedError: the process cannot be started; the probe will say so, too.
        """
        if name not in self._prepared:
            self._prepared[name] = await self._start(name, environ)

    async def adopt(self, early: EarlyProbe) -> None:
        """Take over a process that was started before there was an event loop, as one that :meth:`prepare` started."""
        from gpurt.discovery.adopted import AdoptedProcess

        talk = Conversation(early.token, early.environ)
        await AdoptedProcess.connect(early, talk)
        self._prepared[early.name] = talk

    async def discard(self) -> None:
        """Kill the processes that were prepared and never asked."""
        while self._prepared:
            await self._end(*self._prepared.popitem())

    async def probe(
        self,
        name: str,
        *,
        deadline: float,
        environ: Mapping[str, str],
        verified: Set[str] = frozenset(),
        known: Set[str] = frozenset(),
        on_sighted: Sighted | None = None,
    ) -> ProbeOutcome:
        """Probe one backend. Returns within ``deadline`` + 1 s, and never raises for what happens in the child.

        Cancellation kills the child.

        Args:
            environ: the child's whole environment.
            verified: keys of devices that need no verification.
            known: signatures under which the answer is known.
            on_sighted: called with the devices that a management library shows, before the driver is opened.
        """
        started = self._clock()
        request = {"deadline": deadline, "verified": sorted(verified), "known": sorted(known)}
        transcript = await self._converse(name, deadline, environ, json.dumps(request).encode(), on_sighted)
        return transcript.outcome((self._clock() - started) * 1000)

    async def _converse(
        self, name: str, deadline: float, environ: Mapping[str, str], request: bytes, on_sighted: Sighted | None
    ) -> Transcript:
        stuck = self._alive.get(name)
        if stuck is not None:
            if await off_loop("process", lambda: is_alive(stuck)):
                transcript = Transcript()
                text = (
                    f"the previous probe (process {stuck}) is still there although it was killed: stuck in the driver"
                )
                transcript.fail(Failure(ReasonCode.TIMEOUT, text))
                return transcript
            del self._alive[name]
        talk = self._prepared.pop(name, None)
        if talk is not None and talk.environ != environ:
            await self._end(name, talk)
            talk = None
        if talk is None and name == "cuda" and self._command is probe_command:
            absent = await off_loop("traces", lambda: _no_trace_of_nvidia(environ))
            if absent is not None:
                transcript = Transcript()
                transcript.fail(absent)
                return transcript
        if talk is None:
            try:
                talk = await self._start(name, environ)
            except (OSError, NotImplementedError) as exc:
                # Windows: only the proactor loop has child processes.
                transcript = Transcript()
                transcript.fail(Failure(ReasonCode.ERROR, f"the probe process could not be started: {exc}"))
                return transcript
        try:
            talk.tell_sighted(on_sighted)
            talk.ask(request)
            await self._listen(talk, deadline)
        finally:
            await self._end(name, talk)
        return talk.transcript

    async def _start(self, name: str, environ: Mapping[str, str]) -> Conversation:
        """Cancelled in the middle, the process is waited for until it is there, and killed: of one that is given up
        halfway asyncio kills no descendants, and waits for the pipes that they hold."""
        talk = Conversation(new_token(), environ)
        starting = asyncio.ensure_future(self._spawn(name, talk))
        cancelled: asyncio.CancelledError | None = None
        while not starting.done():
            try:
                await asyncio.wait({starting})
            except asyncio.CancelledError as exc:
                cancelled = exc
        if cancelled is None:
            starting.result()
            return talk
        if starting.exception() is None:
            await self._end(name, talk)
        raise cancelled

    async def _spawn(self, name: str, talk: Conversation) -> None:
        await asyncio.get_running_loop().subprocess_exec(
            lambda: talk,
            *self._command(name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(talk.environ, talk.token),
            start_new_session=True,
        )

    async def _end(self, name: str, talk: Conversation) -> None:
        pid = talk.transport.get_pid()
        self._kill(pid)
        await asyncio.wait({talk.exited}, timeout=REAP_S)
        if not talk.exited.done():
            self._alive[name] = pid
        talk.transport.close()

    async def _listen(self, talk: Conversation, deadline: float) -> None:
        """Until the answer is complete, cannot become so, or is late."""
        await asyncio.wait({talk.answered, talk.exited}, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
        if talk.transcript.unchanged:
            return  # there is nothing open that it would have to close
        if talk.answered.done() and not talk.broken:
            await asyncio.wait({talk.exited}, timeout=CLOSE_GRACE_S)
        elif talk.exited.done():
            await asyncio.wait({talk.answered, talk.silent}, timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        if talk.transcript.complete:
            return
        doing = talk.transcript.doing
        if talk.exited.done():
            text = f"the probe {_ending(talk.exited.result())} without an answer while {doing}"
            talk.transcript.fail(Failure(ReasonCode.CRASHED, text + talk.last_words()))
        else:
            text = f"no answer within {deadline:g} s while {doing}; the probe was killed"
            talk.transcript.fail(Failure(ReasonCode.TIMEOUT, text + talk.last_words()))


def _ending(code: int) -> str:
    if code < 0:
        try:
            return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"ended with exit code {code}"
