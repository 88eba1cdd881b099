"""Names, prefixes and layers."""

from __future__ import annotations

from typing import Any

import pytest

from gpurt.weights import WeightsError
from gpurt.weights.selection import place, select

NAMES = ["embed", "layers.3.w", "layers.3.b", "layers.31.w", "layers.4.w", "norm.weight"]


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (None, NAMES),
        ([""], NAMES),
        (["layers.3."], ["layers.3.w", "layers.3.b"]),
        (["layers.3"], ["layers.3.w", "layers.3.b"]),
        ("layers.3.", ["layers.3.w", "layers.3.b"]),
        ({"norm", "embed"}, ["embed", "norm.weight"]),
        (["layers.3.b", "layers.3"], ["layers.3.w", "layers.3.b"]),
        (["layers"], NAMES[1:5]),
        ([], []),
        (lambda name: name.endswith(".w"), ["layers.3.w", "layers.31.w", "layers.4.w"]),
    ],
)
def test_select(only: Any, expected: list[str]) -> None:
    assert select(NAMES, only, "f") == expected


@pytest.mark.parametrize("entry", ["layers.5", "layer", "layers.3.w.x", "emb", "norm.weight.."])
def test_entry_that_matches_nothing(entry: str) -> None:
    with pytest.raises(WeightsError, match="nothing is named") as caught:
        select(NAMES, ["embed", entry], "f")
    assert repr(entry) in str(caught.value)


def test_place() -> None:
    assert place(NAMES, "cuda:0", "f") == dict.fromkeys(NAMES, "cuda:0")
    placed = place(NAMES, {"": "a", "layers.": "b", "layers.3": "c", "layers.3.b": "d"}, "f")
    assert placed == dict(zip(NAMES, "acdbba", strict=True))
    assert place(["x", "y"], lambda name: name * 2, "f") == {"x": "xx", "y": "yy"}


@pytest.mark.parametrize("placement", [{"embed": "a"}, {}, lambda name: None, lambda name: 3, {"": 5}])
def test_tensor_without_a_device(placement: Any) -> None:
    with pytest.raises(WeightsError) as caught:
        place(NAMES, placement, "f")
    assert caught.value.tensor in ("embed", "layers.3.w")
