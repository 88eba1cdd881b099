"""The loop keeps running, a hung driver hurts only its device, the process ends, a fork is noticed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio

from gpurt.backend import GPUBackend
from gpurt.errors import BackendClosed, DeviceUnresponsive
from gpurt.testing.kit.base import ConformanceBase, assert_nothing_live, filled
from gpurt.testing.kit.probe import DriverProbe
from gpurt.testing.loops import PATIENCE, Ticker, turns, until
from gpurt.types import Capabilities

if TYPE_CHECKING:
    from gpurt.runtime.backend import DriverBackend

GAP_BOUND = 0.5
"""Seconds. Tests run on shared machines, so this catches a blocked loop, not a slow one; benchmarks measure."""
HANG_AFTER = 0.15


class LoopTests(ConformanceBase):
    async def test_loop_runs_beside_large_copies(self, backend: GPUBackend, device_id: str) -> None:
        content: Any = np.ones(self.large_bytes, dtype=np.uint8)
        target: Any = np.zeros_like(content)
        async with Ticker() as ticker, backend.allocation(device_id, content.nbytes) as handle:
            await backend.copy_to_device(content, handle)
            await backend.copy_into(handle, target)
        assert ticker.longest_gap < GAP_BOUND
        assert target[-1] == 1

    async def test_loop_runs_beside_a_slow_driver(self, backend: GPUBackend, device_id: str, hold: DriverProbe) -> None:
        for method, call in (
            ("sync", lambda: backend.synchronize(device_id)),
            ("telemetry", lambda: backend.get_device_memory_info(device_id)),
            ("alloc", lambda: backend.allocate(device_id, 64)),
        ):
            gate = hold.hold(method)
            task: asyncio.Task[Any] = asyncio.ensure_future(call())
            await gate.entered()
            ticks = 0
            async with asyncio.timeout(10):
                while ticks < 20:
                    await asyncio.sleep(0.001)
                    ticks += 1
            assert not task.done()
            gate.release()
            result = await task
            if method == "alloc":
                await backend.deallocate(result)


class HangTests(ConformanceBase):
    @pytest_asyncio.fixture
    async def impatient(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe
    ) -> AsyncIterator[DriverBackend]:
        """The same driver under a shell that gives up on it soon."""
        from gpurt.runtime.backend import DriverBackend

        await backend.shutdown()
        impatient = DriverBackend(shell.driver, hang_after=HANG_AFTER)
        await impatient.initialize()
        yield impatient
        hold.release()
        await impatient.shutdown()

    async def test_hung_call_fails_and_the_device_comes_back(
        self, impatient: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        handle, other = await impatient.allocate(device_id, 64), await impatient.allocate(device_id, 64)
        gate = hold.hold("write")
        hung = asyncio.create_task(impatient.copy_to_device(bytes(64), handle))
        await gate.entered()
        queued = asyncio.create_task(impatient.copy_from_device(handle))
        await asyncio.wait({hung, queued}, timeout=PATIENCE)
        assert hung.done(), "nobody told the caller of the hung call"
        assert queued.done(), "nobody told the caller of a queued call"
        with pytest.raises(DeviceUnresponsive) as caught:
            hung.result()
        assert caught.value.device_id == device_id
        with pytest.raises(DeviceUnresponsive):
            queued.result()
        started = time.monotonic()
        for call in (
            lambda: impatient.copy_to_device(b"x", other),
            lambda: impatient.copy_from_device(other),
            lambda: impatient.allocate(device_id, 64),
            lambda: impatient.synchronize(device_id),
        ):
            with pytest.raises(DeviceUnresponsive):
                await call()
        assert time.monotonic() - started < HANG_AFTER
        device = await impatient.get_device(device_id)
        assert device is not None
        assert device.state == "unresponsive"
        assert not device.usable
        # Freeing is never refused: it is done when the driver returns.
        async with asyncio.timeout(10):
            await impatient.deallocate(other)
            await impatient.deallocate(handle)
        gate.release()
        await until(lambda: impatient.devices[0].state == "healthy", "the device did not come back")
        async with filled(impatient, device_id, b"back") as again:
            assert await impatient.copy_from_device(again) == b"back"
        # The queued read was failed, so it must not have run.
        assert hold.counts["read"] == 1
        await assert_nothing_live(impatient, hold)

    @pytest.mark.parametrize("end", ["hang", "shutdown"])
    async def test_finished_copies_are_told_although_the_next_one_hangs(
        self, impatient: DriverBackend, device_id: str, hold: DriverProbe, end: str
    ) -> None:
        handles = [await impatient.allocate(device_id, 64) for _ in range(3)]
        busy, stuck = hold.hold("write"), hold.hold("read")
        finished = [asyncio.create_task(impatient.copy_to_device(bytes(64), handles[0]))]
        await busy.entered()
        finished.append(asyncio.create_task(impatient.copy_to_device(bytes(64), handles[1])))
        hung = asyncio.create_task(impatient.copy_from_device(handles[2]))
        await turns(3)
        busy.release()
        await stuck.entered()
        if end == "shutdown":
            # Sooner than the hang clock looks, which would tell them, too.
            with pytest.warns(ResourceWarning):
                await impatient.shutdown(timeout=0.001)
        await asyncio.wait(finished, timeout=PATIENCE)
        assert all(copy.done() for copy in finished), "nobody told the callers of finished copies"
        for copy in finished:
            copy.result()
        with pytest.raises((DeviceUnresponsive, BackendClosed)):
            await hung
        hold.release()
        if end == "hang":
            for handle in handles:
                await impatient.deallocate(handle)

    @pytest.mark.parametrize("end", ["hang", "cancel", "shutdown"])
    async def test_a_hung_read_lets_its_caller_go(
        self, impatient: DriverBackend, device_id: str, hold: DriverProbe, end: str
    ) -> None:
        """Also one that waits for the driver to let go of its buffer: for a hung driver that would be for ever."""
        handle = await impatient.allocate(device_id, 64)
        stuck, buffer = hold.hold("read"), bytearray(64)
        reading = asyncio.create_task(impatient.copy_into(handle, buffer))
        await stuck.entered()
        if end == "cancel":
            reading.cancel()
        elif end == "shutdown":
            with pytest.warns(ResourceWarning):
                await impatient.shutdown(timeout=0.001)
        await asyncio.wait({reading}, timeout=PATIENCE)
        assert reading.done(), "the caller of a hung read waits on"
        expected = {"hang": DeviceUnresponsive, "cancel": asyncio.CancelledError, "shutdown": BackendClosed}
        with pytest.raises(expected[end]):
            reading.result()
        with pytest.raises(BufferError):
            buffer.append(0)  # the driver may still write to it
        hold.release()
        if end != "shutdown":
            await impatient.deallocate(handle)

    async def test_other_devices_go_on(
        self, device_id: str, second_device_id: str, impatient: DriverBackend, hold: DriverProbe
    ) -> None:
        """Where one thread serves all devices, the others say so at once and do not wait."""
        gate = hold.hold("sync", index=0)
        with pytest.raises(DeviceUnresponsive):
            await impatient.synchronize(device_id)
        if device_id == second_device_id or impatient.driver.capabilities.threading == "backend":
            with pytest.raises(DeviceUnresponsive):
                await impatient.synchronize(second_device_id)
        else:
            async with filled(impatient, second_device_id, b"alive") as handle:
                assert await impatient.copy_from_device(handle) == b"alive"
                await impatient.synchronize(second_device_id)
        gate.release()
        await until(lambda: impatient.devices[0].state == "healthy", "the device did not come back")

    async def test_hung_allocation_is_freed_when_it_appears(
        self, impatient: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        gate = hold.hold("alloc")
        with pytest.raises(DeviceUnresponsive):
            await impatient.allocate(device_id, 4096)
        gate.release()
        await until(lambda: impatient.devices[0].state == "healthy", "the device did not come back")
        await assert_nothing_live(impatient, hold)
        assert impatient.ledger.usage(device_id).reserved_bytes == 0

    async def test_shutdown_leaves_a_hung_driver_behind(
        self, impatient: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        gate = hold.hold("sync")
        with pytest.raises(DeviceUnresponsive):
            await impatient.synchronize(device_id)
        async with asyncio.timeout(10):
            await impatient.shutdown(timeout=0.05)
        assert impatient.devices == ()
        gate.release()

    async def test_a_slow_queue_is_not_a_hang(
        self, impatient: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        """The clock is that of the call in the driver: waiting in a queue for longer than that is fine."""
        handle = await impatient.allocate(device_id, 64)
        gates = [hold.hold("write") for _ in range(4)]
        writes = [asyncio.create_task(impatient.copy_to_device(bytes(64), handle)) for _ in range(4)]
        for gate in gates:
            await gate.entered()
            await asyncio.sleep(HANG_AFTER / 3)
            gate.release()
        await asyncio.gather(*writes)
        await impatient.deallocate(handle)


class ProcessTests(ConformanceBase):
    async def _child(self, scenario: str) -> tuple[dict[str, Any], float]:
        if self.factory is None:
            pytest.skip("needs `factory`, to make the backend in another process")
        if sys.platform == "win32" and scenario == "fork":
            pytest.skip("no fork here")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gpurt.testing.kit.child",
            scenario,
            self.factory,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        try:
            async with asyncio.timeout(20):
                line = await process.stdout.readline() if process.stdout else b""
                _, stderr = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise AssertionError(f"{scenario}: the child did not end") from None
        ended = time.time()
        assert process.returncode == 0, stderr.decode()
        assert b"Traceback" not in stderr, stderr.decode()
        return json.loads(line), ended

    async def test_process_ends_while_a_driver_hangs(self, backend: GPUBackend, shell: DriverBackend) -> None:
        answer, ended = await self._child("exit")
        assert ended - answer["left"] < 2

    async def test_forked_child_is_told(self, backend: GPUBackend) -> None:
        answer, _ = await self._child("fork")
        assert answer["child"] == ["GPUError"] * 4
        assert answer["parent"] is True

    async def test_misuse_leaves_a_living_process(self, backend: GPUBackend, capabilities: Capabilities) -> None:
        """Most libraries abort, or read what is no longer theirs, on calls of this kind."""
        answer, _ = await self._child("misuse")
        assert answer.pop("round trip") is True
        if capabilities.max_allocation_bytes is not None and answer["allocate far too much"] == "OutOfRange":
            answer["allocate far too much"] = "OutOfMemory"  # more than one allocation may be, whatever is free
        expected = dict.fromkeys(answer, "InvalidHandle") | {
            "allocate far too much": "OutOfMemory",
            "write past the end": "OutOfRange",
            "read past the end": "OutOfRange",
            "read into past the end": "OutOfRange",
            "read before the beginning": "OutOfRange",
            "copy past the end": "OutOfRange",
            "use after shutdown": "BackendClosed",
        }
        assert len(answer) == 24
        assert answer == expected
