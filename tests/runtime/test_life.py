"""The whole life of a backend at random, over a driver that writes down every breach of the promises to it.

A program opens, allocates, copies, cancels, hangs, fails, loses devices, closes, ends its event loop in the middle,
opens again, and drops the backend. At its end nothing is left and nothing was broken, whatever it did.

``GPURT_LIFE_STEPS`` sets the number of steps of the slow test in total.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import itertools
import os
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from gpurt import (
    BackendClosed,
    BackendUnavailable,
    DeviceLost,
    DeviceUnresponsive,
    DriverBackend,
    GPUError,
    HandleInUse,
    InvalidHandle,
    Kernel,
    MemoryHandle,
    OutOfMemory,
    ReasonCode,
)
from gpurt.runtime.opening import Opening
from gpurt.testing import CheckingDriver, Fault, FaultyDriver
from gpurt.testing.kit.hostile import EXCEPTIONS, causes
from gpurt.testing.loops import PATIENCE, loop_factories, turns

STEPS = int(os.environ.get("GPURT_LIFE_STEPS", "200000"))
STEPS_PER_PROGRAM = 40
HANG_AFTER = 0.2
DEVICES = 2
LARGEST = 3000
CAPACITY = 64 << 10
OFFSETS, SIZES = st.integers(0, LARGEST), st.integers(1, LARGEST)

HELD = ("alloc", "free", "write", "read", "copy", "sync", "telemetry", "close", "open", "trim", "host_view", "load")
FAILING = (*HELD, "attach", "detach", "host_alloc", "host_free", "launch")
NOTHING_BACK = frozenset({"free", "write", "copy", "sync", "close", "detach", "host_free", "launch"})
"""Methods that give nothing back: a fault may strike after their work."""
AFTERWARDS = frozenset({"free", "close", "detach", "host_free"})
"""Whether a failure of these did its work nobody could say, so it always has."""

REQUEST: contextvars.ContextVar[object] = contextvars.ContextVar("request")


class Witness:
    """An object of a caller's: it must not outlive the call."""


@dataclass(eq=False)
class Call:
    """One call of the backend."""

    name: str
    task: asyncio.Task[Any] | None
    witness: weakref.ref[Witness]
    succeeded: Callable[[Any], None]
    allowed: tuple[type[BaseException], ...]
    memories: tuple[Memory, ...]
    cancelled: bool = False
    outcome: Literal["ok", "failed", "cancelled", "left"] | None = None

    def __repr__(self) -> str:
        return f"{self.name} of {self.memories}"


@dataclass(eq=False)
class Memory:
    """An allocation, what it should hold, and which calls that depends on."""

    handle: MemoryHandle
    data: bytearray
    known: bool = False
    writes: tuple[Call, ...] = ()
    views: list[Any] = field(default_factory=list)
    """Views and arrays over it, which the program holds."""
    dead: bool = False

    def write(self, call: Call, offset: int, content: bytes | bytearray, *, known: bool = True) -> None:
        self.data[offset : offset + len(content)] = content
        whole = len(content) == len(self.data)
        self.known = known and (whole or self.known)
        self.writes = (call,) if whole else (*(each for each in self.writes if each.outcome != "ok"), call)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"{self.handle.device_id}#{self.handle.handle_id}"


