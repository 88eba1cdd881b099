"""Visibility variables, from the environment to the discovery's answer. Names carry the case."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.line import ProbeLine
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import ReasonCode
from gpurt.identity import device_identity
from gpurt.types import DeviceKind, DeviceState, GPUDevice
from gpurt.visibility.resolver import resolve
from tests.cases.rig import MIB, NO_CUPY, Said, card, cards, look, outcome, replay, uuid, verified
from tests.discovery.cuda_rig import FakeCuPy
from tests.discovery.records import device
from tests.sources.test_vulkan_properties import nvidia as by_vulkans_list
from tests.sources.trees import MI210, kfd_node
from tests.support.nvml_stub import UUID_A, UUID_B, NvmlStub, nvml_stub
from tests.visibility.hosts import amd, nvidia

__all__ = ["nvml_stub"]

CVD, HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"


async def real(stub: NvmlStub, folder: Path, scenario: str, **variables: str) -> DiscoveryResult:
    """Everything is real but NVIDIA's two libraries."""
    environ = stub.env(scenario) | {"PYTHONPATH": str(FakeCuPy(folder).site)} | variables
    async with GPUDiscoveryService(folder / "r.json", backends=["cuda", "cpu"], environ=environ) as service:
        return await service.discover_all_devices()


async def masked(folder: Path, value: str, *rows: dict[str, Any], **variables: str) -> DiscoveryResult:
    """A machine whose cards NVML shows, without CuPy: what the mask means is found out by gpurt alone."""
    said = Said(cuda=outcome(await asyncio.to_thread(cards, folder, *rows), NO_CUPY))
    return await said.discover(folder / "r.json", {CVD: value, **variables})


def left(result: DiscoveryResult) -> list[int]:
    """Numbers of the cards that the mask does not hide."""
    shown = [device for device in result.devices if device.backend == "cuda"]
    assert not any(device.usable for device in shown)
    return [
        int(device.device_id.removeprefix("nvml:"))
        for device in shown
        if not (device.state_reason or "").startswith("hidden_by_environment")
    ]


async def test_cvd_1_order_is_meaning(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    """Logical 0 is B, and what NVML knows of B (rows that wait for a reset) is said of cuda:0 and of no other."""
    result = await real(nvml_stub, tmp_path, "remap1", CUDA_VISIBLE_DEVICES="1,0")
    cards = {device.device_id: device for device in result.devices}
    first, second = cards["cuda:0"], cards["cuda:1"]
    assert (first.stable_id, first.state, first.usable) == (UUID_B, DeviceState.DEGRADED, False)
    assert (second.stable_id, second.state, second.usable) == (UUID_A, DeviceState.HEALTHY, True)


@pytest.mark.parametrize("value", ["", "-1", "none"])
async def test_cvd_2_an_empty_mask_hides_all(nvml_stub: NvmlStub, tmp_path: Path, value: str) -> None:
    result = await real(nvml_stub, tmp_path, "ok2", CUDA_VISIBLE_DEVICES=value)
    report = result.reports[0]
    assert (report.reason, result.backend_name) == (ReasonCode.HIDDEN_BY_ENVIRONMENT, "cpu")
    assert CVD in report.message
    assert CVD in (report.hint or "")
    cards = [device for device in result.devices if device.backend == "cuda"]
    assert {device.stable_id for device in cards} == {UUID_A, UUID_B}
    assert all((device.state_reason or "").startswith("hidden_by_environment") for device in cards)
    assert not any(device.usable for device in cards)


EIGHT = tuple(card(n) for n in range(8))


async def test_cvd_3_a_card_named_twice_empties_the_list_and_is_named(tmp_path: Path) -> None:
    result = await masked(tmp_path, "0,1,2,3,0", *EIGHT)
    assert left(result) == []
    assert result.reports[0].reason is ReasonCode.HIDDEN_BY_ENVIRONMENT
    assert "0 is named twice" in result.reports[0].message


@pytest.mark.parametrize(("value", "expected"), [("0,1,8,2,3", [0, 1]), ("8", [])])
async def test_cvd_4_an_index_beyond_the_count_ends_the_list(tmp_path: Path, value: str, expected: list[int]) -> None:
    result = await masked(tmp_path, value, *EIGHT)
    assert left(result) == expected
    assert "'8' is no device" in result.reports[0].message


@pytest.mark.parametrize("value", ["0,1,2,3,-1,5,6,7", "0,1,2,3,-1,0,6,7"])
async def test_cvd_5_minus_one_ends_the_list_before_a_duplicate(tmp_path: Path, value: str) -> None:
    assert left(await masked(tmp_path, value, *EIGHT)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "expected", "warns"),
    [("1gpu2,2ampere", [1, 2], False), ("0-2", [0], True), (" 0, 1", [0, 1], False), ("0x1", [0], True)],
)
async def test_cvd_6_numbers_are_read_as_strtoul_does(
    tmp_path: Path, value: str, expected: list[int], warns: bool
) -> None:
    result = await masked(tmp_path, value, *EIGHT)
    assert left(result) == expected
    assert (value in result.reports[0].message) >= warns


