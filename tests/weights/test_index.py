"""The index of a sharded checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpurt.weights import WeightsError, parse_index


def index(weight_map: Any) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


def test_right() -> None:
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "sub/model.safetensors", "c": "..odd..safetensors"}
    assert parse_index(index(weight_map), "i") == weight_map
    assert parse_index(index({}), "i") == {}


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "a/../../x",
        "..",
        ".",
        "/etc/passwd",
        "//host/share/x",
        "..\\x",
        "a\\..\\..\\x",
        "\\\\host\\share\\x",
        "C:\\x",
        "C:x",
        "\\x",
        "",
        "a\0b",
        "a\nb",
        5,
        None,
        ["x"],
    ],
)
def test_files_outside_the_folder(shard: Any) -> None:
    with pytest.raises(WeightsError, match="inside the folder") as caught:
        parse_index(index({"w": shard}), "i.json")
    assert (caught.value.path, caught.value.tensor) == ("i.json", "w")


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "weight_map"),
        (b'{"weight_map": []}', "weight_map"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "'a' twice"),
        (b'{"weight_map": {}, "weight_map": {}}', "twice"),
        (b'{"weight_map": {"\\ud83d": "x"}}', "Unicode"),
        (b'{"weight_map": {"a": "\\ud83d"}}', "inside the folder"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_wrong(document: bytes, says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        parse_index(document, "i.json")
