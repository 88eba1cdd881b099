"""Readers of /proc, /sys and /etc over trees written for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurt.sources import host

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host of 754 GiB with 16 CPUs and no cgroup limits."""
    write(tmp_path, "proc/meminfo", "MemTotal: 790627904 kB\nMemFree: 1024 kB\nMemAvailable: 734003200 kB\n")
    write(tmp_path, "proc/self/status", "Name:\tpython\nCpus_allowed:\tffff\nCpus_allowed_list:\t0-15\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def memory_v2(root: Path, group: str, *, limit: str, current: int, inactive: int = 0) -> None:
    write(root, f"sys/fs/cgroup{group}/memory.max", f"{limit}\n")
    write(root, f"sys/fs/cgroup{group}/memory.current", f"{current}\n")
    write(root, f"sys/fs/cgroup{group}/memory.stat", f"anon 1\ninactive_file {inactive}\nactive_file 5\n")


class TestMemory:
    def test_host_without_limits(self, root: Path) -> None:
        budget = host.memory_budget(root)
        assert budget == host.HostMemory(790627904 * 1024, 700 * GIB, 700 * GIB, "meminfo")

    def test_kernel_without_an_estimate_of_its_own(self, tmp_path: Path) -> None:
        write(tmp_path, "proc/meminfo", "MemTotal: 4096 kB\nMemFree: 1024 kB\nBuffers: 256 kB\nCached: 512 kB\n")
        assert host.memory_budget(tmp_path).available_bytes == 1792 * 1024

    def test_cpu1_limit_of_the_own_group_with_reclaimable_cache(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/a\n")
        memory_v2(root, "/a", limit="96636764160", current=10 * GIB, inactive=3 * GIB)
        budget = host.memory_budget(root)
        assert budget.total_bytes == 96636764160
        assert budget.available_bytes == budget.usable_bytes == 96636764160 - 7 * GIB
        assert budget.source == "cgroup"

    def test_limit_larger_than_the_host(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/a\n")
        memory_v2(root, "/a", limit=str(2048 * GIB), current=10 * GIB)
        assert host.memory_budget(root).source == "meminfo"
        assert host.memory_budget(root).total_bytes == 790627904 * 1024

    @pytest.mark.parametrize("unlimited", ["max", "9223372036854771712", "-1", "18446744073709551615"])
    def test_cpu2_ways_to_write_unlimited(self, root: Path, unlimited: str) -> None:
        write(root, "proc/self/cgroup", "4:memory:/a\n0::/a\n")
        memory_v2(root, "/a", limit=unlimited, current=800 * GIB)
        write(root, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", unlimited)
        write(root, "sys/fs/cgroup/memory/a/memory.usage_in_bytes", str(800 * GIB))
        assert host.memory_budget(root) == host.HostMemory(790627904 * 1024, 700 * GIB, 700 * GIB, "meminfo")

    def test_cpu3_limit_and_usage_are_of_the_same_level(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/a/b\n")
        memory_v2(root, "", limit="max", current=700 * GIB)
        memory_v2(root, "/a", limit=str(90 * GIB), current=10 * GIB)
        memory_v2(root, "/a/b", limit="max", current=1 * GIB)
        budget = host.memory_budget(root)
        assert (budget.total_bytes, budget.available_bytes) == (90 * GIB, 80 * GIB)

    def test_tightest_level_wins_whatever_its_depth(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/a/b\n")
        memory_v2(root, "/a", limit=str(90 * GIB), current=80 * GIB)
        memory_v2(root, "/a/b", limit=str(40 * GIB), current=1 * GIB)
        budget = host.memory_budget(root)
        assert (budget.total_bytes, budget.available_bytes) == (40 * GIB, 10 * GIB)

    def test_full_group_has_nothing_left(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/a\n")
        memory_v2(root, "/a", limit=str(GIB), current=2 * GIB)
        assert host.memory_budget(root).available_bytes == 0

    def test_version_1(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "9:name=systemd:/\n4:memory:/docker/x\n1:cpu,cpuacct:/docker/x\n")
        write(root, "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", str(8 * GIB))
        write(root, "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes", str(5 * GIB))
        write(root, "sys/fs/cgroup/memory/docker/x/memory.stat", f"inactive_file 7\ntotal_inactive_file {2 * GIB}\n")
        budget = host.memory_budget(root)
        assert (budget.total_bytes, budget.available_bytes, budget.source) == (8 * GIB, 5 * GIB, "cgroup")

    def test_hybrid_reads_the_hierarchy_that_has_the_controller(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "4:memory:/a\n0::/a\n")
        write(root, "sys/fs/cgroup/unified/a/cgroup.procs", "1\n")
        write(root, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", str(8 * GIB))
        write(root, "sys/fs/cgroup/memory/a/memory.usage_in_bytes", str(1 * GIB))
        assert host.memory_budget(root).available_bytes == 7 * GIB

    def test_container_whose_mount_shows_its_own_group_at_the_top(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/kubepods/pod1/abc\n")
        memory_v2(root, "", limit=str(4 * GIB), current=1 * GIB)
        assert host.memory_budget(root).available_bytes == 3 * GIB

    @pytest.mark.parametrize("path", ["/../..", "/../sibling"])
    def test_group_outside_the_namespace(self, root: Path, path: str) -> None:
        write(root, "proc/self/cgroup", f"0::{path}\n")
        memory_v2(root, "", limit=str(4 * GIB), current=1 * GIB)
        assert host.memory_budget(root).available_bytes == 3 * GIB

    def test_configured_limit(self, root: Path) -> None:
        budget = host.memory_budget(root, 2 * GIB)
        assert budget == host.HostMemory(2 * GIB, 700 * GIB, 2 * GIB, "limit")
        assert host.memory_budget(root, 5000 * GIB) == host.memory_budget(root)

    def test_no_proc_at_all(self, tmp_path: Path) -> None:
        budget = host.memory_budget(tmp_path)
        assert budget.source == "psutil"
        assert 0 < budget.available_bytes <= budget.total_bytes

    def test_this_machine(self) -> None:
        budget = host.memory_budget()
        assert 0 < budget.usable_bytes <= budget.total_bytes
        assert budget.usable_bytes == budget.available_bytes


class TestCpus:
    def test_affinity(self, root: Path) -> None:
        assert host.cpu_count(root) == 16
        write(root, "proc/self/status", "Cpus_allowed_list:\t0-3,8,12-13\n")
        assert host.cpu_count(root) == 7

    @pytest.mark.parametrize(
        ("quota", "affinity", "expected"),
        [
            ("200000 100000", "0-15", 2),
            ("800000 100000", "0-1", 2),
            ("250000 100000", "0-15", 3),
            ("10000 100000", "0-15", 1),
            ("max 100000", "0-15", 16),
        ],
    )
    def test_cpu4_quota_and_affinity(self, root: Path, quota: str, affinity: str, expected: int) -> None:
        write(root, "proc/self/status", f"Cpus_allowed_list:\t{affinity}\n")
        write(root, "proc/self/cgroup", "0::/a/b\n")
        write(root, "sys/fs/cgroup/a/cpu.max", quota)
        write(root, "sys/fs/cgroup/a/b/cpu.max", "max 100000")
        assert host.cpu_count(root) == expected

    def test_quota_of_version_1(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "1:cpu,cpuacct:/a\n")
        write(root, "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "400000\n")
        write(root, "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n")
        assert host.cpu_count(root) == 4
        write(root, "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "-1\n")
        assert host.cpu_count(root) == 16

    @pytest.mark.parametrize(
        ("cpuinfo", "expected"),
        [
            (
                "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu sse4_2 avx "
                "avx2 avx512f\n\nprocessor\t: 1\nvendor_id\t: Other\n",
                host.CpuInfo("Intel(R) Xeon(R)", "intel", "avx512"),
            ),
            (
                "vendor_id\t: AuthenticAMD\nmodel name\t: AMD Ryzen\nflags\t: avx avx2\n",
                host.CpuInfo("AMD Ryzen", "amd", "avx2"),
            ),
        ],
    )
    def test_x86(self, root: Path, cpuinfo: str, expected: host.CpuInfo) -> None:
        write(root, "proc/cpuinfo", cpuinfo)
        assert host.cpu_info(root) == expected

    def test_arm_takes_its_name_from_the_device_tree(self, root: Path) -> None:
        write(root, "proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n")
        write(root, "proc/device-tree/model", "Raspberry Pi 5 Model B Rev 1.0\0")
        assert host.cpu_info(root) == host.CpuInfo("Raspberry Pi 5 Model B Rev 1.0", "arm", "neon")
        assert host.cpu_name(root) == "Raspberry Pi 5 Model B Rev 1.0"

    def test_unknown_processor_still_has_a_record(self, root: Path) -> None:
        info = host.cpu_info(root)
        assert info.name
        assert info.instruction_set


class TestIdentity:
    def test_boot_id(self, root: Path) -> None:
        assert host.boot_id(root) is None
        write(root, "proc/sys/kernel/random/boot_id", "221acdad-c11e-4dcd-8f92-000000000000\n")
        assert host.boot_id(root) == "221acdad-c11e-4dcd-8f92-000000000000"

    def test_fingerprint_is_of_the_machine_id_and_does_not_show_it(self, root: Path) -> None:
        write(root, "etc/machine-id", "0123456789abcdef0123456789abcdef\n")
        first = host.host_fingerprint(root)
        assert first == host.host_fingerprint(root)
        assert first not in "0123456789abcdef0123456789abcdef"
        assert len(first) == 16
        write(root, "etc/machine-id", "ffffffffffffffffffffffffffffffff\n")
        assert host.host_fingerprint(root) != first

    @pytest.mark.parametrize("contents", [None, ""])
    def test_fingerprint_without_machine_id(self, root: Path, contents: str | None) -> None:
        if contents is not None:
            write(root, "etc/machine-id", contents)
        assert host.host_fingerprint(root) == host.host_fingerprint(root)
        assert len(host.host_fingerprint(root)) == 16

    def test_numa_node_of_a_pci_device(self, root: Path) -> None:
        write(root, "sys/bus/pci/devices/0000:81:00.0/numa_node", "1\n")
        write(root, "sys/bus/pci/devices/000f:01:00.0/numa_node", "-1\n")
        assert host.pci_numa_node("00000000:81:00.0", root) == 1
        assert host.pci_numa_node("0000000f:01:00.0", root) is None
        assert host.pci_numa_node("00000000:01:00.0", root) is None
