"""A driver that goes wrong on demand, around any other driver.

::

    driver = FaultyDriver(SimulatedDriver(parse_simulation("h100x2")))
    driver.inject(Fault("write", nth=3, raises=OSError("link down")))
    driver.inject(Fault("read", index=1, corrupt=0))
    driver.inject(Fault("sync", gate=(gate := threading.Event())))  # sync blocks until gate.set()
    driver.wait_until_called("sync")

It obeys the rules of :mod:`gpurt.driver` wherever no fault tells it otherwise, and records every call.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from gpurt.driver import Driver
from gpurt.errors import DeviceLost, GPUError
from gpurt.types import GPUDevice, Telemetry

Method = Literal[
    "open",
    "attach",
    "alloc",
    "free",
    "write",
    "read",
    "copy",
    "sync",
    "telemetry",
    "close",
    "detach",
    "trim",
    "host_view",
    "pointer",
    "load",
    "compile",
    "launch",
    "host_alloc",
    "host_memory",
    "host_free",
]


class InjectedDeviceLoss(RuntimeError):
    """What every call on a device that a fault has lost raises; means :class:`gpurt.errors.DeviceLost`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a driver method, recorded on entry."""

    method: str
    index: int | None
    """The device; for ``copy`` that of the source, None for ``open`` and ``close``."""
    nbytes: int | None
    """Bytes to be allocated or moved, where the method has such a thing."""
    thread: str


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when.

    When: each call of ``method`` (on device ``index``, if given) since the fault was injected is counted from 1.
    The fault strikes if every given condition holds; with none, always.

    What, in this order: wait for ``gate``, sleep, lose the device, raise, and, once the real call has returned,
    lie about its result and corrupt what it read. With ``after`` the waiting, the sleep and the exception follow the
    real call; what it returned is lost by an exception, so that is for methods that return nothing.
    """

    method: Method
    _: KW_ONLY
    index: int | None = None
    nth: int | None = None
    """Only this call."""
    first: int | None = None
    """Only the first so many."""
    every: int | None = None
    """Only call numbers that are multiples of it."""
    probability: float | None = None
    """With this chance, drawn from ``seed``: equal seeds strike at equal calls."""
    seed: int = 0

    gate: threading.Event | None = None
    """Hang until it is set."""
    delay: float = 0.0
    """Seconds."""
    lose: bool = False
    """From now on every call on the device raises :class:`InjectedDeviceLoss`."""
    raises: BaseException | Callable[[], BaseException] | None = None
    """An exception, its class, or a function that makes one."""
    after: bool = False
    """Hang, sleep and raise when the real call has done its work."""
    lie: Mapping[str, Any] | None = None
    """Fields to replace, unvalidated, in the result of ``telemetry`` or in every device that ``open`` returns."""
    corrupt: int | None = None
    """Position, modulo its length, of the byte that is inverted in what ``read`` returns."""


