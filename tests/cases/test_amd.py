"""AMD's devices, from trees of files to the records that people see. Names carry the case."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.line import ProbeLine
from gpurt.discovery.registry import RegistryDocument, RegistryFile
from gpurt.errors import ReasonCode
from gpurt.sources.amd import read_amd
from gpurt.sources.host import HostMemory
from gpurt.types import GPUDevice
from gpurt.usable_memory import Figures, usable_memory
from tests.cases.rig import GIB, Said, look, outcome
from tests.sources import trees
from tests.sources.trees import CPU, KFD, MI210, VEGA10, VEGA10_BANK, amd_card, kfd_node, write


def seen(root: Path, **environ: str) -> ProbeLine:
    return look("rocm", root, environ=environ)


def only(root: Path) -> GPUDevice:
    (device,) = seen(root).devices
    return device


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (110501, "gfx1151"), (100300, "gfx1030")]
)
def test_amd_1_the_architecture_is_a_line_of_the_properties(tmp_path: Path, version: int, name: str) -> None:
    kfd_node(tmp_path, 0, {**MI210, "gfx_target_version": version})
    assert only(tmp_path).compute_capability == name


def test_amd_1_without_it_nothing_is_guessed(tmp_path: Path) -> None:
    kfd_node(tmp_path, 0, VEGA10, VEGA10_BANK)
    write(tmp_path, f"{KFD}/0/gfx_target_version", "90403\n")
    assert only(tmp_path).compute_capability is None


def test_amd_2_processors_are_no_gpus(tmp_path: Path) -> None:
    trees.mi210_host(tmp_path)
    for node in range(3):
        (tmp_path / f"{KFD}/{node}/gpu_id").unlink()
    assert only(tmp_path).name == "AMD Instinct MI210"


@pytest.mark.parametrize(
    ("properties", "banks", "size"),
    [
        (MI210, [{"heap_type": 1, "size_in_bytes": 68702699520}], 68702699520),
        (MI210, [{"heap_type": 2, "size_in_bytes": 68702699520}], 68702699520),
        (VEGA10, [VEGA10_BANK], 17163091968),
        (VEGA10, [], 17163091968),
        (MI210, [], None),
        (MI210, [{"heap_type": 0, "size_in_bytes": 270037725184}], None),
    ],
)
def test_amd_3_memory_is_that_of_the_banks(tmp_path: Path, properties: Any, banks: list[Any], size: int | None) -> None:
    kfd_node(tmp_path, 0, properties, *banks)
    assert only(tmp_path).memory_bytes == size


def test_amd_4_an_older_kernel_tells_less(tmp_path: Path) -> None:
    kfd_node(tmp_path, 0, CPU)
    kfd_node(tmp_path, 1, VEGA10, VEGA10_BANK)
    text = (tmp_path / f"{KFD}/1/properties").read_text()
    (tmp_path / f"{KFD}/1/properties").write_text(f"\nnew_key 17\n\n{text}max_waves_per_simd many\n\n")
    device = only(tmp_path)
    assert device.identity is not None
    assert (device.identity.pci_address, device.identity.uuid) == ("00000000:19:00.0", "GPU-c34ec50444dd0a6c")
    assert (device.compute_units, device.memory_bytes) == (64, 17163091968)


def test_amd_5_an_apu_has_the_hosts_memory(tmp_path: Path) -> None:
    trees.strix_halo_host(tmp_path)
    device = only(tmp_path)
    assert device.unified_memory
    assert device.memory_bytes in (trees.STRIX_HALO_GTT, 133680857088)
    assert device.memory_pool_id is not None
    (source,) = read_amd(tmp_path).devices
    assert (source.vram_total_bytes, source.gtt_total_bytes) == (536870912, 133143986176)
    figures = Figures(536870912, 381681664, unified=True, shared_total_bytes=133143986176)
    assert usable_memory(figures, host=HostMemory(192 * GIB, 180 * GIB, 180 * GIB, "meminfo")).capacity_bytes == (
        133680857088
    )


def test_amd_5_shared_memory_of_a_card_is_never_added(tmp_path: Path) -> None:
    kfd_node(tmp_path, 0, {**MI210, "gfx_target_version": 100304})
    amd_card(tmp_path, 0, "0000:03:00.0", {"mem_info_vram_total": 4 * GIB, "mem_info_gtt_total": 64 * GIB})
    device = only(tmp_path)
    assert (device.memory_bytes, device.unified_memory) == (4 * GIB, False)


def test_amd_6_without_the_compute_node_it_is_listed_with_the_reason(tmp_path: Path) -> None:
    trees.mi210_host(tmp_path)
    (tmp_path / "dev/kfd").unlink()
    line = seen(tmp_path)
    (device,) = line.devices
    assert not device.usable
    assert "/dev/kfd" in (device.state_reason or "")
    assert line.reason in (None, ReasonCode.NO_DRIVER)


def test_amd_6_the_group_that_is_needed_is_named(tmp_path: Path) -> None:
    trees.mi210_host(tmp_path)
    node = tmp_path / "dev/dri/renderD130"
    node.chmod(0o660)
    (device,) = read_amd(tmp_path, lambda path: path.name == "kfd").devices
    assert device.access.reason is ReasonCode.NO_PERMISSION
    assert device.access.group == node.stat().st_gid
    for word in ("/dev/dri/renderD130", f"group id {node.stat().st_gid}", "0660"):
        assert word in device.access.message


def test_amd_7_an_override_is_not_the_architecture(tmp_path: Path) -> None:
    kfd_node(tmp_path, 0, CPU)
    kfd_node(tmp_path, 1, {**MI210, "gfx_target_version": 100301})
    line = seen(tmp_path, HSA_OVERRIDE_GFX_VERSION="10.3.0")
    (device,) = line.devices
    assert device.compute_capability == "gfx1031"
    assert "is gfx1031, and ROCm takes it for gfx1030" in line.message


def test_amd_8_ids_of_64_bits_are_text(tmp_path: Path) -> None:
    kfd_node(tmp_path, 0, {**MI210, "unique_id": 16404946649897475633})
    device = only(tmp_path)
    RegistryFile(tmp_path / "r.json").save(RegistryDocument(devices=(device,)))
    stored = json.loads((tmp_path / "r.json").read_text(), parse_int=float)
    assert stored["devices"][0]["identity"]["uuid"] == f"GPU-{16404946649897475633:016x}"


async def test_amd_6_the_next_backend_is_taken_with_the_reason(tmp_path: Path) -> None:
    await asyncio.to_thread(trees.mi210_host, tmp_path)
    (tmp_path / "dev/kfd").unlink()
    refused = ProbeLine(stage="failed", reason=ReasonCode.NO_LIBRARY, message="CuPy for ROCm is not installed")
    said = Said(rocm=outcome(await asyncio.to_thread(seen, tmp_path), refused))
    result = await said.discover(tmp_path / "r.json", backends=["rocm", "toy"], root=tmp_path)
    assert result.backend_name == "toy"
    report, device = result.reports[0], result.devices[0]
    assert (report.status, report.reason) == ("unavailable", ReasonCode.NO_DRIVER)
    assert "/dev/kfd" in report.message
    assert report.hint
    assert (device.name, device.usable) == ("AMD Instinct MI210", False)
    assert "/dev/kfd" in (device.state_reason or "")
