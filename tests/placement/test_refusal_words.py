"""What a refusal says reads as a sentence, is true of what fits, and begins with what is easiest."""

from __future__ import annotations

from typing import Any

import pytest

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    DomainLimit,
    InfeasibilityReport,
    InfeasiblePlacement,
    ModelSpec,
    Pin,
    PlacementDevice,
    RelaxationKind,
    StageLayers,
    Topology,
    Workload,
)
from gpurt.placement.infeasibility import MOST_OF_A_KIND

pytestmark = pytest.mark.wide

GIB = 1 << 30
Kind = RelaxationKind


def device(name: str, gib: float, **fields: Any) -> PlacementDevice:
    given = {"node": f"n-{name}", "memory_bandwidth": 1e12, "compute_flops": 1e15, **fields}
    return PlacementDevice(id=name, usable_bytes=int(gib * GIB), **given)


def model(layers: int, **fields: Any) -> ModelSpec:
    """One GiB a layer."""
    return ModelSpec.uniform("m", layers=layers, size_bytes=layers * GIB, **fields)


def refused(spec: ModelSpec, devices: list[PlacementDevice], **rules: Any) -> tuple[str, InfeasibilityReport]:
    with pytest.raises(InfeasiblePlacement) as caught:
        ConstraintSatisfactionPlacement().solve_placement(spec, devices, None, Constraints(**rules))
    assert caught.value.report is not None
    return str(caught.value), caught.value.report


HEAD = {"head_bytes": 20 * GIB}
BOTH = {"head_bytes": 2 * GIB, "embedding_bytes": 2 * GIB}


@pytest.mark.parametrize(
    ("spec", "devices", "rules", "layers", "unplaced", "said"),
    [
        (model(80, **HEAD), [device(name, 15) for name in "abcdefgh"], {}, 80, ("head",),
         "80 of 80 layers find room, but no device holds the head beside a layer; to make it possible, "),
        (model(80, **HEAD), [device(name, 15) for name in "ab"], {}, 30, ("head",),
         "30 of 80 layers find room, but no device holds the head beside a layer; to make it possible, "),
        (model(80, embedding_bytes=20 * GIB, **HEAD), [device(name, 15) for name in "abcdefgh"], {}, 80,
         ("embedding", "head"), "80 of 80 layers find room, but no device holds the embedding or the head beside a"),
        (model(10, **BOTH), [device("a", 4), *(device(name, 2) for name in "bcdef")], {}, 10, ("embedding and head",),
         "10 of 10 layers find room, but not with both the embedding and the head; to make it possible, "),
        (model(80, **BOTH), [device("a", 60)], {}, 56, (), "but only 56 once the embedding, the head and the rules"),
        (model(80, **BOTH), [device(name, 60) for name in "ab"], {"max_stages": 1}, 56, (),
         "with max_stages 1 only 56 of 80 layers find room; to make it possible, set max_stages to 2 instead of 1"),
        (model(80, **HEAD), [device(name, 15) for name in "abcdefgh"], {"max_stages": 4}, 60, ("head",),
         "60 of 80 layers find room, but no device holds the head beside a layer"),
        (model(3), [device("a", 0.5)], {}, 0, (), "the largest layer takes 1.0 GiB, and the largest device has 512"),
        (model(3), [device("a", 1)], {}, 1, (), "1 of 3 layers finds room; to make it possible, "),
        (model(4), [device("a", 5), device("b", 0.5)], {"require_devices": frozenset("b")}, 4, (),
         "b is required, and has no room for one layer; to make it possible, no longer require b"),
        (model(4), [device("a", 5), device("b", 0.5)], {"require_nodes": frozenset({"n-b"})}, 4, (),
         "n-b cannot be used as required; to make it possible, no longer require n-b"),
        (model(4), [device(name, 2, labels={"power": "1", "rack": name}) for name in "abc"],
         {"domain_limits": (DomainLimit(domain="power", stages=1), DomainLimit(domain="rack", stages=2))}, 2, (),
         "with at most 1 stage per power and at most 2 stages per rack only 2 of 4 layers find room; to make it "
         "possible, allow 2 stages per power instead of 1"),
        (model(4), [device("a", 1), device("b", 5)], {"pins": (Pin(start=0, end=2, devices=frozenset("a")),)}, 4, (),
         "the pin of layers 0 to 1 to a cannot be kept; to make it possible, drop the pin of layers 0 to 1 to a"),
        (model(4), [device(name, 2, backend=name) for name in "ab"], {"same_backend": True}, 4, (),
         "no devices of one backend hold the whole model; to make it possible, let stages use different backends"),
        (model(4), [device(name, 2) for name in "ab"],
         {"stage_layers": (StageLayers(device="a", maximum=1),)}, 3, (),
         "what stage_layers says of a cannot be kept; to make it possible, allow any number of layers on a"),
    ],
)  # fmt: skip
def test_what_fits_and_what_does_not(
    spec: ModelSpec,
    devices: list[PlacementDevice],
    rules: dict[str, Any],
    layers: int,
    unplaced: tuple[str, ...],
    said: str,
) -> None:
    text, report = refused(spec, devices, **rules)
    assert said in text
    assert (report.placeable_layers, report.unplaced) == (layers, unplaced)
    assert report.short_layers == report.layers - layers
    assert "with without" not in text + report.explain()