class _Armed:
    """A fault and how often its method was called. Guarded by the driver's lock."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._count = 0
        self._random = random.Random(fault.seed)

    def strikes(self, method: str, index: int | None) -> bool:
        fault = self.fault
        if method != fault.method or (fault.index is not None and index != fault.index):
            return False
        self._count += 1
        drawn = self._random.random()
        return (
            (fault.nth is None or self._count == fault.nth)
            and (fault.first is None or self._count <= fault.first)
            and (fault.every is None or self._count % fault.every == 0)
            and (fault.probability is None or drawn < fault.probability)
        )


class FaultyDriver(Driver):
    """``inner`` with faults. Thread-safe; ``sleep`` (seconds) is what a delay calls."""

    def __init__(
        self, inner: Driver, faults: Iterable[Fault] = (), *, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.inner = inner
        # A decorator takes the name of what it decorates, so that device ids stay the same.
        self.name = inner.name  # pyright: ignore[reportAttributeAccessIssue]
        self.capabilities = inner.capabilities
        self._sleep = sleep
        self._armed: list[_Armed] = []
        self._lost: set[int] = set()
        self._calls: list[Call] = []
        self._called = threading.Condition()
        for fault in faults:
            self.inject(fault)

    # What a test does

    def inject(self, fault: Fault) -> Fault:
        """Let ``fault`` happen from now on, beside those that are there; returns it."""
        with self._called:
            self._armed.append(_Armed(fault))
        return fault

    def clear(self) -> None:
        """Forget all faults and losses, and let go of the calls that hang on a gate."""
        with self._called:
            armed, self._armed = self._armed, []
            self._lost.clear()
        for each in armed:
            if each.fault.gate is not None:
                each.fault.gate.set()

    def lose(self, index: int) -> None:
        """Lose a device now: every later call on it raises :class:`InjectedDeviceLoss`."""
        with self._called:
            self._lost.add(index)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call so far, in order of entry."""
        with self._called:
            return tuple(self._calls)

    def wait_until_called(self, method: Method, n: int = 1, timeout: float = 5.0, *, index: int | None = None) -> None:
        """Block until ``method`` (on device ``index``, if given) was entered ``n`` times in all.

        Raises:
            TimeoutError: not within ``timeout`` seconds.
        """

        def seen() -> int:
            return sum(call.method == method and index in (None, call.index) for call in self._calls)

        with self._called:
            if not self._called.wait_for(lambda: seen() >= n, timeout):
                raise TimeoutError(f"{method} was called {seen()} times, not {n}, within {timeout} s")

    # Driver

    def open(self) -> Sequence[GPUDevice]:
        struck = self._enter("open")
        devices = self.inner.open()
        # The inner driver may have replaced its own on the instance.
        self.capabilities = self.inner.capabilities
        self._leave(struck)
        for lie in _lies(struck):
            devices = [device.model_copy(update=lie) for device in devices]
        return devices

    def attach(self, index: int) -> None:
        struck = self._enter("attach", index)
        self.inner.attach(index)
        self._leave(struck)

    def alloc(self, index: int, nbytes: int) -> Any:
        struck = self._enter("alloc", index, nbytes)
        result = self.inner.alloc(index, nbytes)
        self._leave(struck)
        return result

    def free(self, index: int, mem: Any) -> None:
        struck = self._enter("free", index)
        self.inner.free(index, mem)
        self._leave(struck)

    def write(self, index: int, mem: Any, offset: int, src: memoryview) -> None:
        struck = self._enter("write", index, len(src))
        self.inner.write(index, mem, offset, src)
        self._leave(struck)

    def read(self, index: int, mem: Any, offset: int, dst: memoryview) -> None:
        struck = self._enter("read", index, len(dst))
        self.inner.read(index, mem, offset, dst)
        self._leave(struck)
        for fault in struck:
            if fault.corrupt is not None and len(dst):
                dst[fault.corrupt % len(dst)] ^= 0xFF

    def copy(
        self, src_index: int, src: Any, src_offset: int, dst_index: int, dst: Any, dst_offset: int, nbytes: int
    ) -> None:
        struck = self._enter("copy", src_index, nbytes)
        self._check(dst_index)
        self.inner.copy(src_index, src, src_offset, dst_index, dst, dst_offset, nbytes)
        self._leave(struck)

    def sync(self, index: int) -> None:
        struck = self._enter("sync", index)
        self.inner.sync(index)
        self._leave(struck)

    def telemetry(self, index: int) -> Telemetry:
        struck = self._enter("telemetry", index)
        reading = self.inner.telemetry(index)
        self._leave(struck)
        for lie in _lies(struck):
            reading = reading.model_copy(update=lie)
        return reading

    def close(self) -> None:
        struck = self._enter("close")
        self.inner.close()
        self._leave(struck)

    def classify(self, exc: Exception) -> type[GPUError] | None:
        return DeviceLost if isinstance(exc, InjectedDeviceLoss) else self.inner.classify(exc)

    def detach(self, index: int) -> None:
        struck = self._enter("detach", index)
        self.inner.detach(index)
        self._leave(struck)

    def trim(self, index: int) -> int:
        struck = self._enter("trim", index)
        result = self.inner.trim(index)
        self._leave(struck)
        return result

    def host_view(self, index: int, mem: Any) -> memoryview:
        struck = self._enter("host_view", index)
        result = self.inner.host_view(index, mem)
        self._leave(struck)
        return result

    def pointer(self, index: int, mem: Any) -> int:
        struck = self._enter("pointer", index)
        result = self.inner.pointer(index, mem)
        self._leave(struck)
        return result

    def load(self, index: int, mem: Any, offset: int, fd: int, file_offset: int, nbytes: int) -> int:
        struck = self._enter("load", index, nbytes)
        result = self.inner.load(index, mem, offset, fd, file_offset, nbytes)
        self._leave(struck)
        return result

    def compile(self, index: int, source: str, name: str) -> Any:
        struck = self._enter("compile", index)
        result = self.inner.compile(index, source, name)
        self._leave(struck)
        return result

    def launch(
        self, index: int, kernel: Any, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Any]
    ) -> None:
        struck = self._enter("launch", index)
        self.inner.launch(index, kernel, grid, block, args)
        self._leave(struck)

    def host_alloc(self, nbytes: int) -> Any:
        struck = self._enter("host_alloc", nbytes=nbytes)
        result = self.inner.host_alloc(nbytes)
        self._leave(struck)
        return result

    def host_memory(self, block: Any) -> memoryview:
        struck = self._enter("host_memory")
        result = self.inner.host_memory(block)
        self._leave(struck)
        return result

    def host_free(self, block: Any) -> None:
        struck = self._enter("host_free")
        self.inner.host_free(block)
        self._leave(struck)

    # Inside

    def _enter(self, method: Method, index: int | None = None, nbytes: int | None = None) -> list[Fault]:
        """Record the call and do what comes before the real one; returns the faults that struck."""
        with self._called:
            self._calls.append(Call(method, index, nbytes, threading.current_thread().name))
            struck = [armed.fault for armed in self._armed if armed.strikes(method, index)]
            self._called.notify_all()
        before = [fault for fault in struck if not fault.after]
        self._wait(before)
        if index is not None and any(fault.lose for fault in struck):
            self.lose(index)
        # A thread's end is no use of the device.
        if method != "detach":
            self._check(index)
        _raise(before)
        return struck

    def _leave(self, struck: Iterable[Fault]) -> None:
        """What comes after the real call."""
        after = [fault for fault in struck if fault.after]
        self._wait(after)
        _raise(after)

    def _wait(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            if fault.gate is not None:
                fault.gate.wait()
            if fault.delay:
                self._sleep(fault.delay)

    def _check(self, index: int | None) -> None:
        with self._called:
            lost = index in self._lost
        if lost:
            raise InjectedDeviceLoss(f"device {index} was lost by a fault")


def _raise(faults: Iterable[Fault]) -> None:
    for fault in faults:
        if fault.raises is not None:
            raise fault.raises if isinstance(fault.raises, BaseException) else fault.raises()


def _lies(struck: Iterable[Fault]) -> list[Mapping[str, Any]]:
    return [fault.lie for fault in struck if fault.lie is not None]
