"""The staging crew over the stand-in runtime: stripes, sharing, failures, hung devices, life and death."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.support.fake_cuda import MIB, CUDARuntimeError, FakeRuntime

from gpurt.backends.cupy import staging, staging_member
from gpurt.backends.cupy.staging import Crew, crew_size, join_crew, leave_crew
from gpurt.backends.cupy.transfer import Download, Transfer, Upload, cut
from gpurt.errors import GPUError

KIB = 1 << 10
STRIPE = 64 * KIB
WAIT = 5.0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    monkeypatch.setattr(staging_member, "STRIPE_BYTES", STRIPE)
    runtime = FakeRuntime()
    runtime.setDevice(0)
    return runtime


@pytest.fixture
def crew(runtime: FakeRuntime) -> Iterator[Crew]:
    crew = Crew(runtime, 0, 4)
    yield crew
    assert crew.stop(WAIT)
    assert not runtime.pinned
    assert not runtime.streams


def on_device(runtime: FakeRuntime, nbytes: int, index: int = 0) -> int:
    runtime.setDevice(index)
    return runtime.malloc(nbytes)


def memory(runtime: FakeRuntime, address: int) -> Any:
    return np.frombuffer(runtime.live[address].buffer, np.uint8)


def noise(nbytes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def no_plain(start: int, size: int) -> None:
    raise AssertionError("the crew had to do it")


def upload(address: int, host: Any, index: int = 0) -> Upload:
    return Upload(index, address, host.ctypes.data, cut(len(host), STRIPE, 4))


def download(address: int, host: Any, index: int = 0) -> Download:
    return Download(index, address, host.ctypes.data, cut(len(host), STRIPE, 4))


def soon(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.001)


class Gate:
    """Holds staging threads inside a runtime call, those of one device or all, until it is opened."""

    def __init__(self, runtime: FakeRuntime, call: str, *, device: int | None = None, threads: int = 99) -> None:
        self.held: set[str] = set()
        self.opened = threading.Event()
        self._threads = threads
        self._lock = threading.Lock()

        def on_call(name: str, index: int) -> None:
            me = threading.current_thread().name
            if name != call or not me.startswith("gpurt:stage") or device not in (None, index):
                return
            with self._lock:
                if len(self.held) >= self._threads:
                    return
                self.held.add(me)
            assert self.opened.wait(WAIT)

        runtime.on_call = on_call


# Stripes


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("nbytes", [1, 2, 7, 8, 9, 63, 64, 65, 1000, 4097])
def test_stripes_cover_every_byte_once(nbytes: int, threads: int) -> None:
    position = 0
    sizes: list[int] = []
    for start, size in cut(nbytes, 8, threads):
        assert start == position
        assert 0 < size <= 8
        position += size
        sizes.append(size)
    assert position == nbytes
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) == (8 if nbytes > 2 * threads * 8 else min(4, nbytes))


def test_stripes_of_one_byte() -> None:
    assert list(cut(3, 1, 1)) == [(0, 1), (1, 1), (2, 1)]


# Copies


@pytest.mark.parametrize("nbytes", [1, STRIPE - 1, STRIPE, STRIPE + 1, 3 * MIB + 17])
@pytest.mark.parametrize("offset", [0, 1, 4093])
def test_bytes_arrive_both_ways(runtime: FakeRuntime, crew: Crew, nbytes: int, offset: int) -> None:
    device = on_device(runtime, nbytes + offset + 3)
    sent, back = noise(nbytes), np.zeros(nbytes, np.uint8)
    crew.run(upload(device + offset, sent), no_plain)
    around = memory(runtime, device)
    assert not around[:offset].any()
    assert not around[offset + nbytes :].any()
    crew.run(download(device + offset, back), no_plain)
    assert np.array_equal(back, sent)


def test_threads_share_the_work_and_have_their_own_buffers(runtime: FakeRuntime, crew: Crew) -> None:
    device, host = on_device(runtime, 4 * MIB), noise(4 * MIB)
    gate = Gate(runtime, "memcpyAsync")
    with ThreadPoolExecutor(1) as pool:
        copy = pool.submit(crew.run, upload(device, host), no_plain)
        soon(lambda: len(gate.held) == 4)
        gate.opened.set()
        copy.result(WAIT)
    assert gate.held == {f"gpurt:stage:{number}" for number in range(4)}
    assert len(runtime.pinned) == 8
    assert 4 <= len(runtime.streams) <= 8
    assert np.array_equal(memory(runtime, device), host)


def test_slow_thread_does_not_hold_up_the_others(runtime: FakeRuntime, crew: Crew) -> None:
    device, host = on_device(runtime, 4 * MIB), noise(4 * MIB)
    gate = Gate(runtime, "memcpyAsync", threads=1)
    transfer = upload(device, host)
    with ThreadPoolExecutor(1) as pool:
        copy = pool.submit(crew.run, transfer, no_plain)
        soon(lambda: transfer.left == 1)
        assert not copy.done()
        gate.opened.set()
        copy.result(WAIT)
    assert np.array_equal(memory(runtime, device), host)


def test_both_directions_and_two_devices_at_once(runtime: FakeRuntime, crew: Crew) -> None:
    hosts = [noise(2 * MIB + seed, seed) for seed in range(8)]
    devices = [on_device(runtime, len(host), number % 2) for number, host in enumerate(hosts)]
    backs = [np.zeros(len(host), np.uint8) for host in hosts]

    def round_trips(number: int) -> None:
        for _ in range(3):
            crew.run(upload(devices[number], hosts[number], number % 2), no_plain)
            crew.run(download(devices[number], backs[number], number % 2), no_plain)
            assert np.array_equal(backs[number], hosts[number])
            backs[number].fill(0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(round_trips, range(8)))


def test_short_copy_is_not_queued_behind_a_long_one(runtime: FakeRuntime, crew: Crew) -> None:
    long, short = on_device(runtime, 16 * MIB), on_device(runtime, 256 * KIB)
    hosts = noise(16 * MIB), noise(256 * KIB)
    bulk, small = (
        Upload(0, device, host.ctypes.data, cut(len(host), STRIPE, 4))
        for device, host in zip((long, short), hosts, strict=True)
    )
    gate = Gate(runtime, "memcpyAsync")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(crew.run, bulk, no_plain)
        soon(lambda: len(gate.held) == 4)
        second = pool.submit(crew.run, small, no_plain)
        soon(lambda: len(crew._active) == 2)  # pyright: ignore[reportPrivateUsage]
        # Every thread is held. What each takes next, not when: that would be up to the machine.
        following = [crew._choose(number) for number in range(4)]  # pyright: ignore[reportPrivateUsage]
        gate.opened.set()
        first.result(WAIT)
        second.result(WAIT)
    assert bulk in following
    assert following.count(small) == 2


def test_idle_crew_keeps_nothing_of_the_last_copy(runtime: FakeRuntime, crew: Crew) -> None:
    device = on_device(runtime, MIB)
    dropped: list[bool] = []

    class Watched(Upload):
        def __del__(self) -> None:
            dropped.append(True)

    host = noise(MIB)
    crew.run(Watched(0, device, host.ctypes.data, cut(MIB, STRIPE, 4)), no_plain)
    soon(lambda: bool(dropped))


# Failures


@pytest.mark.parametrize("call", ["memcpyAsync", "streamSynchronize"])
@pytest.mark.parametrize("kind", [upload, download])
@pytest.mark.parametrize("after", [0, 5, 40])
def test_failure_in_the_middle_is_the_caller_s(
    runtime: FakeRuntime, crew: Crew, call: str, kind: Callable[..., Transfer], after: int
) -> None:
    device, host = on_device(runtime, 4 * MIB), noise(4 * MIB)
    count = 0
    error = CUDARuntimeError(700)

    def on_call(name: str, index: int) -> None:
        nonlocal count
        count += name == call
        if name == call and count > after:
            raise error

    runtime.on_call = on_call
    transfer = kind(device, host)
    with pytest.raises(CUDARuntimeError) as caught:
        crew.run(transfer, no_plain)
    assert caught.value is error
    assert transfer.left == 0
    assert not transfer.stripes
    runtime.on_call = lambda name, index: None
    # Nothing of it is left that could disturb the next one.
    crew.run(upload(device, host), no_plain)
    back = np.zeros(4 * MIB, np.uint8)
    crew.run(download(device, back), no_plain)
    assert np.array_equal(back, host)


def test_failed_copy_returns_only_when_nothing_touches_its_memory(runtime: FakeRuntime, crew: Crew) -> None:
    device, host = on_device(runtime, 4 * MIB), noise(4 * MIB)
    gate = Gate(runtime, "memcpyAsync", threads=3)
    hold = runtime.on_call

    def on_call(name: str, index: int) -> None:
        hold(name, index)
        if name == "memcpyAsync" and threading.current_thread().name not in gate.held:
            soon(lambda: len(gate.held) == 3)
            raise CUDARuntimeError(719)

    runtime.on_call = on_call
    transfer = upload(device, host)
    with ThreadPoolExecutor(1) as pool:
        copy = pool.submit(crew.run, transfer, no_plain)
        soon(lambda: transfer.left == 3)
        assert not copy.done()
        gate.opened.set()
        with pytest.raises(CUDARuntimeError):
            copy.result(WAIT)


def test_failure_of_one_copy_is_not_another_s(runtime: FakeRuntime, crew: Crew) -> None:
    good, bad = on_device(runtime, 2 * MIB), on_device(runtime, 2 * MIB, 1)
    host = noise(2 * MIB)

    def on_call(name: str, index: int) -> None:
        if index == 1 and name == "streamSynchronize":
            raise CUDARuntimeError(46)

    runtime.on_call = on_call

    def failing() -> None:
        with pytest.raises(CUDARuntimeError):
            crew.run(upload(bad, host, 1), no_plain)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            memory(runtime, good).fill(0)
            pair = pool.submit(crew.run, upload(good, host), no_plain), pool.submit(failing)
            for each in pair:
                each.result(WAIT)
            assert np.array_equal(memory(runtime, good), host)
    runtime.on_call = lambda name, index: None


def test_hung_device_holds_up_its_own_copies_only(
    runtime: FakeRuntime, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STALL_S", 0.01)
    hung, well = on_device(runtime, 2 * MIB), on_device(runtime, 2 * MIB, 1)
    host = noise(2 * MIB)
    gate = Gate(runtime, "streamSynchronize", device=0)
    waiter_hangs = threading.Event()

    def hanging(start: int, size: int) -> None:
        waiter_hangs.set()
        assert gate.opened.wait(WAIT)

    def plain(start: int, size: int) -> None:
        memory(runtime, well)[start : start + size] = host[start : start + size]

    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(crew.run, upload(hung, host), hanging)
        soon(lambda: len(gate.held) == 4)
        crew.run(upload(well, host, 1), plain)
        assert np.array_equal(memory(runtime, well), host)

        def failing(start: int, size: int) -> None:
            raise CUDARuntimeError(700)

        with pytest.raises(CUDARuntimeError):
            crew.run(upload(well, host, 1), failing)
        assert waiter_hangs.wait(WAIT)
        gate.opened.set()
        stuck.result(WAIT)
    # The driver has answered: the crew is whole again.
    memory(runtime, well).fill(0)
    crew.run(upload(well, host, 1), no_plain)
    assert np.array_equal(memory(runtime, well), host)


def test_device_that_hangs_keeps_no_stripe_of_another(
    runtime: FakeRuntime, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STALL_S", 0.01)
    hung, well = on_device(runtime, 2 * MIB), on_device(runtime, 16 * MIB, 1)
    hosts = noise(2 * MIB), noise(16 * MIB)
    gate = Gate(runtime, "streamSynchronize", device=0)

    def hanging(start: int, size: int) -> None:
        assert gate.opened.wait(WAIT)

    def plain(start: int, size: int) -> None:
        memory(runtime, well)[start : start + size] = hosts[1][start : start + size]

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(crew.run, upload(well, hosts[1], 1), plain)
        stuck = pool.submit(crew.run, upload(hung, hosts[0]), hanging)
        other.result(WAIT)
        assert np.array_equal(memory(runtime, well), hosts[1])
        assert not stuck.done()
        gate.opened.set()
        stuck.result(WAIT)


# Life


@pytest.mark.parametrize(("buffers", "size"), [(0, 0), (1, 0), (2, 1), (8, 4)])
def test_crew_is_as_large_as_memory_can_be_pinned(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture, buffers: int, size: int
) -> None:
    runtime.pin_limit = buffers * STRIPE
    crew = Crew(runtime, 0, 1 if buffers < 8 else 4)
    assert crew.size == size
    assert crew.stop(WAIT)
    assert not runtime.pinned
    assert ("no more host memory can be pinned" in caplog.text) == (not size)


def test_crew_that_cannot_start_is_an_error(runtime: FakeRuntime) -> None:
    def on_call(name: str, index: int) -> None:
        if name == "hostAlloc" and threading.current_thread().name == "gpurt:stage:2":
            raise CUDARuntimeError(46)

    runtime.on_call = on_call
    with pytest.raises(CUDARuntimeError) as caught:
        Crew(runtime, 0, 4)
    assert caught.value.status == 46
    assert not runtime.pinned
    assert not staging_threads()


def staging_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpurt:stage")]


def test_threads_are_daemons_with_names(crew: Crew) -> None:
    threads = staging_threads()
    assert sorted(thread.name for thread in threads) == [f"gpurt:stage:{number}" for number in range(4)]
    assert all(thread.daemon for thread in threads)


def test_stop_lets_running_copies_end(runtime: FakeRuntime) -> None:
    crew = Crew(runtime, 0, 2)
    device, host = on_device(runtime, 2 * MIB), noise(2 * MIB)
    gate = Gate(runtime, "memcpyAsync")
    with ThreadPoolExecutor(1) as pool:
        copy = pool.submit(crew.run, upload(device, host), no_plain)
        soon(lambda: len(gate.held) == 2)
        assert not crew.stop(0)
        gate.opened.set()
        copy.result(WAIT)
    assert crew.stop(WAIT)
    assert np.array_equal(memory(runtime, device), host)
    assert not runtime.pinned
    with pytest.raises(GPUError, match="stopped"):
        crew.run(upload(device, host), no_plain)


def test_last_driver_to_leave_ends_the_crew(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "crew_size", lambda: 2)
    assert join_crew(runtime, 0) is join_crew(runtime, 1)
    assert len(staging_threads()) == 2
    leave_crew(runtime)
    assert len(staging_threads()) == 2
    leave_crew(runtime)
    assert not staging_threads()
    assert not runtime.pinned
    leave_crew(runtime)
    again = join_crew(runtime, 0)
    assert again.size == 2
    leave_crew(runtime)


@pytest.mark.parametrize(("cpus", "size"), [(1, 1), (2, 1), (4, 3), (8, 6), (16, 8), (256, 8)])
def test_size_leaves_cpus_for_the_event_loop(monkeypatch: pytest.MonkeyPatch, cpus: int, size: int) -> None:
    monkeypatch.setattr(staging, "cpu_count", lambda: cpus)
    assert crew_size() == size


PROGRAM = """
import os, sys, threading
import numpy as np
from tests.support.fake_cuda import FakeRuntime
from gpurt.backends.cupy import staging
from gpurt.backends.cupy.transfer import Upload, cut
runtime = FakeRuntime()
runtime.setDevice(0)
staging.crew_size = lambda: 3
crew = staging.join_crew(runtime, 0)
device, host = runtime.malloc(16 << 20), np.ones(16 << 20, np.uint8)
def upload():
    crew.run(Upload(0, device, host.ctypes.data, cut(len(host), 4 << 20, 3)), None)
upload()
"""


FORK = "ignore:This process:DeprecationWarning"
"""Python 3.12 warns of what is tested here: a fork beside threads."""


def run_program(body: str) -> float:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", FORK, "-c", PROGRAM + body], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    return time.monotonic() - started


def test_forgotten_crew_ends_with_the_process() -> None:
    run_program("")


def test_process_ends_although_a_staging_thread_hangs() -> None:
    body = """
never, entered = threading.Event(), threading.Event()
def on_call(name, index):
    entered.set()
    never.wait()
runtime.on_call = on_call
threading.Thread(target=upload, daemon=True).start()
entered.wait()
"""
    assert run_program(body) < 10


def test_forked_child_has_no_crew_and_ends() -> None:
    body = """
child = os.fork()
if not child:
    staging.leave_crew(runtime)
    assert not staging._crews
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
upload()
staging.leave_crew(runtime)
assert threading.active_count() == 1
"""
    run_program(body)
