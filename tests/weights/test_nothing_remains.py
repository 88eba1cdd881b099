"""Nothing outlives its call: no cycle of references is left, whatever became of it, and no document with an error.

The collector is off while each case runs, and must find nothing afterwards: not an exception with its traceback, a
frame of the caller, or an object that the header became. What threads of other tests leave would count, so these run in
a process of their own, which ``test_in_a_process_of_its_own`` starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import tracemalloc
import types
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpurt.runtime.backend import DriverBackend
from gpurt.testing import Fault, FaultyDriver, SimulatedDriver, parse_simulation
from gpurt.weights import (
    WeightsError,
    copy_shard_from_peer,
    load_safetensors,
    parse_header,
    parse_index,
    read_header,
    update_shard_from_peer,
)
from tests.weights.support import eventually, raw_file, tensor, write, write_index, write_sharded

ALONE = "GPURT_TEST_ALONE"
alone = pytest.mark.skipif(ALONE not in os.environ, reason="runs in a process of its own")

CONTENT = {f"layers.{n}.w": tensor("U8", 300_000 + n, seed=n) for n in range(8)}
ATTEMPTS = 3
"""A cycle that a call leaves is left each time; what ends beside it, such as a thread of the test before, is not."""
SMALL = {f"layers.{n}.w": tensor("U8", 10 + n, seed=n) for n in range(4)}


class Rig:
    """Two devices whose driver fails on demand, and files to load."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.driver = FaultyDriver(SimulatedDriver(parse_simulation("h100x2")))
        self.backend = DriverBackend(self.driver)
        self.good = write(folder / "good", CONTENT)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device.device_id for device in self.backend.devices)

    def both(self, name: str) -> str:
        return self.devices[int(name.split(".")[1]) % 2]

    def file(self, raw: bytes) -> Path:
        path = self.folder / "file"
        path.write_bytes(raw)
        return path

    async def load(self, path: Path | None = None, placement: Any = None, **options: Any) -> None:
        weights = await load_safetensors(path or self.good, self.backend, placement or self.both, **options)
        await weights.close()

    async def copy(self, device: str | None = None, **options: Any) -> None:
        async with await load_safetensors(self.good, self.backend, self.devices[0]) as theirs:
            device = device or self.devices[1]
            await (await copy_shard_from_peer(theirs, self.backend, self.backend, device, **options)).close()

    async def update(self, change: Callable[[dict[str, Any]], Any] = dict, **options: Any) -> None:
        async with (
            await load_safetensors(self.good, self.backend, self.devices[0]) as theirs,
            await load_safetensors(self.good, self.backend, self.devices[1]) as ours,
        ):
            await update_shard_from_peer(theirs, self.backend, change(ours.as_dict()), self.backend, **options)


def raises(*_: object) -> Any:
    raise ZeroDivisionError


def raises_late(done: int, total: int) -> None:
    if done:
        raise ZeroDivisionError


def truncated(rig: Rig) -> Path:
    return rig.file(rig.good.read_bytes()[:-100])


def sharded(rig: Rig) -> Path:
    return write_sharded(rig.folder, {"1.safetensors": CONTENT, "2.safetensors": {"layers.9.w": tensor("U8", 5)}})


def header(text: bytes) -> Callable[[Rig], Awaitable[None]]:
    return lambda rig: rig.load(rig.file(raw_file(text)))


def struck(fault: Callable[[], Fault], run: Callable[[Rig], Awaitable[None]]) -> Callable[[Rig], Awaitable[None]]:
    async def case(rig: Rig) -> None:
        rig.driver.inject(fault())
        await run(rig)

    return case


def cancelled(run: Callable[[Rig], Awaitable[None]], turns: int) -> Callable[[Rig], Awaitable[None]]:
    async def case(rig: Rig) -> None:
        task = asyncio.ensure_future(run(rig))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await task

    return case


def in_the_driver(method: Any, run: Callable[[Rig], Awaitable[None]]) -> Callable[[Rig], Awaitable[None]]:
    """Cancelled by a timeout while a call of the driver hangs."""

    async def case(rig: Rig) -> None:
        gate = threading.Event()
        rig.driver.inject(Fault(method, gate=gate))
        task = asyncio.ensure_future(run(rig))
        before = len(rig.driver.calls)
        await eventually(lambda: any(call.method == method for call in rig.driver.calls[before:]))
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        gate.set()
        await task

    return case


