"""What nodes say of models and links: newer versions are understood as far as they go, and nonsense changes nothing."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
from rich.console import Console

from gpurt.cli.cluster_table import cluster_table
from gpurt.cluster.assignment import Acknowledgement, Refusal, kept_of
from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.envelope import EventKind, decode
from gpurt.cluster.errors import MalformedEvent
from gpurt.cluster.logged import log_change
from gpurt.cluster.shards import NodePlacement, ResidentLayers, ShardReport, ShardState
from gpurt.cluster.state import decode_snapshot, encode_snapshot
from gpurt.cluster.view import MasterView
from gpurt.placement import PlanVersion
from tests.cluster.support import device, event_bytes, snapshot

SHARD = {"instance": "a", "model": "m", "version": {"term": 1, "n": 2}, "state": "loaded"}


def view() -> MasterView:
    made = MasterView()
    made.node_up("n1")
    made.apply_snapshot(snapshot(device()))
    return made


def told(made: MasterView, kind: EventKind, data: dict[str, Any], seq: int = 1) -> None:
    made.apply_event(decode(event_bytes(seq, kind=kind, data=data)))


def test_a_newer_version_may_say_more() -> None:
    made = view()
    shard = SHARD | {
        "state": "dreaming",
        "colour": "red",
        "resident": [{"device": "GPU-a", "start": 0, "end": 2, "x": 1}],
    }
    told(made, EventKind.NODE_PLACEMENT, {"placement": {"term": 3, "mood": 1, "shards": [shard]}})
    record = made.node("n1")
    assert record is not None
    (seen,) = record.placement.shards
    assert (seen.state, seen.version) == (ShardState.UNKNOWN, PlanVersion(term=1, n=2))
    answer = Acknowledgement.model_validate({"accepted": False, "term": 1, "reason": "bad_weather", "more": 1})
    assert answer.reason is Refusal.OTHER


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (EventKind.NODE_PLACEMENT, {}),
        (EventKind.NODE_PLACEMENT, {"placement": {"shards": [SHARD | {"version": {"term": -1, "n": 0}}]}}),
        (EventKind.NODE_PLACEMENT, {"placement": {"shards": [SHARD | {"version": {"term": 1.5, "n": 0}}]}}),
        (EventKind.NODE_PLACEMENT, {"placement": {"shards": [SHARD] * 65}}),
        (
            EventKind.NODE_PLACEMENT,
            {"placement": {"shards": [SHARD | {"resident": [{"device": "GPU-a", "start": 5, "end": 2}]}]}},
        ),
        (EventKind.NODE_PLACEMENT, {"placement": {"shards": [SHARD]}, "node": {"draining": "perhaps"}}),
        (EventKind.NODE_LINKS, {}),
        (EventKind.NODE_LINKS, {"links": {"measured": [{"peer": "n2", "round_trip_s": -1, "bandwidth": 1}]}}),
    ],
)
def test_nonsense_is_counted_and_changes_nothing(kind: EventKind, data: dict[str, Any]) -> None:
    made = view()
    before = made.node("n1")
    told(made, kind, data)
    after = made.node("n1")
    assert before is not None
    assert after is not None
    assert made.ignored["malformed"] == 1
    assert (after.placement, after.links, after.draining) == (before.placement, before.links, False)
    assert after.seq == 1


def test_it_is_part_of_the_snapshot_and_so_of_a_resync() -> None:
    shard = ShardReport(instance="a", model="m", version=PlanVersion(term=1, n=1), state=ShardState.LOADED)
    said = snapshot(device(), placement=NodePlacement(term=1, shards=(shard,)), draining=True)
    assert decode_snapshot(encode_snapshot(said), node="n1") == said
    made = view()
    changes = made.changes()
    made.apply_snapshot(said)
    record = made.node("n1")
    assert record is not None
    assert record.placement.shards == (shard,)
    assert made.snapshot().available_devices == {}
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(cluster_table(made.snapshot()))
    assert "healthy (draining)" in console.export_text()
    with pytest.raises(MalformedEvent):
        decode_snapshot(encode_snapshot(said).replace(b'"term":1', b'"term":-1'), node="n1")
    # Started again, it holds nothing any more.
    made.apply_snapshot(snapshot(device(), seq=1))
    changes.close()
    assert changes._queue[-1].message == "a let go"  # pyright: ignore[reportPrivateUsage]


def test_a_failure_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    made = view()
    changes = made.changes()
    told(made, EventKind.NODE_PLACEMENT, {"placement": {"shards": [SHARD | {"state": "failed", "message": "no disk"}]}})
    change = changes._queue[-1]  # pyright: ignore[reportPrivateUsage]
    assert change.kind is ChangeKind.NODE_PLACEMENT
    with caplog.at_level(logging.INFO, "gpurt.cluster.changes"):
        log_change(change, made)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "node placement n1: a failed under plan (1, 2): no disk")
    ]


def test_what_is_kept_is_what_both_have() -> None:
    def at(device: str, start: int, end: int, size: int | None = None) -> ResidentLayers:
        return ResidentLayers(device=device, start=start, end=end, bytes=size)

    old = (at("a", 0, 8, 80), at("b", 8, 10, 20), at("c", 10, 12, 20))
    new = (at("a", 4, 9, 50), at("b", 8, 10, 20))
    assert kept_of(old, new) == (at("a", 4, 8), at("b", 8, 10, 20))
