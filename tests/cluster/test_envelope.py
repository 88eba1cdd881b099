"""The envelope is CloudEvents 1.0, and refuses what it must."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

from gpurt.cluster.device_data import DeviceData
from gpurt.cluster.envelope import MAX_EVENT_BYTES, EventKind, decode, encode, make_event
from gpurt.cluster.epoch import MAX_SEQ, Epoch, Position
from gpurt.cluster.errors import InvalidName, MalformedEvent
from gpurt.cluster.keys import check_name, node_key, node_of
from gpurt.cluster.state import NodeFields, decode_snapshot, device_keys, encode_snapshot
from gpurt.errors import GPUError
from tests.cluster.support import E1, device, event_bytes, snapshot

DATA = {"device": {"name": "H100 ü"}, "temperature_c": None}


def make(**fields: Any) -> bytes:
    return event_bytes(7, kind=EventKind.DEVICE_ADDED, subject="GPU-a", data=DATA, **fields)


def changed(**fields: Any) -> bytes:
    document = {**json.loads(make()), **fields}
    return json.dumps({key: value for key, value in document.items() if value is not ...}).encode()


def test_the_official_sdk_reads_what_we_write() -> None:
    event = JSONFormat().read(CloudEvent, make())
    assert event.get_id() == f"n1:{E1}:7"
    assert event.get_source() == "gpurt://test/n1"
    assert event.get_type() == "gpurt.device.added.v1"
    assert event.get_specversion() == "1.0"
    assert event.get_subject() == "GPU-a"
    assert event.get_datacontenttype() == "application/json"
    assert event.get_dataschema() == "gpurt:device-event:1"
    assert event.get_time() is not None
    assert event.get_data() == DATA
    assert event.get_extension("nodeid") == "n1"
    assert event.get_extension("nodeseq") == "7"
    assert event.get_extension("nodeepoch") == str(E1)


def test_we_read_what_the_official_sdk_writes() -> None:
    attributes = {"id": "1", "source": "gpurt://test/n1", "type": "com.example.new.v9", "specversion": "1.0"}
    attributes |= {"nodeid": "n1", "nodeepoch": str(E1), "nodeseq": "18446744073709551615", "stranger": "x"}
    event = decode(JSONFormat().write(CloudEvent(attributes=attributes, data={"a": [1, None]})), node="n1")
    assert event.type == "com.example.new.v9"
    assert event.position == Position(E1, MAX_SEQ)
    assert event.data == {"a": [1, None]}


def test_an_event_comes_back_as_it_was() -> None:
    event = make_event(EventKind.DEVICE_ADDED, cluster="c", node="n1", position=Position(E1, 1), data=DATA)
    assert decode(encode(event), node="n1") == event


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "document"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": NaN}', "NaN"),
        (changed(specversion="2.0"), "specversion"),
        (changed(id=""), "id"),
        (changed(type=...), "type"),
        (changed(time="yesterday"), "time"),
        (changed(time="2026-01-01T00:00:00"), "time"),
        (changed(nodeseq=7), "nodeseq"),
        (changed(nodeseq="0"), "nodeseq"),
        (changed(nodeseq="18446744073709551616"), "nodeseq"),
        (changed(nodeseq="1e3"), "nodeseq"),
        (changed(nodeepoch="one"), "nodeepoch"),
        (changed(data=[1]), "data"),
        (changed(nodeid="n2"), "'n2'"),
        (changed(data={"x": "y" * MAX_EVENT_BYTES}), str(MAX_EVENT_BYTES)),
    ],
    ids=lambda each: each if isinstance(each, str) else "payload",  # payloads hold the time of their making
)
def test_malformed_events_are_refused_by_name(payload: bytes, says: str) -> None:
    with pytest.raises(MalformedEvent, match="n1") as caught:
        decode(payload, node="n1")
    assert says in str(caught.value)
    assert isinstance(caught.value, GPUError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x"])
def test_what_is_not_json_is_not_sent(value: object) -> None:
    with pytest.raises(MalformedEvent, match="not JSON"):
        event_bytes(1, data={"value": value})


def test_an_oversized_event_is_not_sent() -> None:
    with pytest.raises(MalformedEvent, match=f"limit of {MAX_EVENT_BYTES} bytes"):
        event_bytes(1, data={"value": "x" * MAX_EVENT_BYTES})


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(payload: bytes) -> None:
    with pytest.raises(MalformedEvent):
        decode(payload)
    with pytest.raises(MalformedEvent):
        decode_snapshot(payload, node="n1")


@pytest.mark.parametrize("node", [..., None, {"gpu_backend": "cuda", "draining": True, "new": 1}])
def test_the_data_of_a_device_is_checked_as_it_is_read(node: Any) -> None:
    told = {"device": device().model_dump(mode="json"), "event": "added", "reason": None, "later": [1]}
    event = decode(changed(data=told if node is ... else {**told, "node": node}), node="n1")
    assert isinstance(event.data, DeviceData)
    assert event.data.device == device()
    assert event.data.fields == (None if node is ... else NodeFields.model_validate(node or {}))
    # Nothing of it is lost: not what this version does not know, nor that a value is unknown.
    assert event.document()["later"] == [1]
    assert json.loads(encode(event))["data"]["event"] == "added"
    assert decode(encode(event)) == event


@pytest.mark.parametrize("data", [{"device": {"name": 1}}, {"device": None}, {"node": {}}, {}])
def test_data_without_a_device_is_left_to_who_knows_the_type(data: dict[str, Any]) -> None:
    assert decode(changed(data=data)).data == data


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused_and_their_names_are_not(number: str) -> None:
    with pytest.raises(MalformedEvent, match="not JSON"):
        decode(changed(data={"device": "HERE"}).replace(b'"HERE"', number.encode()))
    assert decode(changed(data={"text": number})).document() == {"text": number}


def test_snapshot_round_trip_and_refusals() -> None:
    state = snapshot(device(), device("GPU-b", 1), seq=3, gpu_backend="cuda")
    assert decode_snapshot(encode_snapshot(state), node="n1") == state
    for payload, says in [
        (encode_snapshot(state), "'n1'"),
        (b'{"node": "n2"}', "epoch"),
        (json.dumps({**state.document(), "node": "n2", "epoch": "x"}).encode(), "epoch"),
    ]:
        with pytest.raises(MalformedEvent) as caught:
            decode_snapshot(payload, node="n2")
        assert says in str(caught.value)


def test_two_devices_with_one_identity_both_have_a_key() -> None:
    assert list(device_keys([device("X", 0), device("X", 1)])) == ["X", "X@cuda:1"]


@pytest.mark.parametrize("name", ["", "A", "a/b", "a*", "a.b", "ä", "a" * 65, "a b", "a\n", None, 7])
def test_names_that_could_break_out_of_their_key_are_refused(name: Any) -> None:
    with pytest.raises(InvalidName, match="node name"):
        check_name(name, "node")


def test_keys() -> None:
    assert node_key("c-1", "n_1", "ev") == "gpurt/v1/c-1/node/n_1/ev"
    assert node_key("c-1", "*", "live") == "gpurt/v1/c-1/node/*/live"
    assert node_of("gpurt/v1/c-1/node/n_1/ev") == "n_1"
    for key in ("gpurt/v1/c/node/N/ev", "gpurt/v2/c/node/n/ev", "gpurt/v1/c/node/n", "gpurt/v1/c/placement/n/x"):
        with pytest.raises(InvalidName):
            node_of(key)


def test_epochs_are_ordered_by_start() -> None:
    assert Epoch(2, "0" * 32) > Epoch(1, "f" * 32)
    first, second = Epoch.new(5), Epoch.new(5)
    assert first != second
    assert Epoch.parse(str(first)) == first
    for text in ("", "1", "-1-" + "0" * 32, "01-" + "0" * 32, "1-" + "0" * 31, "1-" + "G" * 32):
        with pytest.raises(InvalidName):
            Epoch.parse(text)
