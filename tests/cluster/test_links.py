"""Nodes measure the ways between them, and placement gets what they found."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest

from gpurt.cluster.bus import EventEngine
from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.commands import MeasureLinks, PeerAddress
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import ClusterError, InvalidName
from gpurt.cluster.link_address import address_towards, split_address
from gpurt.cluster.link_measuring import LinkMeasuring
from gpurt.cluster.link_probe import PeerBusy, probe_link
from gpurt.cluster.link_protocol import (
    CHUNK,
    HELLO,
    MAGIC,
    MAX_BYTES,
    OK,
    PING_BYTES,
    REFUSED,
    SIZE,
    LinkBudget,
    join_endpoint,
    split_endpoint,
)
from gpurt.cluster.link_server import MAX_CALLERS, LinkServer, Slot
from gpurt.cluster.link_survey import request_links, survey_links
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.peer_links import MAX_LINKS, NodeLinks
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.records import ClusterSnapshot, NodeState
from gpurt.cluster.security.errors import InsecureEndpoint
from gpurt.cluster.topology import EVERY_PAIR, pairs_to_measure, topology_from_view
from gpurt.cluster.view import MasterView
from gpurt.placement import ConstraintSatisfactionPlacement, LayerSpec, Locality, ModelSpec, devices_from_view
from gpurt.placement.topology import DEFAULT_CLASSES
from tests.cluster.conftest import Bus
from tests.cluster.support import E1, HOST_A, device, result, snapshot, until
from tests.support.stalling_proxy import StallingProxy

pytestmark = pytest.mark.wide

SMALL = LinkBudget(pings=4, bytes=256 << 10, seconds=1.0)


class Cluster:
    """A master's view, and nodes that may be measured."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.view = bus, MasterView()
        self.engine: EventEngine
        self.nodes: dict[str, LinkMeasuring] = {}

    async def node(self, name: str) -> LinkMeasuring:
        publisher = NodePublisher(await self.bus.node(), name, host=HOST_A, epoch=Epoch.new(1))
        links = self.nodes[name] = LinkMeasuring(publisher)
        await links.start("127.0.0.1")
        await publisher.start(result(device(f"GPU-{name}")))
        await until(lambda: self.view.node(name), f"node {name}")
        return links

    def picture(self) -> ClusterSnapshot:
        return self.view.snapshot()


@pytest.fixture
async def cluster(bus: Bus) -> AsyncIterator[Cluster]:
    made = Cluster(bus)
    made.engine = await bus.observer()
    observer, ready = ClusterObserver(made.engine, made.view), asyncio.Event()
    task = asyncio.create_task(observer.run(ready.set))
    await ready.wait()
    yield made
    for links in made.nodes.values():
        await links.aclose()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_every_pair_of_a_small_cluster_is_measured_and_placement_gets_it(cluster: Cluster) -> None:
    for name in ("n1", "n2", "n3"):
        await cluster.node(name)
    changes = cluster.view.changes()
    pairs = pairs_to_measure(cluster.picture())
    assert len(pairs) == 6
    outcome = await survey_links(cluster.engine, cluster.picture(), pairs, term=2, budget=SMALL)
    assert outcome.failed == {}
    assert set(outcome.measured) == set(pairs)
    await until(lambda: all(len(n.links.measured) == 2 for n in cluster.picture().nodes.values()), "the events")
    picture = cluster.picture()
    for (source, target), link in outcome.measured.items():
        assert picture.nodes[source].links.to(target) == link
        assert link.samples == 1
        assert 0 < link.round_trip_s < 1
        assert link.bandwidth > 1e6
    devices = devices_from_view(picture.available_devices)
    topology = topology_from_view(picture, devices)
    assert len(topology.links) == 6
    matrix = topology.dense(devices)
    assert not matrix.estimated.any()
    first = outcome.measured["n1", "n2"]
    row, column = ([d.node for d in devices].index(name) for name in ("n1", "n2"))
    assert matrix.latency[row, column] == first.round_trip_s / 2
    assert matrix.bandwidth[row, column] == first.bandwidth
    changes.close()
    assert ChangeKind.NODE_LINKS in {change.kind async for change in changes}
    model = ModelSpec(name="tiny", layers=tuple(LayerSpec(weight_bytes=1 << 20) for _ in range(4)), hidden_size=64)
    assert ConstraintSatisfactionPlacement().solve_placement(model=model, devices=devices, topology=topology).stages


