"""What a backend tells of itself: lanes, the hang clock, bytes that were copied."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

from tests.cluster.support import until
from tests.support.reference_driver import ReferenceDriver

from gpurt.activity import ReportsActivity
from gpurt.shell import DriverBackend
from gpurt.telemetry.backend_metrics import backend_families
from gpurt.telemetry.metrics import render
from gpurt.testing.simulated import create_simulated


async def test_bytes_of_completed_copies_are_counted_by_direction(tmp_path: Path) -> None:
    backend = create_simulated("h100x2", seed="x")
    assert isinstance(backend, ReportsActivity)
    assert (backend.copied_bytes(), list(backend.lanes())) == ({}, [])
    await backend.initialize()
    one, other = await backend.allocate("simulated:0", 4 << 20), await backend.allocate("simulated:1", 4 << 20)
    await backend.copy_to_device(b"x" * 100, one)
    await backend.copy_to_device(bytes(3 << 20), one)
    await backend.copy_from_device(one, 0, 10)
    await backend.copy_from_device(one, 0, 2 << 20)
    await backend.copy_into(one, bytearray(7))
    await backend.copy_device_to_device(one, other, 1000)
    path = tmp_path / "file"
    path.write_bytes(b"y" * 5000)
    await backend.load_file(path, other)
    with contextlib.suppress(Exception):
        await backend.load_file(tmp_path / "missing", other)
    with contextlib.suppress(Exception):
        await backend.copy_to_device(bytes(5 << 20), one)
    assert backend.copied_bytes() == {
        ("simulated:0", "host_to_device"): 100 + (3 << 20),
        ("simulated:0", "device_to_host"): 10 + (2 << 20) + 7,
        ("simulated:0", "device_to_device"): 1000,
        ("simulated:1", "file_to_device"): 5000,
    }
    text = render(backend_families([backend]))
    assert "gpurt_copied_bytes_total" in text
    assert 'lane="simulated:0:' in text
    await backend.deallocate(one)
    await backend.deallocate(other)
    await backend.shutdown()
    assert len(backend.copied_bytes()) == 4, "a counter does not begin again"
    assert list(backend.lanes()) == []


async def test_calls_that_wait_and_the_one_in_the_driver_show() -> None:
    driver: Any = ReferenceDriver()
    gate, write = threading.Event(), driver.write

    def slow(*arguments: Any) -> None:
        gate.wait(20)
        write(*arguments)

    backend = DriverBackend(driver, max_pending=2)
    await backend.initialize()
    device_id = backend.devices[0].device_id
    handles = [await backend.allocate(device_id, 4 << 20) for _ in range(5)]
    driver.write = slow
    copies = [asyncio.create_task(backend.copy_to_device(bytes(2 << 20), handle)) for handle in handles]
    await until(lambda: any(lane.held for lane in backend.lanes()))
    (busy,) = (lane for lane in backend.lanes() if lane.calls)
    assert (busy.calls, busy.held) == (2, 3)
    await until(lambda: max(lane.running_s or 0.0 for lane in backend.lanes()) > 0.02)
    gate.set()
    await asyncio.gather(*copies)
    assert {(lane.calls, lane.held, lane.running_s) for lane in backend.lanes()} == {(0, 0, None)}
    for handle in handles:
        await backend.deallocate(handle)
    await backend.shutdown()
