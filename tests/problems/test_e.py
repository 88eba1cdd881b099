"""The event loop: it is never held up, and whoever waits can leave. The numbers are those of docs/problems.md."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

import anyio
import pytest

from gpurt.errors import ReasonCode
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.faults import Fault
from tests.discovery.records import cpu, device
from tests.problems.rig import Children, as_json, machine

on_posix = pytest.mark.skipif(sys.platform == "win32", reason="probe scripts use POSIX signals")
on_every_loop = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


@on_posix
@on_every_loop
async def test_e47_a_tool_that_sleeps_for_a_minute_holds_up_nobody(registry: Path, tmp_path: Path) -> None:
    children = Children(
        tmp_path,
        f"""
        if name == "cuda":
            say("doing", message="asking nvidia-smi")
            if os.fork() == 0:  # the tool is a child of the probe
                open(os.path.join({str(tmp_path / "children")!r}, f"tool-{{os.getpid()}}"), "w").close()
            time.sleep(60)
        say("verified", devices={as_json(cpu(backend="other"))!r})
        """,
    )
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.005)
            turns += 1

    async with children.service(registry, "cuda", "other", probe_timeout=0.8) as service:
        counting = asyncio.create_task(count())
        began = time.monotonic()
        result = await service.discover_all_devices()
        took = time.monotonic() - began
        counting.cancel()
    assert (result.reports[0].reason, result.backend_name) == (ReasonCode.TIMEOUT, "other")
    assert "asking nvidia-smi" in result.reports[0].message
    assert took < 10
    # A loop that stood still during the probe would have made no turn; on a busy machine it makes fewer.
    assert turns > 16
    assert children.started("tool") == 1
    deadline = time.monotonic() + 5
    while children.alive:
        assert time.monotonic() < deadline, "the tool outlives its probe"
        await asyncio.sleep(0.01)


@on_posix
async def test_e48_fifty_callers_at_once_start_one_probe_of_each_backend(registry: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    children = Children(
        tmp_path,
        f"""
        while not os.path.exists({str(gate)!r}):
            time.sleep(0.01)
        say("verified", devices={as_json(device(0))!r} if name == "cuda" else {as_json(cpu(backend="other"))!r})
        """,
    )
    async with children.service(registry, "cuda", "other") as service:
        callers = [asyncio.create_task(service.discover_all_devices()) for _ in range(50)]
        while children.started("cuda") + children.started("other") < 2:
            await asyncio.sleep(0.01)
        late = [asyncio.create_task(service.discover_all_devices()) for _ in range(5)]
        await asyncio.sleep(0)
        gate.touch()
        results = await asyncio.gather(*callers, *late)
    assert all(result is results[0] for result in results)
    assert [each.backend for each in results[0].devices] == ["cuda", "other"]
    assert (children.started("cuda"), children.started("other")) == (1, 1)


@on_every_loop
@pytest.mark.parametrize("scope", ["task", "asyncio.timeout", "anyio"])
async def test_e49_who_waits_for_the_driver_can_leave_while_it_hangs(scope: str) -> None:
    driver, gate = machine("h100x2"), threading.Event()
    async with DriverBackend(driver) as backend:
        driver.inject(Fault("sync", index=0, gate=gate))
        try:
            if scope == "task":
                waiting = asyncio.create_task(backend.synchronize("accel:0"))
                await asyncio.to_thread(driver.wait_until_called, "sync")
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            elif scope == "asyncio.timeout":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await backend.synchronize("accel:0")
            else:
                with anyio.move_on_after(0.05) as left:
                    await backend.synchronize("accel:0")
                assert left.cancelled_caught
            # All of this while the driver has not returned, and the other device is free meanwhile.
            assert not gate.is_set()
            assert [call.method for call in driver.calls].count("sync") == 1
            await backend.synchronize("accel:1")
        finally:
            gate.set()
        await backend.synchronize("accel:0")
