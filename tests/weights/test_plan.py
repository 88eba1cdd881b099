"""Blocks and transfers: every byte once, aligned, and few of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpurt.weights.header import TensorInfo
from gpurt.weights.plan import (
    ALIGNMENT_BYTES,
    GATHER_BYTES,
    STREAM_MIN_BYTES,
    Block,
    Gather,
    Run,
    halve,
    plan_blocks,
    plan_transfers,
)


def infos(sizes: list[int], gaps: list[int] | None = None, start: int = 1000) -> list[TensorInfo]:
    result: list[TensorInfo] = []
    at = start
    for number, size in enumerate(sizes):
        at += gaps[number % len(gaps)] if gaps else 0
        result.append(TensorInfo(str(number), "U8", (size,), at, size))
        at += size
    return result


def runs(block: Block) -> list[Run]:
    return [
        run
        for transfer in plan_transfers(block)
        for run in (transfer.runs if isinstance(transfer, Gather) else [transfer])
    ]


def test_thousands_of_tensors_are_few_large_loads() -> None:
    """Two layers' worth of an ordinary model, 600 times: 8.4 GB."""
    blocks = plan_blocks(infos([4096 * 2, 4096 * 1024 * 2, 11008 * 256] * 600))
    assert len(blocks) == 7
    assert all(len(plan_transfers(block)) == 1 for block in blocks)
    assert all(block.size_bytes <= 1 << 30 for block in blocks)


def test_thousands_of_scalars_are_one_copy() -> None:
    (block,) = plan_blocks(infos([4] * 3000))
    (gather,) = plan_transfers(block)
    assert isinstance(gather, Gather)
    assert (gather.block_offset, gather.size_bytes) == (0, block.size_bytes)


def test_ragged_ends_are_gathered_with_what_follows() -> None:
    big = STREAM_MIN_BYTES + 3
    (block,) = plan_blocks(infos([big, 5, big]))
    first, gather, last = plan_transfers(block)
    assert first == Run(1000, 0, STREAM_MIN_BYTES)
    assert isinstance(gather, Gather)
    assert [(run.file_offset, run.size_bytes) for run in gather.runs] == [(1000 + STREAM_MIN_BYTES, 3), (1000 + big, 5)]
    assert isinstance(last, Run)
    assert last.size_bytes == big  # its end is the block's end


def test_larger_than_the_cap() -> None:
    blocks = plan_blocks(infos([10, 5000, 10, 20]), max_bytes=1000)
    assert [[placed.tensor.name for placed in block.placed] for block in blocks] == [["0"], ["1"], ["2", "3"]]


def test_empty_tensors() -> None:
    (block,) = plan_blocks(infos([0, 0]))
    assert block.size_bytes == 1
    assert plan_transfers(block) == []
    (block,) = plan_blocks(infos([0, 7, 0, 7, 0]))
    assert block.size_bytes == 512
    assert all(placed.offset_bytes + placed.tensor.size_bytes <= block.size_bytes for placed in block.placed)
    assert plan_blocks([]) == []


SIZES = st.lists(
    st.integers(0, 2000)
    | st.integers(STREAM_MIN_BYTES - 2, STREAM_MIN_BYTES + 2)
    | st.integers(0, 40).map(lambda n: n * 16384)
    | st.just(GATHER_BYTES + 1),
    min_size=1,
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(
    sizes=SIZES, gaps=st.lists(st.sampled_from([0, 0, 0, 1, 300]), min_size=1, max_size=5), cap=st.integers(1, 1 << 22)
)
def test_every_byte_once_and_aligned(sizes: list[int], gaps: list[int], cap: int) -> None:
    tensors = infos(sizes, gaps)
    blocks = plan_blocks(tensors, cap)
    assert [placed.tensor for block in blocks for placed in block.placed] == tensors
    for block in blocks:
        assert block.size_bytes <= max(cap, *(placed.tensor.size_bytes for placed in block.placed))
        expected = []
        end = 0
        for placed in block.placed:
            assert placed.offset_bytes >= end
            end = placed.offset_bytes + placed.tensor.size_bytes
            assert end <= block.size_bytes
            assert placed.offset_bytes % ALIGNMENT_BYTES == 0
            if placed.tensor.size_bytes:
                expected.append((placed.offset_bytes, placed.tensor.offset_bytes, placed.tensor.size_bytes))
        # What the runs bring, cut at the tensors' borders, is what the tensors are.
        brought: dict[int, tuple[int, int]] = {}
        for run in runs(block):
            for at, file_offset, size in expected:
                low, high = max(at, run.block_offset), min(at + size, run.block_offset + run.size_bytes)
                if low < high:
                    assert run.file_offset + low - run.block_offset == file_offset + low - at
                    begin, count = brought.get(at, (low, 0))
                    assert begin + count == low or count == 0
                    brought[at] = (begin, count + high - low)
        assert brought == {at: (at, size) for at, _, size in expected}
        assert sum(run.size_bytes for run in runs(block)) == sum(size for _, _, size in expected)
        for transfer in plan_transfers(block):
            finish = transfer.block_offset + transfer.size_bytes
            assert transfer.block_offset % ALIGNMENT_BYTES == 0
            assert finish % ALIGNMENT_BYTES == 0 or finish == block.size_bytes
            if isinstance(transfer, Gather):
                assert transfer.size_bytes <= GATHER_BYTES


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES.filter(lambda sizes: len(sizes) > 1 and sum(sizes) > 0))
def test_halving_ends(sizes: list[int]) -> None:
    (block,) = plan_blocks(infos(sizes), 1 << 40)
    smaller = halve(block)
    assert len(smaller) > 1
    assert [placed.tensor for each in smaller for placed in each.placed] == infos(sizes)
