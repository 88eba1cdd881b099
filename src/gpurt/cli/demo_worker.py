"""One worker process of the demo: started, listened to, killed, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gpurt.cli.demo_model import DEVICE_BYTES
from gpurt.errors import GPUError

GOODBYE_S: Final = 4.0
"""For a worker to leave the cluster and close its backend, before it is killed."""
TAIL_BYTES: Final = 2000


class WorkerProcess:
    """``gpurt worker`` in a session of its own, so that Ctrl-C in the terminal reaches the demo alone. It ends when
    its standard input does, also when this process dies without a word."""

    def __init__(self, name: str, directory: Path, endpoint: str, simulate: str | None) -> None:
        self.name = name
        self.accepting = False
        """It takes its part of a plan."""
        self.shards: dict[str, Any] | None = None
        """Its own words about what it holds since its last plan."""
        self._directory = directory
        self._endpoint = endpoint
        self._simulate = simulate
        self._stderr = directory / f"{name}.stderr"
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._expected_end = False

    async def start(self, weights: Path, on_progress: Callable[[int, int], None]) -> None:
        """Args: ``on_progress`` gets pieces that are loaded and pieces in all."""
        command = [sys.executable, "-m", "gpurt", "worker", "--json", "--exit-with-stdin"]
        command += ["--node", self.name, "--cluster", "demo", "--connect", self._endpoint]
        command += ["--registry", str(self._directory / self.name / "registry.json")]
        if self._simulate:
            command += ["--simulate", self._simulate]
        command += ["--weights", str(weights), "--verify"]
        with self._stderr.open("ab") as stderr:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "GPURT_MEMORY_LIMIT": str(DEVICE_BYTES)},
                start_new_session=True,
            )
        self._reader = asyncio.create_task(self._listen(self._process, on_progress), name=f"demo-{self.name}")

    async def _listen(self, process: asyncio.subprocess.Process, on_progress: Callable[[int, int], None]) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            message = json.loads(line)
            if message["event"] == "loading":
                on_progress(message["done"], message["total"])
            elif message["event"] == "shards":
                self.shards = message
            elif message["event"] == "accepting":
                self.accepting = True

    def raise_if_ended(self) -> None:
        """
        Raises:
            GPUError: the process has ended although nobody asked for it.
        """
        code = self._process.returncode if self._process else None
        if code is not None and not self._expected_end:
            raise GPUError(f"{self.name} ended with exit code {code}\n{self.stderr_tail()}", operation="demo")

    def stderr_tail(self) -> str:
        text = self._stderr.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip() if self._stderr.exists() else ""
        return f"{self.name} said: {text}" if text else f"{self.name} said nothing"

    def kill(self) -> None:
        """SIGKILL, as a crash would be."""
        self._expected_end = True
        assert self._process is not None
        self._process.kill()

    async def end(self) -> None:
        """Let it say goodbye; kill it when it does not. Idempotent."""
        self._expected_end = True
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(GOODBYE_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        await process.wait()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
