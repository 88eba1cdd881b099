"""Intel, Vulkan, Windows and Apple, from recorded answers to the records that people see. Names carry the case."""

from __future__ import annotations

import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.budget import budgeted
from gpurt.discovery.result import DiscoveryResult
from gpurt.errors import ReasonCode
from gpurt.sources.apple_query import query_mlx
from gpurt.sources.dxgi import directml_ordinal, read_dxgi
from gpurt.sources.host import HostMemory
from gpurt.telemetry import with_fallback
from gpurt.telemetry.reading import RawReading
from gpurt.types import DeviceKind, DeviceState, GPUDevice
from gpurt.usable_memory import MemorySettings
from tests.cases.rig import GIB, MIB, card, replay
from tests.sources import trees
from tests.sources.test_apple import M4_MAX, STOCK, computer, displays, mlx, sysctl
from tests.sources.test_dxgi import EGPU, REMOTE, RTX_4090, UHD_770, WARP
from tests.sources.test_dxgi import table as dxgi
from tests.sources.test_opencl_properties import H100 as H100_OF_OPENCL
from tests.sources.test_vulkan_properties import LAVAPIPE, amdvlk, heap, nvidia, radv
from tests.sources.trees import DRM, XE_VRAM, write


def by_vulkan(folder: Path, *rows: dict[str, Any], **tables: Any) -> tuple[GPUDevice, ...]:
    """The devices of a machine whose cards Vulkan lists so, and of which nothing else is known."""
    return replay(folder, "vulkan", vulkan={"devices": list(rows)}, **tables).devices


def at(address: str, devices: Iterable[GPUDevice]) -> GPUDevice:
    (found,) = (device for device in devices if device.identity is not None and address in str(device.identity))
    return found


def test_int_1_sizes_are_of_intels_own_files(tmp_path: Path) -> None:
    trees.intel_host(tmp_path / "root")
    write(tmp_path / "root", f"{DRM}/card1/device/mem_info_vram_total", "0\n")  # AMD's file
    devices = by_vulkan(tmp_path)
    plugged, inside = at("03:00.0", devices), at("00:02.0", devices)
    assert (plugged.memory_bytes, plugged.unified_memory) == (XE_VRAM, False)
    assert (inside.kind, inside.unified_memory) == (DeviceKind.INTEGRATED_GPU, True)


def test_int_1_what_one_source_does_not_tell_a_later_one_does(tmp_path: Path) -> None:
    trees.intel_host(tmp_path / "root")
    (tmp_path / "root" / f"{DRM}/card1/device/tile0/physical_vram_size_bytes").write_text("0\n")
    assert at("03:00.0", by_vulkan(tmp_path)).memory_bytes is None
    row = radv(
        "c", 3, name="Intel(R) Arc(tm) B580 Graphics (BMG G21)", vendor_id=0x8086, device_id=0xE20B, driver_id=6,
        driver_name="Intel open-source Mesa driver", heaps=[heap(XE_VRAM, True)],
    )  # fmt: skip
    card_of_both = at("03:00.0", by_vulkan(tmp_path, row))
    assert (card_of_both.memory_bytes, card_of_both.backends) == (XE_VRAM, ("vulkan",))


def test_int_2_an_integrated_gpu_has_the_hosts_memory_and_not_0(tmp_path: Path) -> None:
    trees.intel_host(tmp_path / "root")
    inside = at("00:02.0", by_vulkan(tmp_path))
    assert (inside.memory_bytes, inside.memory_available) == (33554432 << 10, 16777216 << 10)
    assert inside.memory_usable_bytes is not None
    assert inside.memory_pool_id is not None


def test_vk_1_software_is_never_taken_by_itself(tmp_path: Path) -> None:
    alone = replay(tmp_path, "vulkan", vulkan={"devices": [LAVAPIPE]})
    assert [(device.kind, device.usable) for device in alone.devices] == [(DeviceKind.SOFTWARE, False)]
    assert (alone.backend_name, alone.reports[0].reason) == (None, ReasonCode.NO_DEVICE)
    devices = by_vulkan(tmp_path, LAVAPIPE, radv("b", 3))
    (software,) = (device for device in devices if device.kind is DeviceKind.SOFTWARE)
    assert "only when asked for" in (software.state_reason or "")
    assert [device.name for device in devices if device.kind is DeviceKind.GPU] == [radv("b", 3)["name"]]


