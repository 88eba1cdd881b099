"""Recorded hosts as small tables, and the builders that make a directory tree of them.

Recorded are the KFD nodes of MI210 and Vega10 (ROCm/k8s-device-plugin `testdata`, unique ids included), the sizes of
Strix Halo and of Intel's cards (public reports). What they do not tell is made up after the kernel's own formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

KFD = "sys/class/kfd/kfd/topology/nodes"
DRM = "sys/class/drm"

Node = Mapping[str, int]

CPU: Node = {
    "cpu_cores_count": 64, "simd_count": 0, "mem_banks_count": 1, "simd_per_cu": 0, "array_count": 0,
    "cu_per_simd_array": 0, "device_id": 0, "location_id": 0, "drm_render_minor": 0, "gfx_target_version": 0,
    "max_engine_clk_ccompute": 3400,
}  # fmt: skip

MI210: Node = {
    "cpu_cores_count": 0, "simd_count": 416, "mem_banks_count": 1, "simd_per_cu": 4, "array_count": 8,
    "cu_per_simd_array": 14, "vendor_id": 4098, "device_id": 29711, "location_id": 768, "domain": 0,
    "drm_render_minor": 130, "hive_id": 0, "num_xcc": 1, "gfx_target_version": 90010, "max_engine_clk_fcompute": 1700,
    "local_mem_size": 0, "unique_id": 10645161697164847644,
}  # fmt: skip
MI210_UUID = "GPU-93bb3629c01aea1c"

VEGA10: Node = {  # Linux 4.18: no domain, no gfx_target_version, no num_xcc
    "cpu_cores_count": 0, "simd_count": 256, "mem_banks_count": 1, "simd_per_cu": 4, "array_count": 4,
    "cu_per_simd_array": 16, "vendor_id": 4098, "device_id": 26720, "location_id": 6400, "drm_render_minor": 128,
    "local_mem_size": 17163091968, "unique_id": 14073402507705256556,
}  # fmt: skip
VEGA10_BANK: Node = {"heap_type": 1, "size_in_bytes": 17163091968, "flags": 0, "width": 2048, "mem_clk_max": 945}
VEGA10_USED = 14102528

STRIX_HALO: Node = {
    "cpu_cores_count": 0, "simd_count": 80, "mem_banks_count": 1, "simd_per_cu": 2, "array_count": 4,
    "cu_per_simd_array": 10, "vendor_id": 4098, "device_id": 5510, "location_id": 50176, "domain": 0,
    "drm_render_minor": 128, "num_xcc": 1, "gfx_target_version": 110501, "max_engine_clk_fcompute": 2900,
    "local_mem_size": 0, "unique_id": 0,
}  # fmt: skip
STRIX_HALO_VRAM = 536870912
STRIX_HALO_GTT = 133143986176
STRIX_HALO_VRAM_USED = 155189248

XE_VRAM = 8522825728
"""Arc B580 class card under xe, as reported."""


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def lines(values: Mapping[str, object]) -> str:
    return "".join(f"{key} {value}\n" for key, value in values.items())


def kfd_node(
    root: Path,
    number: int,
    properties: Mapping[str, object],
    *banks: Mapping[str, object],
    name: str = "",
    gpu_id: int = 0,
    used: int | None = None,
) -> Path:
    """One node of the topology; ``used`` is what the first bank says is taken, where the driver tells it."""
    base = f"{KFD}/{number}"
    write(root, f"{base}/properties", lines(properties))
    write(root, f"{base}/name", f"{name}\n")
    write(root, f"{base}/gpu_id", f"{gpu_id}\n")
    for position, bank in enumerate(banks):
        write(root, f"{base}/mem_banks/{position}/properties", lines(bank))
    if used is not None:
        write(root, f"{base}/mem_banks/0/used_memory", f"{used}\n")
    return root / base


def card(
    root: Path,
    number: int,
    address: str,
    *,
    vendor: str,
    device: str,
    driver: str,
    files: Mapping[str, str | int] | None = None,
    render: int | None = None,
) -> Path:
    """One card with its PCI device, linked as the kernel does; ``files`` are below the PCI device."""
    bus = root / "sys/bus/pci/devices" / address
    base = f"sys/bus/pci/devices/{address}"
    write(root, f"{base}/vendor", f"{vendor}\n")
    write(root, f"{base}/device", f"{device}\n")
    write(root, f"{base}/class", "0x030000\n")
    write(root, f"{base}/uevent", f"DRIVER={driver}\nPCI_SLOT_NAME={address}\n")
    write(root, f"{base}/power/runtime_status", "active\n")
    for name, value in (files or {}).items():
        write(root, f"{base}/{name}", f"{value}\n")
    if render is not None:
        (bus / f"drm/renderD{render}").mkdir(parents=True)
        write(root, f"dev/dri/renderD{render}", "")
    directory = root / DRM / f"card{number}"
    directory.mkdir(parents=True)
    (directory / "device").symlink_to(bus, target_is_directory=True)
    return bus


def amd_card(
    root: Path, number: int, address: str, files: Mapping[str, str | int], *, device: str = "0x740f", render: int = 128
) -> Path:
    return card(root, number, address, vendor="0x1002", device=device, driver="amdgpu", files=files, render=render)


def mi210_host(root: Path) -> None:
    """Two NUMA nodes of a processor and one MI210 of 64 GiB, with sensors as a data-centre card has them."""
    size = 68702699520
    kfd_node(root, 0, CPU, {"heap_type": 0, "size_in_bytes": 270037725184})
    kfd_node(root, 1, CPU, {"heap_type": 0, "size_in_bytes": 270571073536})
    kfd_node(
        root, 2, MI210, {"heap_type": 1, "size_in_bytes": size, "width": 4096, "mem_clk_max": 1600},
        name="aldebaran", gpu_id=51145,
    )  # fmt: skip
    amd_card(
        root, 1, "0000:03:00.0",
        {
            "mem_info_vram_total": size, "mem_info_vram_used": 11735040, "mem_info_gtt_total": 270300000000,
            "mem_info_gtt_used": 15000000, "gpu_busy_percent": 3, "product_name": "AMD Instinct MI210",
            "serial_number": "692231000131", "unique_id": "93bb3629c01aea1c", "numa_node": 1,
            "pp_dpm_sclk": "0: 500Mhz\n1: 800Mhz *\n2: 1700Mhz",
            "hwmon/hwmon4/temp1_label": "edge", "hwmon/hwmon4/temp1_input": 46000,
            "hwmon/hwmon4/temp2_label": "junction", "hwmon/hwmon4/temp2_input": 51000,
            "hwmon/hwmon4/power1_average": 67000000, "hwmon/hwmon4/freq1_input": 800000000,
        },
        render=130,
    )  # fmt: skip
    write(root, "dev/kfd", "")


def strix_halo_host(root: Path, *, vram: int = STRIX_HALO_VRAM, gtt: int = STRIX_HALO_GTT) -> None:
    """A processor with an integrated GPU (gfx1151), whose memory is the host's."""
    write(root, "proc/meminfo", "MemTotal: 131072000 kB\nMemFree: 1024 kB\nMemAvailable: 118566368 kB\n")
    kfd_node(root, 0, {**CPU, "cpu_cores_count": 32}, {"heap_type": 0, "size_in_bytes": 134217728000})
    kfd_node(root, 1, STRIX_HALO, {"heap_type": 1, "size_in_bytes": vram}, name="ip discovery", gpu_id=1234)
    amd_card(
        root, 0, "0000:c4:00.0",
        {
            "mem_info_vram_total": vram, "mem_info_vram_used": STRIX_HALO_VRAM_USED, "mem_info_gtt_total": gtt,
            "mem_info_gtt_used": 1073741824, "gpu_busy_percent": 0,
            "hwmon/hwmon3/in0_label": "vddgfx", "hwmon/hwmon3/in1_label": "vddnb",
            "hwmon/hwmon3/temp1_label": "edge", "hwmon/hwmon3/temp1_input": 35000,
            "hwmon/hwmon3/power1_average": 11170000,
        },
        device="0x1586",
    )  # fmt: skip
    write(root, "dev/kfd", "")


