"""``--doctor``: one file with everything for a bug report, and on request nothing of whose machine it is."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gpurt.discover import main
from gpurt.doctor.document import default_name, examine_host, masked
from gpurt.doctor.packages import packages, traps
from gpurt.doctor.registry import registry_health
from gpurt.doctor.system import system
from gpurt.errors import GPUError
from gpurt.recording.mask import Masker
from tests.discovery.records import UUIDS, device, result
from tests.sources.trees import write
from tests.support.nvml_stub import UUID_A, UUID_B, NvmlStub, nvml_stub

__all__ = ["nvml_stub"]

PARTS = {
    "schema", "gpurt", "made_at", "masked", "environment", "discovery", "explanations", "timings_ms", "system",
    "packages", "registry",
}  # fmt: skip


def doctor(*arguments: str, env: dict[str, str], where: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpurt.discover", "--doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=where)


def test_one_file_with_everything(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    env = nvml_stub.env("ok2") | {"CUDA_VISIBLE_DEVICES": UUID_A, "AWS_SECRET_ACCESS_KEY": "hunter2"}
    registry = str(tmp_path / "r.json")
    done = doctor("--registry", registry, "--backend", "cuda", "--backend", "cpu", env=env, where=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = tmp_path.glob("gpurt-doctor-*.json")
    assert path.name in done.stdout
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    document = json.loads(text)
    assert document.keys() == PARTS
    assert "hunter2" not in text
    assert document["environment"]["CUDA_VISIBLE_DEVICES"] == UUID_A
    assert {report["name"] for report in document["discovery"]["reports"]} == {"cuda", "cpu"}
    assert document["timings_ms"]["probes"].keys() == {"cuda", "cpu"}
    assert document["timings_ms"]["discovery"] >= document["timings_ms"]["probes"]["cuda"] > 0
    assert document["packages"]["installed"]["nvidia-ml-py"]
    assert document["registry"]["readable"] is True
    assert document["registry"]["mode"] == "0600"
    assert document["explanations"]
    assert document["system"]["platform"]["kernel"] == os.uname().release
    again = doctor("--registry", registry, "--backend", "cpu", env=env, where=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert path.read_text() == text


def test_masked_it_has_nothing_of_its_owner(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    home = tmp_path / "home" / "mallory"
    home.mkdir(parents=True)
    env = nvml_stub.env("ok2") | {
        "CUDA_VISIBLE_DEVICES": f"{UUID_A[:12]},{UUID_B}",
        "USER": "mallory",
        "HOME": "/home/mallory",
        "CUDA_HOME": "/home/mallory/cuda",
    }
    arguments = ["--registry", str(home / "r.json"), "--backend", "cuda", "--backend", "cpu"]
    done = doctor("report.json", *arguments, "--mask", "--json", env=env, where=tmp_path)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"doctor": "report.json", "masked": True})
    text = (tmp_path / "report.json").read_text()
    for secret in (UUID_A, UUID_B, "1a1a1a1a", "2b2b2b2b", "mallory", f'"{os.uname().nodename}"'):
        assert secret.lower() not in text.lower()
    document = json.loads(text)
    assert document["masked"] is True
    first, second = document["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
    uuids = [each["identity"]["uuid"] for each in document["discovery"]["devices"] if each["backend"] == "cuda"]
    assert uuids[0].startswith(first), "which card the variable names can still be followed"
    assert uuids[1] == second
    assert document["environment"]["CUDA_HOME"].startswith("/home/user-")
    assert any(uuids[0] in each["text"] for each in document["explanations"])


def test_a_home_that_is_not_below_home_is_masked_too(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    """As root's, and as the one that the registry is in by itself."""
    home = tmp_path / "root"
    home.mkdir()
    env = nvml_stub.env("ok2") | {"HOME": str(home), "USER": "root"}
    env.pop("XDG_STATE_HOME", None)
    done = doctor("report.json", "--backend", "cpu", "--mask", env=env, where=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report.json").read_text()
    assert str(home) not in text
    assert json.loads(text)["registry"]["path"].startswith("/home/user-")


async def test_a_discovery_that_fails_is_what_the_report_is_about() -> None:
    async def discover() -> Any:
        raise GPUError("GPURT_PLUGINS='perhaps' is neither true nor false")

    document = await examine_host(discover, environ={})
    assert "perhaps" in document["discovery"]["error"]
    assert document["discovery"]["traceback"]
    assert document["explanations"] == []
    assert document.keys() == PARTS


async def test_versions_are_no_addresses_and_addresses_are() -> None:
    async def discover() -> Any:
        return result(device(0, name="H100 of 10.1.2.3"))

    document = await examine_host(discover, environ={})
    document["packages"] = {"installed": {"nvidia-cublas-cu12": "12.6.4.1"}, "traps": []}
    after = masked(document, Masker())
    assert after["packages"]["installed"] == {"nvidia-cublas-cu12": "12.6.4.1"}
    text = json.dumps(after)
    assert "10.1.2.3" not in text
    assert UUIDS[0] not in text


@pytest.mark.parametrize("name", ["", "new.json"])
def test_it_is_not_written_over_anything(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / (name or default_name())
    path.write_text("precious")
    assert main(["--doctor", *([name] if name else []), "--backend", "cpu"]) == 2
    captured = capsys.readouterr()
    assert "exists already" in captured.err
    assert captured.out == ""
    assert path.read_text() == "precious"


def test_it_needs_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--doctor", str(tmp_path / "no" / "report.json"), "--backend", "cpu"]) == 2
    assert "mkdir -p" in capsys.readouterr().err


def test_the_usual_name_has_the_date() -> None:
    assert default_name(datetime(2026, 11, 28, 9, 30)) == "gpurt-doctor-2026-11-28.json"


@pytest.mark.parametrize(
    "arguments",
    [["--mask"], ["--doctor", "--watch", "1"], ["--record", "a", "--fixture", "b"], ["--doctor", "--record", "a"]],
)
def test_options_that_exclude_each_other(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as exc:
        code = exc.code
    assert code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("option", [["--verify"], ["--registry", "r.json"], ["--timeout", "3"]])
def test_a_recording_has_no_drivers_to_open(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fixture", "anywhere", *option]) == 2
    assert f"{option[0]} means nothing" in capsys.readouterr().err


def test_traps_of_packages_are_named_with_the_way_out() -> None:
    (two,) = traps(["cupy-cuda12x", "cupy-cuda13x", "numpy"], {"pynvml": ["nvidia-ml-py"]})
    assert "cupy-cuda12x and cupy-cuda13x are both installed" in two
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x" in two
    (shadow,) = traps(["nvidia-ml-py", "pynvml"], {"pynvml": ["nvidia-ml-py", "pynvml"]})
    assert "pynvml comes from pynvml and shadows" in shadow
    assert "pip uninstall -y pynvml" in shadow
    (stray,) = traps([], {}, "/here/pynvml.py")
    assert "/here/pynvml.py belongs to no installed package" in stray
    assert len(traps(["onnxruntime", "onnxruntime-directml"], {})) == 1
    assert traps(["cupy-cuda12x", "cupy-xarray", "nvidia-ml-py"], {"pynvml": ["nvidia-ml-py"]}) == []


def test_packages_of_this_environment() -> None:
    found = packages()
    assert found["installed"]["numpy"]
    assert not any(name.startswith("pip") for name in found["installed"])


def test_system_of_a_tree(tmp_path: Path) -> None:
    write(tmp_path, "dev/kfd", "")
    write(tmp_path, "dev/dri/renderD128", "")
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX 590.48.01\n")
    write(tmp_path, "proc/modules", "nvidia 1 0 - Live 0x0\next4 2 0 - Live 0x0\n")
    write(tmp_path, "sys/module/nvidia/version", "590.48.01\n")
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    write(tmp_path, "proc/self/cgroup", "0::/a\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.max", "1073741824\n")
    write(tmp_path, "sys/fs/cgroup/a/cpu.max", "200000 100000\n")
    write(tmp_path, "etc/os-release", 'ID=ubuntu\nPRETTY_NAME="Ubuntu 24.04"\n')
    write(tmp_path, ".dockerenv", "")
    found = system(tmp_path)
    assert [node["path"] for node in found["device_nodes"]] == ["dev/dri/renderD128", "dev/kfd"]
    assert all(node["may_open"] is True and node["mode"] for node in found["device_nodes"])
    assert "590.48.01" in found["nvidia_driver"]["text"]
    assert found["kernel_modules"]["loaded"] == {"nvidia": "590.48.01", "amdgpu": None}
    assert found["limits"]["cgroup"]["memory"][0]["limit_bytes"] == 1 << 30
    assert found["limits"]["cgroup"]["cpu_quota"] == 2.0
    assert found["platform"]["os"] == {"id": "ubuntu", "pretty_name": "Ubuntu 24.04"}
    assert found["platform"]["container"] == "docker"
    assert json.dumps(found, allow_nan=False)
    empty = system(tmp_path / "nothing")
    assert empty["device_nodes"] == []
    assert empty["nvidia_driver"] == {"text": None, "unavailable": "unsupported"}
    assert empty["kernel_modules"]["loaded"] is None


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="everything is open to root")
def test_a_node_that_may_not_be_opened(tmp_path: Path) -> None:
    write(tmp_path, "dev/kfd", "").chmod(0)
    assert system(tmp_path)["device_nodes"][0]["may_open"] is False


def test_health_of_a_registry(tmp_path: Path) -> None:
    path = tmp_path / "registry.json"
    assert registry_health(path) == {"path": str(path), "exists": False}
    path.write_text("{")
    (tmp_path / "registry.json.corrupt-1").write_text("{")
    broken = registry_health(path)
    assert (broken["readable"], broken["corrupt_copies"]) == (False, 1)
    assert path.read_text() == "{", "it is looked at, not put aside"
    path.unlink()
    assert main(["--backend", "cpu", "--registry", str(path), "--json"]) == 1
    good = registry_health(path)
    assert (good["readable"], good["counts"]["devices"]) == (True, 1)