async def with_a_view(rig: Rig) -> None:
    """``close`` with a live view is refused."""
    weights = await load_safetensors(rig.good, rig.backend, rig.devices[0])
    view = await rig.backend.view(weights.handles[0], (4,), "uint8")
    try:
        await weights.close()
    finally:
        view.close()
        await weights.close()


def bad_tensor(**changes: Any) -> bytes:
    return raw_file({"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}}, bytes(4))


BAD_HEADERS = {
    "not JSON": b"{]",
    "cut": b'{"a": [1, 2',
    "not an object": b'{"a": 1}',
    "twice": b'{"a": 1, "a": 2}',
    "twice below": b'{"a": {"b": 1, "b": 2}}',
    "NaN": b'{"a": NaN}',
    "deep": b'{"a": ' + b"[" * 100_000,
    "not UTF-8": b'{"a": "\xff"}',
    "digits": b'{"a": ' + b"1" * 5000 + b"}",
    "metadata": b'{"__metadata__": {"k": 1}}',
    "surrogate": b'{"__metadata__": {"k": "\\ud800"}}',
    "large": b'{"a": [' + b"1, " * 100_000 + b"x]}",
    "long": b'{"' + b"a" * 400_000,
    "empty": b"",
    "array": b"[]",
}
CASES: dict[str, Callable[[Rig], Awaitable[None]]] = {
    "load": lambda rig: rig.load(),
    "load some": lambda rig: rig.load(only=["layers.1"]),
    "load by functions": lambda rig: rig.load(only=lambda name: True, on_progress=lambda done, total: None),
    "load shards": lambda rig: rig.load(sharded(rig), rig.devices[0]),
    "close with a view": with_a_view,
    **{f"header {name}": header(text) for name, text in BAD_HEADERS.items()},
    "header dtype": lambda rig: rig.load(rig.file(bad_tensor(dtype="F33"))),
    "header shape": lambda rig: rig.load(rig.file(bad_tensor(shape=[2**40, 2**40]))),
    "header offsets": lambda rig: rig.load(rig.file(bad_tensor(data_offsets=[1, 5]))),
    "truncated": lambda rig: rig.load(truncated(rig)),
    "too short": lambda rig: rig.load(rig.file(b"123")),
    "no file": lambda rig: rig.load(rig.folder / "none"),
    "a folder": lambda rig: rig.load(rig.folder),
    "NUL": lambda rig: rig.load(Path("a\0b")),
    "bad index": lambda rig: rig.load(write_index(rig.folder, {"layers.1.w": "../x"})),
    "no shard": lambda rig: rig.load(write_index(rig.folder, {"layers.1.w": "none.safetensors"})),
    "not in its shard": lambda rig: rig.load(write_index(rig.folder, {"layers.99.w": "good"})),
    "unknown tensor": lambda rig: rig.load(only=["layers.99"]),
    "bad argument": lambda rig: rig.load(only=7),
    "no device": lambda rig: rig.load(placement="none:7"),
    "no placement": lambda rig: rig.load(placement={"layers.1": "simulated:0"}),
    "only raises": lambda rig: rig.load(only=raises),
    "placement raises": lambda rig: rig.load(placement=raises),
    "progress raises": lambda rig: rig.load(on_progress=raises),
    "progress raises later": lambda rig: rig.load(on_progress=raises_late),
    **{
        f"load, {method} {nth} fails": struck(lambda m=method, n=nth: Fault(m, nth=n, raises=OSError), Rig.load)
        for method in ("alloc", "write", "telemetry", "free")
        for nth in (1, 2)
    },
    "load, memory is full": struck(lambda: Fault("alloc", nth=2, raises=MemoryError), Rig.load),
    **{f"load, cancelled after {turns}": cancelled(Rig.load, turns) for turns in (0, 1, 2, 5, 20, 80, 300)},
    **{f"load, cancelled in {m}": in_the_driver(m, Rig.load) for m in ("alloc", "write", "telemetry", "free")},
    "copy": lambda rig: rig.copy(),
    "copy, no device": lambda rig: rig.copy("none:7"),
    "copy, progress raises": lambda rig: rig.copy(on_progress=raises),
    "copy, progress raises later": lambda rig: rig.copy(on_progress=raises_late),
    "copy, memory is full": struck(lambda: Fault("alloc", index=1, raises=MemoryError), Rig.copy),
    "copy, fails": struck(lambda: Fault("copy", raises=OSError), Rig.copy),
    "copy, and freeing fails": struck(lambda: Fault("free", index=1, raises=OSError), Rig.copy),
    **{f"copy, cancelled after {turns}": cancelled(Rig.copy, turns) for turns in (80, 150, 200, 250)},
    "copy, cancelled in alloc": in_the_driver("alloc", Rig.copy),
    "copy, cancelled in copy": in_the_driver("copy", Rig.copy),
    "update": lambda rig: rig.update(),
    "update, other names": lambda rig: rig.update(lambda ours: {}),
    "update, no tensors": lambda rig: rig.update(lambda ours: dict.fromkeys(ours)),
    "update, no mapping": lambda rig: rig.update(lambda ours: 7),
    "update, progress raises": lambda rig: rig.update(on_progress=raises_late),
    "update, fails": struck(lambda: Fault("copy", raises=OSError), Rig.update),
    "update, cancelled in copy": in_the_driver("copy", Rig.update),
}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    async with rig.backend:
        yield rig
        rig.driver.clear()


@alone
@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
@pytest.mark.parametrize("case", CASES)
async def test_no_cycle_is_left(rig: Rig, case: str) -> None:
    await _attempt(rig, CASES[case])  # what is made once and kept: imports, lanes, pools
    for _ in range(ATTEMPTS):
        with _Collecting() as collecting:
            await _attempt(rig, CASES[case])
            found = collecting.found()
        if not found:
            return
    pytest.fail(f"left in cycles: {found}")


@alone
@pytest.mark.parametrize("text", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_no_cycle_is_left_by_the_parsers(text: bytes) -> None:
    refused: list[str] = []

    def parse() -> None:
        for name in ("header", "index"):
            try:
                if name == "header":
                    parse_header(text, 8 + len(text), "p")
                else:
                    parse_index(text, "p")
            except WeightsError:
                refused.append(name)

    parse()
    assert refused == ["header", "index"]
    _leaves_nothing(parse)


@alone
@pytest.mark.parametrize("text", [b'{"a": "%s', b'{"a": [%s', b'{"a": {"dtype": "%s"}}', b'{"__metadata__": ["%s"]}'])
async def test_an_error_that_is_kept_keeps_no_document(rig: Rig, text: bytes) -> None:
    path = rig.file(raw_file(text % (b"1" * 20_000_000)))
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError) as caught:
            await rig.load(path)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2_000_000
    assert caught.value.path == str(path)


@alone
def test_a_descriptor_and_a_file_leave_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "f", SMALL)

    def read() -> None:
        with path.open("rb") as file:
            assert len(read_header(file, "f").tensors) == len(read_header(file.fileno(), "f").tensors) == 4
        assert parse_index(b'{"weight_map": {"a": "b"}}', "i") == {"a": "b"}

    read()
    _leaves_nothing(read)


def _leaves_nothing(run: Callable[[], None]) -> None:
    for _ in range(ATTEMPTS):
        with _Collecting() as collecting:
            run()
            found = collecting.found()
        if not found:
            return
    pytest.fail(f"left in cycles: {found}")


async def _attempt(rig: Rig, case: Callable[[Rig], Awaitable[None]]) -> None:
    """In a task of its own, so that its frames end."""

    async def attempt() -> None:
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await case(rig)

    await asyncio.create_task(attempt())
    rig.driver.clear()
    await _settled()


async def _settled() -> None:
    """Threads that were started have ended, and so have the loop's turns for them."""
    await eventually(
        lambda: not any(each.name.startswith(("gpurt:weights", "gpurt:host")) for each in threading.enumerate())
    )
    for _ in range(10):
        await asyncio.sleep(0.001)


class _Collecting:
    """The collector is off, and keeps what it finds when it is called."""

    def __enter__(self) -> _Collecting:
        gc.disable()
        gc.freeze()  # what is there already is not looked at, which takes long
        gc.garbage.clear()
        gc.set_debug(gc.DEBUG_SAVEALL)
        return self

    def __exit__(self, *_: object) -> None:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()

    def found(self) -> list[str]:
        gc.collect()
        return sorted({_kind(each) for each in gc.garbage})


def _kind(each: object) -> str:
    if isinstance(each, types.FrameType):
        return f"frame of {each.f_code.co_name}"
    return f"{type(each).__name__} {each}" if isinstance(each, BaseException) else type(each).__name__


@pytest.mark.wide
def test_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
    environ = {**os.environ, ALONE: "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
