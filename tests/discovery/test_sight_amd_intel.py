"""AMD's and Intel's GPUs, from the kernel's files to the result of a discovery."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.gate import gate
from gpurt.discovery.sight import sight
from gpurt.errors import ReasonCode
from gpurt.types import DeviceKind, DeviceState
from tests.discovery.sight_rig import GIB, Machine, gpus, machine, report_of
from tests.sources.trees import (
    MI210,
    MI210_UUID,
    STRIX_HALO_GTT,
    XE_VRAM,
    amd_card,
    intel_host,
    kfd_node,
    mi210_host,
    partitioned_host,
    strix_halo_host,
)

__all__ = ["machine"]

MI210_BYTES = 68702699520


def two_cards(root: Path) -> None:
    """Two MI210 that differ in UUID and address."""
    for number in (1, 2):
        node = {
            **MI210,
            "location_id": number << 8,
            "drm_render_minor": 127 + number,
            "unique_id": 0xAAAA000000000000 + number,
        }
        kfd_node(root, number, node, {"heap_type": 1, "size_in_bytes": MI210_BYTES})
        amd_card(root, number, f"0000:0{number}:00.0", {"product_name": "MI210"}, render=127 + number)
    (root / "dev/kfd").touch()


async def test_a_card_is_listed_with_all_that_the_kernel_knows(machine: Machine) -> None:
    mi210_host(machine.root)
    result = await machine.discover("rocm")
    (card,) = gpus(result)
    assert (card.name, card.vendor, card.backend, card.backend_name) == ("AMD Instinct MI210", "amd", "rocm", "amdgpu")
    assert (card.compute_capability, card.compute_units) == ("gfx90a", 104)
    assert (card.memory_bytes, card.kind, card.unified_memory) == (MI210_BYTES, DeviceKind.GPU, False)
    assert card.stable_id == MI210_UUID
    assert card.identity is not None
    assert (card.identity.pci_address, card.identity.serial) == ("00000000:03:00.0", "692231000131")
    assert (card.usable, card.state, card.numa_node) == (False, DeviceState.HEALTHY, 1)
    assert (card.state_reason or "").startswith("no_library: ")
    report = report_of(result, "rocm")
    assert report.reason is ReasonCode.NO_LIBRARY
    assert "1 device cannot be used without it" in report.message
    assert report.hint
    assert report.device_ids == (card.device_id,)
    assert result.backend_name == "cpu"


async def test_a_gpu_inside_a_processor_has_the_hosts_memory(machine: Machine) -> None:
    strix_halo_host(machine.root)
    (gpu,) = gpus(await machine.discover("rocm"))
    assert (gpu.kind, gpu.unified_memory, gpu.compute_capability) == (DeviceKind.INTEGRATED_GPU, True, "gfx1151")
    assert gpu.memory_bytes == STRIX_HALO_GTT
    assert (gpu.memory_pool_id or "").startswith("host:")


async def test_amd6_nodes_that_may_not_be_opened(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    mi210_host(machine.root)
    node = machine.root / "dev/dri/renderD130"
    monkeypatch.setattr("gpurt.sources.device_nodes.os.access", lambda path, *_, **__: "renderD" not in str(path))
    (card,) = gpus(result := await machine.discover("rocm"))
    assert (card.state_reason or "").startswith("no_permission: inaccessible: ")
    assert f"group id {os.stat(node).st_gid}" in (card.state_reason or "")
    assert "--group-add" in (card.state_reason or "")
    report = report_of(result, "rocm")
    assert report.reason is ReasonCode.NO_PERMISSION
    assert "/dev/dri/renderD130" in report.message


async def test_amd6_without_the_compute_drivers_node(machine: Machine) -> None:
    mi210_host(machine.root)
    (machine.root / "dev/kfd").unlink()
    (card,) = gpus(await machine.discover("rocm"))
    assert "there is no /dev/kfd" in (card.state_reason or "")


def test_amd7_an_override_is_told_and_is_no_part_of_the_card(machine: Machine) -> None:
    mi210_host(machine.root)
    machine.environ = {"HSA_OVERRIDE_GFX_VERSION": "9.0.8"}
    line = machine.sight("rocm")
    assert line.devices[0].compute_capability == "gfx90a"
    assert "takes it for gfx908" in line.message


def test_partitions_share_a_card_and_no_name(machine: Machine) -> None:
    partitioned_host(machine.root, scheme="function")
    devices = machine.sight("rocm").devices
    assert len({device.stable_id for device in devices}) == len(devices) == 4


@pytest.mark.parametrize(
    ("variables", "hidden"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1"}, [True, False]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-aaaa000000000001"}, [False, True]),
        ({"HIP_VISIBLE_DEVICES": "0"}, [False, True]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, [True, True]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, [True, False]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [True, False]),
        ({}, [False, False]),
    ],
)
async def test_amds_variables_hide_cards(machine: Machine, variables: dict[str, str], hidden: list[bool]) -> None:
    two_cards(machine.root)
    machine.environ = variables
    result = await machine.discover("rocm")
    found = [(card.state_reason or "").startswith("hidden_by_environment") for card in gpus(result)]
    assert found == hidden
    is_all = report_of(result, "rocm").reason is ReasonCode.HIDDEN_BY_ENVIRONMENT
    assert is_all is all(hidden)


async def test_cudas_variable_is_not_meant_for_amd_beside_a_card_of_nvidia(machine: Machine) -> None:
    two_cards(machine.root)
    machine.file("sys/bus/pci/devices/0000:0a:00.0/vendor", "0x10de\n")
    machine.environ = {"CUDA_VISIBLE_DEVICES": "1"}
    result = await machine.discover("rocm")
    assert not any("hidden" in (card.state_reason or "") for card in gpus(result))
    assert "set HIP_VISIBLE_DEVICES" in report_of(result, "rocm").message


async def test_cvd10_both_variables_with_the_same_number(machine: Machine) -> None:
    two_cards(machine.root)
    machine.environ = {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}
    result = await machine.discover("rocm")
    report = report_of(result, "rocm")
    assert report.reason is ReasonCode.HIDDEN_BY_ENVIRONMENT
    assert "counted anew from 0" in report.message


async def test_a_card_without_a_driver_is_told(machine: Machine) -> None:
    machine.file("sys/bus/pci/devices/0000:03:00.0/vendor", "0x1002\n")
    machine.file("sys/bus/pci/devices/0000:03:00.0/class", "0x038000\n")
    result = await machine.discover("rocm")
    report = report_of(result, "rocm")
    assert gpus(result) == []
    assert report.reason is ReasonCode.NO_DRIVER
    assert "00000000:03:00.0" in report.message
    assert "no driver is bound to it" in report.message


def anv(bus: int, name: str, size: int | None) -> dict[str, Any]:
    heaps = [] if size is None else [{"size_bytes": size, "device_local": True}]
    return {
        "name": name, "vendor_id": 0x8086, "device_id": 0xE20B, "device_type": 2, "api_version": 4206867,
        "driver_version_code": 100663299, "driver_id": 6, "driver_name": "Intel open-source Mesa driver",
        "driver_info": "Mesa 24.0.3", "device_uuid": f"{bus:02x}" * 16, "pci_domain": 0, "pci_bus": bus,
        "pci_device": 0, "pci_function": 0, "heaps": heaps,
    }  # fmt: skip


async def test_int1_sizes_are_those_of_intels_own_drivers(machine: Machine) -> None:
    intel_host(machine.root)
    inside, card = sorted(gpus(await machine.discover("vulkan")), key=lambda device: device.kind != "igpu")
    assert (inside.kind, inside.unified_memory) == (DeviceKind.INTEGRATED_GPU, True)
    assert inside.memory_bytes == 33554432 << 10
    assert (card.kind, card.memory_bytes, card.memory_available) == (DeviceKind.GPU, XE_VRAM, None)
    assert card.stable_id == "pci:00000000:03:00.0"
    assert not inside.usable
    assert not card.usable


@pytest.mark.parametrize("size", [None, XE_VRAM - 5])
async def test_int1_whoever_knows_the_memory_tells_it_and_nobody_says_0(machine: Machine, size: int | None) -> None:
    intel_host(machine.root)
    vram = machine.root / "sys/bus/pci/devices/0000:03:00.0/tile0/physical_vram_size_bytes"
    if size is not None:
        vram.write_text("0\n")
    machine.record("vulkan", {"devices": [anv(3, "Intel(R) Arc(tm) B580 Graphics (BMG G21)", size)]})
    result = await machine.discover("vulkan")
    card = next(device for device in gpus(result) if device.stable_id == "pci:00000000:03:00.0")
    assert len(gpus(result)) == 2
    assert "B580" in card.name
    assert card.memory_bytes == (XE_VRAM if size is None else size)
    # One card, whoever shows it: no memory twice.
    assert sum(device.memory_bytes or 0 for device in gpus(result)) < XE_VRAM + (33554432 << 10) + GIB


async def test_level_zeros_mask_hides_the_card_from_vulkan_too(machine: Machine) -> None:
    intel_host(machine.root)
    machine.environ = {"ZE_AFFINITY_MASK": "1"}
    machine.record("vulkan", {"devices": [anv(3, "Arc", XE_VRAM)]})
    result = await machine.discover("vulkan")
    reasons = {device.stable_id: device.state_reason or "" for device in gpus(result)}
    # Cards come first, so number 1 is the GPU inside the processor.
    assert reasons["pci:00000000:03:00.0"].startswith("hidden_by_environment: ZE_AFFINITY_MASK")
    assert "hidden" not in reasons["pci:00000000:00:02.0"]


def test_the_gate_asks_nobody_where_there_is_no_such_card(tmp_path: Path) -> None:
    def nothing(name: str) -> bool:
        return False

    def check(name: str, **files: str) -> ReasonCode | None:
        root = tmp_path / f"{name}-{'-'.join(files)}"
        for name_of, text in files.items():
            path = root / "sys/bus/pci/devices/0000:01:00.0" / name_of
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        failure = gate(name, platform="linux", root=root, has_module=nothing)
        return failure.reason if failure else None

    assert check("rocm", vendor="0x10de") is ReasonCode.NO_DEVICE
    assert check("rocm", vendor="0x1002") is ReasonCode.NO_LIBRARY  # another device of theirs
    # Every board for Intel's processors is full of Intel's devices.
    assert check("vulkan", vendor="0x8086") is ReasonCode.NO_LIBRARY
    graphics = {"vendor": "0x8086", "class": "0x030000"}
    assert check("vulkan", **graphics) is None
    assert check("rocm", **(graphics | {"vendor": "0x1002"})) is None
    assert check("rocm") is ReasonCode.NO_LIBRARY


def test_nothing_is_said_of_cards_where_no_file_could_tell_of_them(machine: Machine) -> None:
    assert sight("rocm", environ={}, root=machine.root) is None  # Windows
    machine.file("dev/dxg")
    machine.file("sys/kernel/x")
    assert sight("rocm", environ={}, root=machine.root) is None  # WSL


async def test_a_host_without_such_devices_needs_no_probe(machine: Machine) -> None:
    machine.file("sys/bus/pci/devices/0000:00:1f.0/vendor", "0x8086\n")
    machine.file("sys/bus/pci/devices/0000:00:1f.0/class", "0x060100\n")
    result = await machine.discover("rocm", probed=False)
    assert report_of(result, "rocm").reason is ReasonCode.NO_DEVICE
    assert "no AMD device on the PCI bus" in report_of(result, "rocm").message
