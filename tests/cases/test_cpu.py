"""Limits of control groups on the processor's record. Names carry the case."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurt.sources import host
from tests.sources.trees import write

GIB = 1 << 30
HOST = 810154872832


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", f"MemTotal: {HOST >> 10} kB\nMemFree: 9 kB\nMemAvailable: {700 << 20} kB\n")
    write(tmp_path, "proc/self/status", "Cpus_allowed_list:\t0-15\n")
    return tmp_path


def group(root: Path, name: str, limit: object, current: int, inactive: int = 0) -> None:
    base = f"sys/fs/cgroup{name}"
    write(root, f"{base}/memory.max", f"{limit}\n")
    write(root, f"{base}/memory.current", f"{current}\n")
    write(root, f"{base}/memory.stat", f"inactive_file {inactive}\n")


def test_cpu_1_a_containers_limit_is_what_there_is(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/a\n")
    group(root, "/a", 96636764160, 10 * GIB, 2 * GIB)
    budget = host.memory_budget(root)
    assert (budget.total_bytes, budget.available_bytes) == (96636764160, 96636764160 - 8 * GIB)
    write(root, "proc/meminfo", f"MemTotal: {HOST >> 10} kB\nMemAvailable: {5 << 20} kB\n")
    assert host.memory_budget(root).available_bytes == 5 * GIB


@pytest.mark.parametrize("unlimited", ["max", "9223372036854771712", "-1"])
def test_cpu_2_no_limit_is_no_number(root: Path, unlimited: str) -> None:
    write(root, "proc/self/cgroup", "4:memory:/a\n" if unlimited != "max" else "0::/a\n")
    group(root, "/a", unlimited, GIB)
    for name, value in (("limit_in_bytes", unlimited), ("usage_in_bytes", str(GIB))):
        write(root, f"sys/fs/cgroup/memory/a/memory.{name}", f"{value}\n")
    budget = host.memory_budget(root)
    assert (budget.total_bytes, budget.available_bytes, budget.source) == (HOST >> 10 << 10, 700 * GIB, "meminfo")


def test_cpu_3_limit_and_usage_are_of_one_level(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/child\n")
    group(root, "", "max", 700 * GIB)
    group(root, "/child", 90 * GIB, 10 * GIB)
    assert host.memory_budget(root).available_bytes == 80 * GIB


@pytest.mark.parametrize(("quota", "allowed"), [("200000 100000", "0-15"), ("800000 100000", "0-1")])
def test_cpu_4_threads_are_the_smaller_of_quota_and_affinity(root: Path, quota: str, allowed: str) -> None:
    write(root, "proc/self/status", f"Cpus_allowed_list:\t{allowed}\n")
    write(root, "proc/self/cgroup", "0::/a\n")
    write(root, "sys/fs/cgroup/a/cpu.max", f"{quota}\n")
    assert host.cpu_count(root) == 2
