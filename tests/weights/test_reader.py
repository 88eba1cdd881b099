"""Headers and indexes of any size are read as the library reads them whole, whatever lies across a window's edge."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gpurt.weights import WeightsError, parse_header, parse_index
from gpurt.weights import reader as module
from gpurt.weights.reader import ObjectReader
from tests.weights.support import document, tensor


def read(text: bytes | str) -> dict[str, Any]:
    raw = text.encode() if isinstance(text, str) else text
    return dict(ObjectReader(raw, "p", "header").members())


@pytest.fixture(params=[1, 7, 64, 1 << 18])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(module, "WHOLE_CHARACTERS", min(max(40, request.param * 2), 1 << 16))  # a number has to fit
    monkeypatch.setattr(module, "SINGLY", 3)
    return request.param


def some(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 6)
    alphabet = 'aé\u20ac\U0001f600"\\/\n\t\u0001 ,:{}[]'
    match kind:
        case 0:
            return rng.choice([None, True, False])
        case 1:
            return rng.randrange(-(10**12), 10**12)
        case 2:
            return rng.random() * 10 ** rng.randrange(-20, 20)
        case 3 | 4 | 5:
            return "".join(rng.choices(alphabet, k=rng.randrange(60)))
        case 6:
            return [some(rng, depth + 1) for _ in range(rng.randrange(12))]
        case _:
            return {f"{n}{some(rng, 9)}": some(rng, depth + 1) for n in range(rng.randrange(6))}


def test_like_the_library(window: int) -> None:
    rng = random.Random(window)
    for round_ in range(60):
        value = {f"k{n}": some(rng) for n in range(rng.randrange(8))}
        text = json.dumps(value, ensure_ascii=bool(round_ % 2), indent=rng.choice([None, 0, 3]))
        assert read("\n \t" * rng.randrange(20) + text + " " * rng.randrange(40)) == value


def test_what_is_not_json_is_refused_like_by_the_library(window: int) -> None:
    rng = random.Random(window)
    refused = 0
    for _ in range(400):
        raw = bytearray(json.dumps({"a": some(rng), "b": [1, {"c": "d\U0001f600"}]}).encode())
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(raw))
            raw[at : at + rng.randrange(2)] = rng.choices(b'"\\{}[]:,1ex \x00\xff-', k=rng.randrange(3))
        try:
            expected = json.loads(
                raw.decode(), parse_constant=lambda name: _fail(), object_pairs_hook=lambda pairs: _unique(pairs)
            )
        except (ValueError, RecursionError):
            expected = None
        try:
            assert read(bytes(raw)) == expected
        except WeightsError:
            refused += 1
            assert not isinstance(expected, dict)
    assert refused > 100


def _fail() -> Any:
    raise ValueError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError
    return dict(pairs)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + '{"a": ' * 100_000, "nested too deeply"),
        ('{"' + "a" * 400_000, "without an end"),
        ('{"' + "a" * 400_000 + "\x00", "invalid character"),
        ('{"a": "' + "\\n" * 400_000 + '\\x"}', "invalid character"),
        ('{"a": ' + "1" * 400_000 + "}", "not JSON"),
        ('{"a": [' + "1," * 400_000 + "]}", "not JSON"),
        ('{"a": [' + "1," * 400_000 + "1}", "missing"),
        ('{"a": {' + '"b": 1,' * 100_000, "'b' twice"),
        ('{"a": [' + '"b",' * 100_000 + "NaN]}", "NaN"),
        ("{" + " " * 400_000 + "1}", r"character 400,001\)"),
        ('{"a": 1}' + " " * 400_000 + "x", "follows"),
        (" " * 400_000, "empty"),
        (b'{"a": "' + b"x" * 400_000 + b'\xff"}', "byte 400,007 is not UTF-8"),
    ],
)
def test_large_and_wrong(text: str | bytes, says: str) -> None:
    with pytest.raises(WeightsError, match=says) as caught:
        read(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "note",
    ["x" * 700_000, "\\" * 300_000, "\U0001f600" * 100_000, "a\U0001f600\n" * 50_000, "é\u20ac" * 200_000],
    ids=["plain", "backslashes", "emoji", "mixed", "accents"],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_long_notes_are_legal(note: str, ascii_only: bool) -> None:
    """Previews and whole configurations are kept there."""
    content = {"x": tensor("U8", 4)}
    text = json.dumps(document(content, {"n": note, **{f"k{n}": "v" for n in range(9000)}}), ensure_ascii=ascii_only)
    raw = text.encode()
    header = parse_header(raw, 8 + len(raw) + 4, "p")
    assert header.metadata["n"] == note
    assert [each.name for each in header.tensors] == ["x"]


def test_a_large_header_in_any_order() -> None:
    content = {f"layers.{n}.w": ("U8", (2,), b"..") for n in range(20_000)}
    entries = list(document(content).items())
    random.Random(1).shuffle(entries)
    raw = json.dumps(dict(entries)).encode()
    header = parse_header(raw, 8 + len(raw) + 40_000, "p")
    assert [each.name for each in header.tensors] == list(content)


def test_a_large_index() -> None:
    weight_map = {f"layers.{n}.w": f"{n % 7}.safetensors" for n in range(20_000)}
    raw = json.dumps({"metadata": {"x": list(range(20_000))}, "weight_map": weight_map}).encode()
    assert parse_index(raw, "i") == weight_map
