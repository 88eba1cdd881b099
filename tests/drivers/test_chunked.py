"""Arithmetic of chunked memory, against byte arrays that are really cut into chunks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.backends.chunked import Link, Piece, chunk_sizes, links, pieces

sizes = st.integers(0, 300)
chunks = st.integers(1, 70)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, int]:
    """Size of a memory, offset and length of a range in it."""
    size = draw(st.integers(0, 300))
    offset = draw(st.integers(0, size))
    return size, offset, draw(st.integers(0, size - offset))


def cut(content: bytes, chunk_bytes: int) -> list[bytearray]:
    found, at = [], 0
    for size in chunk_sizes(len(content), chunk_bytes):
        found.append(bytearray(content[at : at + size]))
        at += size
    assert at == len(content)
    return found


@given(sizes, chunks)
def test_chunks_hold_everything_and_the_last_is_exact(nbytes: int, chunk_bytes: int) -> None:
    found = chunk_sizes(nbytes, chunk_bytes)
    assert sum(found) == nbytes
    assert all(size == chunk_bytes for size in found[:-1])
    assert all(0 < size <= chunk_bytes for size in found)


@given(ranges(), chunks)
def test_pieces_read_and_write_the_range_and_nothing_else(span: tuple[int, int, int], chunk_bytes: int) -> None:
    size, offset, nbytes = span
    content = random.Random(size).randbytes(size)
    memory = cut(content, chunk_bytes)
    target = bytearray(nbytes)
    found = list(pieces(offset, nbytes, chunk_bytes))
    for chunk, start, count, at in found:
        target[at : at + count] = memory[chunk][start : start + count]
    assert target == content[offset : offset + nbytes]
    written = bytes(255 - byte for byte in target)
    for piece in found:
        memory[piece.chunk][piece.start : piece.start + piece.nbytes] = written[piece.at : piece.at + piece.nbytes]
    assert b"".join(memory) == content[:offset] + written + content[offset + nbytes :]


@given(ranges(), chunks)
def test_pieces_are_as_few_as_can_be(span: tuple[int, int, int], chunk_bytes: int) -> None:
    _, offset, nbytes = span
    found = list(pieces(offset, nbytes, chunk_bytes))
    assert len({piece.chunk for piece in found}) == len(found)
    assert all(piece.nbytes > 0 for piece in found)
    # Only the first may begin inside its chunk, only the last may end inside.
    assert all(piece.start == 0 for piece in found[1:])
    assert all(piece.start + piece.nbytes == chunk_bytes for piece in found[:-1])


@given(ranges(), chunks, chunks, st.integers(0, 100))
def test_links_copy_between_memories_of_different_chunks(
    span: tuple[int, int, int], src_chunk: int, dst_chunk: int, dst_offset: int
) -> None:
    size, offset, nbytes = span
    content, before = random.Random(size).randbytes(size), random.Random(7).randbytes(dst_offset + nbytes + 5)
    src, dst = cut(content, src_chunk), cut(before, dst_chunk)
    found = list(links(offset, dst_offset, nbytes, src_chunk, dst_chunk))
    for link in found:
        part = src[link.src_chunk][link.src_start : link.src_start + link.nbytes]
        assert len(part) == link.nbytes > 0
        dst[link.dst_chunk][link.dst_start : link.dst_start + link.nbytes] = part
    expected = before[:dst_offset] + content[offset : offset + nbytes] + before[dst_offset + nbytes :]
    assert b"".join(dst) == expected
    assert len({(link.src_chunk, link.dst_chunk) for link in found}) == len(found)


def test_what_it_looks_like() -> None:
    assert chunk_sizes(10, 4) == [4, 4, 2]
    assert list(pieces(3, 6, 4)) == [Piece(0, 3, 1, 0), Piece(1, 0, 4, 1), Piece(2, 0, 1, 5)]
    assert list(links(0, 1, 4, 4, 4)) == [Link(0, 0, 0, 1, 3), Link(0, 3, 1, 0, 1)]


@pytest.mark.parametrize("arguments", [(-1, 1, 4), (0, -1, 4), (0, 1, 0), (0, 1, -4)])
def test_impossible_ranges_are_refused_at_once(arguments: tuple[int, int, int]) -> None:
    offset, nbytes, chunk_bytes = arguments
    with pytest.raises(ValueError, match="must not be negative"):
        pieces(offset, nbytes, chunk_bytes)
    with pytest.raises(ValueError, match="must not be negative"):
        links(offset, 0, nbytes, chunk_bytes, 1)
    with pytest.raises(ValueError, match="must not be negative"):
        links(0, offset, nbytes, 1, chunk_bytes)
    if offset == 0:
        with pytest.raises(ValueError, match="must not be negative"):
            chunk_sizes(nbytes, chunk_bytes)