async def test_a_way_of_twenty_milliseconds_is_measured_as_such_and_placement_gets_it(cluster: Cluster) -> None:
    for name in ("n1", "n2"):
        await cluster.node(name)
    picture = cluster.picture()
    endpoint = picture.nodes["n2"].links.endpoint
    assert endpoint is not None
    _, host, port = split_endpoint(endpoint)
    budget = LinkBudget(pings=9, bytes=64 << 10)
    async with StallingProxy(port, delay_s=0.010) as proxy:
        far = f"tcp/{host}:{proxy.port}"
        start = time.monotonic()
        sample = await probe_link("n2", far, budget)
        # The shortest of its pings: whatever else this machine does makes the pings longer, and the whole as well.
        assert 0.020 <= sample.round_trip_s <= (time.monotonic() - start) / budget.pings
        node = picture.nodes["n2"]
        moved = node.model_copy(update={"links": node.links.model_copy(update={"endpoint": far})})
        picture = picture.model_copy(update={"nodes": {**picture.nodes, "n2": moved}})
        outcome = await survey_links(cluster.engine, picture, [("n1", "n2")], budget=budget)
    assert outcome.failed == {}
    await until(lambda: cluster.picture().nodes["n1"].links.to("n2"), "the event")
    devices = devices_from_view(cluster.picture().available_devices)
    row, column = ([d.node for d in devices].index(name) for name in ("n1", "n2"))
    assert topology_from_view(cluster.picture(), devices).dense(devices).latency[row, column] >= 0.010


async def test_all_measure_each_other_at_once_and_none_fails(cluster: Cluster) -> None:
    """Each node is asked for all ways at the same moment, so that most are busy at first."""
    names = [f"n{index}" for index in range(5)]
    for name in names:
        await cluster.node(name)
    picture = cluster.picture()
    pairs = [(a, b) for a in names for b in names if a != b]
    outcomes = await asyncio.gather(*(survey_links(cluster.engine, picture, pairs, budget=SMALL) for _ in range(2)))
    assert [outcome.failed for outcome in outcomes] == [{}, {}]
    assert {link.samples for link in cluster.nodes["n0"].links.measured} == {2}


async def test_what_fails_is_told_and_the_rest_is_measured(cluster: Cluster) -> None:
    await cluster.node("n1")
    gone = await cluster.node("n2")
    await cluster.node("n3")
    picture = cluster.picture()
    await gone.aclose()
    outcome = await survey_links(
        cluster.engine, picture, [("n1", "n2"), ("n1", "n3"), ("n1", "n1"), ("n1", "n9"), ("n9", "n1")], budget=SMALL
    )
    assert set(outcome.measured) == {("n1", "n3")}
    assert "cannot be measured" in outcome.failed["n1", "n2"]
    assert "itself" in outcome.failed["n1", "n1"]
    assert "n9" in outcome.failed["n1", "n9"]
    assert "n9" in outcome.failed["n9", "n1"]


async def test_a_master_that_was_replaced_has_nothing_measured(cluster: Cluster) -> None:
    for name in ("n1", "n2"):
        await cluster.node(name)
    pairs = [("n1", "n2")]
    assert not (await survey_links(cluster.engine, cluster.picture(), pairs, term=5, budget=SMALL)).failed
    outcome = await survey_links(cluster.engine, cluster.picture(), pairs, term=4, budget=SMALL)
    assert "term 4 refused" in outcome.failed["n1", "n2"]
    assert cluster.nodes["n1"].links.measured[0].samples == 1


@pytest.mark.parametrize(
    "change",
    [
        {"budget": {"bytes": MAX_BYTES + 1}},
        {"budget": {"seconds": 1e9}},
        {"budget": {"pings": 0}},
        {"peers": []},
        {"peers": [{"node": f"n{index}", "endpoint": "tcp/127.0.0.1:1"} for index in range(65)]},
    ],
)
async def test_a_command_over_the_limits_is_refused(cluster: Cluster, change: dict[str, Any]) -> None:
    await cluster.node("n1")
    peers = (PeerAddress(node="n2", endpoint="tcp/127.0.0.1:1"),)
    command = MeasureLinks(peers=peers).model_dump(mode="json") | change
    with pytest.raises(ClusterError, match="command"):
        await cluster.engine.command("n1", json.dumps(command).encode())


