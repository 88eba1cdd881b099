"""How large copies are cut: every byte once, within bounds, and short in time where they are paced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.runtime.pieces import FIRST_BYTES, PIECE_S, UNCUT_BYTES, pieces

MIB = 1 << 20


class Copying:
    """A clock that moves on by what the pieces take at ``rate`` bytes a second."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sizes(self, nbytes: int, most: int, alignment: int = 1) -> list[int]:
        sizes: list[int] = []
        for start, stop in pieces(nbytes, most, alignment, paced=True, clock=self):
            self.now += (stop - start) / self.rate
            sizes.append(stop - start)
        return sizes


@given(
    nbytes=st.integers(1, 40 * MIB),
    most=st.integers(1, 1 << 26).filter(lambda most: most > 1 << 12),
    alignment=st.sampled_from([1, 4, 256, 4096]),
    rate=st.floats(1e6, 1e12),
    paced=st.booleans(),
)
def test_every_byte_once_and_within_bounds(nbytes: int, most: int, alignment: int, rate: float, paced: bool) -> None:
    clock, position = Copying(rate), 0
    for start, stop in pieces(nbytes, most, alignment, paced=paced, clock=clock):
        assert start == position
        assert 0 < stop - start <= most
        assert not start % alignment
        clock.now += (stop - start) / rate
        position = stop
    assert position == nbytes


def test_without_pace_all_are_as_large_as_may_be() -> None:
    assert list(pieces(70, 32, paced=False)) == [(0, 32), (32, 64), (64, 70)]
    assert list(pieces(20 * MIB, 8 * MIB + 3, 4096, paced=False)) == [
        (0, 8 * MIB),
        (8 * MIB, 16 * MIB),
        (16 * MIB, 20 * MIB),
    ]


@pytest.mark.parametrize("paced", [False, True])
def test_what_is_soon_over_is_not_cut(paced: bool) -> None:
    assert list(pieces(UNCUT_BYTES, 256 * MIB, paced=paced)) == [(0, UNCUT_BYTES)]
    assert len(list(pieces(UNCUT_BYTES + 1, 256 * MIB, paced=paced, clock=lambda: 0.0))) == 1 + paced


def test_alignment_larger_than_a_piece_wins() -> None:
    assert list(pieces(300, 100, 256, paced=False)) == [(0, 256), (256, 300)]


def test_touched_memory_is_one_long_copy_after_the_first_piece() -> None:
    assert Copying(8e9).sizes(256 * MIB, 256 * MIB) == [FIRST_BYTES, 252 * MIB]
    assert Copying(8e9).sizes(1024 * MIB, 256 * MIB) == [FIRST_BYTES, *[256 * MIB] * 3, 252 * MIB]


@pytest.mark.parametrize("rate", [1e8, 1.5e9, 4e9])
def test_slow_memory_is_cut_by_time(rate: float) -> None:
    sizes = Copying(rate).sizes(1024 * MIB, 256 * MIB)
    assert max(sizes[1:]) <= max(rate * PIECE_S * 1.01, FIRST_BYTES)
    assert sum(sizes) == 1024 * MIB


def test_pieces_follow_when_the_rate_changes() -> None:
    clock, sizes = Copying(10e9), []
    for start, stop in pieces(1024 * MIB, 256 * MIB, paced=True, clock=clock):
        sizes.append(stop - start)
        if stop > 512 * MIB:
            clock.rate = 1e9
        clock.now += (stop - start) / clock.rate
    assert sizes[:4] == [FIRST_BYTES, 256 * MIB, 256 * MIB, int(1e9 * PIECE_S)]
    assert all(abs(size - 1e9 * PIECE_S) < 2 for size in sizes[3:-1])


def test_a_clock_that_stands_still_is_no_trouble() -> None:
    assert list(pieces(20 * MIB, 8 * MIB, paced=True, clock=lambda: 0.0)) == [
        (0, 4 * MIB),
        (4 * MIB, 12 * MIB),
        (12 * MIB, 20 * MIB),
    ]
