"""Headers and indexes of any content up to 100 MB: refused at once, or read in time proportional to their size.

Work is counted, not timed: calls that the interpreter makes, of which the reader's and the parsers' steps consist. What
one call of the library does is bounded by the window that it sees, which is a small one here.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from gpurt.weights import WeightsError, parse_header, parse_index
from gpurt.weights import reader as module
from gpurt.weights.selection import place, select

MB = 1_000_000


def header(**members: Any) -> bytes:
    return json.dumps(
        {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0], **each} for name, each in members.items()}
    ).encode()


def shaped(item: bytes) -> Callable[[int], bytes]:
    return lambda size: (
        b'{"x": {"dtype": "U8", "shape": [' + item * (size // len(item)) + b'1], "data_offsets": [0, 1]}}'
    )


def around(before: bytes, item: bytes, after: bytes) -> Callable[[int], bytes]:
    return lambda size: before + item * (size // len(item)) + after


def tensors(size: int) -> bytes:
    return header(**{f"model.layers.{n}.weight": {} for n in range(size // 75)})


def many(start: bytes, value: bytes, end: bytes) -> Callable[[int], bytes]:
    return lambda size: start + b", ".join(b'"%d": %s' % (n, value) for n in range(size // (9 + len(value)))) + end


REFUSED: dict[str, tuple[Callable[[int], bytes], str]] = {
    "shape of ones": (shaped(b"1, "), "1,024 characters"),
    "shape of zeros": (shaped(b"0,"), "1,024 characters"),
    "shape of large extents": (shaped(b"9223372036854775807, "), "1,024 characters"),
    "shape of long numbers": (shaped(b"9" * 4000 + b", "), "1,024 characters"),
    "shape of fractions": (shaped(b"1.5, "), "1,024 characters"),
    "shape of texts": (shaped(b'"a", '), "1,024 characters"),
    "shape of arrays": (shaped(b"[], "), "1,024 characters"),
    "entry of arrays": (around(b'{"x": [', b"[],", b"[]]}"), "1,024 characters"),
    "entry of objects": (around(b'{"x": [', b'{"a": 1}, ', b"[]]}"), "1,024 characters"),
    "entry of members": (many(b'{"x": {', b"1", b"}}"), "1,024 characters"),
    "entry of blanks": (around(b'{"x": {', b" ", b"}}"), "1,024 characters"),
    "note of members": (many(b'{"__metadata__": {"k": {', b"1", b"}}}"), "1,024 characters"),
    "notes in an array": (around(b'{"__metadata__": [', b'"a", ', b'"a"]}'), "1,024 characters"),
    "nested arrays": (around(b'{"x": ', b"[", b"}"), "nested too deeply"),
    "nested objects": (around(b'{"x": ', b'{"x": ', b"}"), "nested too deeply|characters"),
    "digits": (around(b'{"x": [', b"1", b"]}"), "characters"),
    "a number": (around(b'{"x": ', b"1", b"}"), "not JSON"),
    "a name": (around(b'{"', b"n", b'": 1}'), "name of more than 1,024 characters"),
    "a name of dots": (around(b'{"', b"n.", b'": 1}'), "name of more than 1,024 characters"),
    "a name of escapes": (around(b'{"', b"\\n", b'": 1}'), "name of more than 1,024 characters"),
    "a note's name": (around(b'{"__metadata__": {"', b"n", b'": "x"}}'), "name of more than 1,024 characters"),
}
ACCEPTED: dict[str, Callable[[int], bytes]] = {
    "tensors": tensors,
    "notes": many(b'{"__metadata__": {', b'"x"', b"}}"),
    "a note": around(b'{"__metadata__": {"k": "', b"x", b'"}}'),
    "a note of escapes": around(b'{"__metadata__": {"k": "', b"a\\n", b'"}}'),
    "a note of emoji": around(b'{"__metadata__": {"k": "', b"\\ud83d\\ude00", b'"}}'),
    "blanks": around(b"{", b" ", b"}"),
    "wrong tensors": many(b"{", b"1", b"}"),
}
INDEXES: dict[str, Callable[[int], bytes]] = {
    "files": many(b'{"weight_map": {', b'"1.safetensors"', b"}}"),
    "different files": lambda size: json.dumps({"weight_map": {f"{n}": f"{n}.st" for n in range(size // 20)}}).encode(),
    "skipped arrays": around(b'{"weight_map": {}, "metadata": [', b"[],", b"[]]}"),
    "skipped numbers": around(b'{"weight_map": {}, "metadata": [', b"1,", b"1]}"),
    "skipped objects": around(b'{"weight_map": {}, "metadata": [', b'{"a": 1},', b"1]}"),
    "skipped members": many(b'{"weight_map": {}, "metadata": {', b"[]", b"}}"),
    "skipped text": around(b'{"weight_map": {}, "metadata": "', b"\\n", b'"}'),
    "a file of arrays": around(b'{"weight_map": {"a": [', b"[],", b"[]]}}"),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large becomes so with fewer characters. The library itself finds out about nesting, in a window."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(module, "WHOLE_CHARACTERS", 1024)


def read(parser: str, text: bytes) -> str:
    try:
        if parser == "header":
            parse_header(text, 8 + len(text), "p")
        else:
            parse_index(text, "p")
    except WeightsError as exc:
        return str(exc)
    return ""


def calls(run: Callable[[], object]) -> int:
    """How many calls, of Python and of C, it makes."""
    count = 0

    def profile(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", REFUSED)
def test_refused_at_once(kind: str) -> None:
    """With a typed error that has the figure, after a window or two: twice the size is no more work."""
    make, says = REFUSED[kind]
    size = 5 * module.BLOCK_BYTES
    few, large = make(size), make(8 * size)
    with pytest.raises(WeightsError, match=says) as caught:
        parse_header(large, 8 + len(large), "p")
    assert len(str(caught.value)) < 400
    steps = [calls(lambda text=text: read("header", text)) for text in (few, large)]
    assert steps[1] <= steps[0] + 20


KINDS = [*(("header", kind) for kind in ACCEPTED), *(("index", kind) for kind in INDEXES)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("parser", "kind"), KINDS, ids=lambda value: value)
def test_work_grows_as_the_size(parser: str, kind: str) -> None:
    make = ACCEPTED[kind] if parser == "header" else INDEXES[kind]
    steps = [calls(lambda size=size: read(parser, make(size))) for size in (20_000, 40_000)]
    assert steps[1] <= 2.2 * steps[0] + 50


@pytest.mark.slow
@pytest.mark.parametrize(("parser", "kind"), [*KINDS, *(("header", kind) for kind in REFUSED)], ids=lambda value: value)
def test_time_grows_as_the_size(parser: str, kind: str) -> None:
    """The processor's time of this thread, the best of three: four times the size, and far from sixteen times it."""
    make = INDEXES[kind] if parser == "index" else ACCEPTED[kind] if kind in ACCEPTED else REFUSED[kind][0]

    def seconds(text: bytes) -> float:
        best = float("inf")
        for _ in range(3):
            began = time.thread_time()
            read(parser, text)
            best = min(best, time.thread_time() - began)
        return best

    assert seconds(make(12 * MB)) < 8 * seconds(make(3 * MB)) + 0.05


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", [kind for kind in INDEXES if "skipped" in kind or "arrays" in kind])
def test_what_is_not_kept_takes_no_memory(kind: str) -> None:
    text = INDEXES[kind](MB // 4)
    tracemalloc.start()
    try:
        read("index", text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Names are kept until their object ends, since none may be there twice.
    assert peak < (4 * MB if "members" in kind else MB // 4)


@pytest.mark.parametrize(("rank", "right"), [(64, True), (65, False), (10_000, False)])
def test_extents(rank: int, right: bool) -> None:
    text = json.dumps({"x": {"dtype": "U8", "shape": [1] * rank, "data_offsets": [0, 1]}}).encode()
    if right:
        assert parse_header(text, 8 + len(text) + 1, "p").tensors[0].shape == (1,) * rank
        return
    with pytest.raises(WeightsError, match=f"{rank:,} extents; at most 64") as caught:
        parse_header(text, 8 + len(text) + 1, "p")
    assert caught.value.tensor == "x"


def test_long_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_STRING", 500_000)
    for length, right in ((500_000, True), (500_001, False)):
        message = read("header", json.dumps({"__metadata__": {"k": "x" * length}}).encode())
        assert (message == "") == right
    assert "more than 500,000 characters" in message


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "text", [tensors(MB // 5), ACCEPTED["notes"](MB // 5), INDEXES["files"](MB // 5)], ids=["tensors", "notes", "files"]
)
def test_too_many_names(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_MEMBERS", 1000)
    assert "more than 1,000 names" in read("index" if b"weight_map" in text else "header", text)


@pytest.mark.parametrize("dots", [1000, 30_000])
def test_names_of_many_dots_are_placed_by_the_entries_alone(dots: int) -> None:
    """By each of its parts, a name of 30,000 dots would be a gigabyte of names."""
    name = "a." * dots + "b"
    placement = {"a.a.": "one", "": "two", name + "c": "three", "a." * (dots - 1) + "a": "four"}
    tracemalloc.start()
    try:
        assert place([name, "a.ab", "a.a"], placement, "p") == {name: "four", "a.ab": "two", "a.a": "one"}
        assert select([name, "a.ab"], ["a.a", name], "p") == [name]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MB