async def test_cvd_7_a_unique_beginning_of_a_uuid_is_enough(tmp_path: Path) -> None:
    rows = card(0, uuid=UUID_A), card(1, uuid=UUID_B)
    assert left(await masked(tmp_path, "GPU-2b2b", *rows)) == [1]
    assert left(await masked(tmp_path, "GPU-2b2b,GPU-1a1a1a1a", *rows)) == [0, 1]
    assert resolve({CVD: "GPU-2b2b,GPU-1a1a1a1a"}, nvidia(UUID_A, UUID_B)).order["cuda"] == ("nvml:1", "nvml:0")


@pytest.mark.parametrize("value", ["MIG-6f6f6f6f-0000-1111-2222-888888888888", f"MIG-{UUID_A}/3/0"])
async def test_cvd_8_both_forms_name_the_partition(nvml_stub: NvmlStub, tmp_path: Path, value: str) -> None:
    environ = nvml_stub.env("mig") | {CVD: value}
    async with GPUDiscoveryService(tmp_path / "r.json", backends=["cuda"], environ=environ) as service:
        result = await service.discover_all_devices()
    named, other = sorted(result.devices, key=lambda device: device.memory_bytes or 0)
    assert named.identity is not None
    assert (named.identity.partition, named.memory_bytes) == ("3/0", 20096 * MIB)
    assert "hidden_by_environment" not in (named.state_reason or "")
    assert "hidden_by_environment" in (other.state_reason or "")


