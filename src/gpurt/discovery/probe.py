"""One probe of one backend: a child process with a deadline, whatever happens in it.

A driver call may hang for ever or crash the process, so first contact is made by somebody who can be killed. The
child has its own session, and all of it is killed at the end, because libraries fork. What the child printed on
stderr is kept for the report.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from gpurt.discovery.probe_child import ENV_PATH, ENV_TOKEN
from gpurt.discovery.wire import (
    MAX_ANSWER_BYTES,
    STDERR_TAIL_BYTES,
    Failure,
    ProbeOutcome,
    Transcript,
)
from gpurt.errors import ReasonCode
from gpurt.offload import off_loop

if TYPE_CHECKING:
    from gpurt.types import GPUDevice

CLOSE_GRACE_S: Final = 1.0
"""How long a child that has answered may take to close its driver and exit."""
DRAIN_S: Final = 0.25
"""How long after the child's exit its answer may still be in the pipe. A grandchild may hold the pipe for ever."""
REAP_S: Final = 0.5
"""How long to wait for a killed child. One in uninterruptible sleep (state D) does not die until its driver lets go."""


Sighted = Callable[["tuple[GPUDevice, ...]"], None]


def has_child_processes(platform: str) -> bool:
    """Whether a probe can be a child: not on iOS, nor where ``sys.executable`` is not an interpreter."""
    return platform != "ios" and bool(sys.executable) and not getattr(sys, "frozen", False)


def probe_command(name: str) -> tuple[str, ...]:
    """The command line of a probe. ``-P``: nothing in the current directory may shadow a module."""
    return (sys.executable, "-P", "-m", "gpurt.discovery.probe_child", name)


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
        self._prepared: dict[str, _Conversation] = {}

    async def prepare(self, name: str, environ: Mapping[str, str]) -> None:
        """Start the process of the next probe of ``name`` with this environment now.

        It looks at NVML and waits to be asked before it opens anything. It ends with the probe, with this process,
        or by :meth:`discard`; whatever it does meanwhile is the probe's answer.

        Raises:
            OSError, NotImplementedError: the process cannot be started; the probe will say so, too.
        """
        if name not in self._prepared:
            self._prepared[name] = await self._start(name, environ)

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
            if await off_loop("process", lambda: _is_alive(stuck)):
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

    async def _start(self, name: str, environ: Mapping[str, str]) -> _Conversation:
        talk = _Conversation(secrets.token_hex(8), environ)
        await asyncio.get_running_loop().subprocess_exec(
            lambda: talk,
            *self._command(name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_child_environment(environ, talk.token),
            start_new_session=True,
        )
        return talk

    async def _end(self, name: str, talk: _Conversation) -> None:
        pid = talk.transport.get_pid()
        self._kill(pid)
        await asyncio.wait({talk.exited}, timeout=REAP_S)
        if not talk.exited.done():
            self._alive[name] = pid
        talk.transport.close()

    async def _listen(self, talk: _Conversation, deadline: float) -> None:
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


class _Conversation(asyncio.SubprocessProtocol):
    """Collects what a child says, in bounded memory."""

    transport: asyncio.SubprocessTransport

    def __init__(self, token: str, environ: Mapping[str, str]) -> None:
        loop = asyncio.get_running_loop()
        self.token = token
        self.environ = dict(environ)
        self.transcript = Transcript()
        self.answered: asyncio.Future[None] = loop.create_future()
        """The transcript is complete."""
        self.broken = False
        """What it said is no answer: there is no reason to let it live."""
        self.exited: asyncio.Future[int] = loop.create_future()
        """The child's return code. Known although a grandchild keeps the pipes open."""
        self.silent: asyncio.Future[None] = loop.create_future()
        """Everybody has closed both pipes."""
        self._prefix = f"{token} ".encode()
        self._partial = bytearray()
        self._received = 0
        self._stderr = bytearray()
        self._open_pipes = {1, 2}
        self._on_sighted: Sighted | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is one by its methods only, so isinstance would say no.
        self.transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._stderr += data
            del self._stderr[:-STDERR_TAIL_BYTES]
        elif not self.transcript.complete:
            self._hear(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open_pipes.discard(fd)
        if not self._open_pipes and not self.silent.done():
            self.silent.set_result(None)

    def process_exited(self) -> None:
        code = self.transport.get_returncode()
        if not self.exited.done():
            self.exited.set_result(-1 if code is None else code)

    def ask(self, request: bytes) -> None:
        """Send the request. A child that does not read it has ended, or will be late."""
        pipe = cast("asyncio.WriteTransport | None", self.transport.get_pipe_transport(0))
        if pipe is not None:
            pipe.write(request + b"\n")

    def tell_sighted(self, on_sighted: Sighted | None) -> None:
        """Have ``on_sighted`` called with what is or will be sighted. Once at most."""
        self._on_sighted = on_sighted
        if on_sighted is not None and self.transcript.sighted and not self.transcript.complete:
            self._on_sighted = None
            on_sighted(self.transcript.sighted)

    def last_words(self) -> str:
        """``": <last line on stderr>"``, or nothing."""
        lines = self._stderr.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last[:300]}" if last else ""

    def _hear(self, data: bytes) -> None:
        from pydantic import ValidationError

        from gpurt.discovery.line import ProbeLine

        self._received += len(data)
        if self._received > MAX_ANSWER_BYTES:
            self._end(f"the probe answered with more than {MAX_ANSWER_BYTES >> 20} MiB")
            return
        *lines, rest = (bytes(self._partial) + data).split(b"\n")
        self._partial[:] = rest
        for line in lines:
            if not line.startswith(self._prefix):
                continue
            try:
                self.transcript.add(ProbeLine.model_validate_json(line[len(self._prefix) :]))
            except ValidationError as exc:
                self._end(f"the probe answered with something that is no answer: {exc.errors()[0]['msg']}")
            if self.transcript.complete:
                self._end(None)
                return
        self.tell_sighted(self._on_sighted)

    def _end(self, problem: str | None) -> None:
        if problem:
            self.broken = True
            self.transcript.fail(Failure(ReasonCode.CRASHED, problem))
        self._partial.clear()
        if not self.answered.done():
            self.answered.set_result(None)


def _child_environment(environ: Mapping[str, str], token: str) -> dict[str, str]:
    env = dict(environ)
    env[ENV_TOKEN] = token
    # pydantic would read the metadata of every installed package to look for plug-ins of its own.
    env.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    env[ENV_PATH] = json.dumps([entry for entry in sys.path if entry])
    # gpurt itself must be found before ENV_PATH can be read. An installed one is; a source tree may not be.
    root = str(Path(__file__).parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), root)))
    return env


def _ending(code: int) -> str:
    if code < 0:
        try:
            return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"ended with exit code {code}"


def kill_tree(pid: int) -> None:
    """Kill a probe and whatever it forked."""
    if sys.platform == "win32":
        import psutil

        try:
            processes = psutil.Process(pid).children(recursive=True)
            for process in (*processes, psutil.Process(pid)):
                process.kill()
        except psutil.Error:
            return  # gone already
    else:
        try:
            # The child leads its own session, so this reaches its descendants also after it has exited.
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return  # all gone; macOS says EPERM for a group of zombies


def _is_alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
