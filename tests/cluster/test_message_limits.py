"""The door for what nodes say: what each field may be, what a wrong one costs, and that it is counted by name."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest

from gpurt.cli.top_overview import overview
from gpurt.cli.top_picture import lines
from gpurt.cluster.board import ReadingsBoard
from gpurt.cluster.commands import request_drain
from gpurt.cluster.envelope import EventKind, decode
from gpurt.cluster.errors import ClusterError, MalformedEvent
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.master import Master, MasterConfig
from gpurt.cluster.message_limits import MAX_TEXT, NUMBERS, Refusals
from gpurt.cluster.metrics import MasterMetrics
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.readings import decode_readings
from gpurt.cluster.state import decode_snapshot, encode_snapshot
from gpurt.cluster.view import MasterView
from gpurt.placement.version import MAX_NUMBER
from gpurt.telemetry.metrics import render
from tests.cluster.hostile import EVIL, Raw, events, readings_document, snapshot_document, spell
from tests.cluster.support import FakeClock, device, snapshot
from tests.telemetry.openmetrics import parse


def kept(document: dict[str, Any]) -> tuple[dict[str, Any], Refusals]:
    """What a snapshot becomes, and what was refused of it."""
    refusals = Refusals(FakeClock())
    return decode_snapshot(spell(document).encode(), node=EVIL, refusals=refusals).document(), refusals


def heard(document: dict[str, Any]) -> tuple[dict[str, Any], Refusals]:
    refusals = Refusals(FakeClock())
    return decode_readings(spell(document).encode(), node=EVIL, refusals=refusals).model_dump(mode="json"), refusals


DEVICE_NUMBERS = [name for name in snapshot_document()["gpu_devices"][0] if name in NUMBERS]
READING_NUMBERS = [name for name in readings_document()["devices"][0] if name in NUMBERS and name != "age_s"]


def test_the_tables_below_have_fields() -> None:
    assert len(DEVICE_NUMBERS) >= 9
    assert len(READING_NUMBERS) == 8


@pytest.mark.parametrize("name", DEVICE_NUMBERS)
def test_a_number_of_a_device_costs_its_field(name: str) -> None:
    honest, none = kept(snapshot_document())
    assert none.total == 0
    least, most = NUMBERS[name]
    for value in (least, most):
        document = snapshot_document()
        document["gpu_devices"][0][name] = value if isinstance(value, float) and value % 1 else int(value)
        seen, refusals = kept(document)
        assert seen["gpu_devices"][0][name] == value
        assert refusals.total == 0
    for value in (least - 1, most * 2 + 1, Raw("1e400"), Raw("-" + "9" * 400), "much", [], {}):
        document = snapshot_document()
        document["gpu_devices"][0][name] = value
        seen, refusals = kept(document)
        assert dict(refusals.of(EVIL)) == {f"gpu_devices.{name}": 1}
        assert seen["gpu_devices"][0][name] is None
        # Everything else is as it was.
        seen["gpu_devices"][0][name] = honest["gpu_devices"][0][name]
        assert seen == honest


@pytest.mark.parametrize("name", READING_NUMBERS)
def test_a_number_of_a_reading_costs_its_field_and_says_why(name: str) -> None:
    honest, none = heard(readings_document())
    assert none.total == 0
    for value in (NUMBERS[name].least - 1, NUMBERS[name].most * 2 + 1, Raw("1e400"), Raw("9" * 400), "hot", [1]):
        document = readings_document()
        document["devices"][0][name] = value
        seen, refusals = heard(document)
        assert dict(refusals.of(EVIL)) == {f"devices.{name}": 1}
        told = seen["devices"][0]
        assert told[name] is None
        assert told["unavailable"].pop(name) == "invalid"
        assert {**told, name: honest["devices"][0][name]} == honest["devices"][0]
        assert seen["devices"][1] == honest["devices"][1]


@pytest.mark.parametrize("age", [Raw("1e400"), -1, 1e9, "old", None, Raw("9" * 400)])
def test_a_reading_of_no_age_costs_its_device_alone(age: Any) -> None:
    document = readings_document()
    document["devices"][0]["age_s"] = age
    seen, refusals = heard(document)
    assert [each["device"] for each in seen["devices"]] == ["cuda:1"]
    assert refusals.by_field == {"devices": 1}


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        (("host", "pid"), -1, "host.pid"),
        (("reports", 0, "elapsed_ms"), 1e300, "reports.elapsed_ms"),
        (("reports", 0, "status"), "perhaps", "reports"),
        (("links", "measured", 0, "bandwidth"), 1e-300, "links.measured"),
        (("links", "measured", 0, "round_trip_s"), Raw("1e999"), "links.measured"),
        (("links", "endpoint"), "x" * 600, "links.endpoint"),
        (("placement", "term"), 10**30, "placement.term"),
        (("placement", "term"), 2**64 - 1, "placement.term"),
        (("gpu_devices", 0, "identity", "key"), "\x1b[2J", "gpu_devices.identity.key"),
        (("gpu_devices", 0, "speeds", "bf16_tflops"), 1e300, "gpu_devices.speeds.bf16_tflops"),
        (("gpu_devices", 0, "backends"), ["x"] * 100, "gpu_devices.backends"),
        (("gpu_devices", 0, "vendor"), "\u202egpj", "gpu_devices.vendor"),
        (("gpu_backend",), "a" * 1000, "gpu_backend"),
    ],
)
def test_what_a_wrong_value_costs_is_as_little_as_can_be(place: tuple[Any, ...], value: Any, field: str) -> None:
    document = snapshot_document()
    holder: Any = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    seen, refusals = kept(document)
    assert field in refusals.of(EVIL)
    assert seen["gpu_devices"][-1]["device_id"] == "cuda:1"
    assert seen["host"]["hostname"] == "h"


@pytest.mark.parametrize(
    ("key", "value"),
    [("n", MAX_NUMBER + 1), ("n", 10**30), ("n", -1), ("term", MAX_NUMBER + 1), ("term", "3"), ("term", None)],
)
def test_a_shard_of_a_plan_that_cannot_be_costs_the_message(key: str, value: Any) -> None:
    """Without it, the node would read as if it had let go of its layers."""
    document, refusals = snapshot_document(), Refusals(FakeClock())
    document["placement"]["shards"][0]["version"][key] = value
    with pytest.raises(MalformedEvent, match=rf"snapshot of node {EVIL}: placement\.shards\.0\.version\.{key}"):
        decode_snapshot(spell(document).encode(), node=EVIL, refusals=refusals)
    assert refusals.of(EVIL)["message"] == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("H100 ü 80 GB", "H100 ü 80 GB"),
        ("one\r\n\ttwo", "one two"),
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("a\u202eb\u2066", r"a\u202eb\u2066"),
        ("\x00\x7f\x9b", r"\x00\x7f\x9b"),
        (Raw('"half \\ud800"'), "half \ufffd"),
    ],
)
def test_text_for_people_is_shown_and_moves_no_cursor(text: str, shown: str) -> None:
    document = snapshot_document()
    document["gpu_devices"][0]["name"] = text
    seen, _ = kept(document)
    assert seen["gpu_devices"][0]["name"] == shown


def test_long_text_is_cut() -> None:
    document = snapshot_document()
    document["gpu_devices"][0]["state_reason"] = "x" * 100_000
    seen, refusals = kept(document)
    assert len(seen["gpu_devices"][0]["state_reason"]) <= MAX_TEXT
    assert dict(refusals.of(EVIL)) == {"gpu_devices.state_reason": 1}


def test_an_event_with_a_wrong_number_tells_the_rest_of_its_device() -> None:
    view = MasterView(clock=FakeClock())
    view.node_up(EVIL)
    view.apply_snapshot(snapshot(node=EVIL), sole=True)
    document = events(1)["added"]
    document["data"]["device"]["memory_bytes"] = Raw("9" * 400)
    assert view.apply_event(decode(spell(document).encode(), node=EVIL, refusals=view.refusals))
    record = view.node(EVIL)
    assert record is not None
    assert record.devices["GPU-e"].device.memory_bytes is None
    assert record.devices["GPU-e"].device.memory_available == 79 << 30
    assert dict(view.refusals.of(EVIL)) == {"memory_bytes": 1}


def test_numbers_of_any_extension_can_be_written_again() -> None:
    for number in ("1e999", "9" * 5000, '[1,{"a":-1e999}]'):
        document = events(1)["added"]
        document["data"]["extension"] = Raw(number)
        event = decode(spell(document).encode(), node=EVIL)
        json.dumps(event.document(), allow_nan=False)


async def test_what_was_refused_is_shown_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    view = MasterView(clock=FakeClock())
    engine = InProcessEngine(InProcessBus("test"))
    board = ReadingsBoard(engine, clock=view.clock, refusals=view.refusals)
    master = Master(MasterConfig("test", listen=False), engine, ClusterObserver(engine, view), board)
    view.node_up(EVIL)
    document = snapshot_document()
    document["gpu_devices"][0]["memory_bytes"] = -1
    for _ in range(100):
        said = decode_snapshot(spell(document).encode(), node=EVIL, refusals=view.refusals)
        view.apply_snapshot(said, sole=True)
    readings = readings_document()
    readings["devices"][0]["age_s"] = Raw("1e400")
    board._take(EVIL, spell(readings).encode())  # pyright: ignore[reportPrivateUsage]
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) <= 5
    assert "node evil: values beyond all limits were refused: gpu_devices.memory_bytes" in told[0].getMessage()
    metrics = MasterMetrics("test")
    metrics.watch(master)
    families = parse(render((await metrics.take())()))
    assert families["gpurt_cluster_refused_values"].value(field="gpu_devices.memory_bytes") == 100
    assert families["gpurt_cluster_refused_values_of_node"].value(node=EVIL) == 101
    top = overview(view.snapshot(), master.readings, view.clock(), view.refusals.of)
    (node,) = top.document()["nodes"]
    assert node["refused"] == {"gpu_devices.memory_bytes": 100, "devices": 1}
    assert any("evil (101 values refused)" in line for line in lines(top))


@pytest.mark.parametrize(
    "answer", [b"\xff", b'{"term":' + b"9" * 400 + b"}", b"[" * 50_000, b'{"term":1e400}', b"{}", b'{"term":-1}']
)
async def test_an_answer_that_is_none_is_an_error_with_a_name(answer: bytes) -> None:
    bus = InProcessBus("test")
    node, master = InProcessEngine(bus), InProcessEngine(bus)
    await node.start()
    await master.start()

    async def handle(_: bytes) -> bytes:
        return answer

    await node.join(EVIL, encode_snapshot(snapshot(device(), node=EVIL)), handle)
    with pytest.raises(ClusterError, match=EVIL):
        await request_drain(master, EVIL)


def test_a_refused_node_is_forgotten_before_memory_is() -> None:
    refusals = Refusals(FakeClock(), max_nodes=10, log=False)
    for number in range(100):
        refusals.add(f"n{number}", {"memory_bytes": 1})
    assert refusals.nodes == tuple(f"n{number}" for number in range(90, 100))
    assert refusals.total == 100
    assert math.isclose(sum(refusals.of("n99").values()), 1)


@pytest.mark.parametrize("kind", [EventKind.NODE_PLACEMENT, EventKind.NODE_LINKS, EventKind.BACKEND_FAILED])
def test_what_is_told_as_a_whole_is_refused_as_a_whole(kind: EventKind) -> None:
    view = MasterView(clock=FakeClock())
    view.node_up(EVIL)
    view.apply_snapshot(decode_snapshot(spell(snapshot_document()).encode(), node=EVIL), sole=True)
    before = view.node(EVIL)
    name = {EventKind.NODE_PLACEMENT: "placement", EventKind.NODE_LINKS: "links", EventKind.BACKEND_FAILED: "failed"}
    document = events(1)[name[kind]]
    key = {"placement": "placement", "links": "links", "failed": "report"}[name[kind]]
    inner = {"placement": {"term": 10**30}, "links": {"measured": [{"peer": 1}]}, "report": {"name": "\x1b"}}[key]
    document["data"][key] = inner
    view.apply_event(decode(spell(document).encode(), node=EVIL))
    after = view.node(EVIL)
    assert before is not None
    assert after is not None
    assert (after.placement, after.links, after.reports) == (before.placement, before.links, before.reports)
    assert view.ignored["malformed"] == 1


def test_a_message_of_nothing_but_faults_is_refused() -> None:
    with pytest.raises(MalformedEvent):
        decode_snapshot(spell({**snapshot_document(), "host": 7}).encode(), node=EVIL)
