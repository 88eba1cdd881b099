"""A whole simulated cluster over the real bus: this process is the hub and the master, a few others are its nodes.

At the end the master's view is compared with what the nodes themselves say of their state. What happens is decided by
the seed (:mod:`gpurt.testing.simulation_plan`); when it arrives is up to the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import psutil

from gpurt.cluster.master import Master, MasterConfig, run_master
from gpurt.errors import GPUError
from gpurt.testing.judged_view import JudgedView
from gpurt.testing.simulated_nodes import CLUSTER
from gpurt.testing.simulation_plan import Freeze, SimulatedFault, SimulationConfig, plan_freezes

CONVERGE_S: Final = 10.0
"""A cluster of 1,000 nodes is asked for everything within this."""
START_S: Final = 120.0
"""1,000 nodes on two cores join within a third of it."""
LINE_BYTES: Final = 8 << 20
_LOOK_S: Final = 0.02


@dataclass(slots=True)
class SimulationReport:
    """What came of a simulation. Seconds and bytes; those of the master's process, which is the hub as well."""

    config: SimulationConfig
    joined_s: float = 0.0
    """From the start of the processes until the view had all nodes."""
    events: int = 0
    """Applied one by one."""
    contained: int = 0
    """That came with a snapshot."""
    resyncs: dict[str, int] = field(default_factory=dict[str, int])
    """Snapshots asked for, by reason."""
    done: dict[str, int] = field(default_factory=dict[str, int])
    """Changes made and faults injected, as the nodes count them."""
    seen: dict[str, int] = field(default_factory=dict[str, int])
    """Changes of nodes that the view told, by kind."""
    converged_s: float | None = None
    """From the last step of the last node until every record was true; None: not within ``CONVERGE_S``."""
    conflicts_over_s: float | None = None
    """The same until no name was believed to be used twice. A clone that is gone shows when its node is asked again:
    see :data:`gpurt.cluster.observer.CONFLICT_INTERVAL_S`."""
    differences: list[str] = field(default_factory=list[str])
    """Nodes of which the view does not hold what is true."""
    wrong: dict[str, int] = field(default_factory=dict[str, int])
    """Events lost, applied twice, taken back, or of another run."""
    memory_bytes: int = 0
    processor_s: float = 0.0
    """From the first step until the view was compared."""
    nodes_memory_bytes: int = 0
    """Of all processes of nodes."""
    truth: str = ""
    """Digest of what is true of all nodes: equal for equal configurations."""

    @property
    def ok(self) -> bool:
        converged = self.converged_s is not None and self.conflicts_over_s is not None
        return converged and not self.differences and not self.wrong

    def document(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self), "ok": self.ok}


OnProgress = Callable[[str, float, float], None]
"""Called with what is being done, how much of it is done, and how much there is to do."""


