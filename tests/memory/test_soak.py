"""The soak: it finds nothing here, and would find what it looks for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpurt.backends.cuda_backend import CUDADriver
from gpurt.driver import Driver
from gpurt.errors import BackendUnavailable, GPUError
from gpurt.runtime.allocator import Allocator, Ledger, Pool
from gpurt.runtime.backend import DriverBackend
from gpurt.runtime.operations import ReadHost
from gpurt.runtime.order import Order
from gpurt.testing import Fault, FaultyDriver, SimulatedDriver, parse_simulation, soak
from gpurt.testing.kit.base import shutdown_quietly
from gpurt.testing.loops import until
from gpurt.testing.soak_run import Soak, SoakResult, resident_bytes
from tests.support.fake_cuda import FakeNvml, install, install_nvml, nvml_record

LIMIT = 8 << 20


class Injected(RuntimeError):
    pass


class InjectedShortage(MemoryError):
    pass


def simulated() -> SimulatedDriver:
    return SimulatedDriver(parse_simulation("h100x2"))


async def run(backend: DriverBackend, steps: int, **options: Any) -> SoakResult:
    await backend.initialize()
    try:
        return await Soak(backend, **options).run(steps)
    finally:
        await shutdown_quietly(backend)


class TestNothingWrong:
    def test_simulated(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The command as users run it."""
        code = soak.main(["--steps", "20000", "--seed", "1", "--limit", str(LIMIT), "--json"])
        document = json.loads(capsys.readouterr().out)
        assert code == 0, document["problem"]
        assert document["ok"]
        assert document["steps"] == 20_000
        assert document["rss_growth_bytes"] < 32 << 20
        for before, after in document["free_bytes"].values():
            assert before == after
        outcomes = document["outcomes"]
        assert sum(outcomes.values()) == 20_000
        # One that does nothing of a kind would show nothing.
        for kind in ("allocated", "freed", "written", "read and known", "copied", "cancelled", "refused for the limit"):
            assert outcomes[kind] > 20, outcomes
        for peak in document["peak_bytes"].values():
            assert LIMIT * 0.8 < peak <= LIMIT

    async def test_ten_thousand_rounds(self) -> None:
        """Allocate, copy, read, free, 10,000 times: the process grows by less than 10 MiB, and no handle is left."""
        backend = DriverBackend(simulated(), memory_limit=LIMIT, pool_bytes=LIMIT // 4)
        content = bytes(range(256)) * 16

        async def rounds(device_id: str, count: int) -> None:
            for _ in range(count):
                async with backend.allocation(device_id, len(content)) as handle:
                    await backend.copy_to_device(content, handle)
                    assert await backend.copy_from_device(handle) == content

        async with backend:
            devices = [device.device_id for device in backend.devices] * 8
            await asyncio.gather(*(rounds(device_id, 50) for device_id in devices))
            before = resident_bytes()
            await asyncio.gather(*(rounds(device_id, 625) for device_id in devices))
            assert resident_bytes() - before < 10 << 20
            assert backend.live_handles == 0
            assert [backend.ledger.usage(device_id).committed_bytes for device_id in devices[:2]] == [0, 0]
            await backend.trim()
            assert backend.driver.live_allocations == 0  # pyright: ignore

    @pytest.mark.slow
    def test_cpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert soak.main(["--steps", "200000", "--backend", "cpu"]) == 0
        assert "200,000 steps" in capsys.readouterr().out

    async def test_lanes_that_are_full(self) -> None:
        backend = DriverBackend(simulated(), memory_limit=LIMIT, pool_bytes=LIMIT // 4, max_pending=2)
        result = await run(backend, 1_500, seed=2, in_flight=100)
        assert result.problem is None

    @pytest.mark.parametrize("mode", ["device", "backend"])
    async def test_fewer_threads(self, mode: str) -> None:
        driver = simulated()
        driver.capabilities = driver.capabilities.model_copy(update={"threading": mode, "chunk_bytes": 1 << 16})
        result = await run(DriverBackend(driver, memory_limit=LIMIT), 1_500, seed=3)
        assert result.problem is None

    async def test_cuda_on_the_stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch)
        install_nvml(monkeypatch, FakeNvml([nvml_record(0), nvml_record(1)]))
        result = await run(DriverBackend(CUDADriver(environ={}), memory_limit=LIMIT), 2_500, seed=4)
        assert result.problem is None

    async def test_driver_that_fails_and_dawdles(self) -> None:
        faults = [
            Fault("write", every=23, raises=Injected),
            Fault("read", every=29, raises=Injected),
            Fault("copy", every=19, raises=Injected),
            Fault("alloc", every=17, raises=Injected),
            Fault("alloc", every=7, raises=InjectedShortage),
            *(Fault(method, probability=0.03, delay=0.001) for method in ("alloc", "free", "write", "read", "copy")),
        ]
        # The errors of calls whose callers have gone.
        complaints: list[BaseException] = []
        backend = DriverBackend(
            FaultyDriver(simulated(), faults),
            memory_limit=LIMIT,
            pool_bytes=LIMIT // 4,
            on_background_error=complaints.append,
        )
        result = await run(backend, 2_000, seed=5, expected=told)
        assert result.problem is None
        assert result.outcomes["failed as told"] > 20
        assert all(isinstance(error, Injected | InjectedShortage) for error in complaints)


def told(error: GPUError) -> bool:
    return isinstance(error.__cause__, Injected | InjectedShortage)


class Leaky(SimulatedDriver):
    """Takes memory back, and does not give it to anybody any more."""

    def free(self, index: int, mem: Any) -> None: ...


class Impatient(DriverBackend):
    """Leaves a cancelled caller's buffer to a driver that still fills it."""

    def _prepare_read_into(self, *args: Any) -> Any:
        job = super()._prepare_read_into(*args)
        if isinstance(job, ReadHost):
            job.__class__ = _NotWaitedFor
        return job


class _NotWaitedFor(ReadHost):
    wait_out = False
    __slots__ = ()


class Possessive(DriverBackend):
    """Keeps what it copied from."""

    kept: Any = None

    async def copy_to_device(self, src: Any, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await super().copy_to_device(src, *args)
        self.kept = memoryview(src) if isinstance(src, memoryview) else self.kept


class TestWhatItFinds:
    async def _find(self, driver: Driver, says: str, kind: type[DriverBackend] = DriverBackend, **options: Any) -> str:
        # What is left behind is nobody's concern here.
        backend = kind(driver, memory_limit=LIMIT // 8, pool_bytes=LIMIT // 16, on_background_error=lambda error: None)
        result = await run(backend, 3_000, stall_s=1.0, **options)
        assert result.problem is not None
        assert says in result.problem, result.problem
        return result.problem

    async def test_wrong_byte(self) -> None:
        driver = FaultyDriver(simulated(), [Fault("read", every=50, corrupt=7)])
        assert "1 of" in await self._find(driver, "bytes are wrong")

    async def test_error(self) -> None:
        driver = FaultyDriver(simulated(), [Fault("write", every=60, raises=OSError("link down"))])
        problem = await self._find(driver, "link down")
        assert problem.startswith("after ")
        assert " steps with seed 0: step " in problem
        assert "copy_to_device" in problem

    async def test_memory_that_the_device_does_not_get_back(self) -> None:
        await self._find(Leaky(parse_simulation("h100")), "bytes free")

    async def test_buffer_written_after_the_return(self) -> None:
        driver = FaultyDriver(simulated(), [Fault("read", delay=0.0005)])
        # Few at once, so that many of those that are cancelled are inside the driver.
        await self._find(driver, "after it had returned", Impatient, in_flight=6)

    async def test_source_that_is_kept(self) -> None:
        await self._find(simulated(), "still holds its source", Possessive)

    async def test_driver_that_never_returns(self) -> None:
        gate = threading.Event()
        driver = FaultyDriver(simulated(), [Fault("write", gate=gate), Fault("read", gate=gate)])
        backend = DriverBackend(driver, pool_bytes=0)
        await backend.initialize()
        try:
            result = await Soak(backend, stall_s=0.3).run(3_000)
        finally:
            gate.set()
            await shutdown_quietly(backend)
        assert result.problem is not None
        assert "no step has ended for 0.3 s" in result.problem
        await until(lambda: driver.inner.live_allocations == 0, "allocations left")  # pyright: ignore

    @pytest.mark.parametrize(
        ("owner", "method", "wrong", "says"),
        [
            pytest.param(Pool, "take", lambda right: _lend_twice, "", id="blocks shared"),
            pytest.param(Order, "submit", lambda right: _without_chains(right), "", id="no order"),
            pytest.param(Ledger, "release", lambda right: _every_other(right), "the ledger says", id="not released"),
            pytest.param(Ledger, "cancel", lambda right: _every_other(right), "the ledger says", id="still reserved"),
            pytest.param(Ledger, "reserve", lambda right: _without_limit(right), "limit", id="limit ignored"),
            pytest.param(Allocator, "release", lambda right: _every_other(right), "in the driver", id="not freed"),
        ],
    )
    async def test_wrong_runtime(
        self, owner: Any, method: str, wrong: Callable[[Any], Any], says: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(owner, method, wrong(getattr(owner, method)))
        driver = FaultyDriver(simulated(), [Fault("write", probability=0.1, delay=0.001)])
        await self._find(driver, says)


def _lend_twice(self: Pool, nbytes: int) -> Any:
    blocks = self._free.get(self.block_bytes(nbytes))
    return blocks[-1] if blocks else None


def _without_chains(right: Any) -> Any:
    return lambda self, job, queue, chains=(), after_devices=(): right(self, job, queue, (), after_devices)


def _without_limit(right: Any) -> Any:
    def reserve(self: Ledger, device_id: str, nbytes: int) -> None:
        usage = self._usage[device_id]
        limit, usage.limit_bytes = usage.limit_bytes, None
        right(self, device_id, nbytes)
        usage.limit_bytes = limit

    return reserve


def _every_other(right: Any) -> Any:
    calls = iter(range(1 << 60))

    def half(self: Any, *args: Any) -> None:
        if next(calls) % 2:
            right(self, *args)

    return half


class TestCommand:
    def test_what_was_wrong(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        driver = FaultyDriver(simulated(), [Fault("read", every=50, corrupt=0)])
        monkeypatch.setattr(soak, "create", lambda name, limit: DriverBackend(driver, memory_limit=limit))
        assert soak.main(["--steps", "2000"]) == 1
        out = capsys.readouterr().out
        assert "WRONG: after " in out
        assert "with seed 0: " in out

    def test_no_such_device(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def refuse(name: str, limit: int) -> DriverBackend:
            raise BackendUnavailable("no GPU", backend=name)

        monkeypatch.setattr(soak, "create", refuse)
        assert soak.main(["--backend", "cuda"]) == 2
        assert "no GPU" in capsys.readouterr().err

    def test_needs_no_test_library(self) -> None:
        code = "import sys, gpurt.testing.soak; sys.exit(bool({'pytest', 'hypothesis', 'cupy'} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