def partitioned_host(root: Path, *, scheme: str, parts: int = 4) -> None:
    """One MI300X cut into ``parts``, numbered in the ``function`` of the PCI address or in the ``top bits`` of it."""
    kfd_node(root, 0, CPU, {"heap_type": 0, "size_in_bytes": 270037725184})
    for part in range(parts):
        location = 0x0500 | part if scheme == "function" else 0x0500 | part << 28
        properties = {
            **MI210, "device_id": 0x74A1, "simd_count": 304, "gfx_target_version": 90402, "location_id": location,
            "drm_render_minor": 128 + part, "unique_id": 0xABCDEF0123456789,
        }  # fmt: skip
        kfd_node(
            root, 1 + part, properties, {"heap_type": 1, "size_in_bytes": 51539607552}, gpu_id=100 + part, used=part
        )
    amd_card(
        root, 0, "0000:05:00.0",
        {
            "mem_info_vram_total": 206158430208, "mem_info_vram_used": 4096, "gpu_busy_percent": 50,
            "current_compute_partition": "QPX", "current_memory_partition": "NPS1",
            "hwmon/hwmon1/temp1_input": 40000, "hwmon/hwmon1/power1_input": 140000000,
        },
        device="0x74a1",
    )  # fmt: skip
    for part in range(1, parts):
        write(root, f"dev/dri/renderD{128 + part}", "")
    write(root, "dev/kfd", "")


def intel_host(root: Path) -> None:
    """An integrated GPU and a card under xe."""
    write(root, "proc/meminfo", "MemTotal: 33554432 kB\nMemFree: 1024 kB\nMemAvailable: 16777216 kB\n")
    card(
        root, 0, "0000:00:02.0", vendor="0x8086", device="0x46a6", driver="i915", render=128,
        files={"hwmon/hwmon5/energy1_input": 123456789},
    )  # fmt: skip
    write(root, f"{DRM}/card0/gt/gt0/rps_act_freq_mhz", "300\n")
    write(root, f"{DRM}/card0/gt_RP0_freq_mhz", "1300\n")
    card(
        root, 1, "0000:03:00.0", vendor="0x8086", device="0xe20b", driver="xe", render=129,
        files={
            "tile0/physical_vram_size_bytes": XE_VRAM, "tile0/gt0/freq0/act_freq": 0, "tile0/gt0/freq0/rp0_freq": 2850,
            "hwmon/hwmon6/temp2_label": "pkg", "hwmon/hwmon6/temp2_input": 41000,
            "hwmon/hwmon6/temp3_label": "vram", "hwmon/hwmon6/temp3_input": 44000,
        },
    )  # fmt: skip
