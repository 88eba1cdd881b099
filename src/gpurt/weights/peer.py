"""Shards from a peer: weights that another device has already, copied from there instead of from the disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from gpurt.backend import GPUBackend
from gpurt.errors import DeviceNotFound, OutOfRange
from gpurt.memory.scope import ScopedArray
from gpurt.memory.transfer import Place, transfer
from gpurt.memory.undo import undo_allocations
from gpurt.runtime.handles import brief
from gpurt.runtime.lane import off_loop
from gpurt.runtime.progress import check_progress, tell_progress
from gpurt.types import MemoryHandle
from gpurt.weights.arguments import check_backend
from gpurt.weights.errors import shown
from gpurt.weights.header import DTYPES, TensorInfo
from gpurt.weights.loaded import LoadedTensor, LoadedWeights
from gpurt.weights.plan import ALIGNMENT_BYTES, Block, Placed, plan_blocks
from gpurt.weights.quiet import drop, quiet

T = TypeVar("T")
V = TypeVar("V")

Piece = LoadedTensor | ScopedArray | MemoryHandle
"""Something with a name in a shard: a tensor of ``gpurt.weights``, an array, or a whole allocation."""


async def copy_shard_from_peer(
    shard: Mapping[str, LoadedTensor],
    peer: GPUBackend,
    backend: GPUBackend,
    device_id: str,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadedWeights:
    """Copy tensors that ``peer`` holds to new memory of ``device_id``, packed as after a load from a file.

    The peer is another device of the same backend (copied directly) or another backend of this process and event loop
    (streamed through host buffers). Its tensors are only read: nothing is allocated there, and they stay whose they
    are. Keep them until this returns; should they be freed meanwhile, the copy fails with ``InvalidHandle``.

    Everything is checked before anything is allocated, and allocated before anything is copied. What was allocated is
    freed on any error and on cancellation, which returns at once.

    Args:
        shard: tensors by name: a ``LoadedWeights``, or a part of one.
        on_progress: called on the event loop with the bytes copied so far and the bytes in all, padding included. What
            it raises ends the copy.

    Raises:
        OutOfRange: a tensor's size is not that of its shape and dtype, or it does not lie inside its allocation.
        InvalidHandle: the peer does not hold it (any more).
        DeviceNotFound: ``backend`` has no such device. OutOfMemory: the shard does not fit.
        DeviceLost, TransferFailed: of either side.
    """
    operation = "copy_shard_from_peer"
    _check_arguments(operation, {"shard": shard}, {"peer": peer, "backend": backend}, on_progress)
    tensors = _as_dict(shard)
    blocks = await _checked(operation, len(tensors), partial(_plan, tensors))
    if await backend.get_device(device_id) is None:
        known = ", ".join(device.device_id for device in backend.devices)
        raise DeviceNotFound(
            f"no device {brief(device_id)}; there are: {known}", backend=backend.name, operation=operation
        )
    await _check_handles(peer, dict.fromkeys(source for source, _ in blocks))
    handles: list[MemoryHandle] = []
    try:
        for _, block in blocks:
            handles.append(await backend.allocate(device_id, block.size_bytes))
        place = partial(_place, tensors, blocks, backend, handles)
        moves, copies = await _checked(operation, len(tensors), place)
        await _run(moves, peer, backend, on_progress)
    except BaseException as failure:
        await undo_allocations(backend, handles, failure)
        raise
    return copies


async def update_shard_from_peer(
    shard: Mapping[str, Piece],
    peer: GPUBackend,
    local: Mapping[str, Piece],
    backend: GPUBackend,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Copy what ``peer`` holds over memory that is there already: ``local`` has the same names with the same sizes.

    For weights that change on one device and are used on another. Nothing is allocated on either device. A copy that
    failed or was cancelled leaves ``local`` partly old and partly new.

    Raises:
        OutOfRange: names, sizes, dtypes or shapes differ, or a piece is to be copied over itself. Before anything is
            copied.
        InvalidHandle: a side does not hold one of its pieces. DeviceLost, TransferFailed: of either side.
    """
    operation = "update_shard_from_peer"
    _check_arguments(operation, {"shard": shard, "local": local}, {"peer": peer, "backend": backend}, on_progress)
    match = partial(_match, _as_dict(shard), _as_dict(local), one_backend=peer is backend)
    moves, sources, targets = await _checked(operation, len(shard), match)
    await _check_handles(peer, sources)
    await _check_handles(backend, targets)
    await _run(moves, peer, backend, on_progress)


