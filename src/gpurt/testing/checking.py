"""CheckingDriver: a driver over host memory that writes down every breach of the promises made to drivers.

::

    driver = FaultyDriver(checking := CheckingDriver(threading="device"))
    backend = DriverBackend(driver)
    ...
    assert checking.violations == []
    assert checking.live == checking.host_live == 0

The promises are those of :mod:`gpurt.driver`. A breach is recorded as a sentence in ``violations`` and never raises, so
that the code under test goes on as it would with a library that does not look. Freed memory is filled with
:data:`POISON` and kept as long as somebody can still reach it: a write to it is seen, and a read gives poison instead
of ending the process. To hold, delay or fail calls, put a :class:`gpurt.testing.FaultyDriver` around it.
"""

from __future__ import annotations

import ctypes
import os
import threading as threads
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Literal

import numpy as np

from gpurt.driver import Driver
from gpurt.errors import CompileFailed, DeviceLost, GPUError
from gpurt.types import Capabilities, DeviceKind, GPUDevice, Telemetry

POISON: Final = 0xDD
"""Every byte of freed memory."""

LANGUAGE: Final = "checking"
"""The language of its kernels: ``"fill"``, whose arguments are one allocation and one ``numpy.uint8``."""

MOST_VIOLATIONS: Final = 100
"""Later ones are dropped: the first tells what went wrong."""


class CheckedDeviceLoss(RuntimeError):
    """What every call on a lost device raises; means :class:`gpurt.errors.DeviceLost`."""


class _Memory:
    """One block of device or page-locked memory. Guarded by the driver's lock."""

    __slots__ = ("busy", "data", "index", "live", "number", "opening")

    def __init__(self, number: int, index: int | None, opening: int, nbytes: int) -> None:
        self.number = number
        self.index = index
        self.opening = opening
        self.data = bytearray(nbytes)
        self.live = True
        self.busy: str | None = None
        """The call that works on it."""

    def __repr__(self) -> str:
        where = "page-locked memory" if self.index is None else f"memory of device {self.index}"
        return f"{where} no. {self.number} ({len(self.data):,} B)"


