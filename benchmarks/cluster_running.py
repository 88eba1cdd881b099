"""Processes, observers and figures of ``benchmarks/cluster.py``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_programs import CLUSTER
from gpurt.cluster.envelope import Envelope
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.records import NodeState
from gpurt.cluster.view import MasterView
from gpurt.cluster.zenoh_engine import ZenohEngine

MIB = 1 << 20


@dataclass(frozen=True)
class Figure:
    part: str
    name: str
    value: float
    unit: str
    target: float | None = None
    more_is_better: bool = False

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.more_is_better else self.value <= self.target


class Process:
    """A program of ``cluster_programs.py``, which says lines of JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, *words: object) -> Process:
        program = Path(__file__).with_name("cluster_programs.py")
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, program, *map(str, words), stdin=pipe, stdout=pipe, limit=MIB
            )
        )

    async def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = await self.process.stdout.readline()
        if not text:
            raise SystemExit(f"a process of the benchmark ended with {await self.process.wait()}")
        return json.loads(text)

    async def ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return await self.line()

    async def kill(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        with contextlib.suppress(TimeoutError):  # those that look after others end by themselves
            async with asyncio.timeout(0.5):
                await self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def started(*words: object) -> AsyncGenerator[Process]:
    process = await Process.start(*words)
    try:
        yield process
    finally:
        await process.kill()


def new_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp/127.0.0.1:{probe.getsockname()[1]}"


@asynccontextmanager
async def observing(
    endpoint: str, *, listen: bool = True, on_event: Callable[[Envelope], None] | None = None
) -> AsyncGenerator[tuple[MasterView, ClusterObserver]]:
    engine = ZenohEngine(cluster=CLUSTER, endpoint=endpoint, listen=listen)
    view = MasterView()
    observer = ClusterObserver(engine, view, on_event=on_event)
    await engine.start()
    run = asyncio.create_task(observer.run())
    try:
        yield view, observer
    finally:
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
        await engine.close()


async def until(condition: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (a view is asked; it tells nobody)
            await asyncio.sleep(0.002)


def healthy(view: MasterView) -> int:
    return sum(record.state is NodeState.HEALTHY for record in view.snapshot().nodes.values())
