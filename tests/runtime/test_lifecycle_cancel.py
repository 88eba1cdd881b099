"""An opening that nobody wants any more, and one that somebody does, on the same driver."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from tests.support.reference_driver import ReferenceDriver

from gpurt.shell import DriverBackend
from gpurt.testing.loops import until
from gpurt.types import GPUDevice


class Recorded(ReferenceDriver):
    """``open`` waits for ``go`` the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.go = threading.Event()

    def open(self) -> Sequence[GPUDevice]:
        first = not self.log
        self.log.append("open")
        if first:
            self.go.wait(20)
        devices = super().open()
        self.log.append("opened")
        return devices

    def close(self) -> None:
        self.log.append("closed")
        super().close()


async def test_a_cancelled_opening_is_undone_before_shutdown_returns() -> None:
    driver = Recorded()
    backend = DriverBackend(driver)
    opening = asyncio.create_task(backend.initialize())
    await until(lambda: driver.log == ["open"], "it is in the driver")
    opening.cancel()
    await asyncio.wait({opening})
    closing = asyncio.create_task(backend.shutdown())
    await asyncio.sleep(0)
    driver.go.set()
    await closing
    assert driver.log == ["open", "opened", "closed"]
    await backend.initialize()
    device_id = backend.devices[0].device_id
    handle = await backend.allocate(device_id, 64)
    await backend.copy_to_device(b"k" * 64, handle)
    assert await backend.copy_from_device(handle) == b"k" * 64
    await backend.deallocate(handle)
    await backend.shutdown()
    assert driver.log == ["open", "opened", "closed"] * 2
