"""Whatever is killed, frozen or cut off while nodes tell their news: every view ends with what is true, and no event
is lost on the way, or applied twice."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpurt.cluster.bus import EventEngine
from gpurt.cluster.endpoints import engine_at
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.records import NodeState
from gpurt.cluster.state import encode_snapshot
from gpurt.cluster.view import MasterView
from gpurt.cluster.zenoh_engine import ZenohEngine
from gpurt.cluster.zenoh_settings import ZenohSettings
from gpurt.testing.judged_view import JudgedView
from tests.cluster.nats_server import NatsServer
from tests.cluster.support import Child, device, event_bytes, free_port, snapshot, until
from tests.support.stalling_proxy import StallingProxy

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this platform cannot freeze a process")

CONVERGED_S = 5.0
ALL_AT_ONCE = "hub, master and worker"
FAULTS = ("hub", "master", "worker", "freeze", "cut", "drop")


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.kill()


@asynccontextmanager
async def observed(engine: EventEngine, view: MasterView) -> AsyncGenerator[None]:
    await engine.start()
    running = asyncio.create_task(ClusterObserver(engine, view).run())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await engine.close()


@dataclass
class Cluster:
    """A hub, a master and workers in processes of their own, one worker behind a proxy, and a second master here, which
    lives through everything."""

    folder: Path
    children: list[Child]
    proxy: StallingProxy
    port: int
    rate: float
    each: int
    """Events of a worker."""
    server: NatsServer | None = None
    """In the place of the hub."""
    view: JudgedView = field(default_factory=JudgedView)
    hub: Child | None = None
    master: Child | None = None
    workers: dict[str, Child] = field(default_factory=dict[str, Child])
    published: Counter[str] = field(default_factory=Counter[str])
    """Events of the runs of a worker that have ended."""
    done: dict[str, asyncio.Task[str]] = field(default_factory=dict[str, "asyncio.Task[str]"])
    complaints: Counter[str] = field(default_factory=Counter[str])

    @property
    def endpoint(self) -> str:
        return self.endpoint_at(self.port)

    def endpoint_at(self, port: int) -> str:
        return f"tcp/127.0.0.1:{port}" if self.server is None else f"nats://127.0.0.1:{port}"

    def child(self, program: str, *args: object) -> Child:
        module = "tests.cluster.programs" if program == "hub" else "tests.cluster.fault_programs"
        self.children.append(Child(program, *args, module=module))
        return self.children[-1]

    async def start_hub(self) -> None:
        if self.server is not None:
            await asyncio.to_thread(self.server.start)
        else:
            self.hub = await self.child("hub", self.endpoint).ready()

    async def kill_hub(self) -> None:
        if self.server is not None:
            await asyncio.to_thread(self.server.kill)
        else:
            assert self.hub is not None
            await self.stop(self.hub)

    async def start_master(self) -> None:
        self.master = await self.child("master", self.endpoint).ready()

    async def start_worker(self, name: str) -> None:
        endpoint = self.endpoint_at(self.proxy.port if name == "w0" else self.port)
        left = self.each - self.published[name]
        worker = self.child("worker", endpoint, name, self.folder / f"{name}.json", self.rate, left)
        self.workers[name] = await worker.ready()
        self.done[name] = asyncio.create_task(worker.line())

    async def stop(self, child: Child) -> None:
        await asyncio.to_thread(child.kill)
        self.children.remove(child)

    async def break_something(self, fault: str, dice: random.Random) -> None:
        seconds = dice.uniform(0.1, 3.0)
        name = dice.choice(sorted(self.workers))
        if fault == "hub":
            await self.kill_hub()
            await asyncio.sleep(min(seconds, 1.0))
            await self.start_hub()
        elif fault == "master":
            assert self.master is not None
            self.complaints += Counter((await self.ask(self.master))[1])
            await self.stop(self.master)
            await self.start_master()
        elif fault == "worker":
            worker = self.workers.pop(name)
            self.done.pop(name).cancel()
            await self.stop(worker)
            record = self.view.node(name)
            self.published[name] += 0 if record is None else record.seq
            await self.start_worker(name)
        elif fault == "freeze":
            self.workers[name].process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            self.workers[name].process.send_signal(signal.SIGCONT)
        elif fault == ALL_AT_ONCE:
            await asyncio.gather(*(self.break_something(one, dice) for one in ("hub", "master", "worker")))
        elif fault == "cut":
            self.proxy.stall()
            await asyncio.sleep(seconds)
            self.proxy.resume()
        else:
            self.proxy.drop()

    async def ask(self, child: Child) -> Any:
        assert child.process.stdin is not None
        child.process.stdin.write("?\n")
        child.process.stdin.flush()
        return json.loads(await child.line())

    async def truth(self) -> dict[str, Any]:
        return {name: await self.ask(worker) for name, worker in self.workers.items()}


async def run_with_faults(
    folder: Path,
    children: list[Child],
    *,
    seed: int,
    events: int,
    rate: float,
    workers: int = 2,
    faults: tuple[str, ...] | None = None,
    server: NatsServer | None = None,
) -> Cluster:
    """Each of ``workers`` tells its share of ``events``, ``rate`` a second. What it tells while it cannot be heard is
    repeated, up to 1,024 events over zenoh; more are known by a snapshot. ``faults`` come in this order, or at random
    until the last event."""
    dice = random.Random(seed)
    port = free_port() if server is None else server.port
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(StallingProxy(port))
        cluster = Cluster(folder, children, proxy, port, rate, events // workers, server)
        await cluster.start_hub()
        await stack.enter_async_context(observed(engine_at(cluster.endpoint, cluster="test"), cluster.view))
        await asyncio.gather(cluster.start_master(), *(cluster.start_worker(f"w{n}") for n in range(workers)))
        told: list[str] = []
        while (not all(done.done() for done in cluster.done.values())) if faults is None else len(told) < len(faults):
            await asyncio.sleep(dice.uniform(0.1, 2.0) if faults is None else 0.2)
            told.append(dice.choice(FAULTS) if faults is None else faults[len(told)])
            await cluster.break_something(told[-1], dice)
        last_fault = time.monotonic()
        assert {await done for done in cluster.done.values()} == {"DONE"}
        quiet = max(time.monotonic(), last_fault)
        truth = await cluster.truth()
        assert cluster.master is not None
        while True:
            theirs, complaints = await cluster.ask(cluster.master)
            if theirs == truth == cluster.view.picture():
                break
            what = f"seed {seed}, faults {told}: {truth}, here {cluster.view.picture()}, there {theirs}"
            assert time.monotonic() < quiet + CONVERGED_S, what
            await asyncio.sleep(0.02)
        cluster.complaints += Counter(complaints) + cluster.view.faults
        assert not cluster.complaints, f"seed {seed}, faults {told}"
        print(
            f"seed {seed}: {cluster.view.applied} events applied, {cluster.view.contained} with snapshots, "
            f"{Counter(told)}, equal {time.monotonic() - quiet:.2f} s after the last event"
        )
        return cluster


async def test_nothing_is_lost_or_doubled_when_hub_master_and_worker_are_killed(
    tmp_path: Path, children: list[Child]
) -> None:
    cluster = await run_with_faults(tmp_path, children, seed=0, events=400, rate=200, faults=("drop", ALL_AT_ONCE))
    assert cluster.view.applied > 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_or_doubled_whatever_fails_at_random(
    seed: int, tmp_path: Path, children: list[Child]
) -> None:
    await run_with_faults(tmp_path, children, seed=seed, events=100_000, rate=300, workers=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_nothing_is_lost_or_doubled_with_nats_in_the_hubs_place(
    seed: int, tmp_path: Path, children: list[Child]
) -> None:
    server = NatsServer()
    try:
        await run_with_faults(tmp_path, children, seed=seed, events=10_000, rate=200, server=server)
    finally:
        await asyncio.to_thread(server.end)


async def test_a_node_behind_a_cut_cable_is_suspect_after_the_lease_and_loses_nothing() -> None:
    settings = ZenohSettings(lease_s=0.8)
    port = free_port()
    hub = ZenohEngine(cluster="test", endpoint=f"tcp/127.0.0.1:{port}", listen=True, settings=settings)
    view = JudgedView()
    async with observed(hub, view), StallingProxy(port) as proxy:
        node = ZenohEngine(cluster="test", endpoint=f"tcp/127.0.0.1:{proxy.port}", settings=settings)
        await node.start()
        try:
            await node.join("n1", encode_snapshot(snapshot(device())))
            await until(lambda: view.node("n1"))
            proxy.stall()
            told = asyncio.create_task(_tell(node, 100))
            taken = await until(lambda: view.node("n1").state is NodeState.SUSPECT)  # type: ignore[union-attr]
            assert taken < settings.lease_s + 0.5
            proxy.resume()
            await told
            await until(lambda: view.node("n1").state is NodeState.HEALTHY)  # type: ignore[union-attr]
            await until(lambda: view.node("n1").seq == 100)  # type: ignore[union-attr]
            assert not view.faults
        finally:
            await node.close()


async def _tell(node: ZenohEngine, count: int) -> None:
    for seq in range(1, count + 1):
        await node.set_state(encode_snapshot(snapshot(device(), seq=seq)))
        await node.publish(event_bytes(seq))
        await asyncio.sleep(0.005)
