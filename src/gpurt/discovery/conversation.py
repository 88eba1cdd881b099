"""What is said between discovery and one probe: its answer is collected in bounded memory, whatever it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from gpurt.discovery.wire import MAX_ANSWER_BYTES, STDERR_TAIL_BYTES, Failure, Transcript
from gpurt.errors import ReasonCode

if TYPE_CHECKING:
    from gpurt.types import GPUDevice

Sighted = Callable[["tuple[GPUDevice, ...]"], None]


class Conversation(asyncio.SubprocessProtocol):
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
        if pipe is not None and not pipe.is_closing():
            with contextlib.suppress(RuntimeError):  # uvloop: closed since
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