async def simulate(config: SimulationConfig, *, on_progress: OnProgress | None = None) -> SimulationReport:
    """Run the simulation. Cancelled, it ends all its processes.

    Args:
        on_progress: called on the loop, five times a second.

    Raises:
        BusUnavailable: no library for the bus. GPUError: a process of nodes has failed or does not get ready.
    """
    view, report, freezes = JudgedView(), SimulationReport(config), plan_freezes(config)
    endpoint = f"tcp/127.0.0.1:{_free_port()}"
    seen: Counter[str] = Counter()
    async with _mastering(endpoint, view) as master, AsyncExitStack() as stack:
        watching = asyncio.create_task(_count(view, seen))
        stack.callback(watching.cancel)
        begin = time.monotonic()
        stepping: list[float] = []
        if on_progress is not None:
            telling = asyncio.create_task(_tell(on_progress, config, view, stepping))
            stack.callback(telling.cancel)
        nodes = [
            await stack.enter_async_context(_started(endpoint, process, config)) for process in range(config.processes)
        ]
        await _within(START_S, asyncio.gather(*(each.line() for each in nodes)), "the nodes do not get ready")
        if not await _until(lambda: len(view.snapshot().nodes) == config.nodes, START_S):
            raise GPUError(
                f"the master sees {len(view.snapshot().nodes)} of {config.nodes} nodes", operation="simulate"
            )
        report.joined_s = time.monotonic() - begin
        processor = time.process_time()
        stepping.append(time.monotonic())
        for each in nodes:
            each.go_on()
        freezing = [asyncio.create_task(_freeze(freeze, nodes[freeze.process])) for freeze in freezes]
        stack.push_async_callback(_end, freezing)
        said = await asyncio.gather(*(each.line() for each in nodes))
        await asyncio.gather(*freezing)
        ended = time.monotonic()
        truth: dict[str, Any] = {name: true for each in said for name, true in each["truth"].items()}

        if await _until(lambda: view.picture() == truth, CONVERGE_S):
            report.converged_s = time.monotonic() - ended
        if await _until(lambda: not view.snapshot().conflicts, CONVERGE_S):
            report.conflicts_over_s = time.monotonic() - ended
        report.processor_s = time.process_time() - processor
        report.memory_bytes = psutil.Process().memory_info().rss
        report.nodes_memory_bytes = sum(each.memory_bytes() for each in nodes)
        picture = view.picture()
        names = truth.keys() | picture.keys()
        report.differences = sorted(name for name in names if picture.get(name) != truth.get(name))
        report.resyncs = {str(reason): count for reason, count in master.observer.resyncs.items()}
        report.seen = dict(sorted(seen.items()))
    done: Counter[str] = Counter()
    for each in said:
        done.update(each["done"])
    report.done = dict(sorted(done.items()))
    if freezes:
        report.done[SimulatedFault.STALL] = len(freezes)
    report.events, report.contained, report.wrong = view.applied, view.contained, dict(view.faults)
    report.truth = hashlib.sha256(json.dumps(truth, sort_keys=True).encode()).hexdigest()[:16]
    return report


class _Nodes:
    """One process of nodes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        text = await self._process.stdout.readline()
        if not text:
            code = await self._process.wait()
            raise GPUError(f"a process of simulated nodes ended with exit code {code}", operation="simulate")
        return json.loads(text)

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    def freeze(self) -> None:
        psutil.Process(self._process.pid).suspend()

    def thaw(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self._process.pid).resume()

    def memory_bytes(self) -> int:
        return psutil.Process(self._process.pid).memory_info().rss

    async def end(self) -> None:
        """At once: its nodes have nothing to keep, and nobody is to hear that they go."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def _started(endpoint: str, process: int, config: SimulationConfig) -> AsyncGenerator[_Nodes]:
    words = [sys.executable, "-m", "gpurt.testing.simulated_nodes", endpoint, str(process), json.dumps(asdict(config))]
    nodes = _Nodes(
        await asyncio.create_subprocess_exec(
            *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=LINE_BYTES, start_new_session=True
        )
    )
    try:
        yield nodes
    finally:
        await nodes.end()


@asynccontextmanager
async def _mastering(endpoint: str, view: JudgedView) -> AsyncGenerator[Master]:
    ready: asyncio.Future[Master] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_master(MasterConfig(CLUSTER, endpoint), view, on_ready=ready.set_result))
    try:
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        yield ready.result()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def _count(view: JudgedView, seen: Counter[str]) -> None:
    async for change in view.changes():
        if change.device is None:
            seen[change.kind] += 1


async def _tell(on_progress: OnProgress, config: SimulationConfig, view: JudgedView, stepping: list[float]) -> None:
    while True:
        if not stepping:
            on_progress("nodes join", len(view.snapshot().nodes), config.nodes)
        elif (over := time.monotonic() - stepping[0]) < config.seconds:
            on_progress("changes and faults", over, config.seconds)
        else:
            on_progress("the view is compared with the nodes", 1, 1)
        await asyncio.sleep(0.2)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _freeze(freeze: Freeze, nodes: _Nodes) -> None:
    await asyncio.sleep(freeze.at_s)
    nodes.freeze()
    try:
        await asyncio.sleep(freeze.seconds)
    finally:
        nodes.thaw()


async def _within(seconds: float, work: asyncio.Future[Any], what: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        raise GPUError(f"{what} within {seconds:g} s", operation="simulate") from None


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
