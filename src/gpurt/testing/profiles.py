"""What real devices are like, for devices that do not exist: the table behind the simulated driver.

Figures are the vendors' own, dense (without sparsity), one direction for links, 10^9 bytes per second; memory is
what the driver reports, which is less than what the box says. A figure that no vendor publishes says so; sensors are
plausible idle readings, and latencies other than NVIDIA's are estimates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from gpurt.types import DeviceKind

MIB = 1 << 20
GIB = 1 << 30
MAX_DEVICES = 1024
"""The most devices that one specification may name: a typing slip must not build a million records."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One model of device. Bandwidths in GB/s, rates in TFLOPS, None where the device has no such thing."""

    key: str
    """Its name in a specification: ``h100``."""
    name: str
    vendor: str
    memory_bytes: int
    memory_bandwidth_gbps: float
    host_link_gbps: float
    """Between host memory and the device, one direction."""
    latency_s: float
    """What the smallest copy costs."""
    fp16_tflops: float
    fp32_tflops: float
    compute_capability: str | None
    compute_units: int
    tensor_core_count: int
    clock_mhz: int
    max_threads_per_block: int
    peer_link_gbps: float | None = None
    """To another device of the same model, one direction; None: copies go through the host."""
    unified_memory: bool = False
    kind: DeviceKind = DeviceKind.GPU
    usable_bytes: int | None = None
    """What may be allocated where that is less than ``memory_bytes``."""
    temperature_c: float | None = None
    power_w: float | None = None

    @property
    def capacity_bytes(self) -> int:
        """What can be allocated in all."""
        return self.memory_bytes if self.usable_bytes is None else self.usable_bytes


_H100 = Profile(
    # H100 datasheet (SXM): 3.35 TB/s, 67 TFLOPS FP32, 1979 TFLOPS FP16 with sparsity, PCIe Gen5 128 GB/s and NVLink
    # 900 GB/s both ways; Hopper architecture white paper: 132 SMs, 528 tensor cores. Total as NVML reports it:
    # 81559 MiB. Latency: a pinned copy of 4 KiB.
    key="h100",
    name="NVIDIA H100 80GB HBM3",
    vendor="nvidia",
    memory_bytes=81559 * MIB,
    memory_bandwidth_gbps=3350.0,
    host_link_gbps=64.0,
    latency_s=10e-6,
    fp16_tflops=989.5,
    fp32_tflops=67.0,
    compute_capability="9.0",
    compute_units=132,
    tensor_core_count=528,
    clock_mhz=1980,
    max_threads_per_block=1024,
    peer_link_gbps=450.0,
    temperature_c=41.0,
    power_w=69.85,
)