def test_vk_2_two_drivers_of_one_card_are_one_device(tmp_path: Path) -> None:
    devices = by_vulkan(tmp_path, radv("a", 3), amdvlk("a", 3), radv("b", 4))
    assert [device.memory_bytes for device in devices] == [24 * GIB] * 2


def test_vk_3_a_key_that_collides_in_one_driver_joins_nothing(tmp_path: Path) -> None:
    devices = by_vulkan(tmp_path, *(nvidia(digit, 1) for digit in "abce"))
    assert len({device.stable_id for device in devices}) == len(devices) == 4


def test_vk_4_one_card_by_three_interfaces_is_one_record(tmp_path: Path) -> None:
    uuid = "GPU-" + "-".join("a" * count for count in (8, 4, 4, 4, 12))
    told = card(0, "NVIDIA GeForce RTX 2080 SUPER", 8192, uuid=uuid, pci_address="0000000F:01:00.0")
    row = H100_OF_OPENCL | {"name": "NVIDIA GeForce RTX 2080 SUPER", "global_memory_bytes": 8192 * MIB}
    opencl = {"platforms": [{"name": "NVIDIA CUDA", "devices": [row | {"pci_domain": 0xF, "pci_bus": 1}]}]}
    (device,) = replay(
        tmp_path, "cuda", "vulkan", "opencl", nvml={"devices": [told]}, opencl=opencl,
        vulkan={"devices": [nvidia("a", 1, pci_domain=0xF)]},
    ).devices  # fmt: skip
    assert device.backends == ("cuda", "vulkan", "opencl")
    assert (device.stable_id, device.memory_bytes) == (uuid, 8192 * MIB)


def by_dxgi(folder: Path, *rows: dict[str, Any]) -> DiscoveryResult:
    return replay(folder, "directml", platform="win32", dxgi=dxgi(*rows))


def test_dml_1_software_and_remote_adapters_are_no_devices(tmp_path: Path) -> None:
    warp, remote, plugged = by_dxgi(tmp_path, WARP, REMOTE | {"pci_bus": 9}, RTX_4090).devices
    assert (warp.kind, plugged.kind) == (DeviceKind.SOFTWARE, DeviceKind.GPU)
    assert "only when asked for" in (warp.state_reason or "")
    assert "remote session" in (remote.state_reason or "")
    assert "remote session" not in (plugged.state_reason or "")
    alone = by_dxgi(tmp_path, WARP)
    assert (alone.backend_name, alone.reports[0].reason) == (None, ReasonCode.NO_DEVICE)
    assert "Microsoft Basic Render Driver" in alone.reports[0].message


def test_dml_2_an_adapter_keeps_its_name_when_another_goes(tmp_path: Path) -> None:
    before = by_dxgi(tmp_path, UHD_770, RTX_4090, EGPU).devices
    other_boot = [row | {"luid": f"{0xBEEF + n:016x}"} for n, row in enumerate((UHD_770, EGPU))]
    after = by_dxgi(tmp_path, *other_boot).devices
    ids = {device.name: device.stable_id for device in before}
    assert len(set(ids.values())) == 3
    assert {device.name: device.stable_id for device in after} == {
        name: key for name, key in ids.items() if name != RTX_4090["name"]
    }
    assert all(device.identity is not None and device.identity.stable for device in before)


def test_dml_3_a_full_field_of_32_bits_is_no_size(tmp_path: Path) -> None:
    def size(**fields: Any) -> int | None:
        told = {key: value for key, value in RTX_4090.items() if key != "dedicated_video_bytes"}
        (device,) = by_dxgi(tmp_path, told | {"adapter_ram_bytes": 4293918720} | fields).devices
        return device.memory_bytes

    assert size(dedicated_video_bytes=25757220864) == 25757220864
    assert size(registry_memory_bytes=25757220864) == 25757220864
    assert size() is None


