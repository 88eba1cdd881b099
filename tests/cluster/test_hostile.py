"""Whatever a node says, everything behind the door goes on, and honest nodes beside it stay as they are."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from rich.console import Console

from gpurt.cli.cluster_table import change_line, cluster_table
from gpurt.cli.links_command import Seen
from gpurt.cli.master import change_document
from gpurt.cli.place_inputs import inventory_of_snapshot
from gpurt.cli.top_overview import overview
from gpurt.cli.top_picture import lines, picture
from gpurt.cluster import latest_version
from gpurt.cluster.assignment import assignments_of
from gpurt.cluster.board import ReadingsBoard
from gpurt.cluster.bus import MAX_STATE_BYTES
from gpurt.cluster.commands import Drain
from gpurt.cluster.committer import PlacementCommitter
from gpurt.cluster.envelope import MAX_EVENT_BYTES, decode, encode
from gpurt.cluster.errors import MalformedEvent
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.keys import EVENTS, TELEMETRY, node_key
from gpurt.cluster.logged import log_change
from gpurt.cluster.master import Master, MasterConfig
from gpurt.cluster.metrics import MasterMetrics
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.readings import MAX_READINGS_BYTES
from gpurt.cluster.records import NodeState
from gpurt.cluster.state import decode_snapshot, encode_snapshot
from gpurt.cluster.view import MasterView
from gpurt.cluster.zenoh_settings import ZenohSettings, session_config
from gpurt.placement import ConstraintSatisfactionPlacement, ModelSpec, PlanVersion
from gpurt.placement.version import MAX_NUMBER
from gpurt.telemetry.metrics import render
from gpurt.testing import cluster_simulation
from gpurt.testing.cluster_simulation import simulate
from gpurt.testing.simulated_nodes import CLUSTER
from gpurt.testing.simulation_plan import SimulationConfig
from tests.cluster.conftest import InProcess
from tests.cluster.hostile import EVIL, events, horror, readings_document, snapshot_document, spell, spoiled
from tests.cluster.plans import plan
from tests.cluster.support import FakeClock, device, free_port, snapshot, until
from tests.cluster.test_assignments import Cluster

EVERYDAY, HEAVY = 80, 100_000
MODEL = ModelSpec.uniform("m", layers=4, size_bytes=4 << 30, flops_per_token=1e9, activation_bytes_per_token=8192)


def strict(text: str) -> Any:
    """JSON without what only Python's has."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    document = json.loads(text, parse_constant=refuse)
    json.dumps(document, allow_nan=False).encode()
    return document


def tame(text: str) -> str:
    """Text that moves no cursor, once it is a line."""
    for character in text:
        assert character == "\n" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"), repr(text)
    text.encode()
    return text


