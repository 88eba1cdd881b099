"""NUMA nodes, huge pages, and what processors are called and can do. Names of tests carry the case that they stand
for."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurt.sources import host

GIB = 1 << 30
NODE = "sys/devices/system/node"


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def node(root: Path, number: int, cpus: str, size: int, free: int, distance: str = "10 80") -> None:
    lines = f"Node {number} MemTotal:  {size >> 10} kB\nNode {number} MemFree:  {free >> 10} kB\n"
    write(root, f"{NODE}/node{number}/meminfo", lines)
    write(root, f"{NODE}/node{number}/cpulist", f"{cpus}\n")
    write(root, f"{NODE}/node{number}/distance", f"{distance}\n")


@pytest.fixture
def hopper(tmp_path: Path) -> Path:
    """Grace Hopper: 480 GiB of the processor's, and the GPU's 96 GiB as a node without CPUs, both in MemTotal."""
    total, available = 576 * GIB, 500 * GIB
    write(tmp_path, "proc/meminfo", f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\n")
    node(tmp_path, 0, "0-71", 480 * GIB, 400 * GIB)
    node(tmp_path, 1, "", 96 * GIB, 90 * GIB, "80 10")
    return tmp_path


class TestNodes:
    def test_nodes(self, hopper: Path) -> None:
        inventory = host.numa_nodes(hopper)
        assert inventory.skipped == ()
        assert inventory.nodes == (
            host.NumaNode(0, frozenset(range(72)), 480 * GIB, 400 * GIB, (10, 80)),
            host.NumaNode(1, frozenset(), 96 * GIB, 90 * GIB, (80, 10)),
        )

    def test_nvf13_gpus_node_is_not_the_hosts_memory(self, hopper: Path) -> None:
        budget = host.memory_budget(hopper, device_memory_bytes=[96 * GIB])
        assert budget.total_bytes == 480 * GIB
        assert budget.available_bytes == 410 * GIB
        assert host.memory_budget(hopper).total_bytes == 576 * GIB  # nobody said that there is such a device

    def test_nvf13_driver_keeps_a_little_for_itself(self, hopper: Path) -> None:
        assert host.memory_budget(hopper, device_memory_bytes=[97871 << 20]).total_bytes == 480 * GIB

    def test_nvf13_memory_without_cpus_of_another_size_is_the_hosts(self, hopper: Path) -> None:
        node(hopper, 2, "", 256 * GIB, 256 * GIB)
        nodes = host.numa_nodes(hopper).nodes
        assert [n.number for n in host.device_nodes(hopper, nodes, [96 * GIB])] == [1]
        assert host.device_nodes(hopper, nodes, [24 * GIB]) == ()
        assert host.device_nodes(hopper, nodes, []) == ()

    def test_nvf13_each_device_takes_one_node(self, hopper: Path) -> None:
        node(hopper, 2, "", 96 * GIB, 96 * GIB)
        nodes = host.numa_nodes(hopper).nodes
        assert [n.number for n in host.device_nodes(hopper, nodes, [96 * GIB])] == [1]
        assert [n.number for n in host.device_nodes(hopper, nodes, [96 * GIB] * 2)] == [1, 2]

    def test_nvf13_node_that_the_driver_names(self, hopper: Path) -> None:
        node(hopper, 2, "", 96 * GIB, 96 * GIB)
        write(hopper, "proc/driver/nvidia/gpus/0009:01:00.0/numa_status", "Node: 2\nStatus: online\n")
        nodes = host.numa_nodes(hopper).nodes
        assert [n.number for n in host.device_nodes(hopper, nodes, [96 * GIB])] == [2]

    def test_a_node_with_cpus_is_the_hosts(self, hopper: Path) -> None:
        assert host.memory_budget(hopper, device_memory_bytes=[480 * GIB]).total_bytes == 576 * GIB

    def test_no_nodes_at_all(self, tmp_path: Path) -> None:
        assert host.numa_nodes(tmp_path) == host.NumaInventory()

    @pytest.mark.parametrize(
        ("file", "text", "field"),
        [
            ("cpulist", "0-x", "cpus"),
            ("cpulist", "9-3", "cpus"),
            ("meminfo", "Node 1 MemTotal: much kB\nNode 1 MemFree: 5 kB\n", "memory_total_bytes"),
            ("meminfo", "Node 1 MemTotal: 4 kB\nNode 1 MemFree: 5 kB\n", "memory_free_bytes"),
            ("distance", "10 far", "distances"),
        ],
    )
    def test_one_broken_file_costs_one_field(self, hopper: Path, file: str, text: str, field: str) -> None:
        write(hopper, f"{NODE}/node1/{file}", text)
        inventory = host.numa_nodes(hopper)
        assert getattr(inventory.nodes[1], field) is None
        assert inventory.nodes[1].unavailable == {field: "invalid"}
        assert [skipped.where for skipped in inventory.skipped] == [f"{NODE}/node1/{file}"]

    def test_a_node_of_which_nothing_is_told(self, tmp_path: Path) -> None:
        (tmp_path / NODE / "node3").mkdir(parents=True)
        write(tmp_path, f"{NODE}/node03/cpulist", "0\n")
        (found,) = host.numa_nodes(tmp_path).nodes
        assert found.number == 3
        assert set(found.unavailable.values()) == {"unsupported"}
        assert len(found.unavailable) == 4

    def test_this_machine(self) -> None:
        inventory = host.numa_nodes()
        assert inventory.skipped == ()
        assert all(found.memory_total_bytes for found in inventory.nodes)


class TestHugePages:
    def test_pools_and_the_transparent_ones(self, tmp_path: Path) -> None:
        base = "sys/kernel/mm"
        for size, total, free in ((1048576, 4, 4), (2048, 512, 500)):
            for name, count in (("nr", total), ("free", free), ("resv", 0)):
                write(tmp_path, f"{base}/hugepages/hugepages-{size}kB/{name}_hugepages", f"{count}\n")
        write(tmp_path, f"{base}/transparent_hugepage/enabled", "always [madvise] never\n")
        assert host.huge_pages(tmp_path) == host.HugePages(
            (host.HugePagePool(2 << 20, 512, 500, 0), host.HugePagePool(GIB, 4, 4, 0)), "madvise"
        )

    def test_none(self, tmp_path: Path) -> None:
        assert host.huge_pages(tmp_path) == host.HugePages()

    def test_nonsense(self, tmp_path: Path) -> None:
        base = "sys/kernel/mm"
        write(tmp_path, f"{base}/hugepages/hugepages-2048kB/nr_hugepages", "many")
        write(tmp_path, f"{base}/hugepages/hugepages-kB/nr_hugepages", "1")
        write(tmp_path, f"{base}/transparent_hugepage/enabled", "sometimes")
        found = host.huge_pages(tmp_path)
        assert found.pools == (host.HugePagePool(2 << 20, None, None, None),)
        assert found.transparent is None
        assert len(found.skipped) == 3


ZEN4 = (
    "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9654 96-Core Processor\nflags\t\t: fpu lm cx16 "
    "lahf_lm popcnt pni sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave avx512f avx512bw avx512cd "
    "avx512dq avx512vl avx512_bf16\n\n"
)
GRACE = "processor\t: 0\nFeatures\t: fp asimd sve sve2 bf16 i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\n"
ASAHI = "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x61\nCPU part\t: 0x032\n\n"
PI_1 = "processor\t: 0\nFeatures\t: half thumb\nCPU implementer\t: 0x41\nCPU part\t: 0xb76\nHardware\t: BCM2835\n\n"
RISCV = "processor\t: 0\nhart\t\t: 0\nisa\t\t: rv64imafdcv_zicbom_zba\nuarch\t\t: spacemit,x60\n\n"
POWER = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\n\n"


class TestProcessors:
    @pytest.mark.parametrize(
        ("cpuinfo", "info", "architecture"),
        [
            (ZEN4, host.CpuInfo("AMD EPYC 9654 96-Core Processor", "amd", "avx512"), "x86_64"),
            (GRACE, host.CpuInfo("Neoverse-V2", "arm", "sve2"), "arm64"),
            (RISCV, host.CpuInfo("spacemit,x60", "unknown", "rvv"), "riscv64"),
            (POWER, host.CpuInfo("POWER9, altivec supported", "unknown", "ppc64"), "ppc64"),
            (PI_1, host.CpuInfo("BCM2835", "arm", "arm"), "arm"),
        ],
    )
    def test_names(self, tmp_path: Path, cpuinfo: str, info: host.CpuInfo, architecture: str) -> None:
        write(tmp_path, "proc/cpuinfo", cpuinfo)
        assert host.cpu_info(tmp_path) == info
        assert host.cpu_features(tmp_path).architecture == architecture

    def test_apple_under_linux(self, tmp_path: Path) -> None:
        write(tmp_path, "proc/cpuinfo", ASAHI)
        write(tmp_path, "proc/device-tree/model", "Apple MacBook Pro (14-inch, M1 Pro, 2021)\0")
        assert host.cpu_info(tmp_path) == host.CpuInfo("Apple MacBook Pro (14-inch, M1 Pro, 2021)", "apple", "neon")

    @pytest.mark.parametrize(
        ("drop", "level"),
        [
            (None, "x86-64-v4"),
            ("avx512vl", "x86-64-v3"),
            ("movbe", "x86-64-v2"),  # what comes after is not looked at
            ("ssse3", "x86-64-v1"),
        ],
    )
    def test_levels_of_x86(self, tmp_path: Path, drop: str | None, level: str) -> None:
        write(tmp_path, "proc/cpuinfo", ZEN4.replace(f" {drop}", ""))
        features = host.cpu_features(tmp_path)
        assert features.level == level
        assert features.flags is not None
        assert "avx512_bf16" in features.flags
        assert drop not in features.flags

    def test_arm_has_no_levels(self, tmp_path: Path) -> None:
        write(tmp_path, "proc/cpuinfo", GRACE)
        features = host.cpu_features(tmp_path)
        assert (features.flags, features.level) == (frozenset({"fp", "asimd", "sve", "sve2", "bf16", "i8mm"}), None)

    def test_apple_under_macos(self, tmp_path: Path) -> None:
        told = {"machdep.cpu.brand_string": "Apple M4 Max", "hw.optional.arm.FEAT_BF16": "1",
                "hw.optional.arm.AdvSIMD": "\x01", "hw.optional.arm.FEAT_SME": "0"}  # fmt: skip
        info = host.cpu_info(tmp_path, told.get)
        assert (info.name, info.vendor, info.instruction_set) == ("Apple M4 Max", "apple", "neon")
        assert host.cpu_features(tmp_path, told.get).flags == {"bf16", "asimd"}

    def test_intel_under_macos(self, tmp_path: Path) -> None:
        told = {
            "machdep.cpu.brand_string": "Intel(R) Core(TM) i9-9980HK CPU @ 2.40GHz",
            "machdep.cpu.features": "FPU SSE3 SSE4.2 AVX1.0",
            "machdep.cpu.leaf7_features": "BMI1 AVX2",
        }
        info = host.cpu_info(tmp_path, told.get)
        assert info == host.CpuInfo("Intel(R) Core(TM) i9-9980HK CPU @ 2.40GHz", "intel", "avx2")
        assert host.cpu_features(tmp_path, told.get).flags == {"fpu", "pni", "sse4_2", "avx", "bmi1", "avx2"}

    def test_nothing_told(self, tmp_path: Path) -> None:
        features = host.cpu_features(tmp_path, {}.get)
        assert (features.flags, features.level) == (None, None)
        assert features.architecture
        assert host.cpu_info(tmp_path, {}.get).name

    def test_this_machine(self) -> None:
        assert host.cpu_info().name
        assert host.cpu_features().flags

    @pytest.mark.parametrize("address", ["", "garbage", "0:1", "zz:00:00.0", "00000000:81:00.0"])
    def test_node_of_a_device_that_is_not_there(self, tmp_path: Path, address: str) -> None:
        assert host.pci_numa_node(address, tmp_path) is None