@pytest.mark.parametrize("rows", [(UHD_770, RTX_4090), (RTX_4090, UHD_770)])
def test_dml_4_the_card_comes_before_the_processors_gpu(tmp_path: Path, rows: tuple[dict[str, Any], ...]) -> None:
    ranked = read_dxgi(dxgi(*rows)).ranked()
    assert [adapter.name for adapter in ranked] == ["NVIDIA GeForce RTX 4090", "Intel(R) UHD Graphics 770"]
    assert {device.name for device in by_dxgi(tmp_path, *rows).devices} == {adapter.name for adapter in ranked}


def test_dml_5_the_number_is_derived_and_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    best = read_dxgi(dxgi(UHD_770, RTX_4090, order=[1, 0])).ranked()[0]
    with caplog.at_level("INFO", "gpurt.sources.dxgi"):
        ordinal = directml_ordinal(best)
    assert (ordinal.device_id, ordinal.name, ordinal.verified) == (1, "NVIDIA GeForce RTX 4090", False)
    assert "NVIDIA GeForce RTX 4090" in caplog.text


def by_apple(folder: Path, tables: dict[str, Any]) -> DiscoveryResult:
    return replay(folder, "metal", platform="darwin", apple=tables)


@pytest.mark.parametrize(
    ("wired", "working_set", "budget"),
    [
        ("0", STOCK, STOCK),
        (None, STOCK, STOCK),
        ("garbage", STOCK, STOCK),
        ("114688", 112 * GIB, 112 * GIB),
        ("114688", None, 112 * GIB),  # without MLX the setting itself
        ("0", None, None),
        ("garbage", None, None),
    ],
)
def test_apl_1_the_budget_is_metals(
    tmp_path: Path, wired: str | None, working_set: int | None, budget: int | None
) -> None:
    """107.52 GiB of 128: a plan for 108.01 GiB does not fit."""
    told = mlx(max_recommended_working_set_size=working_set)
    (device,) = by_apple(tmp_path, computer(sysctl=sysctl(wired), mlx=told)).devices
    assert (device.memory_bytes, device.unified_memory) == (128 * GIB, True)
    assert device.memory_usable_bytes == budget
    memory = HostMemory(128 * GIB, 126 * GIB, 126 * GIB, "meminfo")
    usable = budgeted(device, MemorySettings(), memory, "host:x")
    assert usable.memory_usable_bytes is not None
    assert usable.memory_usable_bytes <= min(budget or 126 * GIB, 126 * GIB)


def test_apl_2_no_metal_device_is_an_answer(tmp_path: Path) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("[metal::Device] No Metal device")

    fake = types.SimpleNamespace(metal=types.SimpleNamespace(is_available=lambda: False), device_info=fails, gpu="gpu")
    result = by_apple(tmp_path, computer(system_profiler=displays(), ioreg="", mlx=query_mlx(fake)))
    (report,) = result.reports
    assert (result.devices, report.reason) == ((), ReasonCode.NO_DEVICE)
    assert report.message
    assert report.hint


async def test_apl_3_a_fallback_produces_samples() -> None:
    async def absent() -> RawReading:
        raise FileNotFoundError("macmon")

    async def fails() -> RawReading:
        raise RuntimeError("exit status 1")

    async def works() -> RawReading:
        return RawReading({"memory_total_bytes": 16 * GIB, "temperature_c": 41})

    for first in (absent, fails):
        read = with_fallback(first, works)
        assert (await read()).values["memory_total_bytes"] == 16 * GIB


def test_apl_3_until_then_memory_is_unknown(tmp_path: Path) -> None:
    missing = {"error": {"reason": "no_library", "message": "there is no such tool"}}
    tables = computer(sysctl=missing, ioreg=missing, mlx=missing, system_profiler=displays(M4_MAX))
    (device,) = by_apple(tmp_path, tables).devices
    assert device.memory_bytes is device.memory_usable_bytes is None
    assert device.state is DeviceState.UNKNOWN, "a recording: nobody asked its driver"