@pytest.mark.parametrize(
    ("rules", "topology", "said"),
    [
        ({"max_link_seconds": 1e-6}, Topology(), "within max_link_seconds 1e-06 hold the whole model; to make it"),
        ({"max_link_seconds": 1e-6, "min_stages": 2}, Topology(), "hold the whole model under the other rules; to"),
        ({"min_stages": 2}, Topology.unconnected(), "all reach each other hold the whole model under the other rules"),
        ({"same_backend": True, "min_stages": 2}, Topology(), "one backend hold the whole model under the other rules"),
    ],
)
def test_that_no_devices_hold_the_model_is_said_of_them_under_all_rules(
    rules: dict[str, Any], topology: Topology, said: str
) -> None:
    """Where one device holds it and several are asked for, the model as such finds room."""
    room = 5 if "min_stages" in rules else 3
    devices = [device("a", room, backend="x"), device("b", room, backend="y")]
    with pytest.raises(InfeasiblePlacement, match=said):
        ConstraintSatisfactionPlacement().solve_placement(model(4), devices, topology, Constraints(**rules))


def test_layers_are_not_said_to_find_room_where_bytes_are_counted_of_fewer_devices() -> None:
    with pytest.raises(InfeasiblePlacement) as caught:
        ConstraintSatisfactionPlacement().solve_placement(
            model(4), [device("a", 3), device("b", 3)], Topology.unconnected()
        )
    assert caught.value.report is not None
    lines = caught.value.report.explain().splitlines()
    assert lines[1:3] == [
        "4.0 GiB are needed and 3.0 GiB usable on 1 device.",
        "4 of 4 layers would find room if all devices reached each other.",
    ]


def test_the_easiest_change_comes_first() -> None:
    """One rule to drop, a number format, a shorter context, fewer sequences, one device, bytes on all of them."""
    spec = model(8, dtype="float16", kv_bytes_per_token=1 << 20)
    work = Workload(context_tokens=512, batch=2)
    devices = [device("a", 8.5), device("b", 8.5)]
    _, report = refused(spec, devices, workload=work, exclude_devices=frozenset("b"))
    assert [change.kind for change in report.relaxations] == [
        Kind.INCLUDE, Kind.ADD_DEVICES, Kind.ADD_DEVICE_OF_SIZE, Kind.BYTES_PER_DEVICE,
    ]  # fmt: skip
    _, report = refused(spec, [device("a", 12.5)], workload=work)
    assert [change.kind for change in report.relaxations] == [
        Kind.QUANTISATION, Kind.CONTEXT_TOKENS, Kind.BATCH,
        Kind.ADD_DEVICES, Kind.ADD_DEVICE_OF_SIZE, Kind.BYTES_PER_DEVICE,
    ]  # fmt: skip
    assert [change.change for change in report.relaxations][:4] == [
        "store the weights as Q8_0 (8.5 bits each instead of 16)",
        "hold a context of 256 tokens instead of 512",
        "run 1 sequence at once instead of 2",
        "add 1 device like a (12.5 GiB usable)",
    ]


def test_several_devices_come_after_bytes_on_each() -> None:
    _, report = refused(model(10), [device("a", 4), device("b", 1.5)])
    kinds = [change.kind for change in report.relaxations]
    several = next(change for change in report.relaxations if change.kind is Kind.ADD_DEVICES)
    assert several.amount != 1
    assert kinds.index(Kind.BYTES_PER_DEVICE) < kinds.index(Kind.ADD_DEVICES)


def test_every_rule_that_may_go_alone_is_listed_up_to_a_number() -> None:
    spec, names = model(10), [f"d{at:02}" for at in range(20)]
    devices = [device("a", 6), *(device(name, 6) for name in names)]
    for count in (7, 20):
        out = frozenset(names[:count])
        _, report = refused(spec, devices[: count + 1], exclude_devices=out)
        alone = [change for change in report.relaxations if change.kind is Kind.INCLUDE]
        assert all(len(change.names) == 1 for change in alone)
        assert len({change.names for change in alone}) == len(alone) == min(count, MOST_OF_A_KIND)
    pins = (Pin(start=0, end=3, devices=frozenset("a")), Pin(start=2, end=5, devices=frozenset({"d00"})))
    _, report = refused(spec, devices, pins=pins)
    assert [change.index for change in report.relaxations if change.kind is Kind.DROP_PIN] == [0, 1]
    _, report = refused(model(2), devices[:4], require_devices=frozenset({"a", "d00", "d01"}))
    assert sorted(change.names for change in report.relaxations if change.kind is Kind.REQUIRE) == [
        ("a",), ("d00",), ("d01",),
    ]  # fmt: skip


def test_a_rule_behind_one_that_cannot_be_kept_is_named_for_what_it_is() -> None:
    _, report = refused(model(4), [device("a", 5), device("b", 0.5)], require_nodes=frozenset({"n-b"}))
    assert {kind.value for kind in report.conflicts} == {"memory", "require_nodes"}
