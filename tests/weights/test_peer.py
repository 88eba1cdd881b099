"""Shards from a peer (X16): its real bytes arrive, nothing of either side is leaked, whatever happens on the way."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from gpurt.errors import (
    BackendClosed,
    DeviceLost,
    DeviceNotFound,
    DeviceUnresponsive,
    GPUError,
    HandleInUse,
    InvalidHandle,
    OutOfMemory,
    OutOfRange,
    TransferFailed,
    Unsupported,
)
from gpurt.memory import transfer
from gpurt.runtime.backend import DriverBackend
from gpurt.runtime.host_memory import HostBuffer
from gpurt.tensors import get_memory_manager, to_device
from gpurt.testing import Fault, FaultyDriver, SimulatedDriver, parse_simulation
from gpurt.weights import LoadedWeights, load_safetensors
from gpurt.weights.peer import copy_shard_from_peer, update_shard_from_peer
from tests.weights.support import check, eventually, tensor, write, write_sharded

CONTENT = {
    "embed": tensor("BF16", 300, 70, seed=1),
    "scale": tensor("F32", 1, seed=2),
    "empty": tensor("F32", 0, 4),
    "layers.0.w": tensor("F16", 128, 1000, seed=3),
    "layers.0.bias": tensor("I8", 333, seed=4),
    "layers.1.w": tensor("F8_E4M3", 77, 999, seed=5),
    "mask": tensor("BOOL", 5, seed=6),
}
TOTAL = sum(len(data) for _, _, data in CONTENT.values())


class Side:
    """A backend of two simulated devices that fails on demand."""

    def __init__(self, **options: Any) -> None:
        self.simulated = SimulatedDriver(parse_simulation("h100x2"))
        self.driver = FaultyDriver(self.simulated)
        self.backend = DriverBackend(self.driver, **options)
        self.devices = ("simulated:0", "simulated:1")

    def count(self, *methods: str) -> int:
        return sum(call.method in methods for call in self.driver.calls)

    async def holds(self, allocations: int) -> None:
        await eventually(lambda: self.simulated.live_allocations == self.backend.live_handles == allocations)
        usages = [self.backend.ledger.usage(device_id) for device_id in self.devices]
        assert sum(usage.current_count for usage in usages) == allocations


@pytest.fixture
async def peer() -> AsyncIterator[Side]:
    side = Side()
    async with side.backend:
        yield side
        side.driver.clear()
        await side.holds(0)


@pytest.fixture
async def local() -> AsyncIterator[Side]:
    side = Side()
    async with side.backend:
        yield side
        side.driver.clear()
        await side.holds(0)


@pytest.fixture
async def weights(peer: Side, tmp_path: Path) -> AsyncIterator[LoadedWeights]:
    async with await load_safetensors(
        write(tmp_path / "w.safetensors", CONTENT), peer.backend, "simulated:0"
    ) as loaded:
        yield loaded
        peer.driver.clear()


async def test_to_another_device_of_the_backend(peer: Side, weights: LoadedWeights) -> None:
    moved = peer.count("read", "write")
    async with await copy_shard_from_peer(weights, peer.backend, peer.backend, "simulated:1") as ours:
        await check(peer.backend, ours, CONTENT)
        assert list(ours) == list(weights)
        assert {one.device_id for one in ours.values()} == {"simulated:1"}
        assert peer.count("write") + peer.count("read") - len(CONTENT) + 1 == moved  # only what `check` has read
        assert peer.count("copy") == 1  # neighbours go together
    await peer.holds(1)
    await check(peer.backend, weights, CONTENT)


@pytest.mark.parametrize("staging_bytes", [256, 4096, 1 << 24])
async def test_to_another_backend(
    peer: Side, local: Side, weights: LoadedWeights, staging_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STAGING_BYTES", staging_bytes)
    progress: list[tuple[int, int]] = []
    async with await copy_shard_from_peer(
        weights, peer.backend, local.backend, "simulated:1", on_progress=lambda *done: progress.append(done)
    ) as ours:
        await check(local.backend, ours, CONTENT)
        await local.holds(1)
    assert progress[0][0] == 0
    assert progress[-1][0] == progress[-1][1] >= TOTAL
    assert progress == sorted(progress)
    await local.holds(0)
    await peer.holds(1)
    assert local.backend._opening.host_pool.used_bytes == 0


async def test_one_chunk_is_read_while_the_one_before_is_written(
    peer: Side, local: Side, weights: LoadedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STAGING_BYTES", 1 << 16)
    gate = threading.Event()
    local.driver.inject(Fault("write", gate=gate))
    task = asyncio.create_task(copy_shard_from_peer(weights, peer.backend, local.backend, "simulated:0"))
    await asyncio.to_thread(local.driver.wait_until_called, "write")
    await asyncio.to_thread(peer.driver.wait_until_called, "read", 2)
    gate.set()
    async with await task as ours:
        await check(local.backend, ours, CONTENT)


async def test_a_part_of_it(peer: Side, local: Side, weights: LoadedWeights) -> None:
    part = {name: weights[name] for name in ("layers.1.w", "scale", "empty")}
    async with await copy_shard_from_peer(part, peer.backend, local.backend, "simulated:0") as ours:
        await check(local.backend, ours, {name: CONTENT[name] for name in part})
        assert list(ours) == list(part)
        size = sum(handle.size_bytes for handle in ours.handles)
        assert size <= sum(-(-one.size_bytes // 256) * 256 for one in part.values())  # what lies between stays


async def test_of_several_files_and_devices(peer: Side, local: Side, tmp_path: Path) -> None:
    shards = {f"{n}.safetensors": {f"{n}.w": tensor("F32", 500 + n, seed=n)} for n in range(4)}
    content = {name: entry for shard in shards.values() for name, entry in shard.items()}
    index = write_sharded(tmp_path, shards)
    placement = {"0": "simulated:0", "1": "simulated:1", "2": "simulated:0", "3": "simulated:1"}
    async with (
        await load_safetensors(index, peer.backend, placement) as theirs,
        await copy_shard_from_peer(theirs, peer.backend, local.backend, "simulated:0") as ours,
    ):
        await check(local.backend, ours, content)


async def test_nothing(peer: Side, local: Side) -> None:
    async with await copy_shard_from_peer({}, peer.backend, local.backend, "simulated:0") as ours:
        assert len(ours) == 0


async def test_the_copy_outlives_the_peer(local: Side, tmp_path: Path) -> None:
    side = Side()
    async with side.backend:
        path = write(tmp_path / "w.safetensors", CONTENT)
        async with await load_safetensors(path, side.backend, "simulated:0") as theirs:
            ours = await copy_shard_from_peer(theirs, side.backend, local.backend, "simulated:0")
        await side.holds(0)
    await check(local.backend, ours, CONTENT)
    await ours.close()


# Refused before anything is allocated or copied


def wrong(weights: LoadedWeights, **change: Any) -> dict[str, Any]:
    return {**weights, "scale": dataclasses.replace(weights["scale"], **change)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"size_bytes": 8}, "8 bytes"),
        ({"size_bytes": 0}, "0 bytes"),
        ({"shape": (2,)}, "shape"),
        ({"dtype": "F64"}, "F64"),
        ({"dtype": "F3"}, "F3"),
        ({"offset_bytes": 1 << 40}, "not inside"),
        ({"offset_bytes": -4}, "not inside"),
        ({"size_bytes": -4}, "not inside"),
    ],
)
async def test_a_size_that_is_wrong(
    peer: Side, local: Side, weights: LoadedWeights, change: dict[str, Any], says: str
) -> None:
    moved = peer.count("read"), local.count("alloc", "write")
    with pytest.raises(OutOfRange, match=says) as caught:
        await copy_shard_from_peer(wrong(weights, **change), peer.backend, local.backend, "simulated:0")
    assert "scale" in str(caught.value)
    assert caught.value.operation == "copy_shard_from_peer"
    assert (peer.count("read"), local.count("alloc", "write")) == moved


async def test_no_tensor(peer: Side, local: Side, weights: LoadedWeights) -> None:
    with pytest.raises(OutOfRange, match="not a tensor"):
        await copy_shard_from_peer(
            {"w": weights["scale"].handle},  # type: ignore[dict-item]
            peer.backend,
            local.backend,
            "simulated:0",
        )


async def test_arguments_of_other_kinds(peer: Side, local: Side, weights: LoadedWeights) -> None:
    shard: Any = weights
    for call, says in [
        (lambda: copy_shard_from_peer(shard, None, local.backend, "simulated:0"), "peer must"),  # type: ignore[arg-type]
        (lambda: copy_shard_from_peer(shard, peer.backend, None, "simulated:0"), "backend must"),  # type: ignore[arg-type]
        (lambda: copy_shard_from_peer(None, peer.backend, local.backend, "simulated:0"), "shard must"),  # type: ignore[arg-type]
        (lambda: copy_shard_from_peer(wrong(weights, handle=None), peer.backend, local.backend, "simulated:0"), "None"),
        (lambda: copy_shard_from_peer(shard, peer.backend, local.backend, "simulated:0", on_progress=3), "on_progress"),  # type: ignore[arg-type]
        (lambda: update_shard_from_peer(shard, None, shard, local.backend), "peer must"),  # type: ignore[arg-type]
        (lambda: update_shard_from_peer(shard, peer.backend, None, local.backend), "local must"),  # type: ignore[arg-type]
        (lambda: update_shard_from_peer({"w": None}, peer.backend, {"w": None}, local.backend), "not a tensor"),  # type: ignore[dict-item]
    ]:
        with pytest.raises(OutOfRange, match=says) as caught:
            await call()
        assert caught.value.operation in ("copy_shard_from_peer", "update_shard_from_peer")
    assert local.count("alloc", "write") == 0


async def test_weights_over_themselves(peer: Side, weights: LoadedWeights) -> None:
    copied = peer.count("copy")
    with pytest.raises(OutOfRange, match="over itself") as caught:
        await update_shard_from_peer(weights, peer.backend, weights, peer.backend)
    assert caught.value.operation == "update_shard_from_peer"
    assert peer.count("copy") == copied


async def test_handles_that_the_peer_does_not_hold(peer: Side, local: Side, weights: LoadedWeights) -> None:
    with pytest.raises(InvalidHandle, match="another backend"):
        await copy_shard_from_peer(weights, local.backend, peer.backend, "simulated:0")
    async with await copy_shard_from_peer(weights, peer.backend, local.backend, "simulated:0") as ours:
        pass
    with pytest.raises(InvalidHandle, match="freed"):
        await copy_shard_from_peer(ours, local.backend, peer.backend, "simulated:0")
    assert local.count("write") == peer.count("copy") + 1  # nothing was written but by the copy that worked


async def test_no_such_device_or_no_room(peer: Side, weights: LoadedWeights) -> None:
    small = Side(memory_limit=TOTAL // 2)
    async with small.backend:
        with pytest.raises(DeviceNotFound, match="simulated:1"):
            await copy_shard_from_peer(weights, peer.backend, small.backend, "simulated:2")
        with pytest.raises(OutOfMemory):
            await copy_shard_from_peer(weights, peer.backend, small.backend, "simulated:0")
        await small.holds(0)
        assert small.count("write") == 0
    with pytest.raises(BackendClosed):
        await copy_shard_from_peer(weights, peer.backend, small.backend, "simulated:0")


# Failures on the way

FAULTS = [
    ("peer", Fault("read", nth=2, raises=OSError("link down")), TransferFailed),
    ("local", Fault("write", nth=2, raises=OSError("link down")), TransferFailed),
    ("peer", Fault("read", nth=2, lose=True), DeviceLost),
    ("local", Fault("write", nth=2, lose=True), DeviceLost),
    ("local", Fault("alloc", nth=2, raises=MemoryError("full")), OutOfMemory),
]


@pytest.mark.parametrize(("side", "fault", "error"), FAULTS, ids=lambda value: getattr(value, "method", None))
async def test_a_side_that_fails(
    peer: Side,
    local: Side,
    tmp_path: Path,
    side: str,
    fault: Fault,
    error: type[GPUError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "STAGING_BYTES", 1 << 15)
    shards = {f"{n}.safetensors": {f"{n}.w": tensor("U8", 100_000, seed=n)} for n in range(2)}
    theirs = await load_safetensors(write_sharded(tmp_path, shards), peer.backend, "simulated:0")
    failing = {"peer": peer, "local": local}[side]
    failing.driver.inject(fault)
    with pytest.raises(error):
        await copy_shard_from_peer(theirs, peer.backend, local.backend, "simulated:0")
    assert local.backend.live_handles == 0
    await eventually(lambda: local.backend._opening.host_pool.used_bytes == 0)
    await theirs.close()
    if error is DeviceLost:
        failing.simulated.remove(0)  # the memory went with the device


async def test_a_device_that_is_lost_in_a_direct_copy(peer: Side, weights: LoadedWeights) -> None:
    peer.driver.inject(Fault("copy", raises=OSError("NVLink")))
    with pytest.raises(TransferFailed, match="NVLink"):
        await copy_shard_from_peer(weights, peer.backend, peer.backend, "simulated:1")
    await peer.holds(1)
    peer.driver.clear()
    peer.driver.lose(1)
    with pytest.raises(DeviceLost):
        await copy_shard_from_peer(weights, peer.backend, peer.backend, "simulated:1")
    assert peer.backend.live_handles == 1
    peer.driver.clear()


async def test_weights_that_the_peer_frees_meanwhile(
    peer: Side, local: Side, weights: LoadedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STAGING_BYTES", 1 << 14)
    gate = threading.Event()
    local.driver.inject(Fault("write", first=1, gate=gate))
    task = asyncio.create_task(copy_shard_from_peer(weights, peer.backend, local.backend, "simulated:0"))
    await asyncio.to_thread(local.driver.wait_until_called, "write")
    await weights.close()
    gate.set()
    with pytest.raises(InvalidHandle, match="freed"):
        await task
    await local.holds(0)
    await peer.holds(0)


async def test_progress_that_raises_ends_it(peer: Side, local: Side, weights: LoadedWeights) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await copy_shard_from_peer(weights, peer.backend, local.backend, "simulated:0", on_progress=stop)
    await local.holds(0)


# Cancellation


@pytest.mark.parametrize("where", ["alloc", "write", "read", "copy"])
@pytest.mark.parametrize("dialect", ["task", "anyio", "group"])
async def test_cancelled(peer: Side, local: Side, weights: LoadedWeights, where: str, dialect: str) -> None:
    gate = threading.Event()
    direct = where == "copy"
    held, target, device = (peer, peer, "simulated:1") if direct else (local, local, "simulated:0")
    held = peer if where == "read" else held
    reads = peer.count("read")
    held.driver.inject(Fault(where, gate=gate))  # type: ignore[arg-type]

    async def copy() -> None:
        await copy_shard_from_peer(weights, peer.backend, target.backend, device)

    async def until_inside() -> None:
        n = reads + 1 if where == "read" else held.count(where) or 1
        await asyncio.to_thread(held.driver.wait_until_called, where, n)

    async with asyncio.timeout(5):
        if dialect == "task":
            task = asyncio.create_task(copy())
            await until_inside()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif dialect == "anyio":
            async with anyio.create_task_group() as group:
                group.start_soon(copy)
                await until_inside()
                group.cancel_scope.cancel()
        else:
            with pytest.raises(ExceptionGroup):
                await beside_a_failure(copy, until_inside)
    assert not gate.is_set()  # no driver was waited for, not even the peer's
    gate.set()
    if not direct:
        await local.holds(0)
    await peer.holds(1)
    await eventually(lambda: local.backend._opening.host_pool.used_bytes == 0)
    held.driver.clear()
    await check(peer.backend, weights, CONTENT)


async def beside_a_failure(copy: Callable[[], Awaitable[None]], until: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as siblings:
        siblings.create_task(copy())  # type: ignore[arg-type]
        await until()
        raise ZeroDivisionError


async def test_cancelled_at_every_turn(
    peer: Side, local: Side, weights: LoadedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STAGING_BYTES", 1 << 16)
    turns, done = 0, False
    while not done:
        task = asyncio.create_task(copy_shard_from_peer(weights, peer.backend, local.backend, "simulated:0"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await (await task).close()
            done = True
        except asyncio.CancelledError:
            pass
        turns += 1 + turns // 8
        await local.holds(0)
        await peer.holds(1)
    assert turns > 3
    await eventually(lambda: local.backend._opening.host_pool.used_bytes == 0)


async def test_a_peer_that_hangs(local: Side, tmp_path: Path) -> None:
    side = Side(hang_after=0.1)
    async with side.backend:
        path = write(tmp_path / "w.safetensors", CONTENT)
        async with await load_safetensors(path, side.backend, "simulated:0") as theirs:
            gate = threading.Event()
            side.driver.inject(Fault("read", gate=gate))
            with pytest.raises(DeviceUnresponsive):
                async with asyncio.timeout(5):
                    await copy_shard_from_peer(theirs, side.backend, local.backend, "simulated:0")
            await local.holds(0)
            with pytest.raises(DeviceUnresponsive):
                await copy_shard_from_peer(theirs, side.backend, local.backend, "simulated:0")
            gate.set()
            side.driver.clear()
            await side.backend.synchronize("simulated:1")
            await eventually(lambda: side.backend.devices[0].usable)
    await eventually(lambda: local.backend._opening.host_pool.used_bytes == 0)


# A backend that has no host buffers


async def test_without_host_buffers(
    peer: Side, local: Side, weights: LoadedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(device_id: str, size_bytes: int) -> HostBuffer:
        raise Unsupported("no host buffers")

    monkeypatch.setattr(local.backend, "host_buffer", none)
    async with await copy_shard_from_peer(weights, peer.backend, local.backend, "simulated:0") as ours:
        await check(local.backend, ours, CONTENT)


# In place


async def test_updated_in_place(peer: Side, local: Side, weights: LoadedWeights, tmp_path: Path) -> None:
    newer = {name: (dtype, shape, bytes(255 - byte for byte in data)) for name, (dtype, shape, data) in CONTENT.items()}
    async with await copy_shard_from_peer(weights, peer.backend, local.backend, "simulated:0") as ours:
        path = write(tmp_path / "newer.safetensors", newer)
        async with await load_safetensors(path, peer.backend, "simulated:1") as theirs:
            allocations = local.count("alloc"), peer.count("alloc")
            part = {name: theirs[name] for name in ("embed", "mask", "empty")}
            await update_shard_from_peer(part, peer.backend, {name: ours[name] for name in part}, local.backend)
            await check(local.backend, ours, {**CONTENT, **{name: newer[name] for name in part}})
            await update_shard_from_peer(theirs, peer.backend, ours, local.backend)
            await check(local.backend, ours, newer)
            await update_shard_from_peer(theirs, peer.backend, weights, peer.backend)  # directly, in one backend
            await check(peer.backend, weights, newer)
            assert (local.count("alloc"), peer.count("alloc")) == allocations


async def test_arrays_and_handles_in_place(peer: Side, local: Side) -> None:
    values = np.arange(1000, dtype="float32")
    theirs = await to_device(values, backend=peer.backend)
    ours = await (await get_memory_manager(backend=local.backend)).allocate(1000, "float32")
    await update_shard_from_peer({"w": theirs}, peer.backend, {"w": ours}, local.backend)
    np.testing.assert_array_equal(await ours.numpy(), values)
    async with local.backend.allocation("simulated:1", 4000) as handle:
        await update_shard_from_peer({"w": theirs.handle}, peer.backend, {"w": handle}, local.backend)
        assert await local.backend.copy_from_device(handle) == values.tobytes()
    await theirs.free()
    await ours.free()


async def test_a_size_mismatch_in_place(peer: Side, local: Side, weights: LoadedWeights) -> None:
    async with await copy_shard_from_peer(weights, peer.backend, local.backend, "simulated:0") as ours:
        moved = local.count("write")
        other = dataclasses.replace
        scale = ours["scale"]
        for changed, says in [
            ({"scale": other(scale, shape=(1, 1))}, "shape"),
            ({"scale": other(scale, dtype="I32")}, "I32"),
            ({"scale": other(scale, size_bytes=2)}, "2 here"),
            ({"scale": scale.handle}, "at the peer and"),
            ({"more": scale}, "there only here"),
        ]:
            with pytest.raises(OutOfRange, match=says) as caught:
                await update_shard_from_peer(weights, peer.backend, {**ours, **changed}, local.backend)
            assert caught.value.operation == "update_shard_from_peer"
        with pytest.raises(OutOfRange, match="only at the peer"):
            await update_shard_from_peer(weights, peer.backend, {}, local.backend)
        with pytest.raises(InvalidHandle):
            await update_shard_from_peer(weights, peer.backend, ours, peer.backend)
        assert local.count("write") == moved


async def test_one_dead_handle_and_nothing_is_copied(peer: Side, local: Side) -> None:
    theirs = {name: await peer.backend.allocate("simulated:0", 100) for name in "ab"}
    ours = {name: await local.backend.allocate("simulated:0", 100) for name in "ab"}
    for side, dead in ((local, ours["b"]), (peer, theirs["b"])):
        await side.backend.deallocate(dead)
        with pytest.raises(InvalidHandle, match="freed"):
            await update_shard_from_peer(theirs, peer.backend, ours, local.backend)
        ours["b"] = ours["a"]  # alive, for the second round
    assert (peer.count("read"), local.count("write")) == (0, 0)
    await peer.backend.deallocate(theirs["a"])
    await local.backend.deallocate(ours["a"])


async def test_a_shard_in_use_is_not_freed(tmp_path: Path) -> None:
    """Copies are ordinary weights: views keep them."""
    from tests.support.reference_driver import ReferenceDriver

    async with DriverBackend(ReferenceDriver()) as backend:
        path = write(tmp_path / "w.safetensors", CONTENT)
        async with await load_safetensors(path, backend, "reference:0") as theirs:
            ours = await copy_shard_from_peer(theirs, backend, backend, "reference:1")
            with await backend.view(ours["embed"].handle), pytest.raises(HandleInUse):
                await ours.close()
            await ours.close()
        assert backend.live_handles == 0
