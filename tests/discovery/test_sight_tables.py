"""Vulkan, OpenCL, DXGI and Apple's tools: from recorded tables to the result of a discovery, and what a recording
needs. Names of tests carry the case that they stand for."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.gate import has_vulkan_driver
from gpurt.discovery.merge import merge
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.sight import TABLES, paths_of, sight, table_of
from gpurt.errors import ReasonCode
from gpurt.types import DeviceKind, GPUDevice
from tests.discovery.sight_rig import GIB, Machine, gpus, machine, report_of
from tests.sources import test_apple as apple
from tests.sources import test_dxgi as dxgi
from tests.sources.test_opencl_properties import H100, POCL
from tests.sources.test_vulkan_properties import LAVAPIPE, amdvlk, nvidia, radv
from tests.sources.trees import intel_host, mi210_host, strix_halo_host

__all__ = ["machine"]

Table = dict[str, Any]


class TestVulkan:
    async def test_vk1_software_alone_is_no_device(self, machine: Machine) -> None:
        machine.with_vulkan()
        machine.record("vulkan", {"devices": [LAVAPIPE]})
        result = await machine.discover("vulkan")
        (found,) = gpus(result)
        assert (found.kind, found.usable) == (DeviceKind.SOFTWARE, False)
        assert found.state_reason == "no_library: software adapter, and its package is not installed"
        assert report_of(result, "vulkan").reason is ReasonCode.NO_DEVICE
        assert "software adapters alone: llvmpipe" in report_of(result, "vulkan").message
        assert result.backend_name == "cpu"

    async def test_vk2_two_drivers_show_one_card_once(self, machine: Machine) -> None:
        machine.with_vulkan()
        machine.record("vulkan", {"devices": [radv("1", 3), amdvlk("1", 3), radv("2", 4), LAVAPIPE]})
        found = [device for device in gpus(await machine.discover("vulkan")) if device.kind is DeviceKind.GPU]
        assert [device.stable_id for device in found] == ["pci:00000000:03:00.0", "pci:00000000:04:00.0"]
        assert [device.memory_bytes for device in found] == [24 * GIB, 24 * GIB]

    async def test_vk3_an_address_that_all_cards_share_tells_nothing(self, machine: Machine) -> None:
        machine.with_vulkan()
        machine.record("vulkan", {"devices": [nvidia(digit, 1) for digit in "1234"]})
        assert len({device.stable_id for device in gpus(await machine.discover("vulkan"))}) == 4

    async def test_vk4_one_card_of_three_interfaces_is_one_record(self, machine: Machine) -> None:
        machine.with_vulkan()
        uuid = "GPU-11111111-1111-1111-1111-111111111111"
        nvml = {"index": 0, "uuid": uuid, "pci_address": "00000000:09:00.0", "name": "NVIDIA GeForce RTX 2080 SUPER"}
        machine.record("nvml", {"driver_version": "591.86", "devices": [nvml]})
        machine.record("vulkan", {"devices": [nvidia("1", 9, pci_domain=None, pci_bus=None)]})
        machine.record("opencl", {"platforms": [{"name": "NVIDIA CUDA", "devices": [H100 | {"pci_bus": 9}]}]})
        records = {name: await _off(machine.sight, name) for name in ("cuda", "vulkan", "opencl")}
        (found,) = merge([each.devices for each in records.values()], priority=tuple(records))
        assert (found.stable_id, found.backends) == (uuid, ("cuda", "vulkan", "opencl"))
        # NVML does not tell it here, so the first that does, and nobody's is added to it.
        assert found.memory_bytes == records["vulkan"].devices[0].memory_bytes

    async def test_a_translation_layer_is_known_by_the_name_inside(self, machine: Machine) -> None:
        machine.with_vulkan()
        dozen = nvidia("f", 0, pci_domain=None, pci_bus=None, pci_device=None, pci_function=None, driver_id=23) | {
            "name": "Microsoft Direct3D12 (NVIDIA GeForce RTX 2080 SUPER)",
            "driver_name": "Dozen",
        }
        machine.record("vulkan", {"devices": [nvidia("1", 1), dozen]})
        (found,) = gpus(await machine.discover("vulkan"))
        assert found.name == "NVIDIA GeForce RTX 2080 SUPER"

    @pytest.mark.skipif(importlib.util.find_spec("vulkan") is None, reason="the package vulkan is not installed")
    @pytest.mark.skipif(not has_vulkan_driver(Path("/"), os.environ), reason="no Vulkan driver is installed")
    async def test_vk1_lavapipe_itself(self, tmp_path: Path) -> None:
        service = GPUDiscoveryService(tmp_path / "registry.json", backends=["vulkan", "cpu"], environ=os.environ)
        async with service:
            result = await service.discover_all_devices()
        software = [device for device in result.devices if device.kind is DeviceKind.SOFTWARE]
        if not software:
            pytest.skip(f"no lavapipe: {report_of(result, 'vulkan').message}")
        assert any("llvmpipe" in device.name for device in software)
        assert not any(device.usable for device in software)


async def _off(line: Callable[[str], Any], name: str) -> Any:
    return await asyncio.to_thread(line, name)


class TestOpenCl:
    def test_a_card_and_the_processor(self, machine: Machine) -> None:
        platforms = [{"name": "PoCL", "devices": [POCL]}, {"name": "NVIDIA CUDA", "devices": [H100]}]
        machine.record("opencl", {"platforms": platforms})
        processor, card = machine.sight("opencl").devices
        assert (processor.kind, processor.vendor) == (DeviceKind.SOFTWARE, "amd")
        assert (card.kind, card.vendor, card.stable_id) == (DeviceKind.GPU, "nvidia", "pci:00000000:09:00.0")
        assert (card.memory_bytes, card.compute_units, card.backend) == (85017493504, 132, "opencl")

    def test_the_processor_alone_is_no_gpu(self, machine: Machine) -> None:
        machine.record("opencl", {"platforms": [{"name": "PoCL", "devices": [POCL]}]})
        assert machine.sight("opencl").reason is ReasonCode.NO_DEVICE


class TestWindows:
    async def discover(self, machine: Machine, *rows: Table, **more: Any) -> list[GPUDevice]:
        machine.file("Windows/System32/dxgi.dll")
        machine.record("dxgi", dxgi.table(*rows, **more))
        self.result = await machine.discover("directml", platform="win32")
        return gpus(self.result)

    async def test_adapters_with_their_own_memory_or_the_hosts(self, machine: Machine) -> None:
        found = {device.name: device for device in await self.discover(machine, dxgi.RTX_4090, dxgi.UHD_770, dxgi.WARP)}
        card, inside = found["NVIDIA GeForce RTX 4090"], found["Intel(R) UHD Graphics 770"]
        assert (card.kind, card.memory_bytes, card.memory_available) == (DeviceKind.GPU, 25757220864, 23 * GIB)
        assert card.stable_id == "pci:00000000:01:00.0"
        assert (inside.kind, inside.unified_memory) == (DeviceKind.INTEGRATED_GPU, True)
        assert inside.memory_bytes == 134217728 + 16 * GIB
        assert found["Microsoft Basic Render Driver"].kind is DeviceKind.SOFTWARE
        assert report_of(self.result, "directml").reason is ReasonCode.NO_LIBRARY
        assert "2 devices cannot be used without it" in report_of(self.result, "directml").message

    async def test_dml1_warp_and_remote_sessions_are_no_devices(self, machine: Machine) -> None:
        found = await self.discover(machine, dxgi.WARP, dxgi.REMOTE)
        assert not any(device.usable for device in found)
        assert report_of(self.result, "directml").reason is ReasonCode.NO_DEVICE

    async def test_an_adapter_without_an_address_is_known_until_the_next_boot(self, machine: Machine) -> None:
        row = {key: value for key, value in dxgi.RTX_4090.items() if not key.startswith("pci_")}
        (found,) = await self.discover(machine, row)
        assert found.identity is not None
        assert (found.identity.key, found.identity.stable) == ("luid:000000000000d3a1", False)

    async def test_a_size_that_nobody_tells_is_none(self, machine: Machine) -> None:
        row = dxgi.UHD_770 | {"dedicated_video_bytes": 0, "local_budget_bytes": None}
        (found,) = await self.discover(machine, row)
        assert (found.kind, found.memory_bytes) == (DeviceKind.UNKNOWN, None)


class TestApple:
    async def discover(self, machine: Machine, **parts: Any) -> list[GPUDevice]:
        machine.file("usr/sbin/system_profiler")
        machine.record("apple", apple.computer(**parts))
        self.result = await machine.discover("metal", platform="darwin")
        return gpus(self.result)

    async def test_apl1_the_memory_is_the_hosts_and_the_budget_is_metals(self, machine: Machine) -> None:
        (found,) = await self.discover(machine)
        assert (found.name, found.vendor, found.backend) == ("Apple M4 Max", "apple", "metal")
        assert (found.compute_capability, found.compute_units) == ("applegpu_g16s", 40)
        assert (found.memory_bytes, found.unified_memory) == (128 * GIB, True)
        line = await _off(machine.sight, "metal")
        assert line.devices[0].memory_usable_bytes == apple.STOCK
        assert report_of(self.result, "metal").reason is ReasonCode.NO_LIBRARY

    async def test_apl2_without_a_metal_device_the_gpu_is_listed_with_the_reason(self, machine: Machine) -> None:
        (found,) = await self.discover(machine, mlx={"available": False})
        assert "MLX finds no Metal device" in (found.state_reason or "")
        assert report_of(self.result, "metal").reason is ReasonCode.NO_DEVICE

    async def test_gpus_of_other_vendors_are_not_metals_to_use(self, machine: Machine) -> None:
        both = apple.displays(apple.RADEON, apple.UHD_630)
        found = await self.discover(machine, system_profiler=both, ioreg=apple.registry(), mlx={"available": False})
        assert {device.vendor for device in found} == {"amd", "intel"}
        assert all("Apple's own" in (device.state_reason or "") for device in found)


class TestRecording:
    @pytest.mark.parametrize(
        ("family", "backend", "host"),
        [("amd", "rocm", mi210_host), ("amd", "rocm", strix_halo_host), ("intel", "vulkan", intel_host)],
    )
    def test_the_files_of_a_family_are_all_it_needs(
        self, machine: Machine, tmp_path: Path, family: str, backend: str, host: Callable[[Path], None]
    ) -> None:
        host(machine.root)
        copy = tmp_path / "copy"
        for pattern in paths_of(family):
            for source in machine.root.glob(pattern):
                target = copy / source.relative_to(machine.root)
                target.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    target.mkdir(exist_ok=True)
                elif not target.exists():
                    shutil.copyfile(source, target)
        (copy / "proc").mkdir(exist_ok=True)
        if (machine.root / "proc/meminfo").exists():
            shutil.copyfile(machine.root / "proc/meminfo", copy / "proc/meminfo")
        seen, again = (sight(backend, environ={}, root=root, tables=tmp_path) for root in (machine.root, copy))
        assert seen is not None
        assert seen.devices
        assert again == seen

    def test_every_source_has_a_table_that_says_at_least_why_not(self) -> None:
        absent = {name: table_of(name) for name in TABLES if name not in ("vulkan", "opencl")}
        assert all(isinstance(table, dict) and table for table in absent.values())
        assert table_of("amd") is None

    def test_names_without_sources(self) -> None:
        for name in ("cpu", "tflite", "somebody_elses"):
            assert sight(name, environ={}) is None
        assert paths_of("somebody_elses") == ()
        assert not any(
            pattern.startswith("/") for name in ("nvml", "amd", "intel", "host") for pattern in paths_of(name)
        )
