"""Marks, sleep and the watcher that puts them together."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from gpurt.hotchange import Cause, HotChangeWatcher
from gpurt.hotchange import watcher as module
from gpurt.hotchange.marks import changes, read_marks
from gpurt.hotchange.nodes import lost_nodes
from gpurt.hotchange.sleep import SleepClock, boottime


def put(root: Path, name: str, text: str = "") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("nvidiactl", "nvidia0", "nvidia-uvm", "kfd", "dri/renderD128", "dri/card0", "accel/accel0"):
        put(tmp_path, f"dev/{name}")
    put(tmp_path, "proc/driver/nvidia/version", "NVRM version: 590.48.01\n")
    return tmp_path


class TestMarks:
    def test_nodes_and_versions(self, root: Path) -> None:
        marks = read_marks(root)
        assert marks.nodes == {"dev/nvidiactl", "dev/nvidia0", "dev/kfd", "dev/dri/renderD128", "dev/accel/accel0"}
        assert "NVRM version: 590.48.01\n" in marks.versions

    def test_an_empty_tree_is_a_look_too(self, tmp_path: Path) -> None:
        assert not read_marks(tmp_path).nodes
        assert set(read_marks(tmp_path).versions) == {None}

    def test_the_same_is_no_change(self, root: Path) -> None:
        before = read_marks(root)
        put(root, "dev/nvidia-uvm-tools")  # our own probe made it
        put(root, "dev/sda")
        assert not changes(before, read_marks(root))

    @pytest.mark.parametrize("node", ["nvidia1", "dri/renderD129", "nvidia-caps/nvidia-cap12", "accel/accel1", "dxg"])
    def test_a_node_that_comes_and_goes(self, root: Path, node: str) -> None:
        before = read_marks(root)
        put(root, f"dev/{node}")
        after = read_marks(root)
        assert changes(before, after) == changes(after, before) == {Cause.NODES}

    def test_a_driver_that_is_updated_loaded_or_unloaded(self, root: Path) -> None:
        before = read_marks(root)
        put(root, "proc/driver/nvidia/version", "NVRM version: 595.80\n")
        assert changes(before, read_marks(root)) == {Cause.DRIVER}
        put(root, "sys/module/amdgpu/srcversion", "ABC")
        loaded = read_marks(root)
        (root / "sys/module/amdgpu/srcversion").unlink()
        assert changes(loaded, read_marks(root)) == {Cause.DRIVER}


class TestSleep:
    def test_time_that_only_the_one_clock_counts_was_slept(self) -> None:
        awake, slept = 100.0, 0.0
        clock = SleepClock(lambda: awake + slept, lambda: awake)
        awake += 3600
        assert clock.slept_s() == 0.0
        awake, slept = awake + 5, slept + 7200
        assert clock.slept_s() == 7200
        assert clock.slept_s() == 0.0

    def test_less_than_a_second_is_the_machine_being_busy(self) -> None:
        ahead = 0.0
        clock = SleepClock(lambda: 10 + ahead, lambda: 10.0)
        for _ in range(100):
            ahead += 0.02
            assert clock.slept_s() == 0.0

    def test_without_such_a_clock_nothing_is_known(self) -> None:
        assert SleepClock(lambda: None, lambda: 1.0).slept_s() == 0.0

    def test_the_real_clocks_agree_while_nobody_sleeps(self) -> None:
        clock = SleepClock()
        assert boottime() is None or clock.slept_s() == 0.0

    def test_clk_1_a_wall_clock_that_jumps_is_no_sleep(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import time

        clock = SleepClock()
        now = time.time() + 3600
        monkeypatch.setattr(time, "time", lambda: now)
        assert clock.slept_s() == 0.0


class TestLostNodes:
    BEFORE = frozenset({"dev/nvidiactl", "dev/nvidia0", "dev/kfd", "dev/dri/renderD128"})

    def test_a_node_that_is_gone_while_the_driver_is_there(self, root: Path) -> None:
        (root / "dev/nvidia0").unlink()
        assert lost_nodes("cuda", self.BEFORE, root) == ("/dev/nvidia0",)
        assert lost_nodes("rocm", self.BEFORE, root) == ()

    def test_a_right_that_was_taken_back(self, root: Path) -> None:
        def refused(path: Path) -> None:
            assert path == root / "dev/nvidiactl"  # never a card's own node, which would wake it
            raise PermissionError(1, "Operation not permitted")

        assert lost_nodes("cuda", self.BEFORE, root, refused) == ("/dev/nvidiactl",)

    def test_a_driver_that_was_unloaded_is_another_story(self, root: Path) -> None:
        (root / "dev/nvidia0").unlink()
        (root / "proc/driver/nvidia/version").unlink()
        assert lost_nodes("cuda", self.BEFORE, root) == ()

    def test_nothing_is_lost_that_never_was_there(self, root: Path) -> None:
        assert lost_nodes("cuda", frozenset(), root) == ()
        assert lost_nodes("metal", self.BEFORE, root) == ()


class Told:
    def __init__(self) -> None:
        self.causes: list[frozenset[Cause]] = []
        self.arrived = asyncio.Event()

    def __call__(self, causes: frozenset[Cause]) -> None:
        self.causes.append(causes)
        self.arrived.set()

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.causes) < count:
                self.arrived.clear()
                await self.arrived.wait()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEBOUNCE_S", 0.02)
    monkeypatch.setattr(module, "GAP_S", 0.02)


async def looked(watcher: HotChangeWatcher) -> None:
    async with asyncio.timeout(5):
        while watcher._marks is None:
            await asyncio.sleep(0.001)


@pytest.mark.usefixtures("quick")
class TestWatcher:
    async def test_nodes_and_driver_are_told_together_and_once(self, root: Path) -> None:
        told = Told()
        watcher = HotChangeWatcher(told, root=root, tick_s=0.01)
        watcher.start()
        watcher.start()
        await looked(watcher)
        put(root, "dev/nvidia1")
        put(root, "proc/driver/nvidia/version", "NVRM version: 595.80\n")
        await told.wait(1)
        await asyncio.sleep(0.1)
        watcher.close()
        assert frozenset[Cause]().union(*told.causes) == {Cause.NODES, Cause.DRIVER}
        assert len(told.causes) <= 2  # a tick may have come between the two files

    async def test_a_sleep_is_told_with_its_cause(self, root: Path) -> None:
        told, slept = Told(), 5000.0
        watcher = HotChangeWatcher(told, root=root, tick_s=0.01, sleep=SleepClock(lambda: 10 + slept, lambda: 10.0))
        watcher.start()  # what it slept before nobody asked about
        await asyncio.sleep(0.05)
        assert told.causes == []
        slept += 60
        await told.wait(1)
        watcher.close()
        assert told.causes == [{Cause.RESUMED}]

    async def test_it_ends_when_nobody_listens(self, root: Path) -> None:
        wanted = True
        watcher = HotChangeWatcher(Told(), root=root, tick_s=0.01, wanted=lambda: wanted)
        watcher.start()
        assert watcher._loop is not None
        wanted = False
        async with asyncio.timeout(5):
            while watcher._loop is not None:
                await asyncio.sleep(0.001)

    async def test_closing_leaves_no_thread_and_says_nothing_more(self, root: Path) -> None:
        told = Told()
        watcher = HotChangeWatcher(told, root=root, tick_s=0.01)
        watcher.start()
        await looked(watcher)
        put(root, "dev/nvidia1")
        watcher.close()
        watcher.close()
        await asyncio.sleep(0.1)
        assert told.causes == []
        async with asyncio.timeout(5):
            while any("marks" in thread.name for thread in threading.enumerate()):
                await asyncio.sleep(0.001)

    def test_one_loop_after_another(self, root: Path) -> None:
        told: list[frozenset[Cause]] = []
        watcher = HotChangeWatcher(told.append, root=root, tick_s=0.01)

        async def once(node: str) -> None:
            watcher.start()
            await looked(watcher)
            put(root, f"dev/{node}")
            async with asyncio.timeout(5):
                while not told:
                    await asyncio.sleep(0.001)
            told.clear()

        asyncio.run(once("nvidia1"))  # ends without a close
        asyncio.run(once("nvidia2"))

    async def test_a_sandbox_without_netlink_still_compares(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(on_change: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(module, "UeventSocket", refused)
        watcher = HotChangeWatcher(Told())
        watcher.start()
        assert not watcher.hears_kernel
        await looked(watcher)
        watcher.close()

    async def test_a_storm_is_told_at_most_every_two_seconds(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "GAP_S", 60.0)
        told = Told()
        watcher = HotChangeWatcher(told, root=root, tick_s=60)
        watcher.start()
        for _ in range(50):
            watcher._note(Cause.KERNEL)
            await asyncio.sleep(0.002)
        watcher.close()
        assert told.causes == [{Cause.KERNEL}]
