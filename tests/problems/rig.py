"""A machine whose backends answer what a test says, a backend that can be plugged in, and a small cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import psutil

from gpurt import plugins
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.master import MasterConfig, run_master
from gpurt.cluster.records import NodeRecord
from gpurt.cluster.view import MasterView
from gpurt.cluster.worker import Worker, WorkerConfig, run_worker
from gpurt.discovery.conversation import Sighted
from gpurt.discovery.events import DeviceEvent
from gpurt.discovery.probe import ChildProber
from gpurt.discovery.probe_child import ENV_TOKEN
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.sight import steps
from gpurt.discovery.subscription import Subscription
from gpurt.discovery.wire import Failure, ProbeOutcome, Transcript
from gpurt.driver import Driver
from gpurt.errors import ReasonCode
from gpurt.testing.faults import FaultyDriver
from gpurt.testing.profiles import Profile, parse_simulation
from gpurt.testing.simulated import SimulatedDriver
from gpurt.types import GPUDevice

Answer = ProbeOutcome | Failure | Sequence[GPUDevice]


class Host:
    """Stands in for probe processes: what each backend answers now. A callable is given the probe's deadline."""

    def __init__(self, **shows: Answer | Callable[[float], ProbeOutcome]) -> None:
        self.shows = dict(shows)
        self.probes: list[str] = []
        self.deadlines: list[float] = []

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
        self.probes.append(name)
        self.deadlines.append(deadline)
        await asyncio.sleep(0)
        shown = self.shows[name]
        if callable(shown):
            return shown(deadline)
        if isinstance(shown, Failure):
            return ProbeOutcome(failure=shown)
        return shown if isinstance(shown, ProbeOutcome) else ProbeOutcome(verified=tuple(shown))

    def service(self, registry: Path, **options: Any) -> GPUDiscoveryService:
        options = {"backends": list(self.shows), "environ": {}, "interval": 0.02} | options
        return GPUDiscoveryService(registry_path=registry, prober=self, **options)


class Tree:
    """Probes that look at a file tree and at recorded answers of libraries; no driver opens anything."""

    def __init__(self, root: Path, **tables: Any) -> None:
        self.root = root
        self._tables = root / "tables"
        self._tables.mkdir()
        for source, table in tables.items():
            (self._tables / f"{source}.json").write_text(json.dumps(table))

    async def probe(self, name: str, *, environ: Mapping[str, str], **_: Any) -> ProbeOutcome:
        def look() -> ProbeOutcome:
            transcript = Transcript()
            for line in steps(name, environ=environ, root=self.root, tables=self._tables):
                transcript.add(line)
            transcript.fail(Failure(ReasonCode.NO_LIBRARY, f"the library of {name} is not installed"))
            return transcript.outcome(1.0)

        return await asyncio.to_thread(look)

    async def discover(self, *names: str, **variables: str) -> DiscoveryResult:
        registry = self.root / "registry.json"
        async with GPUDiscoveryService(
            registry, backends=names, prober=self, root=self.root, environ=variables
        ) as service:
            return await service.discover_all_devices()


def answers_after(seconds: float, *devices: GPUDevice) -> Callable[[float], ProbeOutcome]:
    """A driver that needs so long: one that has less time is killed at its deadline."""

    def probe(deadline: float) -> ProbeOutcome:
        if deadline >= seconds:
            return ProbeOutcome(verified=devices, elapsed_ms=seconds * 1000)
        failure = Failure(ReasonCode.TIMEOUT, f"no answer within {deadline:g} s while opening; the probe was killed")
        return ProbeOutcome(failure=failure, elapsed_ms=deadline * 1000)

    return probe


async def take(events: Subscription, count: int) -> list[DeviceEvent]:
    async with asyncio.timeout(5):
        return [await anext(events) for _ in range(count)]


async def rest(service: GPUDiscoveryService, events: Subscription) -> list[DeviceEvent]:
    """What is left to hear once the service is shut down."""
    await service.shutdown()
    return [event async for event in events]


def kinds(events: Sequence[DeviceEvent]) -> list[tuple[str, str | None]]:
    return [(str(event.type), event.stable_id or event.backend) for event in events]


# Probes that are real processes, of scripts

_PRELUDE = f"""
import json, os, signal, sys, time
name = sys.argv[1]
open(os.path.join({{folder!r}}, f"{{{{name}}}}-{{{{os.getpid()}}}}"), "w").close()
def say(stage, **fields):
    os.write(1, (os.environ[{ENV_TOKEN!r}] + " " + json.dumps(dict(stage=stage, **fields)) + "\\n").encode())
"""