_TABLE = (
    _H100,
    # H200 datasheet: 141 GB, 4.8 TB/s, otherwise as H100. Total as NVML reports it: 143771 MiB.
    replace(
        _H100,
        key="h200",
        name="NVIDIA H200",
        memory_bytes=143771 * MIB,
        memory_bandwidth_gbps=4800.0,
        temperature_c=28.0,
        power_w=77.71,
    ),
    # A100 80GB SXM datasheet: 2039 GB/s, FP16 312, FP32 19.5, NVLink 600 GB/s and PCIe Gen4 64 GB/s both ways;
    # GA100 white paper: 108 SMs, 432 tensor cores, 1410 MHz.
    Profile(
        key="a100",
        name="NVIDIA A100-SXM4-80GB",
        vendor="nvidia",
        memory_bytes=81920 * MIB,
        memory_bandwidth_gbps=2039.0,
        host_link_gbps=32.0,
        latency_s=10e-6,
        fp16_tflops=312.0,
        fp32_tflops=19.5,
        compute_capability="8.0",
        compute_units=108,
        tensor_core_count=432,
        clock_mhz=1410,
        max_threads_per_block=1024,
        peer_link_gbps=300.0,
        temperature_c=36.0,
        power_w=62.0,
    ),
    # L40S datasheet: 48 GB, 864 GB/s, FP32 91.6, FP16 362.05, 568 tensor cores, PCIe Gen4 64 GB/s both ways, no
    # NVLink. Total as NVML reports it with ECC on: 46068 MiB.
    Profile(
        key="l40s",
        name="NVIDIA L40S",
        vendor="nvidia",
        memory_bytes=46068 * MIB,
        memory_bandwidth_gbps=864.0,
        host_link_gbps=32.0,
        latency_s=10e-6,
        fp16_tflops=362.05,
        fp32_tflops=91.6,
        compute_capability="8.9",
        compute_units=142,
        tensor_core_count=568,
        clock_mhz=2520,
        max_threads_per_block=1024,
        temperature_c=38.0,
        power_w=35.0,
    ),
    # Ada architecture white paper, appendix on the RTX 4090: 128 SMs, 512 tensor cores, 2520 MHz, 1008 GB/s,
    # FP32 82.6, FP16 tensor 330.3. No NVLink. Peer copies over PCIe are off in its driver.
    Profile(
        key="rtx-4090",
        name="NVIDIA GeForce RTX 4090",
        vendor="nvidia",
        memory_bytes=24564 * MIB,
        memory_bandwidth_gbps=1008.0,
        host_link_gbps=32.0,
        latency_s=10e-6,
        fp16_tflops=330.3,
        fp32_tflops=82.6,
        compute_capability="8.9",
        compute_units=128,
        tensor_core_count=512,
        clock_mhz=2520,
        max_threads_per_block=1024,
        temperature_c=35.0,
        power_w=20.0,
    ),
    # AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s, FP16 1307.4, FP32 163.4, 304 CUs, 1216 matrix cores,
    # 2100 MHz, PCIe Gen5 x16, Infinity Fabric links of 128 GB/s both ways.
    Profile(
        key="mi300x",
        name="AMD Instinct MI300X",
        vendor="amd",
        memory_bytes=192 * GIB,
        memory_bandwidth_gbps=5300.0,
        host_link_gbps=64.0,
        latency_s=15e-6,
        fp16_tflops=1307.4,
        fp32_tflops=163.4,
        compute_capability="gfx942",
        compute_units=304,
        tensor_core_count=1216,
        clock_mhz=2100,
        max_threads_per_block=1024,
        peer_link_gbps=64.0,
        temperature_c=40.0,
        power_w=140.0,
    ),
    # Apple's Mac Studio (2023) specifications: M2 Ultra, 76-core GPU, 192 GB, 800 GB/s. Apple's announcement: 27.2
    # TFLOPS; clock and half-precision rate, taken as equal, are not published. Usable: Metal's
    # recommendedMaxWorkingSetSize. A unified copy reads and writes the same memory, hence half the bandwidth as its
    # host link. Metal reports no sensors.
    Profile(
        key="m2-ultra",
        name="Apple M2 Ultra",
        vendor="apple",
        memory_bytes=192 * GIB,
        usable_bytes=144 * GIB,
        memory_bandwidth_gbps=800.0,
        host_link_gbps=400.0,
        latency_s=50e-6,
        fp16_tflops=27.2,
        fp32_tflops=27.2,
        compute_capability=None,
        compute_units=76,
        tensor_core_count=0,
        clock_mhz=1398,
        max_threads_per_block=1024,
        unified_memory=True,
        kind=DeviceKind.INTEGRATED_GPU,
    ),
    # NVIDIA DGX Spark datasheet: 128 GB unified LPDDR5x, 273 GB/s, 6144 CUDA cores (48 SMs, 192 tensor cores), 1
    # PFLOP FP4 with sparsity, hence 125 dense FP16; FP32 = cores x 2 x clock, which is not published. Total as CUDA
    # reports it.
    Profile(
        key="gb10",
        name="NVIDIA GB10",
        vendor="nvidia",
        memory_bytes=130669424640,
        memory_bandwidth_gbps=273.0,
        host_link_gbps=136.5,
        latency_s=10e-6,
        fp16_tflops=125.0,
        fp32_tflops=31.0,
        compute_capability="12.1",
        compute_units=48,
        tensor_core_count=192,
        clock_mhz=2525,
        max_threads_per_block=1024,
        unified_memory=True,
        kind=DeviceKind.INTEGRATED_GPU,
        temperature_c=35.0,
        power_w=11.17,
    ),
    # Snapdragon 8 Gen 3 product brief: LPDDR5X-9600, 4 x 16 bit, 76.8 GB/s, in a 12 GB phone. Rates and clock of
    # its Adreno 750 are not published: 2.8 and 5.5 TFLOPS are ALUs x 2 x 903 MHz. Units and what may be used (half)
    # are assumptions: Android has no fixed limit.
    Profile(
        key="phone",
        name="Adreno 750",
        vendor="qualcomm",
        memory_bytes=12 * GIB,
        usable_bytes=6 * GIB,
        memory_bandwidth_gbps=76.8,
        host_link_gbps=38.4,
        latency_s=100e-6,
        fp16_tflops=5.5,
        fp32_tflops=2.8,
        compute_capability=None,
        compute_units=6,
        tensor_core_count=0,
        clock_mhz=903,
        max_threads_per_block=1024,
        unified_memory=True,
        kind=DeviceKind.INTEGRATED_GPU,
        temperature_c=34.0,
    ),
)

PROFILES: dict[str, Profile] = {profile.key: profile for profile in _TABLE}
"""Every known model by its key."""


def parse_simulation(text: str) -> tuple[Profile, ...]:
    """The devices that a specification such as ``"h100x8,m2-ultra"`` names, in its order.

    Items are separated by commas; ``NAMExCOUNT`` repeats one. Case and surrounding blanks do not matter.

    Raises:
        ValueError: unknown name, count of zero or over ``MAX_DEVICES`` in all, empty specification.
    """
    profiles: list[Profile] = []
    for item in text.split(","):
        key, count = _split(item.strip().lower())
        if key not in PROFILES:
            known = ", ".join(PROFILES)
            raise ValueError(f"unknown simulated device {item.strip()!r} in {text!r}: known are {known}")
        if not 1 <= count <= MAX_DEVICES - len(profiles):
            raise ValueError(f"{item.strip()!r} in {text!r}: a simulation has 1 to {MAX_DEVICES} devices")
        profiles.extend([PROFILES[key]] * count)
    return tuple(profiles)


def _split(item: str) -> tuple[str, int]:
    # A known name wins, so that the last letter of "mi300x" is not taken for a multiplication sign. Ten digits are
    # more than any allowed count, and keep int() away from its own limit on the length of numbers.
    match = None if item in PROFILES else re.fullmatch(r"(.+)x([0-9]{1,10})", item)
    return (match[1], int(match[2])) if match else (item, 1)