class Everything:
    """A master's view with an honest node, and all that is shown, summed, written and planned from it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.view = MasterView(clock=self.clock)
        engine = InProcessEngine(InProcessBus("test"))
        self.board = ReadingsBoard(engine, clock=self.clock, refusals=self.view.refusals)
        observer = ClusterObserver(engine, self.view)
        self.master = Master(MasterConfig("test", listen=False), engine, observer, self.board)
        self.metrics = MasterMetrics("test")
        self.metrics.watch(self.master)
        self.changes = self.view.changes(1 << 20)
        good = snapshot(device("GPU-g"), node="good", gpu_backend="cuda", discovery_status="complete")
        self.view.node_up("good")
        self.view.apply_snapshot(good, sole=True)
        self.good = self.view.node("good")
        self.view.node_up(EVIL)
        self.seq = 0
        self.resync()

    def resync(self) -> None:
        said = snapshot_document() | {"seq": self.seq}
        self.view.apply_snapshot(decode_snapshot(spell(said).encode(), node=EVIL), sole=True)

    def snapshot(self, payload: bytes) -> None:
        try:
            seen = decode_snapshot(payload, node=EVIL, refusals=self.view.refusals)
        except MalformedEvent as exc:
            tame(str(exc))
            return
        strict(encode_snapshot(seen).decode())  # whoever keeps it can send it on
        self.view.apply_snapshot(seen, sole=True)

    def event(self, payload: bytes) -> None:
        if len(payload) > MAX_EVENT_BYTES:
            return
        try:
            event = decode(payload, node=EVIL, refusals=self.view.refusals)
        except MalformedEvent as exc:
            tame(str(exc))
            return
        try:
            strict(encode(event).decode())
        except MalformedEvent as exc:
            assert "over the limit" in str(exc)  # escapes made it longer  # noqa: PT017
        self.view.apply_event(event)

    def readings(self, payload: bytes) -> None:
        self.board._take(EVIL, payload)  # pyright: ignore[reportPrivateUsage]

    async def shown(self) -> None:
        """Everything that anybody sees."""
        seen = self.view.snapshot()
        assert self.view.node("good") == self.good
        while self.changes._queue:  # pyright: ignore[reportPrivateUsage]
            change = await anext(self.changes)
            tame(change_line(change, seen))
            strict(json.dumps(change_document(change, seen), allow_nan=False))
            log_change(change, self.view)
        for name in seen.nodes:
            for each in self.master.readings(name).values():
                strict(json.dumps(each.model_dump(mode="json"), allow_nan=False))
        # top
        top = overview(seen, self.master.readings, self.clock(), self.view.refusals.of)
        strict(json.dumps(top.document(), allow_nan=False))
        for line in lines(top):
            assert "\n" not in tame(line)
        console = Console(width=150, file=io.StringIO(), record=True)
        console.print(picture(top, "title", [], width=150, height=60))
        console.print(cluster_table(seen, readings=self.master.readings))
        console.print(cluster_table(seen, compact=True))
        tame(console.export_text())
        # metrics
        text = render((await self.metrics.take())())
        assert {family.name for family in openmetrics.text_string_to_metric_families(text)}
        # links
        measured = {(name, link.peer): link for name, node in seen.nodes.items() for link in node.links.measured}
        ways = Seen(sorted(seen.nodes), measured, {})
        tame(ways.text())
        strict(json.dumps(ways.document(), allow_nan=False))
        # place
        inventory = inventory_of_snapshot(seen)
        strict(inventory.model_dump_json())
        assert "good/GPU-g" in {each.id for each in inventory.devices}
        for why in inventory.left_out.values():
            tame(why)
        # drain, commit
        strict(Drain(term=seen.nodes[EVIL].placement.term).model_dump_json())
        before = latest_version(seen, "a") or PlanVersion(term=1, n=0)
        assert before.term <= max(seen.term, 1)
        version = before.next(term=max(seen.term, before.term))
        assignments_of(plan(("good/GPU-g", 0, 4)), version)

    def planned(self) -> None:
        inventory = inventory_of_snapshot(self.view.snapshot())
        found = ConstraintSatisfactionPlacement().solve_placement(
            MODEL, inventory.devices, inventory.topology, time_budget=0.2
        )
        strict(found.model_dump_json())


@pytest.mark.parametrize("ahead", [1, 2, 1 << 40, MAX_NUMBER - 3])
async def test_a_shard_of_a_later_term_than_its_node_has_heard_of_is_no_plan_to_go_on_from(ahead: int) -> None:
    """A node follows no plan of a master of whom it has not heard, so that one of the two numbers is made up."""
    target = Everything()
    document = snapshot_document()
    document["placement"]["shards"][0]["version"]["term"] = document["placement"]["term"] + ahead
    target.snapshot(spell(document).encode())
    seen = target.view.snapshot()
    shard = seen.nodes[EVIL].placement.shard("a")
    assert shard is not None, "it is what the node says, and no value of it is beyond any limit"
    assert latest_version(seen, "a") is None
    await target.shown()


async def bombard(count: int, seed: int) -> None:
    draw, target = random.Random(seed), Everything()
    for number in range(count):
        match draw.randrange(3):
            case 0:
                target.snapshot(
                    spoiled({**snapshot_document(), "seq": target.seq}, draw).encode(errors="surrogatepass")
                )
            case 1:
                target.seq += 1
                target.event(spoiled(draw.choice(list(events(target.seq).values())), draw).encode())
            case _:
                target.readings(spoiled(readings_document(), draw).encode())
        if number % 8 == 7:
            await target.shown()
        if number % 200 == 199:
            target.planned()
            target.resync()
    await target.shown()
    refusals = target.view.refusals
    assert set(refusals.nodes) <= {EVIL}
    assert refusals.total > count / 10
    assert refusals.by_field == dict(refusals.of(EVIL))


def acknowledgement() -> dict[str, Any]:
    return {
        "accepted": True,
        "term": 1,
        "reason": None,
        "message": "well",
        "device": "GPU-e",
        "short_bytes": 5,
        "state": "loaded",
    }


async def commits(rounds: int, seed: int, folder: Path) -> None:
    """A master goes on to place a model while one of its nodes answers, says and holds anything."""
    draw, bus = random.Random(seed), InProcess(small=False)
    cluster, evil = Cluster(bus, folder), await bus.node()
    cluster.engine = await bus.observer()
    cluster.committer = PlacementCommitter(cluster.engine, cluster.view)
    board = ReadingsBoard(cluster.engine, refusals=cluster.view.refusals)

    async def answer(payload: bytes) -> bytes:
        if draw.random() < 0.2:
            raise ValueError(spell(horror(draw)))
        return spoiled(acknowledgement(), draw).encode(errors="surrogatepass")

    tasks = [
        asyncio.create_task(ClusterObserver(cluster.engine, cluster.view).run()),
        asyncio.create_task(cluster.committer.run()),
    ]
    try:
        async with board:
            await cluster.node("good")
            await evil.join(EVIL, spell(snapshot_document()).encode(), answer)
            await until(lambda: cluster.view.node(EVIL) is not None, "the node that lies")
            version = PlanVersion(term=1, n=0)
            for number in range(rounds):
                said = {**snapshot_document(), "seq": number}
                await evil.set_state(spoiled(said, draw).encode(errors="surrogatepass")[:MAX_STATE_BYTES])
                for document in (draw.choice(list(events(number + 1).values())), readings_document()):
                    payload = spoiled(document, draw).encode(errors="surrogatepass")
                    if document.get("type") and len(payload) <= MAX_EVENT_BYTES:
                        await evil.publish(payload)
                    elif not document.get("type") and len(payload) <= MAX_READINGS_BYTES:
                        await evil.publish_telemetry(payload)
                for parts in ([("good/GPU-good-0", 0, 2), (f"{EVIL}/GPU-e", 2, 4)], [("good/GPU-good-0", 0, 4)]):
                    seen = cluster.view.snapshot()
                    before = max(version, latest_version(seen, "llama") or version)
                    version = before.next(term=max(seen.term, before.term))
                    outcome = await cluster.committer.commit(plan(*parts), version)
                    strict(outcome.model_dump_json())
                    tame(outcome.message)
                    assert not any(task.done() for task in tasks), "nothing of the master has ended"
                assert outcome.committed, outcome.message
                await cluster.loaded("good", version)
            record = cluster.view.node("good")
            assert record is not None
            assert record.state is NodeState.HEALTHY
            assert not cluster.view.refusals.of("good")
    finally:
        await cluster.nodes["good"].assignments.aclose()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await bus.aclose()


async def test_a_master_commits_plans_whatever_one_of_its_nodes_says(tmp_path: Path) -> None:
    await commits(10, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
async def test_a_master_commits_plans_whatever_one_of_its_nodes_says_1000_times(seed: int, tmp_path: Path) -> None:
    await commits(1000, seed, tmp_path)


@pytest.mark.wide
async def test_a_simulation_ends_with_the_truth_whatever_is_sent_in_the_names_of_its_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zenoh = pytest.importorskip("zenoh")
    port, draw, sent = free_port(), random.Random(5), 0
    monkeypatch.setattr(cluster_simulation, "_free_port", lambda: port)
    config = SimulationConfig(nodes=8, devices=2, seconds=3.0, churn=50.0, seed=7)
    running = asyncio.create_task(simulate(config))
    at = f"tcp/127.0.0.1:{port}"

    def lie() -> None:
        nonlocal sent
        session = zenoh.open(session_config(zenoh, at, listen=False, settings=ZenohSettings()))
        try:
            while not running.done():
                sent += 1
                name = draw.choice(config.names)
                document = draw.choice([*events(sent).values(), readings_document()])
                leaf = EVENTS if document.get("type") else TELEMETRY
                payload = spoiled(document, draw).replace(EVIL, name).encode(errors="surrogatepass")
                session.put(node_key(CLUSTER, name, leaf), payload)
                time.sleep(0.002)
        finally:
            session.close()

    lying = asyncio.create_task(asyncio.to_thread(lie))
    report = await running
    await lying
    assert sent > 100
    assert report.ok, (report.differences, report.wrong, report.converged_s, report.conflicts_over_s)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    log = logging.getLogger("gpurt")
    level, log.level = log.level, logging.ERROR
    yield
    log.level = level


async def test_nothing_that_a_node_says_ends_anything() -> None:
    await bombard(EVERYDAY, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
async def test_nothing_that_a_node_says_ends_anything_100000_times(seed: int) -> None:
    await bombard(HEAVY // 10, seed=seed)
