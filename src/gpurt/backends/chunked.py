"""Memory that a library holds as a list of equal chunks, the last one exact: which bytes lie where. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Piece(NamedTuple):
    """``nbytes`` bytes of one chunk, from its byte ``start``; ``at`` is their place in the transfer they belong to."""

    chunk: int
    start: int
    nbytes: int
    at: int


class Link(NamedTuple):
    """``nbytes`` bytes that lie in one chunk on both sides of a copy."""

    src_chunk: int
    src_start: int
    dst_chunk: int
    dst_start: int
    nbytes: int


def chunk_sizes(nbytes: int, chunk_bytes: int) -> list[int]:
    """The sizes of the chunks that hold ``nbytes``: all ``chunk_bytes`` but the last, which is what remains.

    No bytes take no chunk.

    Raises:
        ValueError: a negative size, or a chunk of no bytes.
    """
    _check(nbytes, chunk_bytes)
    whole, rest = divmod(nbytes, chunk_bytes)
    return [chunk_bytes] * whole + ([rest] if rest else [])


def pieces(offset: int, nbytes: int, chunk_bytes: int) -> Iterator[Piece]:
    """The range ``[offset, offset + nbytes)`` cut where chunks meet, in order.

    A piece of ``chunk_bytes`` covers its chunk; one that is shorter covers it only where the chunk is the last and the
    piece starts it and has all of its bytes, which the caller sees by comparing ``nbytes`` with the chunk's size.

    Raises:
        ValueError: a negative offset or size, or a chunk of no bytes.
    """
    _check(min(offset, nbytes), chunk_bytes)
    return _pieces(offset, nbytes, chunk_bytes)


def links(src_offset: int, dst_offset: int, nbytes: int, src_chunk_bytes: int, dst_chunk_bytes: int) -> Iterator[Link]:
    """The copy of ``nbytes`` between two chunked memories, cut where chunks of either meet, in order.

    Raises:
        ValueError: a negative offset or size, or a chunk of no bytes.
    """
    _check(min(src_offset, dst_offset, nbytes), min(src_chunk_bytes, dst_chunk_bytes))
    return _links(src_offset, dst_offset, nbytes, src_chunk_bytes, dst_chunk_bytes)


def _pieces(offset: int, nbytes: int, chunk_bytes: int) -> Iterator[Piece]:
    at = 0
    while at < nbytes:
        chunk, start = divmod(offset + at, chunk_bytes)
        count = min(chunk_bytes - start, nbytes - at)
        yield Piece(chunk, start, count, at)
        at += count


def _links(src_offset: int, dst_offset: int, nbytes: int, src_chunk_bytes: int, dst_chunk_bytes: int) -> Iterator[Link]:
    for src in _pieces(src_offset, nbytes, src_chunk_bytes):
        for dst in _pieces(dst_offset + src.at, src.nbytes, dst_chunk_bytes):
            yield Link(src.chunk, src.start + dst.at, dst.chunk, dst.start, dst.nbytes)


def _check(least: int, chunk_bytes: int) -> None:
    if least < 0 or chunk_bytes < 1:
        raise ValueError(f"offsets and sizes must not be negative, a chunk not empty: {least}, {chunk_bytes}")
