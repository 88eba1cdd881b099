"""Who has held a node's name first keeps it, whoever a hub that comes back sees first; and some names nobody has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from gpurt.cluster.bus import EventEngine, held_of, held_text
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import InvalidName, NodeNameTaken
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.keys import RESERVED, check_name, node_of
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.view import MasterView
from gpurt.cluster.worker import WorkerConfig
from gpurt.cluster.zenoh_engine import ZenohEngine
from tests.cluster.conftest import Bus
from tests.cluster.support import E1, E2, HOST_A, HOST_B, device, free_port, result, until


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_names_are_refused_in_any_case(name: str) -> None:
    for spelled in (name, name.upper(), name.capitalize()):
        with pytest.raises(InvalidName, match="is reserved"):
            check_name(spelled, "node")
    with pytest.raises(InvalidName, match="is reserved"):
        WorkerConfig(name)
    with pytest.raises(InvalidName, match="is reserved"):
        node_of(f"gpurt/v1/test/node/{name}/ev")
    assert check_name(name, "cluster") == name


@pytest.mark.parametrize(
    "text", [None, b"", b"-1.000", b"1e400", b"nan", b"inf", b"9" * 400, b"1.0", b"\xff", b"1.000 "]
)
def test_what_is_no_time_counts_as_none(text: bytes | None) -> None:
    assert held_of(text) == 0.0
    assert held_of(held_text(-1e9)) > 0


Engines = Callable[[], EventEngine]


@pytest.fixture(params=["inprocess", pytest.param("zenoh", marks=pytest.mark.wide)])
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    """Makes engines of one bus; the first one is its hub."""
    made: list[EventEngine] = []
    bus, endpoint = InProcessBus("test"), f"tcp/127.0.0.1:{free_port()}"

    def make() -> EventEngine:
        zenoh = request.param == "zenoh"
        engine = ZenohEngine(cluster="test", endpoint=endpoint, listen=not made) if zenoh else InProcessEngine(bus)
        made.append(engine)
        return engine

    yield make
    await asyncio.gather(*(engine.close() for engine in made))


@pytest.mark.parametrize("first", [E1, E2], ids=["the earlier run", "the later run"])
async def test_the_first_holder_keeps_the_name(
    first: Epoch, engines: Engines, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = E2 if first is E1 else E1
    hub, view = engines(), MasterView()
    await hub.start()
    watching = asyncio.create_task(ClusterObserver(hub, view, snapshot_timeout_s=1).run())
    one_engine, other_engine = engines(), engines()
    await one_engine.start()
    await other_engine.start()
    one = NodePublisher(one_engine, "w1", host=HOST_A, epoch=first)
    other = NodePublisher(other_engine, "w1", host=HOST_B, epoch=second)
    await one.start(result(device()))
    await until(lambda: view.node("w1") is not None and view.snapshot().nodes["w1"].state == "healthy")
    await asyncio.sleep(0.1)

    async def nobody(node: str, *, timeout: float = 2.0, quiet: bool = False) -> tuple[()]:
        return ()

    with monkeypatch.context() as blind:  # as when the hub is just coming back: the other one is not there yet
        blind.setattr(other_engine, "snapshot", nobody)
        await other.start(result(device("GPU-b")))
    try:
        await one.settle_name()
        assert "this process has held it for" in caplog.text
        with pytest.raises(NodeNameTaken, match=r"is held by process 1 on alpha .* it ends"):
            await other.settle_name()
        await other.leave()  # does nothing: a goodbye would be taken for that of the first
        await other_engine.close()
        await one.settle_name()
        await until(lambda: not view.snapshot().conflicts, "the end of the conflict")
        await until(lambda: view.snapshot().nodes["w1"].state == "healthy")
        record = view.snapshot().nodes["w1"]
        assert (record.epoch, record.host.hostname) == (str(first), "alpha")
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_quiet_question_is_not_that_of_somebody_who_watches(bus: Bus) -> None:
    observer, node, asked = await bus.observer(), await bus.node(), list[bool]()
    await node.join("w1", b"state", on_asked=lambda: asked.append(True))
    await until_answered(observer, quiet=True)
    [reply] = await node.snapshot("w1", quiet=True)
    assert 0 <= reply.held_s < 60
    assert asked == []
    await until_answered(observer, quiet=False)
    await until(lambda: asked)


async def until_answered(observer: EventEngine, *, quiet: bool) -> None:
    async with asyncio.timeout(10):
        while not await observer.snapshot("w1", timeout=1, quiet=quiet):
            await asyncio.sleep(0.01)
