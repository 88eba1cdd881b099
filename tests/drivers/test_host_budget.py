"""What a driver over host memory may give out, on a host made of files."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from gpurt.backends.host_budget import HostBudget
from gpurt.sources import host

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    describe(tmp_path, available=600)
    return tmp_path


def describe(root: Path, *, available: int) -> None:
    (root / "proc").mkdir(exist_ok=True)
    lines = (f"MemTotal: {1024 * 1024} kB", f"MemFree: {available * 1024} kB", f"MemAvailable: {available * 1024} kB")
    (root / "proc/meminfo").write_text("\n".join(lines) + "\n")


@pytest.fixture(autouse=True)
def resident(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that this process occupies, as the budget hears."""
    occupied = [100 * MIB]
    monkeypatch.setattr(host, "resident_bytes", lambda: occupied[0])
    return occupied


def test_what_is_given_out_counts_before_it_is_touched(root: Path) -> None:
    budget = HostBudget("toy", root=root)
    assert budget.reading(0) == (1024 * MIB, 600 * MIB)
    budget.take(0, 400 * MIB)
    assert budget.reading(0) == (1024 * MIB, 200 * MIB)
    with pytest.raises(MemoryError, match=r"209,715,201 bytes asked for on toy:0, and 209,715,200 of"):
        budget.take(0, 200 * MIB + 1)
    budget.take(0, 200 * MIB)
    budget.give_back(0, 600 * MIB)
    assert budget.reading(0) == (1024 * MIB, 600 * MIB)


def test_what_we_touched_is_not_counted_twice(root: Path, resident: list[int]) -> None:
    budget = HostBudget("toy", root=root)
    budget.take(0, 400 * MIB)
    resident[0] += 400 * MIB
    describe(root, available=200)
    assert budget.reading(0) == (1024 * MIB, 200 * MIB)


def test_what_others_take_is_seen_and_never_negative(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = HostBudget("toy", root=root)
    budget.take(0, 400 * MIB)
    describe(root, available=100)
    assert budget.reading(0) == (1024 * MIB, 200 * MIB), "that of a moment ago"
    later = time.monotonic() + 1
    monkeypatch.setattr("gpurt.backends.host_budget.time.monotonic", lambda: later)
    assert budget.reading(0) == (1024 * MIB, 0)
    with pytest.raises(MemoryError, match="and 0 of this host's memory"):
        budget.take(0, 1)


def test_old_reading_does_not_refuse_what_is_there_now(root: Path) -> None:
    budget = HostBudget("toy", root=root)
    describe(root, available=10)
    with pytest.raises(MemoryError):
        budget.take(0, 20 * MIB)
    describe(root, available=600)
    budget.take(0, 20 * MIB)


def test_devices_share_equally(root: Path) -> None:
    budget = HostBudget("toy", devices=2, root=root)
    assert budget.reading(1) == (512 * MIB, 300 * MIB)
    budget.take(0, 300 * MIB)
    budget.take(1, 300 * MIB)
    with pytest.raises(MemoryError, match="toy:1"):
        budget.take(1, 1)


def test_reset_forgets(root: Path) -> None:
    budget = HostBudget("toy", root=root)
    budget.take(0, 600 * MIB)
    budget.reset()
    assert budget.reading(0) == (1024 * MIB, 600 * MIB)


def test_threads_do_not_overshoot_together(root: Path) -> None:
    budget = HostBudget("toy", root=root)
    given: list[int] = []

    def grab() -> None:
        for _ in range(100):
            try:
                budget.take(0, 5 * MIB)
            except MemoryError:
                return
            given.append(1)

    threads = [threading.Thread(target=grab) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(given) == 120