@dataclass(slots=True)
class _Move:
    """One copy: as many neighbours at a time as lie in both allocations alike."""

    source: MemoryHandle
    source_offset: int
    target: MemoryHandle
    target_offset: int
    size_bytes: int


async def _run(
    moves: list[_Move], peer: GPUBackend, backend: GPUBackend, on_progress: Callable[[int, int], None] | None
) -> None:
    total, before = await off_loop("host", lambda: sum(move.size_bytes for move in moves)), 0

    def report(done: int) -> None:
        if on_progress is not None:
            tell_progress(on_progress, before + done, total)

    report(0)
    for move in moves:
        source = Place(peer, move.source, move.source_offset)
        await transfer(source, Place(backend, move.target, move.target_offset), move.size_bytes, on_progress=report)
        before += move.size_bytes


def _check_arguments(
    operation: str, shards: Mapping[str, object], backends: Mapping[str, object], on_progress: object
) -> None:
    try:
        for what, shard in shards.items():
            if not isinstance(shard, Mapping):
                raise OutOfRange(f"{what} must map names to tensors, and is {type(shard).__name__}")
        for what, backend in backends.items():
            check_backend(backend, what)
        check_progress(on_progress)
    except OutOfRange as exc:
        exc.operation = operation
        raise


def _as_dict(shard: Mapping[str, V]) -> dict[str, V]:
    """A copy, made at once: the caller may change its own meanwhile."""
    return cast("dict[str, V]", shard.as_dict()) if isinstance(shard, LoadedWeights) else dict(shard)


async def _checked(operation: str, objects: int, call: Callable[[], T]) -> T:
    """Passes over all tensors, of which a checkpoint may have 100,000, run off the event loop."""

    def quietly() -> T:
        with quiet(objects):
            return call()

    try:
        return await off_loop("host", quietly)
    except OutOfRange as exc:
        exc.operation = operation
        raise


def _plan(shard: Mapping[str, LoadedTensor]) -> list[tuple[MemoryHandle, Block]]:
    """The peer's allocations, each with a block of its tensors in the order in which they lie there."""
    groups: dict[MemoryHandle, list[TensorInfo]] = {}
    for name, tensor in shard.items():
        _check_tensor(name, tensor)
        info = TensorInfo(name, tensor.dtype, tensor.shape, tensor.offset_bytes, tensor.size_bytes)
        groups.setdefault(tensor.handle, []).append(info)
    return [
        (handle, block)
        for handle, infos in groups.items()
        for block in plan_blocks(sorted(infos, key=lambda info: (info.offset_bytes, info.size_bytes)))
    ]


def _place(
    shard: Mapping[str, LoadedTensor],
    blocks: list[tuple[MemoryHandle, Block]],
    backend: GPUBackend,
    handles: Sequence[MemoryHandle],
) -> tuple[list[_Move], LoadedWeights]:
    """What to copy, and the weights that there will be. Takes the blocks, which are freed here and not on the loop."""
    moves: list[_Move] = []
    tensors: dict[str, LoadedTensor] = {}
    spent: list[Placed] = []
    for target in handles:
        source, block = blocks.pop(0)
        moves += _moves(source, target, block)
        for each in block.placed:
            name, info = each.tensor.name, each.tensor
            tensors[name] = LoadedTensor(name, target, each.offset_bytes, info.size_bytes, info.dtype, info.shape)
        spent += block.placed
        del block
    in_order = {name: tensors[name] for name in shard}
    for each in (spent, tensors):
        drop(each)
    return moves, LoadedWeights(backend, in_order, handles, ())


