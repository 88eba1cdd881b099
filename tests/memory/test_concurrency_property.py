"""Random programs over several allocations, many calls at once and some cancelled: what a sequential model says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gpurt.backends.cpu_backend import CPUDriver
from gpurt.driver import Driver
from gpurt.errors import InvalidHandle
from gpurt.runtime import backend as backend_module
from gpurt.runtime import operations
from gpurt.runtime.backend import DriverBackend
from gpurt.runtime.order import Order
from gpurt.testing import Fault, FaultyDriver, SimulatedDriver, parse_simulation
from gpurt.testing.kit.base import assert_nothing_live
from gpurt.testing.loops import turns
from gpurt.types import MemoryHandle

Check = Callable[..., None]
CHUNK_BYTES = 64
SMALL_BYTES = 100
"""Copies over this take the lanes of large ones."""
SIZES = (300, 1, 200, 64, 500, 257)
"""Of the allocations of a program; every other one is on the second device."""


@dataclass(frozen=True)
class Step:
    """One call, and what happens after it was made. Numbers are taken modulo what is possible."""

    kind: str
    handle: int
    other: int
    start: int
    size: int
    turns: int
    """Of the loop, before the next step."""
    cancel_after: int | None
    """Steps; 0 is before the call has begun."""


STEPS = st.lists(
    st.builds(
        Step,
        kind=st.sampled_from(
            ["write"] * 5 + ["read"] * 3 + ["read_into"] * 3 + ["copy"] * 4 + ["borrow", "synchronize", "free"]
        ),
        handle=st.integers(0, len(SIZES) - 1),
        other=st.integers(0, len(SIZES) - 1),
        start=st.integers(0, 600),
        size=st.integers(0, 600),
        turns=st.sampled_from([0, 0, 0, 0, 1, 2, 5]),
        cancel_after=st.none() | st.none() | st.integers(0, 6),
    ),
    min_size=1,
    max_size=30,
)


@dataclass
class Call:
    """A step under way, and what came of it."""

    step: Step
    number: int
    task: asyncio.Task[Any] | None = None
    begun: int | None = None
    """Place in the order of submission."""
    source: bytearray = field(default_factory=bytearray)
    buffer: bytearray = field(default_factory=bytearray)
    at_return: bytes = b""
    """What was in ``buffer`` when the cancelled call returned."""

    @property
    def cancelled(self) -> bool:
        assert self.task is not None
        return self.task.cancelled()


class Model:
    """The program once more, one call after the other."""

    def __init__(self) -> None:
        self.content: list[bytearray | None] = [bytearray(pattern(-1, size)) for size in SIZES]
        self.unknown = [bytearray(size) for size in SIZES]
        """Ones where a cancelled write leaves the content open."""

    def check(self, index: int, start: int, actual: bytes | bytearray) -> None:
        content = self.content[index]
        assert content is not None
        unknown = self.unknown[index][start : start + len(actual)]
        expected = content[start : start + len(actual)]
        assert len(actual) == len(expected)
        wrong = [at for at in range(len(actual)) if actual[at] != expected[at] and not unknown[at]]
        assert not wrong, f"allocation {index}: wrong from byte {start + wrong[0]} on"

    def play(self, call: Call) -> None:
        step = call.step
        assert call.task is not None
        needed = {"write": [step.handle], "synchronize": [], "borrow": [], "copy": [step.handle, step.other]}
        if any(self.content[index] is None for index in needed.get(step.kind, [step.handle])):
            assert isinstance(call.task.exception(), InvalidHandle)
            return
        if not call.cancelled:
            call.task.result()
        start, size = extent(step)
        match step.kind:
            case "write":
                self._put(step.handle, start, pattern(call.number, size), bytes(size), call)
            case "copy":
                source, start, target_start, size = copied(step)
                content = self.content[source]
                assert content is not None
                unknown = self.unknown[source][start : start + size]
                self._put(step.other, target_start, content[start : start + size], unknown, call)
            case "read" if not call.cancelled:
                self.check(step.handle, start, call.task.result())
            case "read_into" if call.cancelled:
                assert call.buffer == call.at_return
            case "read_into":
                self.check(step.handle, start, call.buffer)
            case "free":
                self.content[step.handle] = None
            case _:
                pass

    def _put(self, index: int, start: int, new: bytes | bytearray, unknown: bytes | bytearray, call: Call) -> None:
        content = self.content[index]
        assert content is not None
        content[start : start + len(new)] = new
        self.unknown[index][start : start + len(new)] = b"\1" * len(new) if call.cancelled else unknown


def extent(step: Step) -> tuple[int, int]:
    total = SIZES[step.handle]
    start = step.start % (total + 1)
    return start, step.size % (total - start + 1)


def copied(step: Step) -> tuple[int, int, int, int]:
    """Source, start there, start in ``step.other``, size; disjoint within one allocation."""
    source, target = SIZES[step.handle], SIZES[step.other]
    if step.handle == step.other:
        size = step.size % (source // 2 + 1)
        return (step.handle, 0, source - size, size) if step.start % 2 else (step.handle, source - size, 0, size)
    size = step.size % (min(source, target) + 1)
    return step.handle, step.start % (source - size + 1), step.start % (target - size + 1), size


def pattern(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


class Program:
    """Steps carried out on an open backend."""

    def __init__(self, backend: DriverBackend) -> None:
        self.backend = backend
        self.handles: list[MemoryHandle] = []
        self._order = itertools.count()

    async def run(self, steps: list[Step]) -> None:
        devices = itertools.cycle(device.device_id for device in self.backend.devices)
        try:
            for size in SIZES:
                self.handles.append(await self.backend.allocate(next(devices), size))
                await self.backend.copy_to_device(pattern(-1, size), self.handles[-1])
            calls = await self._call(steps)
            model = Model()
            for call in sorted((call for call in calls if call.begun is not None), key=lambda call: call.begun or 0):
                model.play(call)
            for index, content in enumerate(model.content):
                if content is not None:
                    model.check(index, 0, await self.backend.copy_from_device(self.handles[index]))
        finally:
            for handle in self.handles:
                with contextlib.suppress(InvalidHandle):
                    await self.backend.deallocate(handle)
        await assert_nothing_live(self.backend)
        for call in calls:
            call.source.append(0)  # fails while anybody holds it
            call.buffer.append(0)

    async def _call(self, steps: list[Step]) -> list[Call]:
        """Every step, and wait for all of them."""
        calls = [Call(step, number) for number, step in enumerate(steps)]
        for call in calls:
            call.task = asyncio.create_task(self._carry_out(call))
            self._cancel_due(calls, call.number)
            await turns(call.step.turns)
        async with asyncio.timeout(20):
            await asyncio.wait([call.task for call in calls if call.task is not None])
        for device in self.backend.devices:
            await self.backend.synchronize(device.device_id)
        return calls

    def _cancel_due(self, calls: list[Call], now: int) -> None:
        for call in calls[: now + 1]:
            if call.step.cancel_after is not None and call.number + call.step.cancel_after == now:
                assert call.task is not None
                call.task.cancel()

    async def _carry_out(self, call: Call) -> Any:
        """The first step of this is that of the call: its place in the order."""
        call.begun = next(self._order)
        step, backend = call.step, self.backend
        handle, (start, size) = self.handles[step.handle], extent(step)
        match step.kind:
            case "write":
                call.source[:] = pattern(call.number, size)
                await backend.copy_to_device(call.source, handle, start)
                call.source[:] = bytes(size)  # it is the caller's again
            case "read":
                return await backend.copy_from_device(handle, start, size)
            case "read_into":
                call.buffer[:] = bytes(size)
                try:
                    await backend.copy_into(handle, call.buffer, start)
                except asyncio.CancelledError:
                    call.at_return = bytes(call.buffer)
                    raise
            case "copy":
                _, start, target_start, size = copied(step)
                await backend.copy_device_to_device(
                    handle,
                    self.handles[step.other],
                    size,
                    src_offset_bytes=start,
                    dst_offset_bytes=target_start,
                )
            case "borrow":
                async with backend.allocation(handle.device_id, 1 + size) as borrowed:
                    await backend.copy_to_device(pattern(call.number, 1 + size), borrowed)
                    assert await backend.copy_from_device(borrowed) == pattern(call.number, 1 + size)
            case "synchronize":
                await backend.synchronize(handle.device_id)
            case "free":
                await backend.deallocate(handle)
            case kind:
                raise AssertionError(kind)


def simulated() -> Driver:
    return SimulatedDriver(parse_simulation("h100x2"))


def cpu() -> Driver:
    return CPUDriver(devices=2)


@pytest.fixture(autouse=True)
def _large_copies_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backend_module, operations):
        monkeypatch.setattr(module, "SMALL_COPY_BYTES", SMALL_BYTES)


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Iterator[Check]:
    """Compares so many random programs on one backend with the model."""
    make, pool_bytes, seed = request.param
    driver = make()
    driver.capabilities = driver.capabilities.model_copy(update={"chunk_bytes": CHUNK_BYTES})
    delays = [
        Fault(method, probability=0.1, seed=number, delay=0.0002)
        for number, method in enumerate(("write", "read", "copy", "alloc", "free"))
    ]
    backend = DriverBackend(FaultyDriver(driver, delays), pool_bytes=pool_bytes)
    with asyncio.Runner() as runner:
        runner.run(backend.initialize())

        def check(examples: int, *, shrink: bool = True) -> None:
            @settings(
                max_examples=examples,
                phases=[phase for phase in Phase if shrink or phase is not Phase.shrink],
                deadline=None,
                database=None,
                derandomize=seed is None,
                suppress_health_check=list(HealthCheck),
            )
            @given(STEPS)
            def programs(steps: list[Step]) -> None:
                runner.run(Program(backend).run(steps))

            programs()

        yield check
        runner.run(backend.shutdown())


BACKENDS = [
    pytest.param((simulated, 1 << 20, None), id="simulated, pooled"),
    pytest.param((simulated, 0, None), id="simulated"),
    pytest.param((cpu, None, None), id="cpu"),
]


@pytest.mark.parametrize("check", BACKENDS, indirect=True)
def test_programs(check: Check) -> None:
    check(100)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [pytest.param((*each.values[0][:2], "any"), id=each.id) for each in BACKENDS], indirect=True
)
def test_many_programs(check: Check) -> None:
    check(3_000)


@pytest.mark.parametrize("check", BACKENDS[:1], indirect=True)
def test_a_runtime_without_order_is_found_out(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Order.submit

    def without_chains(self: Order, job: Any, queue: Any, chains: Any = (), after_devices: Any = ()) -> None:
        submit(self, job, queue, (), after_devices)

    monkeypatch.setattr(Order, "submit", without_chains)
    # A group when the same program does not fail again: threads decide.
    with pytest.raises((AssertionError, ExceptionGroup)) as caught:
        check(100, shrink=False)
    assert "wrong from byte" in "".join(traceback.format_exception(caught.value))