@pytest.mark.parametrize("endpoint", ["tcp/192.0.2.1:7000", "tls/127.0.0.1:7000", "udp/127.0.0.1:7000", "nowhere"])
async def test_nodes_go_to_no_address_that_they_may_not(cluster: Cluster, endpoint: str) -> None:
    """Out of the machine without certificates, or by another protocol: refused before anything is opened."""
    await cluster.node("n1")
    answer = await request_links(cluster.engine, "n1", [PeerAddress(node="n2", endpoint=endpoint)], budget=SMALL)
    assert answer.measured == ()
    assert set(answer.failed) == {"n2"}


# The two ends


@pytest.fixture
async def server() -> AsyncIterator[tuple[Slot, str]]:
    slot = Slot()
    made = LinkServer(slot)
    yield slot, await made.start("127.0.0.1")
    await made.aclose()


async def test_a_node_that_measures_is_busy_for_others(server: tuple[Slot, str]) -> None:
    slot, endpoint = server
    assert slot.take()
    with pytest.raises(PeerBusy):
        await probe_link("n2", endpoint, SMALL)
    slot.give_back()
    sample = await probe_link("n2", endpoint, SMALL)
    assert sample.bytes == SMALL.bytes - SMALL.bytes // 8
    # And it has let go of its slot.
    await until(slot.take, "the free slot")


async def opened(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    _, host, port = split_endpoint(endpoint)
    return await asyncio.open_connection(host, port)


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (HELLO.pack(b"GET / HT", 1, 1), b""),
        (HELLO.pack(MAGIC, 60_000, 1), REFUSED),
        (HELLO.pack(MAGIC, 1, MAX_BYTES + 1), REFUSED),
        (b"x", b""),
    ],
)
async def test_a_stranger_is_refused(server: tuple[Slot, str], hello: bytes, said: bytes) -> None:
    slot, endpoint = server
    reader, writer = await opened(endpoint)
    writer.write(hello)
    if len(hello) == HELLO.size:
        assert await answer_of(reader) == said
    else:
        writer.transport.abort()
    assert slot.take()
    writer.transport.abort()


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """All that comes before the connection ends; an abortive end is an end."""
    got = b""
    with suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            got += piece
    return got


@pytest.mark.parametrize("piece", [CHUNK + 1, CHUNK])
async def test_who_sends_more_than_announced_is_cut_off(server: tuple[Slot, str], piece: int) -> None:
    slot, endpoint = server
    reader, writer = await opened(endpoint)
    writer.write(HELLO.pack(MAGIC, 1, CHUNK - 1))
    assert await reader.readexactly(1) == OK
    writer.write(b"x" * PING_BYTES)
    assert await reader.readexactly(PING_BYTES) == b"x" * PING_BYTES
    writer.write(SIZE.pack(piece))
    assert await answer_of(reader) == b""
    await until(slot.take, "the free slot")
    writer.transport.abort()


async def test_the_end_of_the_server_ends_what_is_under_way(server: tuple[Slot, str]) -> None:
    slot = Slot()
    made = LinkServer(slot)
    endpoint = await made.start("127.0.0.1")
    reader, writer = await opened(endpoint)
    writer.write(HELLO.pack(MAGIC, 1, CHUNK))
    assert await reader.readexactly(1) == OK
    await made.aclose()
    await made.aclose()
    assert await answer_of(reader) == b""
    assert slot.take()
    writer.transport.abort()
    with pytest.raises(ClusterError, match="cannot be measured"):
        await probe_link("n2", endpoint, SMALL)


async def test_only_so_many_may_call(server: tuple[Slot, str]) -> None:
    _, endpoint = server
    waiting = [await opened(endpoint) for _ in range(MAX_CALLERS)]
    reader, writer = await opened(endpoint)
    assert await answer_of(reader) == b""
    for _, each in [*waiting, (reader, writer)]:
        each.transport.abort()


async def test_a_cancelled_probe_lets_go_at_once() -> None:
    accepted = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as mute:
        port = mute.sockets[0].getsockname()[1]
        probe = asyncio.create_task(probe_link("n2", f"tcp/127.0.0.1:{port}", SMALL))
        await accepted.wait()
        probe.cancel()
        done, _ = await asyncio.wait({probe}, timeout=1.0)
        assert done


@pytest.mark.parametrize("insecure", [False, True])
async def test_off_loopback_only_when_it_is_said(insecure: bool) -> None:
    server = LinkServer(Slot())
    if insecure:
        # No address of this machine: it is tried, and that is all that is wanted here.
        with pytest.raises(OSError, match=r"192\.0\.2\.1|assign"):
            await server.start("192.0.2.1", insecure=True)
    else:
        with pytest.raises(InsecureEndpoint):
            await server.start("192.0.2.1")
    await server.aclose()


