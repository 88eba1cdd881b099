"""What the observer asks nodes for, where several reasons come together."""

from __future__ import annotations

import asyncio

import pytest

from gpurt.cluster.bus import EventReceived, EventsDropped, NodeUp
from gpurt.cluster.envelope import EventKind
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.records import NodeState
from gpurt.cluster.state import encode_snapshot
from gpurt.cluster.view import MasterView
from tests.cluster.conftest import Bus
from tests.cluster.support import HOST_A, device, event_bytes, result, snapshot, until


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (EventsDropped("n1"), "overflow"),
        (EventReceived("n1", event_bytes(1, kind=EventKind.NODE_SNAPSHOT)), "notice"),
    ],
)
async def test_a_token_that_comes_late_does_not_hide_that_something_is_missing(
    item: EventsDropped | EventReceived, reason: str
) -> None:
    """With the token alone, the snapshot would be held back until the bus repeats events, which it never will."""
    bus = InProcessBus("test")
    node, engine = InProcessEngine(bus), InProcessEngine(bus)
    await node.start()
    await engine.start()
    view = MasterView()
    observer = ClusterObserver(engine, view)
    watching = asyncio.create_task(observer.run())
    try:
        await node.join("n1", encode_snapshot(snapshot(device())))
        await until(lambda: view.node("n1"), "the first snapshot")
        await node.set_state(encode_snapshot(snapshot(device(), device("GPU-b", 1), seq=1)))
        bus.deliver(NodeUp("n1"))
        bus.deliver(item)
        await until(lambda: len(view.snapshot().devices) == 2, "the snapshot")
        assert observer.resyncs == {"joined": 1, reason: 1}
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_all_nodes_are_looked_at_only_when_one_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every node that joins, or every event behind a hole, it would cost more the more nodes there are."""
    bus = InProcessBus("test")
    looks: list[float] = []
    tick = MasterView.tick

    def counted(view: MasterView) -> None:
        looks.append(view.clock())
        tick(view)

    monkeypatch.setattr(MasterView, "tick", counted)
    nodes = [InProcessEngine(bus) for _ in range(200)]
    for number, node in enumerate(nodes):
        await node.start()
        await node.join(f"n{number}", encode_snapshot(snapshot(device(), node=f"n{number}")))
    engine = InProcessEngine(bus)
    await engine.start()
    view = MasterView(grace_s=0.1)
    watching = asyncio.create_task(ClusterObserver(engine, view).run())
    try:
        await until(lambda: len(view.snapshot().nodes) == 200, "all nodes")
        for seq in range(2, 102):
            bus.deliver(EventReceived("n1", event_bytes(seq, node="n1")))
        await nodes[-1].close()
        await until(lambda: view.node("n199").state is NodeState.LOST, "the end of the grace")  # type: ignore[union-attr]
        assert len(looks) < 20
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_node_that_starts_again_is_back_however_much_it_had_said(bus: Bus) -> None:
    """Its goodbye is of one run: the next one need not say as much before it is believed."""
    engine, node = await bus.observer(), await bus.node()
    view, ready = MasterView(), asyncio.Event()
    watching = asyncio.create_task(ClusterObserver(engine, view).run(ready.set))
    await ready.wait()
    try:
        for counter in range(1, 5):
            publisher = NodePublisher(node, "n1", host=HOST_A, epoch=Epoch.new(counter))
            await publisher.start(result(device()))

            def there(epoch: str = str(publisher.epoch)) -> bool:
                record = view.node("n1")
                return record is not None and (record.state, record.epoch) == (NodeState.HEALTHY, epoch)

            await until(there, f"run {counter}", timeout=5.0)
            for said in range(60 // counter):
                await publisher.publish_snapshot(result(device(clock_rate_mhz=1000 + said)))
            await publisher.leave()
            await until(lambda: view.node("n1").state is NodeState.LEFT, "the goodbye")  # type: ignore[union-attr]
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