async def test_cvd_9_numbers_of_cuda_are_joined_by_address(tmp_path: Path) -> None:
    slow = card(0, "NVIDIA GeForce GTX 1660 SUPER", 6144, compute_capability="7.5")
    fast = card(1, "NVIDIA GeForce RTX 3090", 24576, compute_capability="8.6")
    before = dict(os.environ)
    seen = await asyncio.to_thread(cards, tmp_path, slow, fast)
    said = Said(cuda=outcome(seen, verified(*seen.devices[::-1])))
    result = await said.discover(tmp_path / "r.json")
    assert [(d.device_id, d.stable_id, (d.memory_bytes or 0) // MIB) for d in result.devices[:2]] == [
        ("cuda:0", uuid(1), 24576),
        ("cuda:1", uuid(0), 6144),
    ]
    # Without CUDA a number is nobody, unless CUDA was told to count as the bus does.
    assert left(await masked(tmp_path, "0", slow, fast)) == [0, 1]
    assert left(await masked(tmp_path, "0", slow, fast, CUDA_DEVICE_ORDER="PCI_BUS_ID")) == [0]
    assert dict(os.environ) == before


@pytest.fixture
def four_of_amd(tmp_path: Path) -> Path:
    for n in range(4):
        properties = {**MI210, "location_id": 0x300 + (n << 8), "drm_render_minor": 128 + n, "unique_id": 77 + n}
        kfd_node(tmp_path, n, properties, {"heap_type": 1, "size_in_bytes": 64 << 30})
    return tmp_path


async def with_rocm(root: Path, **variables: str) -> tuple[list[int], str]:
    """Numbers of the cards that ROCm may show, and what the report says."""
    refused = ProbeLine(stage="failed", reason=ReasonCode.NO_LIBRARY, message="no CuPy for ROCm")
    said = Said(rocm=outcome(await asyncio.to_thread(look, "rocm", root, environ=variables), refused))
    result = await said.discover(root / "r.json", variables, backends=["rocm", "toy"], root=root)
    shown = [device for device in result.devices if device.backend == "rocm"]
    assert len(shown) == 4
    visible = [device for device in shown if "hidden_by_environment" not in (device.state_reason or "")]
    return sorted(int(device.device_id.rpartition(":")[2]) for device in visible), result.reports[0].message


async def test_cvd_10_rocr_filters_and_hip_counts_what_is_left(four_of_amd: Path) -> None:
    visible, _ = await with_rocm(four_of_amd, ROCR_VISIBLE_DEVICES="0,3", HIP_VISIBLE_DEVICES="1")
    assert visible == [3]
    visible, said = await with_rocm(four_of_amd, ROCR_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="1")
    assert visible == []
    assert "counted anew from 0" in said


async def test_cvd_11_each_variable_has_its_own_place(four_of_amd: Path) -> None:
    assert (await with_rocm(four_of_amd, HIP_VISIBLE_DEVICES="2,3"))[0] == [2, 3]
    assert resolve({HIP: "2,3"}, amd(4)).order["rocm"] == ("amd:2", "amd:3")
    visible, said = await with_rocm(four_of_amd, ROCR_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="0,1")
    assert visible == [1]
    assert "'1' is no device" in said


def by_vulkan(n: int, *, uuid: str | None, pci: str | None) -> GPUDevice:
    """A card as a backend over Vulkan shows it, opened and verified: Vulkan does not know CUDA's variable."""
    raw = uuid.removeprefix("GPU-").upper() if uuid else None
    update = {"device_id": f"wgpu:{n}", "backend": "wgpu", "backend_name": "wgpu", "backends": ("wgpu",)}
    return device(n).model_copy(
        update=update | {"identity": device_identity(uuid=raw, pci_address=pci, fallback=f"wgpu:{n}")}
    )


@pytest.mark.parametrize("known", ["uuid", "pci"])
@pytest.mark.parametrize("cupy", [True, False])
async def test_cvd_12_a_hidden_card_stays_hidden_in_every_interface(tmp_path: Path, known: str, cupy: bool) -> None:
    rows = card(0, uuid=UUID_A), card(1, uuid=UUID_B)
    seen = await asyncio.to_thread(cards, tmp_path, *rows)
    both = tuple(
        by_vulkan(n, uuid=row["uuid"] if known == "uuid" else None, pci=row["pci_address"] if known == "pci" else None)
        for n, row in enumerate(rows)
    )
    said = Said(
        cuda=outcome(seen, verified(seen.devices[1]) if cupy else NO_CUPY),
        wgpu=outcome(ProbeLine(stage="verified", devices=both)),
    )
    environ = {CVD: UUID_B[:12]}
    async with said.service(tmp_path / "r.json", environ, backends=["cuda", "wgpu", "toy"]) as service:
        result = await service.discover_all_devices()
    by_uuid = {device.stable_id: device for device in result.devices if device.kind is not DeviceKind.CPU}
    assert set(by_uuid) == {UUID_A, UUID_B}
    hidden, shown = by_uuid[UUID_A], by_uuid[UUID_B]
    assert not hidden.usable
    assert CVD in (hidden.state_reason or "")
    assert set(hidden.backends) == {"cuda", "wgpu"}
    assert shown.usable


def test_cvd_12_also_where_vulkan_alone_is_asked_for_it(tmp_path: Path) -> None:
    """Vulkan's own list, with the same 16 bytes: the mask is about the card, not about CUDA."""
    first, second = (f"GPU-{c * 8}-{c * 4}-{c * 4}-{c * 4}-{c * 12}" for c in "ab")
    vulkan = {"devices": [by_vulkans_list("a", 1), by_vulkans_list("b", 2)]}
    nvml = {"devices": [card(0, uuid=first), card(1, uuid=second)]}
    result = replay(tmp_path, "cuda", "vulkan", environ={CVD: second}, nvml=nvml, vulkan=vulkan)
    reasons = {device.stable_id: device.state_reason or "" for device in result.devices}
    assert set(reasons) == {first, second}
    assert reasons[first].startswith("hidden_by_environment")
    assert not reasons[second].startswith("hidden_by_environment")
    (alone,) = (
        d for d in replay(tmp_path, "vulkan", environ={CVD: second}, vulkan=vulkan).devices if "a" * 8 in str(d)
    )
    assert (alone.state_reason or "").startswith("hidden_by_environment")


LOUD = "import os, pathlib\npathlib.Path({log!r}).open('a').write(f'{{os.getpid()}} {name}\\n')\n{then}\n"
SCRIPT = """
import asyncio, json, os, sys
import gpurt
after_import = sorted(sys.modules)
from gpurt.discovery.service import GPUDiscoveryService
async def main():
    async with GPUDiscoveryService(sys.argv[1], backends=["cuda", "cpu"]) as service:
        return await service.discover_all_devices()
result = asyncio.run(main())
vendor = ("cupy", "cupy_backends", "torch", "pynvml", "mlx", "onnxruntime")
print(json.dumps({
    "pid": os.getpid(), "imported": [m for m in after_import if m in vendor],
    "used": [m for m in sys.modules if m in vendor], "cards": [d.stable_id for d in result.devices],
}))
"""


def test_cvd_13_discovery_initialises_no_cuda_in_its_process(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    """CuPy and PyTorch leave a line with the number of the process that loads them: a child's, for verification."""
    log = tmp_path / "log"
    for name in ("cupy", "cupy_backends", "torch"):
        (tmp_path / name).mkdir()
        text = LOUD.format(log=str(log), name=name, then="raise RuntimeError('cuInit was called')")
        (tmp_path / name / "__init__.py").write_text(text)
    environ = nvml_stub.env("ok2") | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "r.json")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["cards"][:2] == [UUID_A, UUID_B]
    assert said["imported"] == said["used"] == []
    loaded = [line.split() for line in log.read_text().splitlines()]
    assert not any(pid == str(said["pid"]) or name == "torch" for pid, name in loaded)
