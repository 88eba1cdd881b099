"""What discovery says of recorded machines: those of ``tests/fixtures``, made from public captures and reports."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpurt.discover import main
from gpurt.discovery.report import size_text
from gpurt.errors import ReasonCode
from gpurt.recording.replay import Recording
from gpurt.types import DeviceKind, DeviceState, GPUDevice

FIXTURES = Path(__file__).parents[1] / "fixtures"
MIB = 1 << 20


async def devices(name: str) -> tuple[GPUDevice, ...]:
    recording = await asyncio.to_thread(Recording, FIXTURES / name)
    return (await recording.discover()).devices


async def only(name: str) -> GPUDevice:
    (device,) = [each for each in await devices(name) if each.kind is not DeviceKind.CPU]
    return device


@pytest.mark.parametrize(
    ("name", "model", "total_mib", "free_mib", "capability", "driver"),
    [
        ("nvidia-h100", "NVIDIA H100 80GB HBM3", 81559, 81559 - 479, "9.0", "590.48.01"),
        ("nvidia-h200", "NVIDIA H200", 143771, 143771 - 614, "9.0", "590.48.01"),
        ("nvidia-l40s", "NVIDIA L40S", 46068, 46068 - 609, "8.9", "595.80"),
        ("nvidia-rtx-4080-super", "NVIDIA GeForce RTX 4080 SUPER", 16376, 16376 - 434 - 596, "8.9", "595.71.05"),
        ("nvidia-rtx-2080-super-wddm", "NVIDIA GeForce RTX 2080 SUPER", 8192, 8192 - 205 - 702, "7.5", "591.86"),
    ],
)
async def test_cards_of_nvidia(
    name: str, model: str, total_mib: int, free_mib: int, capability: str, driver: str
) -> None:
    device = await only(name)
    assert (device.name, device.vendor, device.kind) == (model, "nvidia", DeviceKind.GPU)
    assert (device.memory_bytes, device.memory_available) == (total_mib * MIB, free_mib * MIB)
    assert (device.compute_capability, device.driver_version) == (capability, driver)
    assert device.identity is not None
    assert device.identity.stable
    assert device.identity.uuid == device.stable_id
    assert device.state is DeviceState.UNKNOWN, "nobody asked it"
    assert not device.usable
    assert (device.state_reason or "").startswith("not_recorded: the recording has no answer of cuda's own driver")
    assert device.memory_usable_bytes == free_mib * MIB - (512 << 20), "as on its machine: free, less the reserve"


async def test_pci_domain_and_address_of_the_capture() -> None:
    assert (await only("nvidia-h200")).identity.pci_address == "00000000:83:00.0"  # type: ignore[union-attr]
    assert (await only("nvidia-gb10")).identity.pci_address == "0000000f:01:00.0"  # type: ignore[union-attr]


async def test_a_card_in_parts_is_its_parts() -> None:
    parts = await devices("nvidia-h100-mig")
    assert [part.memory_bytes for part in parts] == [size * MIB for size in (40448, 20096, 9984, 9984)]
    assert [part.compute_units for part in parts] == [60, 32, 16, 16]
    assert [part.identity and part.identity.partition for part in parts] == ["2/0", "3/0", "9/0", "10/0"]
    assert len({part.stable_id for part in parts}) == 4
    assert {part.memory_available for part in parts} == {None}, "the capture does not tell what is free"


async def test_gb10_has_the_memory_of_its_host_once() -> None:
    gpu, processor = await devices("nvidia-gb10")
    assert (gpu.unified_memory, gpu.kind) == (True, DeviceKind.INTEGRATED_GPU)
    assert gpu.memory_bytes == 127600748 << 10
    assert gpu.memory_usable_bytes is not None
    assert processor.memory_usable_bytes == 118566368 << 10
    assert gpu.memory_usable_bytes <= processor.memory_usable_bytes
    assert gpu.memory_pool_id == processor.memory_pool_id


async def test_jetson_tells_nothing_and_is_0_of_nothing() -> None:
    orin = await only("nvidia-jetson-orin")
    assert (orin.name, orin.compute_capability) == ("Orin (nvgpu)", "8.7")
    assert (orin.memory_bytes, orin.memory_available, orin.memory_usable_bytes) == (None, None, None)
    assert orin.identity is not None
    assert not orin.identity.stable


async def test_mi210() -> None:
    card = await only("amd-mi210")
    assert (card.compute_capability, card.compute_units) == ("gfx90a", 104)
    assert (card.identity and card.identity.pci_address) == "00000000:03:00.0"
    assert card.stable_id == "GPU-93bb3629c01aea1c"
    assert card.memory_bytes == 68702699520


async def test_vega10_of_an_old_kernel() -> None:
    card = await only("amd-vega10")
    assert card.compute_capability is None, "never a default"
    assert card.compute_units == 64
    assert (card.identity and card.identity.pci_address) == "00000000:19:00.0"
    assert card.memory_bytes == 17163091968
    assert card.memory_available == 17163091968 - 14102528


async def test_strix_halo_is_not_512_mib() -> None:
    gpu, processor = await devices("amd-strix-halo")
    assert (gpu.compute_capability, gpu.kind, gpu.unified_memory) == ("gfx1151", DeviceKind.INTEGRATED_GPU, True)
    assert gpu.memory_bytes == 133143986176
    assert gpu.memory_pool_id == processor.memory_pool_id


@pytest.mark.parametrize(("name", "budget"), [("apple-m4-max", 115448720916), ("apple-m4-max-wired", 114688 * MIB)])
async def test_apple_may_use_its_working_set_and_not_all_memory(name: str, budget: int) -> None:
    gpu = await only(name)
    assert (gpu.name, gpu.vendor, gpu.compute_units) == ("Apple M4 Max", "apple", 40)
    assert gpu.memory_bytes == 128 << 30
    assert gpu.memory_usable_bytes == budget


async def test_windows_by_dxgi() -> None:
    card, warp = await devices("windows-rtx-4090")
    assert (card.memory_bytes, card.kind) == (25757220864, DeviceKind.GPU)
    assert (card.identity and card.identity.pci_address) == "00000000:01:00.0"
    assert warp.kind is DeviceKind.SOFTWARE
    assert not warp.usable


async def test_windows_by_wmi_does_not_take_4_gib_for_a_size() -> None:
    card, inside = await devices("windows-wmi")
    assert (card.name, card.memory_bytes) == ("NVIDIA GeForce RTX 4090", None)
    assert inside.memory_bytes == 1073741824


@pytest.mark.parametrize("directory", sorted(FIXTURES.iterdir()), ids=lambda path: path.name)
def test_the_command_says_recorded_and_explains_everything(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--json", "--explain", "--fixture", str(directory)])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (code, document["discovery_status"]) == (1, "partial"), "nothing failed, and nothing is known to work"
    assert not any(report["reason"] == "no_library" for report in document["reports"])
    assert {device["state"] for device in document["devices"] if device["kind"] != "cpu"} == {"unknown"}
    assert document["recorded"]["directory"] == str(directory)
    assert all(device["recorded"] for device in document["devices"])
    assert document["devices"]
    explained = document["explanations"]
    about = {topic: [each for each in explained if each["topic"] == topic] for topic in ("backend", "device", "memory")}
    assert [each["subject"] for each in about["backend"]] == [report["name"] for report in document["reports"]]
    assert [each["subject"] for each in about["device"]] == [device["device_id"] for device in document["devices"]]
    assert {device["device_id"] for device in document["devices"]} <= {each["subject"] for each in about["memory"]}
    for device, sentence in zip(document["devices"], about["device"], strict=True):
        assert "(recorded)" in sentence["text"]
        assert device["usable"] or sentence["todo"] == "nothing: a recording is looked at, not used"
    (verdict,) = [each for each in explained if each["subject"] == "discovery"]
    assert "the recording has no answer" in verdict["text"]
    assert ("of the processor there is nothing" in verdict["text"]) == (document["backend_name"] != "cpu")
    for device in document["devices"]:
        (sentence,) = [each for each in about["memory"] if each["subject"] == device["device_id"]]
        known = device["memory_usable_bytes"] is not None
        assert ("to use, decided by" in sentence["text"]) == known, "the sentence and the figure agree"
    (nothing,) = [each for each in explained if each["topic"] == "visibility"]
    assert nothing["text"].startswith("In the recorded environment: ")
    assert main(["--fixture", str(directory)]) == code
    shown = capsys.readouterr().out
    assert all(f"{device['device_id']} (recorded)" in shown for device in document["devices"])
    for device in document["devices"]:
        if device["memory_usable_bytes"] is not None:
            assert size_text(device["memory_usable_bytes"]) in shown


def test_a_variable_beside_a_recording(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    directory = str(FIXTURES / "nvidia-h100")
    monkeypatch.setenv("GPURT_MEMORY_LIMIT", "lots")
    assert main(["--fixture", directory]) == 2
    assert "'lots'" in capsys.readouterr().err
    monkeypatch.setenv("GPURT_MEMORY_LIMIT", "20GiB")
    assert main(["--fixture", directory]) == 1
    assert "GPURT_MEMORY_LIMIT is set here and does nothing" in caplog.text


def test_a_recorded_variable_that_is_wrong_is_an_error_as_on_its_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = shutil.copytree(FIXTURES / "nvidia-h100", tmp_path / "there")
    (directory / "environ.json").write_text('{"GPURT_MEMORY_LIMIT": "lots"}')
    assert main(["--fixture", str(directory)]) == 2
    assert "'lots'" in capsys.readouterr().err


def test_one_backend_of_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--backend", "CPU", "--fixture", str(FIXTURES / "nvidia-gb10")]) == 1
    assert [report["name"] for report in json.loads(capsys.readouterr().out)["reports"]] == ["cpu"]
    assert main(["--backend", "rocm", "--fixture", str(FIXTURES / "nvidia-gb10")]) == 2
    assert "has nothing of backend 'rocm'" in capsys.readouterr().err


WATCHED = """
import os, sys
from gpurt.discover import main
for directory in sys.argv[1:]:  # everything is imported, and read that Python itself reads
    main(["--json", "--explain", "--fixture", directory])