class Children:
    """Probes whose processes run a script of the test's; each leaves its backend's name and its number."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder / "children"
        self.folder.mkdir()
        text = _PRELUDE.format(folder=str(self.folder)) + textwrap.dedent(script)
        self.prober = ChildProber(command=lambda name: (sys.executable, "-S", "-c", text, name))

    def started(self, name: str) -> int:
        return sum(entry.name.startswith(f"{name}-") for entry in self.folder.iterdir())

    @property
    def alive(self) -> list[int]:
        def runs(pid: int) -> bool:
            try:
                return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return False

        return [pid for pid in (int(each.name.rpartition("-")[2]) for each in self.folder.iterdir()) if runs(pid)]

    def service(self, registry: Path, *names: str, **options: Any) -> GPUDiscoveryService:
        options = {"environ": dict(os.environ), "interval": 0.02} | options
        return GPUDiscoveryService(registry_path=registry, backends=names, prober=self.prober, **options)


def as_json(*devices: GPUDevice) -> list[Any]:
    return [device.model_dump(mode="json") for device in devices]


# A backend of this process


class Machine(SimulatedDriver):
    """Simulated devices that pass for real ones, so that they are verified and remembered as those are."""

    def open(self) -> Sequence[GPUDevice]:
        return [device.model_copy(update={"simulated": False}) for device in super().open()]


def machine(spec: str | Sequence[Profile], name: str = "accel") -> FaultyDriver:
    """Devices that can go wrong, of the backend ``name``."""
    profiles = parse_simulation(spec) if isinstance(spec, str) else spec
    return FaultyDriver(type("Machine", (Machine,), {"name": name})(profiles))


@contextlib.contextmanager
def plugged(driver: Driver, name: str | None = None) -> Iterator[None]:
    """``driver`` is what a backend of this process is made of."""
    name = name or driver.name
    plugins.register(name, lambda: driver, replace=True)
    try:
        yield
    finally:
        plugins.unregister(name)


# Workers and their master


class Cluster:
    """Workers and a master on one bus, all of this process."""

    def __init__(self, group: asyncio.TaskGroup, folder: Path) -> None:
        self.view = MasterView(grace_s=0.05)
        self.workers: dict[str, Worker] = {}
        self.bus = InProcessBus("test")
        self._group = group
        self._folder = folder
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._engines: dict[str, InProcessEngine] = {}

    async def master(self) -> None:
        listening = asyncio.Event()
        work = run_master(
            MasterConfig("test"), self.view, engine=InProcessEngine(self.bus), on_ready=lambda _: listening.set()
        )
        self._tasks["(master)"] = self._group.create_task(work)
        await listening.wait()

    async def start(self, node: str, **config: Any) -> Worker:
        """A worker that has joined with what it looked up."""
        ready = asyncio.Event()

        async def joined(worker: Worker) -> None:
            self.workers[node] = worker
            ready.set()

        config = {"registry_path": self._folder / f"{node}.json", "interval_s": 0.05} | config
        engine = self._engines[node] = InProcessEngine(self.bus)
        work = run_worker(WorkerConfig(node, "test", **config), on_ready=joined, engine=engine)
        self._tasks[node] = self._group.create_task(work)
        async with asyncio.timeout(15):
            await ready.wait()
        # Its first word may come after it is there.
        await self.until(lambda: self.view.node(node) is not None)
        await self.until(lambda: self.node(node).discovery_status not in (None, "stale", "preview"))
        return self.workers[node]

    async def cut_off(self, node: str) -> None:
        """The worker disappears from the bus without a word; its process goes on."""
        await self._engines[node].close()

    async def stop(self, node: str) -> None:
        task = self._tasks.pop(node)
        task.cancel()
        await asyncio.wait({task})

    async def stop_all(self) -> None:
        for node in tuple(self._tasks):
            await self.stop(node)

    def node(self, name: str) -> NodeRecord:
        record = self.view.node(name)
        assert record is not None
        return record

    def available(self, node: str) -> list[str]:
        """What the master may place work on, by the names of today."""
        return sorted(
            device.device_id for (name, _), device in self.view.snapshot().available_devices.items() if name == node
        )

    async def until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the master never came to see it so"
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def a_cluster(folder: Path) -> AsyncIterator[Cluster]:
    async with asyncio.TaskGroup() as group:
        cluster = Cluster(group, folder)
        await cluster.master()
        try:
            yield cluster
        finally:
            await cluster.stop_all()
