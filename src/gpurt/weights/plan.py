"""Which bytes go where: tensors of one file and one device packed into blocks, blocks filled by few transfers. Pure.

A checkpoint has thousands of tensors, and an allocation or a copy each would pay the library's call and its
rounding (CUDA: 512 bytes to 2 MiB) thousands of times and never reach the link's speed. So neighbours of one file
and device share an allocation, a block, and are streamed together as one range of the file. A block ends at a cap so
that no single allocation is larger than libraries and fragmented memory allow, unless one tensor alone is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from gpurt.weights.header import TensorInfo

BLOCK_BYTES: Final = 1 << 30
"""Cap of a block. 1 GiB takes 20 ms or more on any link, so that a call each costs nothing; Vulkan guarantees
no larger allocation."""
BLOCK_TENSORS: Final = 1 << 14
"""Cap of the tensors in a block, which are freed in one call: 2 ms."""
ALIGNMENT_BYTES: Final = 256
"""Tensors begin at multiples of this: what ``cudaMalloc`` promises and the widest vector loads of kernels need."""
STREAM_MIN_BYTES: Final = 64 << 10
"""Runs below this are gathered: one more copy in host memory (about 10 µs for 64 KiB) costs less than a request."""
GATHER_BYTES: Final = 4 << 20
"""The most host memory that gathering takes for one transfer."""


@dataclass(frozen=True, slots=True)
class Placed:
    tensor: TensorInfo
    offset_bytes: int
    """In the block."""


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation to be, with tensors of one file in the order of their data."""

    placed: tuple[Placed, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """A range of the file that goes to the block as it is."""

    file_offset: int
    block_offset: int
    size_bytes: int


@dataclass(slots=True)
class Gather:
    """Small runs, and the padding between them, that are put together in host memory and copied at once."""

    block_offset: int
    size_bytes: int = 0
    runs: list[Run] = field(default_factory=list[Run])


def plan_blocks(tensors: Iterable[TensorInfo], max_bytes: int = BLOCK_BYTES) -> list[Block]:
    """Pack ``tensors`` (of one file, in the order of their data) into blocks of ``max_bytes`` and
    :data:`BLOCK_TENSORS` at most; a tensor that is larger has a block of its own."""
    blocks: list[Block] = []
    placed: list[Placed] = []
    end = 0
    for tensor in tensors:
        offset = _aligned(end)
        if placed and (offset + tensor.size_bytes > max_bytes or len(placed) == BLOCK_TENSORS):
            blocks.append(_block(placed, end))
            placed, offset = [], 0
        placed.append(Placed(tensor, offset))
        end = offset + tensor.size_bytes
    if placed:
        blocks.append(_block(placed, end))
    return blocks


def halve(block: Block) -> list[Block]:
    """The tensors of a block of several in smaller blocks."""
    return plan_blocks([each.tensor for each in block.placed], block.size_bytes // 2)


def plan_transfers(block: Block) -> list[Run | Gather]:
    """What fills a block, in its order. Every transfer begins at a multiple of the alignment and ends at one or at
    the block's end, which is what libraries with coarse copies ask for."""
    transfers: list[Run | Gather] = []
    gather: Gather | None = None
    for run in _runs(block):
        streamed = 0
        if run.size_bytes >= STREAM_MIN_BYTES:
            at_end = run.block_offset + run.size_bytes == block.size_bytes
            streamed = run.size_bytes if at_end else run.size_bytes - run.size_bytes % ALIGNMENT_BYTES
            transfers.append(Run(run.file_offset, run.block_offset, streamed))
        rest = Run(run.file_offset + streamed, run.block_offset + streamed, run.size_bytes - streamed)
        if not rest.size_bytes:
            continue
        end = min(block.size_bytes, _aligned(rest.block_offset + rest.size_bytes))
        if (
            gather is None
            or gather.block_offset + gather.size_bytes != rest.block_offset
            or end - gather.block_offset > GATHER_BYTES
        ):
            gather = Gather(rest.block_offset)
            transfers.append(gather)
        gather.runs.append(rest)
        gather.size_bytes = end - gather.block_offset
    return transfers


def _runs(block: Block) -> Iterator[Run]:
    """The longest ranges that are adjacent in the file and in the block."""
    run: Run | None = None
    for each in block.placed:
        tensor = each.tensor
        if not tensor.size_bytes:
            continue
        if run is not None:
            if (
                run.file_offset + run.size_bytes == tensor.offset_bytes
                and run.block_offset + run.size_bytes == each.offset_bytes
            ):
                run = Run(run.file_offset, run.block_offset, run.size_bytes + tensor.size_bytes)
                continue
            yield run
        run = Run(tensor.offset_bytes, each.offset_bytes, tensor.size_bytes)
    if run is not None:
        yield run


def _block(placed: list[Placed], end: int) -> Block:
    # A block of empty tensors alone still needs an allocation for their handle.
    return Block(tuple(placed), max(1, end))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
