"""Control groups in every arrangement, CPUs that may be used, and files that make no sense. Names of tests carry the
case that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurt.sources import host

GIB = 1 << 30
HOST = 754 * GIB
CHILD = "sys/fs/cgroup/memory"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host of 754 GiB with 16 CPUs and no cgroup limits."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {HOST >> 10} kB\nMemFree: 1024 kB\nMemAvailable: {700 << 20} kB\n")
    write(tmp_path, "proc/self/status", "Name:\tpython\nCpus_allowed:\tffff\nCpus_allowed_list:\t0-15\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def mounts(root: Path, *lines: str) -> None:
    """``/proc/self/mountinfo``: a line is root, mount point, type, and options of the file system."""
    rows = []
    for i, line in enumerate(lines):
        top, point, kind, options = line.split()
        rows.append(f"{30 + i} 25 0:{26 + i} {top} {point} rw,nosuid shared:9 - {kind} {kind} rw,{options}")
    write(root, "proc/self/mountinfo", "25 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + "\n".join(rows) + "\n")


def limit_v1(root: Path, group: str, limit: int, usage: int, stat: str = "") -> None:
    write(root, f"{CHILD}{group}/memory.limit_in_bytes", f"{limit}\n")
    write(root, f"{CHILD}{group}/memory.usage_in_bytes", f"{usage}\n")
    write(root, f"{CHILD}{group}/memory.stat", stat)


class TestMounts:
    def test_cpu1_group_inside_a_container_that_shows_the_hosts_paths(self, root: Path) -> None:
        """Without knowing what lies at the mount point, the child's own limit would not be found."""
        write(root, "proc/self/cgroup", "4:memory:/docker/abc/child\n")
        mounts(root, "/docker/abc /sys/fs/cgroup/memory cgroup memory")
        limit_v1(root, "", 8 * GIB, 3 * GIB)
        limit_v1(root, "/child", 2 * GIB, GIB)
        budget = host.memory_budget(root)
        assert (budget.total_bytes, budget.available_bytes, budget.source) == (2 * GIB, GIB, "cgroup")
        assert budget.skipped == ()

    def test_nested_groups_of_version_2_in_a_container(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/kubepods/pod1/abc/a/b\n")
        mounts(root, "/kubepods/pod1/abc /sys/fs/cgroup cgroup2 nsdelegate")
        write(root, "sys/fs/cgroup/a/memory.max", str(4 * GIB))
        write(root, "sys/fs/cgroup/a/memory.current", str(GIB))
        write(root, "sys/fs/cgroup/a/b/memory.max", "max")
        assert host.memory_budget(root).available_bytes == 3 * GIB

    def test_mounted_somewhere_else_with_blanks_in_the_name(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "4:memory:/a\n0::/a\n")
        mounts(root, r"/ /mnt/c\040groups cgroup memory", "/ /sys/fs/cgroup/unified cgroup2 nsdelegate")
        write(root, "mnt/c groups/a/memory.limit_in_bytes", str(GIB))
        write(root, "mnt/c groups/a/memory.usage_in_bytes", "0")
        assert host.memory_budget(root).total_bytes == GIB

    def test_best_of_two_mounts_is_the_one_that_shows_more_levels(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "4:memory:/pod/abc\n")
        mounts(root, "/pod/abc /inner cgroup memory", "/ /outer cgroup memory")
        write(root, "inner/memory.limit_in_bytes", str(8 * GIB))
        write(root, "outer/pod/memory.limit_in_bytes", str(4 * GIB))
        write(root, "outer/pod/abc/memory.limit_in_bytes", str(8 * GIB))
        assert host.memory_budget(root).total_bytes == 4 * GIB

    def test_group_outside_of_what_is_mounted_ends_at_the_mount_point(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "4:memory:/system.slice/x\n")
        mounts(root, "/docker/abc /sys/fs/cgroup/memory cgroup memory")
        limit_v1(root, "", 4 * GIB, GIB)
        assert host.memory_budget(root).available_bytes == 3 * GIB

    def test_limit_above_what_a_container_sees(self, root: Path) -> None:
        """Version 1 tells the tightest limit of all levels, those outside of the container included."""
        write(root, "proc/self/cgroup", "4:memory:/docker/abc\n")
        mounts(root, "/docker/abc /sys/fs/cgroup/memory cgroup memory")
        limit_v1(root, "", 9223372036854771712, GIB, f"hierarchical_memory_limit {6 * GIB}\ntotal_inactive_file 0\n")
        budget = host.memory_budget(root)
        assert (budget.total_bytes, budget.available_bytes) == (6 * GIB, 5 * GIB)

    def test_hybrid_with_the_controller_in_version_1_only(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "3:cpuset,cpu:/a\n0::/a\n")
        mounts(root, "/ /sys/fs/cgroup/cpu cgroup cpuset,cpu", "/ /sys/fs/cgroup/unified cgroup2 nsdelegate")
        write(root, "sys/fs/cgroup/unified/a/cgroup.procs", "1\n")
        write(root, "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "300000\n")
        write(root, "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n")
        write(root, "sys/fs/cgroup/cpu/a/cpuset.cpus", "0-7\n")
        budget = host.cpu_budget(root)
        assert (budget.count, budget.allowed, budget.quota, budget.source) == (3, 8, 3.0, "quota")


class TestCpus:
    def test_cpu4_affinity_and_quota_in_one_record(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/a\n")
        write(root, "sys/fs/cgroup/a/cpu.max", "200000 100000\n")
        assert host.cpu_budget(root) == host.CpuBudget(2, 16, 2.0, "quota")
        write(root, "sys/fs/cgroup/a/cpu.max", "800000 100000\n")
        write(root, "proc/self/status", "Cpus_allowed_list:\t0-1\n")
        assert host.cpu_budget(root) == host.CpuBudget(2, 2, 8.0, "affinity")

    def test_cpu4_tightest_quota_of_all_levels(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/a/b\n")
        write(root, "sys/fs/cgroup/a/cpu.max", "150000 100000\n")
        write(root, "sys/fs/cgroup/a/b/cpu.max", "800000 100000\n")
        assert host.cpu_budget(root) == host.CpuBudget(2, 16, 1.5, "quota")

    def test_set_of_cpus_of_the_group(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/a/b\n")
        write(root, "sys/fs/cgroup/a/cpuset.cpus.effective", "0-3,8\n")
        write(root, "sys/fs/cgroup/a/b/cpuset.cpus.effective", "\n")
        assert host.cpu_budget(root) == host.CpuBudget(5, 5, None, "cpuset")

    def test_cpus_that_are_not_plugged_in_do_not_count(self, root: Path) -> None:
        write(root, "proc/self/status", "Cpus_allowed_list:\t0-127\n")
        write(root, "sys/devices/system/cpu/online", "0-7\n")
        assert host.cpu_count(root) == 8

    def test_nothing_told(self, tmp_path: Path) -> None:
        budget = host.cpu_budget(tmp_path)
        assert budget.source == "os"
        assert budget.count >= 1

    def test_this_machine(self) -> None:
        budget = host.cpu_budget()
        assert 1 <= budget.count <= budget.allowed
        assert budget.skipped == ()


class TestNonsense:
    @pytest.mark.parametrize("text", ["garbage", "-7", "1e9", "0x", "12 34", "\N{ARABIC-INDIC DIGIT FIVE}"])
    def test_limit_that_is_none_is_said_and_not_counted(self, root: Path, text: str) -> None:
        write(root, "proc/self/cgroup", "0::/a\n")
        write(root, "sys/fs/cgroup/a/memory.max", text)
        budget = host.memory_budget(root)
        assert budget.total_bytes == HOST
        assert [skipped.where for skipped in budget.skipped] == ["sys/fs/cgroup/a/memory.max"]

    def test_limit_without_a_usage_still_bounds(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/a\n")
        write(root, "sys/fs/cgroup/a/memory.max", str(4 * GIB))
        write(root, "sys/fs/cgroup/a/memory.current", "lots")
        budget = host.memory_budget(root)
        assert (budget.total_bytes, budget.available_bytes) == (4 * GIB, 4 * GIB)
        assert budget.skipped[0].where == "sys/fs/cgroup/a/memory.current"

    @pytest.mark.parametrize("text", ["", "x", "0 0", "100000", "-5 100000", "200000 0", "0 100000", "max max max"])
    def test_quota_that_is_none_limits_nothing(self, root: Path, text: str) -> None:
        write(root, "proc/self/cgroup", "0::/a\n")
        write(root, "sys/fs/cgroup/a/cpu.max", text)
        budget = host.cpu_budget(root)
        assert (budget.count, budget.quota) == (16, None)
        assert len(budget.skipped) == bool(text)

    @pytest.mark.parametrize("line", ["garbage", "0:", "x::/a", "0::a", f"0::/{'x' * 5000}", "a\0b"])
    def test_group_that_is_none_is_said(self, root: Path, line: str) -> None:
        write(root, "proc/self/cgroup", f"{line}\n0::/a\n")
        write(root, "sys/fs/cgroup/a/memory.max", str(GIB))
        budget = host.memory_budget(root)
        assert budget.total_bytes == GIB
        assert [skipped.where for skipped in budget.skipped] == ["proc/self/cgroup"]

    def test_name_that_no_file_system_takes(self, root: Path) -> None:
        write(root, "proc/self/cgroup", f"0::/{'x' * 300}/a\n")
        write(root, "sys/fs/cgroup/memory.max", str(GIB))
        assert host.memory_budget(root).total_bytes == GIB

    def test_affinity_that_no_machine_has(self, root: Path) -> None:
        write(root, "proc/self/status", "Cpus_allowed_list:\t0-99999999999\n")
        budget = host.cpu_budget(root)
        assert budget.source == "os"
        assert budget.skipped[0].where == "proc/self/status"

    def test_meminfo_that_makes_no_sense(self, tmp_path: Path) -> None:
        write(tmp_path, "proc/meminfo", "MemTotal: much kB\nMemAvailable: -5 kB\n")
        budget = host.memory_budget(tmp_path)
        assert budget.source == "psutil"
        assert budget.skipped[0].where == "proc/meminfo"
        assert budget.total_bytes > 0

    def test_file_that_is_a_directory(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/a\n")
        (root / "sys/fs/cgroup/a/memory.max").mkdir(parents=True)
        budget = host.memory_budget(root)
        assert budget.total_bytes == HOST
        assert budget.skipped[0].why == "cannot be read: error"
