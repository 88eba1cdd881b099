"""What is under way at once on one CUDA device: both directions, and small copies beside large ones. Gates in the
stand-in runtime hold one copy inside the library; the others must come and go meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from tests.support.fake_cuda import MIB, FakeNvml, FakeRuntime, install, install_nvml, nvml_record

from gpurt.backends.cuda_backend import CUDABackend
from gpurt.backends.cupy import copy_tuning, host_copies, staging, staging_member
from gpurt.backends.cupy.copy_tuning import CopyTuning

WAIT = 5.0
THREADS = 3
STRIPE = 64 << 10
FROM = 256 << 10


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    for module in (staging_member, host_copies):
        monkeypatch.setattr(module, "STRIPE_BYTES", STRIPE)
    monkeypatch.setattr(copy_tuning, "SIZES", (FROM, 2 * FROM))
    monkeypatch.setattr(staging, "crew_size", lambda: THREADS)
    install_nvml(monkeypatch, FakeNvml([nvml_record(0)]))
    return install(monkeypatch, FakeRuntime(devices=1))


@pytest.fixture
async def backend(runtime: FakeRuntime) -> AsyncIterator[CUDABackend]:
    async with CUDABackend() as backend:
        backend.driver.use_tuning(0, CopyTuning(THREADS, FROM, FROM))  # type: ignore[attr-defined]
        yield backend


class Gates:
    """Holds every thread whose name has one of ``names`` in it inside ``call``."""

    def __init__(self, runtime: FakeRuntime, call: str, *names: str) -> None:
        self.inside: set[str] = set()
        self.opened = threading.Event()
        self._changed = threading.Condition()

        def on_call(name: str, index: int) -> None:
            me = threading.current_thread().name
            if name != call or not any(part in me for part in names) or self.opened.is_set():
                return
            with self._changed:
                self.inside.add(me)
                self._changed.notify_all()
            assert self.opened.wait(WAIT)

        runtime.on_call = on_call

    async def hold(self, threads: int) -> None:
        """Until so many threads are inside."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: len(self.inside) >= threads, WAIT)

        assert await asyncio.to_thread(wait)


@pytest.fixture
def gates(runtime: FakeRuntime) -> Iterator[Callable[..., Gates]]:
    made: list[Gates] = []

    def make(call: str, *names: str) -> Gates:
        made.append(Gates(runtime, call, *names))
        return made[-1]

    yield make
    for each in made:
        each.opened.set()


async def test_both_directions_of_pinned_memory_are_in_the_library_at_once(
    backend: CUDABackend, runtime: FakeRuntime, gates: Callable[..., Gates]
) -> None:
    there, back = await backend.allocate("cuda:0", 8 * MIB), await backend.allocate("cuda:0", 8 * MIB)
    await backend.copy_to_device(b"b" * (8 * MIB), back)
    with await backend.host_buffer("cuda:0", 8 * MIB) as out, await backend.host_buffer("cuda:0", 8 * MIB) as into:
        assert out.pinned
        assert into.pinned
        out.memory[:] = b"a" * (8 * MIB)
        held = gates("streamSynchronize", "h2d", "d2h")
        runtime.calls.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(backend.copy_to_device(out.memory, there))
            group.create_task(backend.copy_into(back, into.memory))
            await held.hold(2)
            # Each is one asynchronous copy on a stream of its own, and waits for nobody but itself.
            assert runtime.calls.count("memcpyAsync") == 2
            assert held.inside == {"gpurt:cuda:0:h2d", "gpurt:cuda:0:d2h"}
            held.opened.set()
        assert bytes(into.memory[:3]) == b"bbb"
    assert (await backend.copy_from_device(there, 0, 3)) == b"aaa"


async def test_a_direction_that_stands_still_does_not_hold_up_the_other(
    backend: CUDABackend, gates: Callable[..., Gates]
) -> None:
    there, back = await backend.allocate("cuda:0", 2 * MIB), await backend.allocate("cuda:0", 2 * MIB)
    with await backend.host_buffer("cuda:0", 2 * MIB) as host:
        held = gates("streamSynchronize", "h2d")
        upload = asyncio.create_task(backend.copy_to_device(host.memory, there))
        await held.hold(1)
        async with asyncio.timeout(WAIT):
            for _ in range(3):
                assert await backend.copy_into(back, bytearray(2 * MIB)) == 2 * MIB
        assert not upload.done()
        held.opened.set()
        await upload


@pytest.mark.parametrize("call", ["memcpyAsync", "streamSynchronize"])
async def test_small_copies_pass_a_striped_load(backend: CUDABackend, gates: Callable[..., Gates], call: str) -> None:
    bulk, small = await backend.allocate("cuda:0", 8 * MIB), await backend.allocate("cuda:0", 4096)
    payload = bytes(range(256)) * 16
    held = gates(call, "gpurt:stage")
    load = asyncio.create_task(backend.copy_to_device(bytes(8 * MIB), bulk))
    await held.hold(THREADS)  # the whole crew stands still
    async with asyncio.timeout(WAIT):
        await backend.copy_to_device(payload, small)
        assert await backend.copy_from_device(small) == payload
        await asyncio.gather(*(backend.copy_to_device(payload, small) for _ in range(64)))
    assert not load.done()
    held.opened.set()
    await load


async def test_a_small_copy_is_two_calls_of_the_library(backend: CUDABackend, runtime: FakeRuntime) -> None:
    handle = await backend.allocate("cuda:0", 4096)
    host = bytearray(4096)
    for copy in (
        lambda: backend.copy_to_device(bytes(4096), handle),
        lambda: backend.copy_to_device(host, handle),
        lambda: backend.copy_into(handle, host),
        lambda: backend.copy_from_device(handle),
    ):
        await copy()  # makes the thread's stream
        runtime.calls.clear()
        await copy()
        assert runtime.calls == ["setDevice", "memcpyAsync", "streamSynchronize"]
    host.append(1)  # BufferError while anything still exports it