def test_addresses() -> None:
    assert address_towards("tcp/127.0.0.1:7447") == address_towards("unixsock-stream//tmp/x") == "127.0.0.1"
    assert split_address("10.0.0.1:9") == ("10.0.0.1", 9)
    assert split_address("[::1]:9") == ("::1", 9)
    assert split_address("host") == ("host", 0)
    for wrong in ("a b", "host:70000", ":5", ""):
        with pytest.raises(InvalidName):
            split_address(wrong)
    for host in ("10.0.0.1", "::1", "host"):
        assert split_endpoint(join_endpoint(host, 9, tls=True)) == (True, host, 9)


# What is made of it


def test_measurements_are_averaged_and_bounded() -> None:
    links = NodeLinks()
    for bandwidth in (100.0, 200.0):
        links = links.with_sample("n2", 0.1, bandwidth)
    (link,) = links.measured
    assert (link.samples, link.bandwidth, link.round_trip_s) == (2, pytest.approx(130.0), pytest.approx(0.1))
    now = datetime.now(UTC)
    for index in range(MAX_LINKS + 5):
        links = links.with_sample(f"p{index}", 0.1, 1.0, now)
    assert len(links.measured) == MAX_LINKS
    assert links.to("n2") is None


def view_of(count: int, measured: dict[tuple[str, str], tuple[float, float]]) -> ClusterSnapshot:
    view = MasterView()
    for index in range(count):
        name = f"n{index}"
        links = NodeLinks(endpoint=f"tcp/127.0.0.1:{index + 1}")
        for (source, target), (round_trip, bandwidth) in measured.items():
            if source == name:
                links = links.with_sample(target, round_trip, bandwidth)
        view.node_up(name)
        view.apply_snapshot(snapshot(device(f"GPU-{index}"), node=name, epoch=E1, links=links))
    return view.snapshot()


def test_what_was_not_measured_is_of_its_class_and_estimated() -> None:
    picture = view_of(
        4, {("n0", "n1"): (0.002, 1e9), ("n1", "n0"): (0.004, 3e9), ("n0", "n2"): (0.1, 1e7), ("n0", "x"): (9.0, 1.0)}
    )
    zones = {"n2": "b", "n3": "b"}
    devices = devices_from_view(picture.available_devices, zones=zones)
    topology = topology_from_view(picture, devices)
    matrix = topology.dense(devices)
    at = {each.node: index for index, each in enumerate(devices)}

    def seen(a: str, b: str) -> tuple[float, float, bool]:
        where = at[a], at[b]
        return matrix.latency[where], matrix.bandwidth[where], bool(matrix.estimated[where])

    assert seen("n0", "n1") == (0.001, 1e9, False)
    assert seen("n1", "n0") == (0.002, 3e9, False)
    # Measured the other way round only.
    assert seen("n2", "n0") == (0.05, 1e7, True)
    # Of the classes: medians of 0.001 and 0.002 s within a zone, and of the one way between zones.
    assert seen("n2", "n3") == (pytest.approx(0.0015), pytest.approx(2e9), True)
    assert seen("n1", "n3") == (0.05, 1e7, True)
    nothing = topology_from_view(view_of(2, {}), devices_from_view(view_of(2, {}).available_devices))
    assert nothing.classes == DEFAULT_CLASSES
    assert nothing.classes[Locality.NODE] is not None


def test_of_many_nodes_a_sample_of_each_class_is_measured() -> None:
    picture = view_of(40, {})
    zones = {f"n{index}": "ab"[index % 2] for index in range(40)}
    pairs = pairs_to_measure(picture, zones=zones, seed=3)
    assert pairs == pairs_to_measure(picture, zones=zones, seed=3)
    assert len(pairs) == len(set(pairs)) == 40 * 3
    assert sum(zones[a] == zones[b] for a, b in pairs) == 40 * 2
    assert len(pairs_to_measure(view_of(EVERY_PAIR, {}))) == EVERY_PAIR * (EVERY_PAIR - 1)


def test_a_node_that_is_away_is_not_measured() -> None:
    view = MasterView()
    for name in ("n1", "n2", "n3"):
        view.node_up(name)
        links = NodeLinks(endpoint=None if name == "n3" else "tcp/127.0.0.1:1")
        view.apply_snapshot(snapshot(device(f"GPU-{name}"), node=name, links=links))
    view.node_down("n2")
    assert view.snapshot().nodes["n2"].state is NodeState.SUSPECT
    assert pairs_to_measure(view.snapshot()) == ()
