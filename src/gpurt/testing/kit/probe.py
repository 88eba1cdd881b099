"""DriverProbe: watches one driver under the shell, holds its calls, makes them fail.

It shadows the driver's methods on the instance, so it works with any driver and needs no cooperation. It also
checks what the shell promises to every driver (see :mod:`gpurt.driver`) and collects breaches in ``violations``.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NoReturn, cast

import numpy as np

from gpurt.driver import Driver
from gpurt.testing.loops import PATIENCE

_DATA = frozenset({"alloc", "free", "write", "read", "copy", "compile", "launch", "sync"})
WATCHED = (
    *(*sorted(_DATA), "open", "attach", "detach", "telemetry", "trim", "close"),
    *("host_view", "pointer", "load", "host_alloc", "host_free"),
)

REQUEST_ID: ContextVar[str | None] = ContextVar("gpurt_conformance_request", default=None)
"""A context variable that the probe reads inside driver calls, to show that the caller's context is carried."""


class Gate:
    """One place where driver calls wait until ``release``. Made on the loop thread."""

    def __init__(self, method: str, index: int | None, calls: int | None) -> None:
        self.method = method
        self.index = index
        self.left_to_hold = calls
        self.returned = threading.Event()
        """Set when the first held call has left the driver."""
        self._loop = asyncio.get_running_loop()
        self._entered = asyncio.Event()
        self._opened = threading.Event()

    def takes(self, method: str, index: int | None) -> bool:
        return self.left_to_hold != 0 and self.method == method and self.index in (None, index)

    async def entered(self) -> None:
        """Wait until a call is inside the driver."""
        async with asyncio.timeout(PATIENCE):
            await self._entered.wait()

    def release(self) -> None:
        self._opened.set()

    def hold(self) -> None:
        """Driver thread: report and wait."""
        # A loop that has gone has nobody left who could ask.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._entered.set)
        self._opened.wait()


class DriverProbe:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.counts: Counter[str] = Counter()
        """Calls that entered the driver, by method."""
        self.log: list[tuple[str, str]] = []
        """``(method, "enter" | "exit")`` in order."""
        self.violations: list[str] = []
        self.threads: dict[tuple[str, int | None], set[int]] = {}
        """``(method, device index)`` → identifiers of the threads that called it."""
        self.contexts: dict[str, str | None] = {}
        """Method → value of ``REQUEST_ID`` in its latest call."""
        self._lock = threading.Lock()
        self._live: dict[tuple[int, int], Any] = {}
        self._busy: dict[tuple[int, int], str] = {}
        self._attached: set[tuple[int, int]] = set()
        self._saw_open = False
        self._gates: list[Gate] = []
        self._failures: dict[str, list[BaseException]] = {}
        # A held call may take any time, which no driver may that promises short ones.
        self._inline_copy_bytes = driver.inline_copy_bytes
        driver.inline_copy_bytes = 0
        for method in WATCHED:
            setattr(driver, method, self._wrap(method, getattr(driver, method)))

    def remove(self) -> None:
        """Release every gate and give the driver its own methods back."""
        self.release()
        for method in WATCHED:
            vars(self.driver).pop(method, None)
        self.driver.inline_copy_bytes = self._inline_copy_bytes

    def hold(self, method: str, *, index: int | None = None, calls: int | None = 1) -> Gate:
        """Hold the next ``calls`` calls of ``method`` (None: all), on one device or on any."""
        gate = Gate(method, index, calls)
        with self._lock:
            self._gates.append(gate)
        return gate

    def release(self) -> None:
        with self._lock:
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()

    def fail(self, method: str, *exceptions: BaseException) -> None:
        """Make the next calls of ``method`` raise these, in order."""
        with self._lock:
            self._failures.setdefault(method, []).extend(exceptions)

    def forgive(self) -> None:
        """Forget failures that have not happened yet."""
        with self._lock:
            self._failures.clear()

    @property
    def live(self) -> int:
        """Allocations that the driver handed out and that were not freed, since the probe was made."""
        with self._lock:
            return len(self._live)

    def _wrap(self, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            memory = self._memory(method, args)
            gate, failure = self._enter(method, args, memory)
            try:
                if gate is not None:
                    gate.hold()
                if failure is not None:
                    _fail_with_arrays(failure, args)
                result = original(*args, **kwargs)
                if method == "alloc":
                    with self._lock:
                        self._live[args[0], id(result)] = result
                return result
            finally:
                with self._lock:
                    for key in memory:
                        self._busy.pop(key, None)
                    self.log.append((method, "exit"))
                if gate is not None:
                    gate.returned.set()

        return call

    @staticmethod
    def _memory(method: str, args: tuple[Any, ...]) -> set[tuple[int, int]]:
        match method:
            case "free" | "write" | "read":
                return {(args[0], id(args[1]))}
            case "copy":
                return {(args[0], id(args[1])), (args[3], id(args[4]))}
            case "launch":
                return {(args[0], id(each)) for each in args[4] if not isinstance(each, np.generic)}
            case _:
                return set()

    def _enter(
        self, method: str, args: tuple[Any, ...], memory: set[tuple[int, int]]
    ) -> tuple[Gate | None, BaseException | None]:
        thread = threading.get_ident()
        index = args[0] if args else None
        self._check_call(method, args)
        with self._lock:
            self.counts[method] += 1
            self.log.append((method, "enter"))
            self.threads.setdefault((method, index), set()).add(thread)
            self.contexts[method] = REQUEST_ID.get()
            if method == "open":
                self._saw_open = True
                self._attached.clear()
            elif method == "attach":
                self._attached.add((thread, index or 0))
            elif method in _DATA and self._saw_open and (thread, index) not in self._attached:
                self.violations.append(f"{method}({index}) on a thread without attach")
            for key in memory:
                if key in self._busy:
                    self.violations.append(f"{method} while {self._busy[key]} works on the same memory")
                self._busy[key] = method
            if method == "free":
                self._live.pop((args[0], id(args[1])), None)
            gate = next((gate for gate in self._gates if gate.takes(method, index)), None)
            if gate is not None and gate.left_to_hold is not None:
                gate.left_to_hold -= 1
            failures = self._failures.get(method)
            return gate, failures.pop(0) if failures else None

    def _check_call(self, method: str, args: tuple[Any, ...]) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            self.violations.append(f"{method} on the event loop's thread")
        if method in ("write", "read"):
            view: memoryview = args[3]
            if view.format != "B" or view.ndim != 1 or not view.c_contiguous:
                self.violations.append(f"{method} with a view that is not flat bytes")
            if view.nbytes > self.driver.capabilities.chunk_bytes:
                self.violations.append(f"{method} of {view.nbytes} bytes, over chunk_bytes")
            if method == "read" and view.readonly:
                self.violations.append("read into a read-only view")


def _fail_with_arrays(failure: BaseException, args: tuple[Any, ...]) -> NoReturn:
    """As a driver fails that has made arrays of what it was to copy: they are in the traceback."""
    _arrays = [np.frombuffer(cast("memoryview", each), np.uint8) for each in args if isinstance(each, memoryview)]
    raise failure
