"""``on_progress`` of a load: refused before anything starts, heard while it runs, and never after it has returned."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpurt.errors import DeviceLost, GPUError, OutOfRange
from gpurt.runtime.backend import DriverBackend
from gpurt.testing import Fault, FaultyDriver
from gpurt.testing.loops import until
from tests.support.reference_driver import ReferenceDriver

CHUNK = 1 << 16
SIZE = 8 * CHUNK
DEVICE = "reference:0"


class Rig:
    def __init__(self, path: Path) -> None:
        inner = ReferenceDriver(chunk_bytes=CHUNK)
        inner.capabilities = inner.capabilities.model_copy(update={"host_visible": False})
        self.driver = FaultyDriver(inner)
        self.backend = DriverBackend(self.driver, on_background_error=lambda error: None)
        self.path = path

    @property
    def writes(self) -> int:
        return sum(call.method == "write" for call in self.driver.calls)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    rig = Rig(path)
    async with rig.backend:
        yield rig
        rig.driver.clear()


async def coroutine(done: int) -> None: ...


class Awaited:
    async def __call__(self, done: int) -> None: ...


@pytest.mark.parametrize("wrong", [3, "print", coroutine, functools.partial(coroutine), Awaited()])
async def test_what_is_no_ordinary_function(rig: Rig, wrong: Any) -> None:
    async with rig.backend.allocation(DEVICE, SIZE) as handle:
        with pytest.raises(OutOfRange, match="on_progress") as caught:
            await rig.backend.load_file(rig.path, handle, on_progress=wrong)
    assert caught.value.device_id == DEVICE
    assert "load_file" in (caught.value.operation or "")
    assert rig.writes == 0


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), DeviceLost("mine"), asyncio.CancelledError("mine")])
async def test_what_it_raises_ends_the_load(rig: Rig, error: BaseException) -> None:
    gate = threading.Event()
    rig.driver.inject(Fault("write", nth=3, gate=gate))
    heard: list[int] = []

    def on_progress(done: int) -> None:
        heard.append(done)
        if len(heard) == 2:
            raise error

    async with rig.backend.allocation(DEVICE, SIZE) as handle:
        with pytest.raises(type(error)) as caught:
            await rig.backend.load_file(rig.path, handle, on_progress=on_progress)
        assert caught.value is error
        assert not gate.is_set()  # the driver was not waited for
        gate.set()
        await rig.backend.synchronize(DEVICE)
        assert rig.writes <= 3
        assert heard == [CHUNK, 2 * CHUNK]
        assert rig.backend.devices[0].usable  # an error of the caller's says nothing of the device
        assert await rig.backend.load_file(rig.path, handle) == SIZE


async def test_what_it_raises_at_the_end_counts_too(rig: Rig) -> None:
    def on_progress(done: int) -> None:
        if done == SIZE:
            raise ZeroDivisionError

    async with rig.backend.allocation(DEVICE, SIZE) as handle:
        with pytest.raises(ZeroDivisionError):
            await rig.backend.load_file(rig.path, handle, on_progress=on_progress)


async def test_a_coroutine_that_it_returns_is_an_error(rig: Rig) -> None:
    async with rig.backend.allocation(DEVICE, SIZE) as handle:
        with pytest.raises(OutOfRange, match="coroutine"):
            await rig.backend.load_file(rig.path, handle, on_progress=lambda done: coroutine(done))  # type: ignore[arg-type, return-value]


async def test_nothing_is_heard_after_the_end(rig: Rig) -> None:
    heard: list[int] = []
    gate = threading.Event()
    rig.driver.inject(Fault("write", nth=3, gate=gate))
    async with rig.backend.allocation(DEVICE, SIZE) as handle:
        load = asyncio.create_task(rig.backend.load_file(rig.path, handle, on_progress=heard.append))
        await until(lambda: rig.writes == 3, "the third chunk")
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        before = list(heard)
        gate.set()
        await rig.backend.synchronize(DEVICE)
        await asyncio.sleep(0)
        assert heard == before
        rig.driver.inject(Fault("write", raises=OSError("link down")))
        with pytest.raises(GPUError, match="link down"):
            await rig.backend.load_file(rig.path, handle, on_progress=heard.append)
    assert heard == before