class CheckingDriver(Driver):
    """Devices in byte arrays, and a record of everything that a backend must not do to a driver.

    Recorded are: a call while the library is closed, ``open`` while it is open and ``close`` while it is not; a call on
    a thread that is not attached in this opening, or on a second thread where ``threading`` allows one; ``attach``
    twice and ``detach`` on another thread; ``close`` with attached threads, live memory or live page-locked memory; a
    second ``free`` or ``host_free``; freeing memory into which somebody still looks; the use of freed memory, of
    memory of another device or of an earlier opening; two calls at once on the same memory; ranges outside of memory,
    over ``chunk_bytes`` or not aligned; a write to freed memory by somebody who kept a view.

    Args:
        devices: number of devices, ``checking:0`` and so on.
        threading, alignment_bytes, chunk_bytes, pool_bytes, host_visible, cuda_pointers, pins_memory, loads_files,
            max_allocation_bytes: see :class:`gpurt.types.Capabilities`.
        inline_copy_bytes: see :class:`gpurt.driver.Driver`.
        capacity_bytes: memory of each device.
        none_token: let the first live allocation of each device be named by the token None.
    """

    name: ClassVar[str] = "checking"

    def __init__(
        self,
        *,
        devices: int = 2,
        threading: Literal["backend", "device", "queue"] = "queue",
        alignment_bytes: int = 1,
        chunk_bytes: int = 1 << 16,
        pool_bytes: int = 0,
        host_visible: bool = False,
        cuda_pointers: bool = False,
        pins_memory: bool = False,
        loads_files: bool = False,
        kernels: bool = False,
        inline_copy_bytes: int = 0,
        capacity_bytes: int = 1 << 30,
        max_allocation_bytes: int | None = None,
        none_token: bool = False,
    ) -> None:
        self.capabilities = Capabilities(
            threading=threading,
            p2p=True,
            host_visible=host_visible,
            cuda_pointers=cuda_pointers,
            pins_memory=pins_memory,
            loads_files=loads_files,
            kernels=frozenset({LANGUAGE} if kernels else ()),
            pool_bytes=pool_bytes,
            alignment_bytes=alignment_bytes,
            chunk_bytes=chunk_bytes,
            max_allocation_bytes=max_allocation_bytes,
            telemetry=frozenset({"memory_total_bytes", "memory_free_bytes", "temperature_c"}),
        )
        self.inline_copy_bytes = inline_copy_bytes
        self.capacity_bytes = capacity_bytes
        self.opens = 0
        """Calls of ``open`` that have returned."""
        self.closes = 0
        """Calls of ``close`` that have returned."""
        self._none_token = none_token
        self._devices = devices
        self._lock = threads.RLock()
        self._violations: list[str] = []
        self._number = 0
        self._is_open = False
        self._live: dict[int, _Memory] = {}
        self._host_live: dict[int, _Memory] = {}
        self._none: dict[int, _Memory] = {}
        self._watched: list[_Memory] = []
        """Freed while somebody looked into it."""
        self._lost: set[int] = set()
        self._owners: dict[object, threads.Thread] = {}
        self._attached: dict[tuple[threads.Thread, int], int] = {}
        """Thread and device to the opening in which they were attached."""
        self._inside: dict[int, str] = {}
        """Calls between their entry and their return, by a number of their own."""

    # What a test asks and does

    @property
    def violations(self) -> list[str]:
        """Every breach so far, in order, at most :data:`MOST_VIOLATIONS`."""
        with self._lock:
            written = [
                f"{memory!r} was written to after it was freed"
                for memory in self._watched
                if memory.data.count(POISON) != len(memory.data)
            ]
            return [*self._violations, *written]

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def live(self) -> int:
        """Allocations that were not freed and whose device is not lost."""
        with self._lock:
            return len(self._live)

    @property
    def live_bytes(self) -> int:
        with self._lock:
            return sum(len(memory.data) for memory in self._live.values())

    @property
    def host_live(self) -> int:
        """Blocks of page-locked memory that were not given back."""
        with self._lock:
            return len(self._host_live)

    def lose(self, index: int) -> None:
        """Take a device away, and its memory with it, until the next ``open``."""
        with self._lock:
            self._lost.add(index)
            for number, memory in list(self._live.items()):
                if memory.index == index:
                    del self._live[number]
            self._none.pop(index, None)

    # Driver

    def open(self) -> Sequence[GPUDevice]:
        with self._lock:
            if self._is_open:
                self._violate("open while the library is open")
            if self._inside:
                self._violate(f"open while {', '.join(self._inside.values())} has not returned")
            self._is_open = True
            self.opens += 1
            self._lost.clear()
            self._owners.clear()
            self._check_thread("open", None)
        return [self._record(index) for index in range(self._devices)]

    def attach(self, index: int) -> None:
        key = threads.current_thread(), index
        with self._lock:
            self._check_open(f"attach({index})")
            if self._attached.get(key) == self.opens:
                self._violate(f"attach({index}) twice on {key[0].name}")
            self._check_device(index)
            self._attached[key] = self.opens

    def detach(self, index: int) -> None:
        key = threads.current_thread(), index
        with self._lock:
            opening = self._attached.pop(key, None)
            if opening is None:
                self._violate(f"detach({index}) on {key[0].name}, which is not attached")
            elif not self._is_open or opening != self.opens:
                self._violate(f"detach({index}) after the library was closed")

    def alloc(self, index: int, nbytes: int) -> Any:
        with self._call("alloc", index):
            if nbytes <= 0 or nbytes % self.capabilities.alignment_bytes:
                self._note(f"alloc({index}) of {nbytes} bytes")
            with self._lock:
                self._check_device(index)
                used = sum(len(memory.data) for memory in self._live.values() if memory.index == index)
                if used + nbytes > self.capacity_bytes:
                    raise MemoryError(f"{nbytes} bytes asked for, {self.capacity_bytes - used} free")
                memory = self._make(index, nbytes)
                self._live[memory.number] = memory
                if self._none_token and index not in self._none:
                    self._none[index] = memory
                    return None
            return memory

    def free(self, index: int, mem: Any) -> None:
        memory = self._resolve("free", index, mem)
        if memory is None:
            return
        with self._call("free", index, memory):
            with self._lock:
                self._check_device(index)
                if not memory.live:
                    return
                self._live.pop(memory.number, None)
                if mem is None:
                    del self._none[index]
            self._end(memory)

    def write(self, index: int, mem: Any, offset: int, src: memoryview) -> None:
        memory = self._resolve("write", index, mem)
        if memory is None:
            return
        with self._call("write", index, memory, inline_bytes=len(src)):
            self._check_loss(index)
            if self._fits("write", memory, offset, src):
                memoryview(memory.data)[offset : offset + len(src)] = src

    def read(self, index: int, mem: Any, offset: int, dst: memoryview) -> None:
        memory = self._resolve("read", index, mem)
        if memory is None:
            return
        with self._call("read", index, memory, inline_bytes=len(dst)):
            self._check_loss(index)
            if dst.readonly:
                self._note("read into a buffer that is read-only")
            elif self._fits("read", memory, offset, dst):
                dst[:] = memoryview(memory.data)[offset : offset + len(dst)]

    def copy(
        self, src_index: int, src: Any, src_offset: int, dst_index: int, dst: Any, dst_offset: int, nbytes: int
    ) -> None:
        source, target = self._resolve("copy", src_index, src), self._resolve("copy", dst_index, dst)
        if source is None or target is None:
            return
        memories = (source,) if source is target else (source, target)
        with self._call("copy", src_index, *memories):
            self._check_loss(src_index)
            self._check_loss(dst_index)
            inside = min(src_offset, dst_offset, nbytes) >= 0
            inside = inside and src_offset + nbytes <= len(source.data) and dst_offset + nbytes <= len(target.data)
            if not inside or (source is target and abs(src_offset - dst_offset) < nbytes):
                self._note(f"copy of {nbytes} bytes from {src_offset} of {source!r} to {dst_offset} of {target!r}")
                return
            content = memoryview(source.data)[src_offset : src_offset + nbytes]
            memoryview(target.data)[dst_offset : dst_offset + nbytes] = content

    def sync(self, index: int) -> None:
        with self._call("sync", index):
            self._check_loss(index)

    def telemetry(self, index: int) -> Telemetry:
        with self._call("telemetry", index):
            self._check_loss(index)
            with self._lock:
                used = sum(len(memory.data) for memory in self._live.values() if memory.index == index)
            return Telemetry(
                memory_total_bytes=self.capacity_bytes,
                memory_used_bytes=used,
                memory_free_bytes=self.capacity_bytes - used,
                temperature_c=40.0,
            )

    def close(self) -> None:
        with self._lock:
            self._check_open("close")
            self._check_thread("close", None)
            if self._inside:
                self._violate(f"close while {', '.join(self._inside.values())} has not returned")
            if self._live:
                self._violate(f"close with live memory: {list(self._live.values())[:5]}")
            if self._host_live:
                self._violate(f"close with live page-locked memory: {list(self._host_live.values())[:5]}")
            attached = [thread.name for (thread, _), opening in self._attached.items() if opening == self.opens]
            if attached:
                self._violate(f"close while {', '.join(attached)} is attached")
            self._is_open = False
            self.closes += 1

    def classify(self, exc: Exception) -> type[GPUError] | None:
        return DeviceLost if isinstance(exc, CheckedDeviceLoss) else super().classify(exc)

    def trim(self, index: int) -> int:
        with self._call("trim", index):
            self._check_loss(index)
            return 0

    def host_view(self, index: int, mem: Any) -> memoryview:
        memory = self._resolve("host_view", index, mem)
        if memory is None:
            return memoryview(bytearray())
        with self._call("host_view", index, memory):
            self._check_loss(index)
            return memoryview(memory.data)

    def pointer(self, index: int, mem: Any) -> int:
        memory = self._resolve("pointer", index, mem)
        if memory is None:
            return 0
        with self._call("pointer", index, memory):
            self._check_loss(index)
            return ctypes.addressof(ctypes.c_char.from_buffer(memory.data))

    def load(self, index: int, mem: Any, offset: int, fd: int, file_offset: int, nbytes: int) -> int:
        memory = self._resolve("load", index, mem)
        if memory is None:
            return 0
        with self._call("load", index, memory):
            self._check_loss(index)
            content = os.pread(fd, nbytes, file_offset)
            if self._fits("load", memory, offset, memoryview(content)):
                memoryview(memory.data)[offset : offset + len(content)] = content
            return len(content)

    def compile(self, index: int, source: str, name: str) -> Any:
        with self._call("compile", index):
            self._check_loss(index)
            if not self.capabilities.kernels:
                return super().compile(index, source, name)
            if source != "fill":
                raise CompileFailed(f"there is no kernel {name} in this source", log=source)
            return index, self.opens

    def launch(
        self, index: int, kernel: Any, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Any]
    ) -> None:
        numbers: list[Any] = [each for each in args if isinstance(each, np.generic)]
        value = int(numbers[0]) if numbers else 0
        memories = [self._resolve("launch", index, each) for each in args if not isinstance(each, np.generic)]
        with self._call("launch", index, *(memory for memory in dict.fromkeys(memories) if memory is not None)):
            self._check_loss(index)
            if kernel != (index, self.opens):
                self._note(f"launch({index}) of a kernel of another device or opening")
            for memory in memories:
                if memory is not None and memory.live:
                    memoryview(memory.data)[:] = bytes([value]) * len(memory.data)

    def host_alloc(self, nbytes: int) -> Any:
        with self._call("host_alloc", None), self._lock:
            memory = self._make(None, nbytes)
            self._host_live[memory.number] = memory
            return memory

    def host_memory(self, block: Any) -> memoryview:
        with self._lock:
            self._check_open("host_memory")
            if not block.live:
                self._violate(f"host_memory of {block!r}, which was given back")
        return memoryview(block.data)

    def host_free(self, block: Any) -> None:
        with self._call("host_free", None, block):
            with self._lock:
                if not block.live:
                    return
                del self._host_live[block.number]
            self._end(block)

    # Inside

    def _record(self, index: int) -> GPUDevice:
        return GPUDevice(
            device_id=f"{self.name}:{index}",
            name="Checking",
            vendor="gpurt",
            backend=self.name,
            compute_capability=None,
            memory_bytes=self.capacity_bytes,
            memory_available=self.capacity_bytes,
            compute_units=None,
            tensor_core_count=0,
            max_threads_per_block=1024,
            clock_rate_mhz=None,
            bandwidth_gbps=None,
            support_level="full",
            driver_version=None,
            backend_name="bytearray",
            kind=DeviceKind.CPU,
            simulated=True,
        )

    def _make(self, index: int | None, nbytes: int) -> _Memory:
        """Under the lock."""
        self._number += 1
        memory = _Memory(self._number, index, self.opens, nbytes)
        memory.data[:] = bytes([POISON]) * nbytes
        return memory

    def _end(self, memory: _Memory) -> None:
        """Poison a block, and keep it if somebody still looks into it."""
        with self._lock:
            memory.live = False
            memoryview(memory.data)[:] = bytes([POISON]) * len(memory.data)
            if _is_exported(memory.data):
                self._violate(f"{memory!r} is freed while somebody looks into it")
                self._watched.append(memory)

    def _resolve(self, method: str, index: int, token: Any) -> _Memory | None:
        """What a token names; None where it names nothing, which is a breach unless the device is lost."""
        with self._lock:
            memory = self._none.get(index) if token is None else token
            if not isinstance(memory, _Memory):
                if index in self._lost:
                    raise CheckedDeviceLoss(f"device {index} is lost")
                self._violate(f"{method}({index}) of {token!r}, which is no live memory")
                return None
            if memory.index != index:
                self._violate(f"{method}({index}) of {memory!r}")
            return memory

    def _fits(self, method: str, memory: _Memory, offset: int, buffer: memoryview) -> bool:
        unit, size, total = self.capabilities.alignment_bytes, len(buffer), len(memory.data)
        if buffer.format != "B" or buffer.ndim != 1 or not buffer.c_contiguous:
            self._note(f"{method} with a buffer that is not flat bytes")
        if method != "load" and size > self.capabilities.chunk_bytes:
            self._note(f"{method} of {size} bytes, over chunk_bytes")
        # The end of a size that was rounded up need not be aligned.
        if offset % unit or (size % unit and -(-(offset + size) // unit) * unit != total):
            self._note(f"{method} of {size} bytes at {offset}, not in multiples of {unit}")
        if offset < 0 or offset + size > total:
            self._note(f"{method} of {size} bytes at {offset} of {memory!r}")
            return False
        return memory.live

    def _check_loss(self, index: int) -> None:
        with self._lock:
            self._check_device(index)

    def _check_device(self, index: int) -> None:
        """Under the lock."""
        if index in self._lost:
            raise CheckedDeviceLoss(f"device {index} is lost")

    def _check_open(self, what: str) -> None:
        """Under the lock."""
        if not self._is_open:
            self._violate(f"{what} while the library is closed")

    def _check_thread(self, method: str, index: int | None) -> None:
        """Under the lock: one thread for everything, or one per device and another for its telemetry."""
        match self.capabilities.threading:
            case "backend":
                key: object = "all"
            case "device" if index is not None:
                key = (index, method == "telemetry")
            case _:
                return
        thread = threads.current_thread()
        owner = self._owners.setdefault(key, thread)
        if owner is not thread:
            self._violate(f"{method} on {thread.name}, where {owner.name} served before")

    def _violate(self, text: str) -> None:
        """Under the lock."""
        if len(self._violations) < MOST_VIOLATIONS:
            self._violations.append(f"{text} [{threads.current_thread().name}]")

    def _note(self, text: str) -> None:
        with self._lock:
            self._violate(text)

    @contextmanager
    def _call(
        self, method: str, index: int | None, *memories: _Memory, inline_bytes: int | None = None
    ) -> Generator[None]:
        """Check a call as it arrives, and remember that it is inside until it returns."""
        thread = threads.current_thread()
        what = method if index is None else f"{method}({index})"
        with self._lock:
            self._check_open(what)
            if inline_bytes is None or inline_bytes > self.inline_copy_bytes:
                self._check_thread(method, index)
                opening = None if index is None else self._attached.get((thread, index))
                if index is not None and opening is None:
                    self._violate(f"{what} on a thread without attach")
                elif index is not None and opening != self.opens:
                    self._violate(f"{what} on a thread that was attached in an earlier opening")
            for memory in memories:
                if not memory.live:
                    self._violate(f"{what} of {memory!r}, which was freed")
                elif memory.opening != self.opens:
                    self._violate(f"{what} of {memory!r} of an earlier opening")
                if memory.busy is not None:
                    self._violate(f"{what} while {memory.busy} works on {memory!r}")
                memory.busy = what
            self._number += 1
            number = self._number
            self._inside[number] = what
        try:
            yield
        finally:
            with self._lock:
                del self._inside[number]
                for memory in memories:
                    memory.busy = None


def _is_exported(data: bytearray) -> bool:
    """Whether somebody holds a view of it: only then it cannot change its size."""
    try:
        data.append(POISON)
    except BufferError:
        return True
    data.pop()
    return False
