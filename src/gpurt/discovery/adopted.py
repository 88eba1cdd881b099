"""A child process that asyncio did not start, as the transport that it would have made for it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from gpurt.discovery.probe_process import EarlyProbe


class AdoptedProcess(asyncio.SubprocessTransport):
    """Feeds a :class:`asyncio.SubprocessProtocol` from the descriptors of a child. Get one by :meth:`connect`."""

    def __init__(self, early: EarlyProbe, protocol: asyncio.SubprocessProtocol) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._pid, self._exit = early.pid, early.exit
        self._protocol = protocol
        self._pipes: dict[int, asyncio.BaseTransport] = {}
        self._code: int | None = None

    @classmethod
    async def connect(cls, early: EarlyProbe, protocol: asyncio.SubprocessProtocol) -> Self:
        process = cls(early, protocol)
        loop = process._loop
        process._pipes[0], _ = await loop.connect_write_pipe(
            asyncio.BaseProtocol, os.fdopen(early.stdin, "wb", buffering=0)
        )
        protocol.connection_made(process)
        for number, fd in ((1, early.stdout), (2, early.stderr)):
            process._pipes[number], _ = await loop.connect_read_pipe(
                lambda number=number: _Output(protocol, number), os.fdopen(fd, "rb", buffering=0)
            )
        loop.add_reader(early.exit, process._reap)
        return process

    def get_pid(self) -> int:
        return self._pid

    def get_returncode(self) -> int | None:
        return self._code

    def get_pipe_transport(self, fd: int) -> asyncio.BaseTransport | None:
        return self._pipes.get(fd)

    def send_signal(self, signal: int) -> None:
        if self._code is None:
            os.kill(self._pid, signal)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def is_closing(self) -> bool:
        return self._exit < 0

    def close(self) -> None:
        """Close the pipes and, if the child has not ended, stop waiting for it."""
        for pipe in self._pipes.values():
            pipe.close()
        self._forget()

    def _reap(self) -> None:
        """The pidfd is readable: the child has ended, so this does not block."""
        try:
            _, status = os.waitpid(self._pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # somebody waits for all children of this process
            self._code = 255
        self._forget()
        self._protocol.process_exited()

    def _forget(self) -> None:
        fd, self._exit = self._exit, -1
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)


class _Output(asyncio.Protocol):
    def __init__(self, process: asyncio.SubprocessProtocol, number: int) -> None:
        self._process, self._number = process, number

    def data_received(self, data: bytes) -> None:
        self._process.pipe_data_received(self._number, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._process.pipe_connection_lost(self._number, exc)