def _match(
    shard: Mapping[str, Piece], local: Mapping[str, Piece], *, one_backend: bool
) -> tuple[list[_Move], dict[MemoryHandle, None], dict[MemoryHandle, None]]:
    """What to copy, and all allocations of each side."""
    for name in shard.keys() ^ local.keys():
        raise _refused(name, f"is there only {'at the peer' if name in shard else 'here'}")
    moves: list[_Move] = []
    for name, theirs in shard.items():
        ours = local[name]
        (source, source_offset, size), (target, target_offset, room) = _extent(name, theirs), _extent(name, ours)
        if size != room:
            raise _refused(name, f"has {size:,} bytes at the peer and {room:,} here")
        _check_alike(name, theirs, ours)
        if one_backend and source == target and abs(source_offset - target_offset) < size:
            raise _refused(name, f"would be copied over itself: {size:,} bytes at {source_offset:,} of one allocation")
        moves.append(_Move(source, source_offset, target, target_offset, size))
    return moves, dict.fromkeys(move.source for move in moves), dict.fromkeys(move.target for move in moves)


def _moves(source: MemoryHandle, target: MemoryHandle, block: Block) -> Iterator[_Move]:
    move: _Move | None = None
    for each in block.placed:
        start, size = each.tensor.offset_bytes, each.tensor.size_bytes
        if not size:
            continue
        if move is not None and (move.source_offset + move.size_bytes, move.target_offset + move.size_bytes) == (
            start,
            each.offset_bytes,
        ):
            move.size_bytes += size
        else:
            if move is not None:
                yield move
            move = _Move(source, start, target, each.offset_bytes, size)
        # Padding goes along: libraries with coarse copies ask for ends at multiples, or at the allocation's end.
        room = min(source.size_bytes - move.source_offset, target.size_bytes - move.target_offset)
        move.size_bytes = min(room, -(-move.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    if move is not None:
        yield move


def _extent(name: str, piece: Piece) -> tuple[MemoryHandle, int, int]:
    """Allocation, offset and size of a piece."""
    if isinstance(piece, MemoryHandle):
        return piece, 0, piece.size_bytes
    if isinstance(piece, ScopedArray) and isinstance(piece.handle, MemoryHandle):  # pyright: ignore[reportUnnecessaryIsInstance]
        return piece.handle, 0, piece.handle.size_bytes
    if not isinstance(piece, LoadedTensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _refused(name, f"is a {type(piece).__name__}, not a tensor")
    if not isinstance(piece.handle, MemoryHandle):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _refused(name, f"has no handle but {brief(piece.handle)}")
    offset, size, whole = piece.offset_bytes, piece.size_bytes, piece.handle.size_bytes
    if offset < 0 or size < 0 or offset + size > whole:
        raise _refused(name, f"has {size:,} bytes at {offset:,}, which is not inside its allocation of {whole:,} bytes")
    return piece.handle, offset, size


def _check_tensor(name: str, tensor: LoadedTensor) -> None:
    if not isinstance(tensor, LoadedTensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _refused(name, f"is a {type(tensor).__name__}, not a tensor of loaded weights")
    _extent(name, tensor)
    known = DTYPES.get(tensor.dtype)
    if known is None or math.prod(tensor.shape) * known.bits != tensor.size_bytes * 8:
        raise _refused(name, f"is {tensor.dtype} of shape {tensor.shape}, which is not {tensor.size_bytes:,} bytes")


def _check_alike(name: str, theirs: Piece, ours: Piece) -> None:
    # Between names of the file format and NumPy's, sizes must do.
    if isinstance(theirs, LoadedTensor) and isinstance(ours, LoadedTensor) and theirs.dtype != ours.dtype:
        raise _refused(name, f"is {theirs.dtype} at the peer and {ours.dtype} here")
    if isinstance(theirs, ScopedArray) and isinstance(ours, ScopedArray) and theirs.dtype != ours.dtype:
        raise _refused(name, f"is {theirs.dtype} at the peer and {ours.dtype} here")
    if not isinstance(theirs, MemoryHandle) and not isinstance(ours, MemoryHandle) and theirs.shape != ours.shape:
        raise _refused(name, f"has shape {theirs.shape} at the peer and {ours.shape} here")


def _refused(name: str, what: str) -> OutOfRange:
    return OutOfRange(f"{shown(name)} {what}")


async def _check_handles(backend: GPUBackend, handles: Iterable[MemoryHandle]) -> None:
    for handle in handles:
        # No bytes: the library is not called, and a handle that is dead or of somebody else is refused.
        await backend.copy_from_device(handle, 0, 0)