def when(condition: Callable[[Any], bool]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a rule do nothing otherwise. Preconditions of Hypothesis must not depend on what other threads have done."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def guarded(self: Life, **arguments: Any) -> None:
            if condition(self):
                body(self, **arguments)

        return guarded

    return decorate


def step(**strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """A rule that is part of the history of its program, which a failure shows: one that hangs on the moment at which
    another thread did something fails only once, and Hypothesis cannot repeat it."""

    def decorate(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def remembered(self: Life, **arguments: Any) -> None:
            self.history.append(f"{body.__name__}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
            with self.telling():
                body(self, **arguments)

        return rule(**strategies)(remembered)

    return decorate


class Life(RuleBasedStateMachine):
    threading: ClassVar[Literal["backend", "device", "queue"]] = "queue"
    loop_name: ClassVar[str] = "asyncio"
    eager: ClassVar[bool] = False
    strict: ClassVar[bool] = False
    """A caller's object that waits for a garbage collection counts as kept."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.simplefilter("ignore")
        gc.disable()
        gc.freeze()  # what is there already is of no interest, and a collection need not visit it
        self.before = set(threading.enumerate())
        self.loop: asyncio.AbstractEventLoop | None = None
        self.state: Literal["closed", "open", "closing", "left"] = "closed"
        """``left``: the loop ended while the backend was open or being closed."""
        self.calls: list[Call] = []
        self.memories: list[Memory] = []
        self.buffers: list[Any] = []
        self.kernels: dict[str, Kernel] = {}
        self.limbo: list[asyncio.Task[Any]] = []
        self.checks: list[tuple[bytes, bytes, tuple[Call, ...]]] = []
        self.witnesses: list[weakref.ref[Witness]] = []
        self.cycles = False
        self.left: list[weakref.ref[Witness]] = []
        """Those of tasks that were pending when their loop was closed: such a task and what it awaits are a cycle."""
        self.closing: asyncio.Task[None] | None = None
        self.numbers = itertools.count(1)
        self.struck: dict[int, str] = {}
        """Number of every exception that a fault has raised, and its method."""
        self.seen: Counter[int] = Counter()
        """How often each has reached a caller or was reported."""
        self.told = 0
        self.gates = 0
        self.may_hang = False
        self.exact = True
        """The program knows what is live: false once it has freed memory under a view."""
        self.lost: set[str] = set()
        self.history: list[str] = []
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name) / "bytes"
        self.file.write_bytes(bytes(range(256)) * 16)

    @initialize(
        pool_bytes=st.sampled_from([0, 1 << 15]),
        inline=st.sampled_from([0, 0, 512]),
        alignment=st.sampled_from([1, 1, 4]),
        none_token=st.booleans(),
        host_visible=st.booleans(),
        pins=st.booleans(),
        loads=st.booleans(),
        max_pending=st.sampled_from([1024, 2]),
    )
    def configure(self, **options: Any) -> None:
        self.history.append(f"{type(self).__name__}: {options}")
        with self.telling():
            self.begin(**options)

    def begin(
        self,
        pool_bytes: int,
        inline: int,
        alignment: int,
        none_token: bool,
        host_visible: bool,
        pins: bool,
        loads: bool,
        max_pending: int,
    ) -> None:
        self.checking = CheckingDriver(
            devices=DEVICES,
            threading=self.threading,
            alignment_bytes=alignment,
            chunk_bytes=1 << 10,
            host_visible=host_visible,
            pins_memory=pins,
            loads_files=loads,
            kernels=True,
            inline_copy_bytes=inline,
            capacity_bytes=CAPACITY,
            none_token=none_token,
        )
        self.unit = alignment
        self.driver = FaultyDriver(self.checking)
        self.driver.inline_copy_bytes = inline
        self.options = {"pool_bytes": pool_bytes, "max_pending": max_pending, "hang_after": HANG_AFTER}
        self.backend: DriverBackend | None = self.new_backend()
        self.open()

    def new_backend(self) -> DriverBackend:
        # Not a bound method of the machine's: the backend must die with its last user.
        return DriverBackend(self.driver, on_background_error=_reporter(weakref.ref(self)), **self.options)

    def reported(self, error: BaseException) -> None:
        self.told += 1
        self.count(error)

    def count(self, error: BaseException) -> bool:
        numbers = {number for each in causes(error) if (number := getattr(each, "number", None)) is not None}
        self.seen.update(numbers)
        return bool(numbers)

    @contextlib.contextmanager
    def telling(self) -> Generator[None]:
        try:
            yield
        except BaseException as exc:
            exc.add_note("the program: " + "; ".join(self.history))
            raise

    # Driving the loop

    def run(self, coroutine: Awaitable[Any]) -> Any:
        assert self.loop is not None

        results: list[Any] = []

        async def bounded() -> None:
            # Not returned: frames behind those of a failed call would hold it, and with it the calls that it names.
            async with asyncio.timeout(PATIENCE):
                results.append(await coroutine)

        self.loop.run_until_complete(bounded())
        return results.pop()

    def start(
        self,
        name: str,
        make: Callable[[], Awaitable[Any]],
        succeeded: Callable[[Any], None] = lambda _: None,
        *memories: Memory,
        allowed: tuple[type[BaseException], ...] = (),
    ) -> Call:
        """Submit a call: its first step is done when this returns."""

        async def call(ready: list[weakref.ref[Witness]]) -> Any:
            witness = Witness()
            REQUEST.set(witness)
            ready.append(weakref.ref(witness))
            return await make()

        async def submit(ready: list[weakref.ref[Witness]]) -> None:
            # In no local variable: the frames of a failure may link back to this one, which would be a cycle.
            started.append(asyncio.create_task(call(ready)))
            await asyncio.sleep(0)

        started: list[asyncio.Task[Any]] = []
        ready: list[weakref.ref[Witness]] = []
        self.run(submit(ready))
        made = Call(name, started.pop(), ready[0], succeeded, allowed, memories)
        self.witnesses.append(made.witness)
        self.calls.append(made)
        return made

    def collect(self) -> None:
        for call in list(self.calls):
            task = call.task
            if task is None or not task.done():
                continue
            call.task = None
            self.calls.remove(call)
            if task.cancelled():
                assert call.cancelled, f"{call} was cancelled by nobody"
                call.outcome = "cancelled"
            elif (error := task.exception()) is not None:
                call.outcome = "failed"
                try:
                    self.judge(call, error)
                finally:
                    del error
            else:
                call.outcome = "ok"
                call.succeeded(task.result())
            del task
        waiting = []
        for got, expected, writes in self.checks:
            if any(each.outcome is None for each in writes):
                waiting.append((got, expected, writes))
            elif all(each.outcome == "ok" for each in writes):
                assert got == expected, f"a copy returned {got!r:.60}, not {expected!r:.60}"
        self.checks = waiting
        if self.closing is not None and self.closing.done():
            assert self.closing.cancelled() or self.closing.exception() is None
            if not self.closing.cancelled():
                self.closed()
            self.closing = None

    def judge(self, call: Call, error: BaseException) -> None:
        """An error is one of ours and has a reason that the program knows."""
        injected = self.count(error)
        assert isinstance(error, GPUError), f"{call} raised {type(error).__name__}"
        assert str(error)
        if injected or isinstance(error, call.allowed):
            return
        if isinstance(error, DeviceUnresponsive):
            assert self.may_hang, f"{call}: nothing hangs: {error}"
        elif isinstance(error, DeviceLost):
            assert self.lost, f"{call}: nothing is lost: {error}"
        elif isinstance(error, BackendClosed | InvalidHandle):
            assert self.state != "open" or any(memory.dead for memory in call.memories), f"{call}: {error}"
        elif isinstance(error, OutOfMemory):
            assert call.name == "allocate", f"{call}: {error}"
        else:
            raise AssertionError(f"{call} raised {error!r}") from error

    def closed(self) -> None:
        self.state = "closed"
        self.forget()

    def forget(self) -> None:
        """The handles of an opening are dead; arrays over its memory may live on."""
        for memory in self.memories:
            memory.dead = True
        self.memories = [memory for memory in self.memories if memory.views]
        self.kernels.clear()

    @property
    def leftovers(self) -> bool:
        """Something of an opening may live on after its end, also in tasks that were pending when their loop ended."""
        return bool(self.gates or self.buffers or self.limbo or any(memory.views for memory in self.memories))

    def live(self, which: int) -> Memory | None:
        live = [memory for memory in self.memories if not memory.dead]
        return live[which % len(live)] if live else None

    def quiet(self) -> None:
        """Wait until every call is over. Nothing may be held."""
        assert not self.gates
        self.collect()
        pending = [call.task for call in self.calls if call.task is not None]
        if self.closing is not None and not self.leftovers:
            pending.append(self.closing)
        if pending:
            self.run(asyncio.wait(pending))
        del pending
        self.collect()

    def new_loop(self) -> None:
        self.loop = loop_factories()[self.loop_name]()
        if self.eager:
            self.loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]

    # Opening and closing

    def open(self) -> None:
        if self.loop is None:
            self.new_loop()
        backend = self.backend
        assert backend is not None
        may_refuse = self.leftovers
        try:
            self.run(backend.initialize())
        except BackendUnavailable as error:
            injected = self.count(error)
            if not injected and not (may_refuse and error.reason == ReasonCode.TIMEOUT):
                raise AssertionError(f"initialize raised {error!r}") from error
            if self.state == "left":
                self.forget()
                self.state = "closed"
            return
        except GPUError as error:
            raise AssertionError(f"initialize raised {error!r}") from error
        self.forget()
        self.lost.clear()
        self.exact = True
        self.may_hang = self.gates > 0
        self.state = "open"
        assert self.checking.is_open
        for device in backend.devices:
            assert backend.ledger.usage(device.device_id).current_count == 0
        for which in range(DEVICES):
            self.allocate(which=which, size=100 + 1500 * which)

    @step(elsewhere=st.booleans())
    @when(lambda self: self.state != "open" and self.closing is None)
    def initialize_again(self, elsewhere: bool) -> None:
        if self.state == "closing":
            self.shutdown_again()
            return
        if elsewhere and self.loop is not None and not self.calls and self.state == "closed":
            self.loop.close()
            self.loop = None
        self.open()

    @step(timeout=st.sampled_from([10, None]), background=st.booleans(), cancel=st.booleans())
    @when(lambda self: self.state == "open")
    def shutdown(self, timeout: float | None, background: bool, cancel: bool) -> None:
        assert self.loop is not None
        assert self.backend is not None
        if self.leftovers and not background:
            timeout = 0.01
        self.state = "closing"
        backend = self.backend

        async def begin() -> asyncio.Task[None]:
            task = asyncio.create_task(backend.shutdown(timeout=timeout))
            await turns(2)
            if cancel:
                task.cancel()
                await turns(1)
            return task

        self.closing = self.run(begin())
        if not background:
            self.run(asyncio.wait({self.closing}))
            if cancel:
                self.closing = self.run(begin_again(backend, timeout))
                self.run(asyncio.wait({self.closing}))
        self.collect()

    def shutdown_again(self) -> None:
        assert self.backend is not None
        self.closing = self.run(begin_again(self.backend, 0.01 if self.leftovers else 10))
        self.run(asyncio.wait({self.closing}))
        self.collect()

    @step(cancel_all=st.booleans())
    @when(lambda self: self.loop is not None)
    def end_loop(self, cancel_all: bool) -> None:
        """As at the end of ``asyncio.run``, or bluntly."""
        loop = self.loop
        assert loop is not None
        self.cycles = True
        if cancel_all:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            for call in self.calls:
                call.cancelled = True
            if left:
                self.run(asyncio.wait(left))
            del left
            self.collect()
            self.run(loop.shutdown_asyncgens())
        loop.close()
        self.loop = None
        if self.closing is not None:
            self.limbo.append(self.closing)
            self.closing = None
        for call in self.calls:
            assert call.task is not None
            self.limbo.append(call.task)
            call.task, call.outcome = None, "left"
            self.witnesses.remove(call.witness)
            self.left.append(call.witness)
        self.calls.clear()
        self.checks.clear()
        if self.state != "closed":
            self.state = "left"

    def let_go_of_limbo(self) -> None:
        for task in self.limbo:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        task = None
        if self.limbo:
            self.limbo.clear()
            gc.collect()

    @step()
    @when(lambda self: self.state == "open" and not self.gates)
    def drop_backend(self) -> None:
        """Nobody shuts it down."""
        self.quiet()
        self.let_go_of_arrays()  # also of views that came while everything settled
        for buffer in self.buffers:  # who has an open one keeps its memory, and the driver open
            buffer.close()
        self.buffers.clear()
        assert self.backend is not None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.let_go_of_limbo()
            name, self.backend, self.cycles = self.backend.name, None, True
            gc.collect()
            self.wait_for(lambda: not self.threads() and not self.checking.is_open, "a dropped backend ended")
        told = [each for each in caught if each.category is ResourceWarning and name in str(each.message)]
        assert len(told) == 1, [str(each.message) for each in caught]
        self.forget()
        self.state = "closed"
        self.backend = self.new_backend()

    # Memory and copies

    @step(which=st.integers(0, DEVICES - 1), size=SIZES)
    @when(lambda self: self.state in ("open", "closing") and self.loop is not None)
    def allocate(self, which: int, size: int) -> None:
        backend = self.backend
        assert backend is not None
        size = -(-size // self.unit) * self.unit

        def made(handle: MemoryHandle) -> None:
            memory = Memory(handle, bytearray(size))
            memory.dead = self.state == "closed" or handle.generation != backend.generation
            self.memories.append(memory)

        self.start("allocate", lambda: backend.allocate(f"checking:{which}", size), made)

    @step(which=st.integers(0, 99))
    @when(lambda self: self.loop is not None and self.live(0) is not None)
    def deallocate(self, which: int) -> None:
        backend, memory = self.backend, self.live(which)
        assert memory is not None
        assert backend is not None
        viewed = bool(memory.views) or any(each.name == "view" for each in self.calls)
        memory.dead = not viewed or self.state != "open"
        if viewed:
            memory.dead, self.exact = True, False  # nobody uses it any more, whether it was freed or not

            def freed(_: object) -> None: ...

            self.start("deallocate", lambda: backend.deallocate(memory.handle), freed, memory, allowed=(HandleInUse,))
        else:
            self.start("deallocate", lambda: backend.deallocate(memory.handle), lambda _: None, memory)

    @step(which=st.integers(0, 99), offset=OFFSETS, size=SIZES, fill=st.integers(0, 255))
    @when(lambda self: self.loop is not None and self.live(0) is not None)
    def write(self, which: int, offset: int, size: int, fill: int) -> None:
        backend, memory = self.backend, self.live(which)
        assert memory is not None
        assert backend is not None
        offset, size = self.range(memory, offset, size)
        content = bytearray([fill]) * size
        handle = memory.handle
        call = self.start("copy_to_device", lambda: backend.copy_to_device(content, handle, offset), _nothing, memory)
        memory.write(call, offset, content)

    @step(which=st.integers(0, 99), start=st.integers(0, 2000))
    @when(lambda self: self.loop is not None and self.live(0) is not None)
    def load(self, which: int, start: int) -> None:
        backend, memory = self.backend, self.live(which)
        assert memory is not None
        assert backend is not None
        size = min(len(memory.data), 2048)
        size -= size % self.unit
        handle, file = memory.handle, self.file
        call = self.start(
            "load_file", lambda: backend.load_file(file, handle, file_offset=start, size_bytes=size), _nothing, memory
        )
        memory.write(call, 0, (bytes(range(256)) * 16)[start : start + size])

    @step(
        which=st.integers(0, 99),
        offset=OFFSETS,
        size=SIZES,
        into=st.sampled_from(["new", "bytearray", "buffer"]),
    )
    @when(lambda self: self.loop is not None and self.live(0) is not None)
    def read(self, which: int, offset: int, size: int, into: str) -> None:
        backend, memory = self.backend, self.live(which)
        assert memory is not None
        assert backend is not None
        offset, size = self.range(memory, offset, size)
        handle = memory.handle
        known, expected, writes = memory.known, bytes(memory.data[offset : offset + size]), memory.writes
        buffer = next((each for each in self.buffers if not each.closed), None)
        if into == "buffer" and buffer is not None and not any(each.name == "copy_into" for each in self.calls):
            size = min(size, buffer.nbytes - buffer.nbytes % self.unit)
            expected, target = expected[:size], buffer.memory[:size]
        else:
            target = memoryview(bytearray(size))

        def check(got: Any) -> None:
            content = got if isinstance(got, bytes) else bytes(target)
            if known:
                self.checks.append((content, expected, writes))

        if into == "new":
            self.start("copy_from_device", lambda: backend.copy_from_device(handle, offset, size), check, memory)
        else:
            self.start("copy_into", lambda: backend.copy_into(handle, target, offset), check, memory)

    @step(
        first=st.integers(0, 99),
        second=st.integers(0, 99),
        size=SIZES,
        src_offset=OFFSETS,
        dst_offset=OFFSETS,
    )
    @when(lambda self: self.loop is not None and self.live(0) is not None)
    def copy(self, first: int, second: int, size: int, src_offset: int, dst_offset: int) -> None:
        backend, src, dst = self.backend, self.live(first), self.live(second)
        assert backend is not None
        assert src is not None
        assert dst is not None
        if src is dst:
            return
        src_offset, size = self.range(src, src_offset, size)
        dst_offset, size = self.range(dst, dst_offset, size)
        size = min(size, len(src.data) - src_offset)
        content, known, writes = bytes(src.data[src_offset : src_offset + size]), src.known, src.writes
        handles = src.handle, dst.handle
        call = self.start(
            "copy_device_to_device",
            lambda: backend.copy_device_to_device(
                *handles, size, src_offset_bytes=src_offset, dst_offset_bytes=dst_offset
            ),
            _nothing,
            src,
            dst,
        )
        dst.write(call, dst_offset, content, known=known)
        dst.writes = (*dst.writes, *writes)

    @step(which=st.integers(0, 99), value=st.integers(0, 255))
    @when(lambda self: self.loop is not None and self.live(0) is not None)
    def launch(self, which: int, value: int) -> None:
        backend, memory = self.backend, self.live(which)
        assert memory is not None
        assert backend is not None
        handle, device_id = memory.handle, memory.handle.device_id
        kernel = self.kernels.get(device_id)
        if kernel is None:
            self.start(
                "compile",
                lambda: backend.compile(device_id, "fill", "fill"),
                lambda made: self.kernels.__setitem__(device_id, made),
            )
            return
        call = self.start("launch", lambda: backend.launch(kernel, 1, 1, [handle, np.uint8(value)]), _nothing, memory)
        memory.write(call, 0, bytes([value]) * len(memory.data))

    def range(self, memory: Memory, offset: int, size: int) -> tuple[int, int]:
        offset = offset % len(memory.data)
        offset -= offset % self.unit
        size = min(size, len(memory.data) - offset)
        return offset, max(self.unit, size - size % self.unit)

    @step(which=st.integers(0, 99), close=st.booleans())
    @when(lambda self: self.loop is not None and self.checking.capabilities.host_visible)
    def view(self, which: int, close: bool) -> None:
        backend, memory = self.backend, self.live(which)
        if memory is None or self.state != "open":
            return
        assert backend is not None
        handle = memory.handle

        def viewed(view: Any) -> None:
            memory.views.append(view.numpy())
            if memory not in self.memories:
                self.memories.append(memory)
            if close:
                view.close()
            else:
                memory.views.append(view)

        self.start("view", lambda: backend.view(handle), viewed, memory)

    def let_go_of_arrays(self) -> None:
        for memory in self.memories:
            for view in memory.views:
                if hasattr(view, "close"):
                    view.close()
            memory.views.clear()
            view = None
        self.memories = [memory for memory in self.memories if not memory.dead]

    @step(which=st.integers(0, DEVICES - 1), size=st.integers(64, 5000))
    @when(lambda self: self.state == "open" and self.loop is not None and len(self.buffers) < 2)
    def host_buffer(self, which: int, size: int) -> None:
        backend = self.backend
        assert backend is not None
        self.start("host_buffer", lambda: backend.host_buffer(f"checking:{which}", size), self.buffers.append)

    @step(what=st.sampled_from(["limbo", "arrays", "buffer", "closed buffer"]))
    def drop(self, what: str) -> None:
        """Let go of what the program holds."""
        if what == "limbo":
            self.let_go_of_limbo()
        elif what == "arrays":
            self.let_go_of_arrays()
        elif self.buffers:
            buffer = self.buffers.pop()
            if what == "closed buffer":
                buffer.close()

    @step(which=st.integers(0, DEVICES - 1), what=st.sampled_from(["trim", "synchronize", "get_device_temperature"]))
    @when(lambda self: self.state == "open" and self.loop is not None)
    def ask(self, which: int, what: str) -> None:
        backend = self.backend
        assert backend is not None
        self.start(what, lambda: getattr(backend, what)(f"checking:{which}"))

    # What goes wrong

    @step(which=st.integers(0, 99))
    @when(lambda self: bool(self.calls) and self.loop is not None)
    def cancel(self, which: int) -> None:
        call = self.calls[which % len(self.calls)]
        assert call.task is not None
        call.task.cancel()
        call.cancelled = True

    @step(method=st.sampled_from(HELD), after=st.booleans())
    @when(lambda self: self.gates < 2 and self.closing is None)
    def hold(self, method: Any, after: bool) -> None:
        if self.driver.inline_copy_bytes and method in ("write", "read"):
            return  # the loop itself would wait
        self.driver.inject(Fault(method, first=1, gate=threading.Event(), after=after and method in NOTHING_BACK))
        self.gates += 1
        self.may_hang = True

    @step()
    @when(lambda self: self.gates > 0)
    def release(self) -> None:
        self.driver.clear()
        self.gates = 0

    @step(method=st.sampled_from(FAILING), kind=st.sampled_from(list(EXCEPTIONS)), after=st.booleans())
    def fail(self, method: Any, kind: str, after: bool) -> None:
        def make() -> BaseException:
            exc = EXCEPTIONS[kind]()
            number = next(self.numbers)
            exc.number = number  # type: ignore[attr-defined]
            self.struck[number] = method if kind != "memory_error" else f"{method} of memory"
            return exc

        after = method in AFTERWARDS or (after and method in NOTHING_BACK)
        self.driver.inject(Fault(method, first=1, raises=make, after=after))

    @step()
    @when(lambda self: self.state == "open" and self.gates > 0 and bool(self.calls) and self.loop is not None)
    def hang(self) -> None:
        """Long enough for the hang clock."""
        pending = [call.task for call in self.calls if call.task is not None]
        self.run(asyncio.wait(pending, timeout=2 * HANG_AFTER))
        del pending
        self.collect()

    @step(which=st.integers(0, DEVICES - 1))
    @when(lambda self: self.state == "open" and not self.lost)
    def lose(self, which: int) -> None:
        self.checking.lose(which)
        self.lost.add(f"checking:{which}")

    @step(count=st.integers(1, 8))
    @when(lambda self: self.loop is not None)
    def let_run(self, count: int) -> None:
        self.run(turns(count))
        self.collect()

    @step()
    @when(lambda self: self.loop is not None and self.gates == 0)
    def settle(self) -> None:
        """Nothing hangs: every call ends, the books are right, and nothing of a caller's is left."""
        self.quiet()
        backend = self.backend
        if self.state != "open" or backend is None:
            return
        if self.may_hang:
            self.wait_for(
                lambda: all(device.state.value in ("healthy", "lost") for device in backend.devices),
                "devices came back",
            )
            self.may_hang = False
        for device in backend.devices:
            name = device.device_id
            if name in self.lost:
                continue
            self.wait_for(lambda name=name: backend.ledger.usage(name).reserved_bytes == 0, "nothing is reserved")
            if self.exact:
                live = [each for each in self.memories if not each.dead and each.handle.device_id == name]
                expected = len(live), sum(map(len, live))
                self.wait_for(
                    lambda name=name, expected=expected: _books(backend, name) == expected, "the ledger is right"
                )
        for memory in self.memories:
            array = next((each for each in memory.views if isinstance(each, np.ndarray)), None)
            if array is None or memory.handle.device_id in self.lost or self.limbo:
                continue
            if memory.known and all(each.outcome == "ok" for each in memory.writes):
                assert bytes(array) == bytes(memory.data), "an array shows something else than was copied"
            del array

    # The end

    @invariant()
    def nothing_was_broken(self) -> None:
        if hasattr(self, "checking"):
            with self.telling():
                self.collect()
                assert self.checking.violations == [], self.checking.violations

    def threads(self) -> list[str]:
        new = set(threading.enumerate()) - self.before
        return [thread.name for thread in new if thread.name.startswith("gpurt")]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                openings = [each for each in gc.get_objects() if isinstance(each, Opening) and not each.closed]
                raise AssertionError(f"not within {PATIENCE} s: {what}; {openings}, threads {self.threads()}")
            if self.loop is None:
                time.sleep(0.0005)
            else:
                self.run(asyncio.sleep(0.0005))

    def teardown(self) -> None:
        try:
            if hasattr(self, "checking"):
                with self.telling():
                    self.finish()
        finally:
            if hasattr(self, "checking"):
                self.driver.clear()
            gc.unfreeze()
            gc.enable()
            self.warnings.__exit__(None, None, None)
            self.folder.cleanup()

    def finish(self) -> None:
        self.driver.clear()
        self.gates = 0
        self.let_go_of_arrays()
        for buffer in self.buffers:
            buffer.close()
        self.buffers.clear()
        self.let_go_of_limbo()
        if self.loop is None:
            self.new_loop()
        assert self.loop is not None
        self.quiet()
        self.let_go_of_arrays()  # views that came while everything settled
        for buffer in self.buffers:
            buffer.close()
        self.buffers.clear()
        backend = self.backend
        assert backend is not None
        self.run(backend.shutdown())
        self.collect()
        del backend
        self.wait_for(
            lambda: not self.checking.is_open and not self.threads(),
            f"the library was closed, and {self.threads()} ended",
        )
        checking = self.checking
        assert checking.violations == [], checking.violations
        assert checking.opens == checking.closes, f"{checking.opens} opens, {checking.closes} closes"
        assert (checking.live, checking.host_live) == (0, 0), f"{checking.live}, {checking.host_live} blocks are live"
        self.run(turns(3))
        assert asyncio.all_tasks(self.loop) == set()
        self.loop.close()
        self.loop = None
        self.memories.clear()
        witnesses = (*self.witnesses, *self.left)
        deadline = time.monotonic() + 1
        # Only the ends of loops and of backends that nobody ended need a collection, and an eager task that fails in
        # its first step: asyncio's own frames, which made it, hold it then.
        while (kept := sum(witness() is not None for witness in witnesses)) and time.monotonic() < deadline:
            if self.cycles or self.eager or not self.strict:
                gc.collect()
            time.sleep(0.001)
        assert not kept, f"objects of {kept} callers of {len(witnesses)} are alive"
        for number, method in self.struck.items():
            # Out of memory is tried again, and readings for the report of it are a help, no more.
            least = 0 if method.endswith("of memory") or method in ("telemetry", "sync") else 1
            assert least <= self.seen[number] <= 1, f"a failure of {method} was reported {self.seen[number]} times"


def _books(backend: DriverBackend, device_id: str) -> tuple[int, int]:
    usage = backend.ledger.usage(device_id)
    return usage.current_count, usage.current_bytes


async def begin_again(backend: DriverBackend, timeout: float | None) -> asyncio.Task[None]:
    task = asyncio.create_task(backend.shutdown(timeout=timeout))
    await turns(2)
    return task


def _reporter(machine: weakref.ref[Life]) -> Callable[[BaseException], None]:
    def report(error: BaseException) -> None:
        if (life := machine()) is not None:
            life.reported(error)

    return report


def _nothing(_: object) -> None: ...


def live(machine: type[Life], steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(1, steps // STEPS_PER_PROGRAM),
            stateful_step_count=STEPS_PER_PROGRAM,
            deadline=None,
            database=None,
            derandomize=True,
            print_blob=False,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


def variant(mode: str, loop_name: str, eager: bool, *, strict: bool = False) -> type[Life]:
    return type(
        f"Life_{mode}_{loop_name}{'_eager' * eager}",
        (Life,),
        {"threading": mode, "loop_name": loop_name, "eager": eager, "strict": strict},
    )


VARIANTS = [
    (mode, loop_name, eager)
    for mode in ("backend", "device", "queue")
    for loop_name in loop_factories()
    # uvloop passes the factory an argument that Python 3.12 and 3.13 do not know.
    for eager in ((False, True) if sys.version_info >= (3, 12) and loop_name == "asyncio" else (False,))
]


@pytest.mark.parametrize("mode", ["backend", "device", "queue"])
def test_any_life_leaves_nothing(mode: str) -> None:
    live(variant(mode, "asyncio", eager=False), 4 * STEPS_PER_PROGRAM)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "loop_name", "eager"), VARIANTS)
def test_many_lives_leave_nothing(mode: str, loop_name: str, eager: bool) -> None:
    live(variant(mode, loop_name, eager, strict=True), STEPS // len(VARIANTS))