outside = []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.fsdecode(arguments[0])
        if path.startswith(("/proc", "/sys", "/dev", "/etc", "/var")) and path != "/dev/null":
            outside.append(path)
    elif event in ("os.listdir", "os.scandir") and str(arguments[0]).startswith(("/proc", "/sys", "/dev")):
        outside.append(str(arguments[0]))
    elif event in ("subprocess.Popen", "ctypes.dlopen", "socket.gethostname"):
        outside.append(event)
sys.addaudithook(hook)
for directory in sys.argv[1:]:
    main(["--json", "--explain", "--fixture", directory])
sys.stderr.write(repr(outside))
"""


def test_nothing_of_this_machine_is_touched() -> None:
    directories = [str(path) for path in sorted(FIXTURES.iterdir())]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *directories], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "[]"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "is not a recording"),
        ("[]", "is not a JSON object"),
        ("{", "cannot be read"),
        ('{"schema": 99, "recorded_at": "now", "platform": "linux"}', "upgrade gpurt"),
        ('{"schema": 1, "recorded_at": "now", "platform": "amiga"}', "platform"),
    ],
)
def test_what_is_no_recording_is_exit_code_2(
    content: str | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "meta.json").write_text(content)
    assert main(["--fixture", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("file", ["drivers.json", "nodes.json", "environ.json"])
def test_a_broken_file_of_a_recording_is_named(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "meta.json").write_text('{"schema": 1, "recorded_at": "now", "platform": "linux"}')
    (tmp_path / file).write_text('{"nodes": [1], "cuda": 5')
    assert main(["--fixture", str(tmp_path)]) == 2
    assert file in capsys.readouterr().err


async def test_nodes_that_the_recorded_process_could_not_open(tmp_path: Path) -> None:
    """AMD-6: shown with the numeric group that helps, whoever looks at the recording."""

    def closed() -> Recording:
        directory = Path(shutil.copytree(FIXTURES / "amd-mi210", tmp_path / "closed"))
        nodes = json.loads((directory / "nodes.json").read_text())
        for node in nodes["nodes"]:
            node |= {"may_open": False, "gid": 992}
        (directory / "nodes.json").write_text(json.dumps(nodes))
        return Recording(directory)

    result = await (await asyncio.to_thread(closed)).discover()
    (card,) = result.devices
    assert "--group-add 992" in (card.state_reason or "")
    assert result.reports[0].reason is ReasonCode.NO_PERMISSION
