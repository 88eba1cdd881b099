"""A recording of a machine says the same as the machine, and nothing that it should not."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpurt.discover import main
from gpurt.recording.answers import answers_of
from gpurt.recording.environment import allowed
from gpurt.recording.files import MAX_FILE_BYTES, read_files, write_files
from gpurt.recording.mask import Masker
from gpurt.recording.prober import FixtureProber
from gpurt.recording.record import record
from gpurt.recording.replay import Recording
from gpurt.recording.tables import read_tables
from gpurt.sources.amd import read_amd
from gpurt.sources.host_cgroup import cpu_quota
from gpurt.sources.host_files import HostFiles
from gpurt.sources.host_identity import host_fingerprint
from gpurt.sources.host_memory import memory_budget
from gpurt.sources.intel import read_intel
from tests.discovery.cuda_rig import FakeCuPy
from tests.discovery.records import absent, cpu, result
from tests.sources import trees
from tests.support.nvml_stub import UUID_A, UUID_B, NvmlStub, nvml_stub

__all__ = ["nvml_stub"]

UNTOLD = ("registry", "timestamp", "recorded", "topology")


def run(*arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpurt.discover", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(env))


def facts(document: dict[str, Any]) -> dict[str, Any]:
    """What a recording keeps: all but times and figures of the second."""
    told = json.loads(json.dumps({key: value for key, value in document.items() if key not in UNTOLD}))
    for device in told["devices"]:
        device.pop("recorded", None)
        if device["kind"] == "cpu":
            for figure in ("memory_available", "memory_usable_bytes", "clock_rate_mhz"):
                device.pop(figure)
    for report in told["reports"]:
        report.pop("elapsed_ms")
    return told


def host_of(document: dict[str, Any]) -> str:
    return next(device["identity"]["key"] for device in document["devices"] if device["kind"] == "cpu")


@pytest.mark.parametrize(
    ("scenario", "variables", "code"),
    [
        ("ok2", {}, 0),
        ("ok2", {"CUDA_VISIBLE_DEVICES": "1"}, 0),
        pytest.param("ok2", {"CUDA_VISIBLE_DEVICES": ""}, 1, marks=pytest.mark.slow),
        ("lost1", {}, 0),
        pytest.param("init18", {}, 0, marks=pytest.mark.slow),
    ],
)
def test_the_same_answer(
    scenario: str,
    variables: dict[str, str],
    code: int,
    nvml_stub: NvmlStub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = nvml_stub.env(scenario) | {"PYTHONPATH": str(FakeCuPy(tmp_path).site)} | variables
    backends = ["--backend", "cuda", "--backend", "cpu"]
    live = run("--json", *backends, "--registry", str(tmp_path / "r.json"), env=env)
    recorded = run("--json", *backends, "--record", str(tmp_path / "there"), env=env)
    assert (recorded.returncode, recorded.stderr) == (0, "")
    assert main(["--json", "--fixture", str(tmp_path / "there")]) == live.returncode == code
    before, after = json.loads(live.stdout), json.loads(capsys.readouterr().out)
    assert facts(before) == facts(after)
    assert host_of(after) == f"host:{host_fingerprint()}"
    machine_id = Path("/etc/machine-id")
    if machine_id.exists() and (confidential := machine_id.read_text().strip()):
        assert (tmp_path / "there/root/etc/machine-id").read_text().strip() != confidential


def test_a_masked_recording_has_nothing_of_its_owner(
    nvml_stub: NvmlStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = nvml_stub.env("ok2") | {
        "PYTHONPATH": str(FakeCuPy(tmp_path).site),
        "CUDA_VISIBLE_DEVICES": UUID_B[:12],
        "USER": "mallory",
        "CUDA_HOME": "/home/mallory/cuda",
        "SECRET_TOKEN": "hunter2",
    }
    there = tmp_path / "there"
    done = run("--backend", "cuda", "--backend", "cpu", "--mask", "--record", str(there), env=env)
    assert done.returncode == 0, done.stderr
    everything = "".join(
        f"{path}\n{path.read_text(errors='replace')}" for path in there.rglob("*") if path.is_file()
    ).lower()
    secrets = [
        UUID_A,
        UUID_B,
        UUID_A[4:].replace("-", ""),
        "1a1a1a1a",
        "2b2b2b2b",
        "mallory",
        "hunter2",
        "secret_token",
    ]
    secrets += [os.uname().nodename, host_fingerprint()]
    machine_id = Path("/etc/machine-id")
    if machine_id.exists() and machine_id.read_text().strip():
        secrets.append(machine_id.read_text().strip())
    everything = everything.replace(str(tmp_path).lower(), "")
    found = [
        secret for secret in secrets if re.search(rf"(?<![a-z0-9]){re.escape(secret.lower())}(?![a-z0-9])", everything)
    ]
    assert found == []
    main(["--json", "--fixture", str(there)])
    first, second = (d for d in json.loads(capsys.readouterr().out)["devices"] if d["backend"] == "cuda")
    assert "does not name it" in first["state_reason"]
    assert "does not name it" not in second["state_reason"], "the masked variable still names the card that it named"
    assert json.loads((there / "meta.json").read_text())["masked"] is True


def test_a_library_that_hangs_costs_its_table(
    nvml_stub: NvmlStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    env = nvml_stub.env("hang") | {"PYTHONPATH": str(FakeCuPy(tmp_path).site)}
    done = run("--backend", "cuda", "--backend", "cpu", "--timeout", "1", "--record", str(there), env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads((there / "tables/nvml.json").read_text())["error"]["reason"] == "timeout"
    assert main(["--json", "--explain", "--fixture", str(there)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["reports"][0]["reason"] == "timeout"
    assert document["explanations"][0]["status"] == "failing"


@pytest.mark.parametrize(("scenario", "reason"), [("segv", "crashed"), ("init9", "no_driver")])
async def test_tables_of_a_library_that_fails(scenario: str, reason: str, nvml_stub: NvmlStub) -> None:
    tables = await read_tables(["cuda", "cpu"], nvml_stub.env(scenario), 30)
    assert tables["nvml"]["error"]["reason"] == reason
    assert list(tables) == ["nvml"]


def test_only_into_a_new_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("precious")
    assert main(["--backend", "cpu", "--record", str(tmp_path)]) == 2
    assert "there is something" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert main(["--backend", "cpu", "--record", str(tmp_path / "a" / "b")]) == 2
    assert main(["--backend", "nonsense", "--record", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_only_its_owner_may_look(tmp_path: Path) -> None:
    assert main(["--backend", "cpu", "--record", str(tmp_path / "there")]) == 0
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o700


@pytest.mark.parametrize("build", [trees.mi210_host, trees.strix_halo_host, trees.intel_host])
def test_readers_read_of_the_copy_what_they_read_of_the_machine(build: Callable[[Path], None], tmp_path: Path) -> None:
    source, target = tmp_path / "machine", tmp_path / "copy"
    build(source)
    write_files(read_files(source), target, None)
    for node in ("dev/kfd", "dev/dri/renderD128", "dev/dri/renderD129", "dev/dri/renderD130"):
        if (source / node).exists():
            trees.write(target, node, "")
    assert read_amd(target).devices == read_amd(source).devices
    assert read_intel(target).devices == read_intel(source).devices
    assert read_amd(source).devices or read_intel(source).devices


def test_what_is_copied_is_ours_and_not_confidential(tmp_path: Path) -> None:
    source, target = tmp_path / "machine", tmp_path / "copy"
    trees.write(source, "proc/self/cgroup", "0::/a\n")
    trees.write(
        source,
        "proc/self/mountinfo",
        "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n31 1 0:27 / /home rw - nfs server.lan:/alice rw\n",
    )
    trees.write(source, "sys/fs/cgroup/a/memory.max", "4096\n")
    trees.write(source, "sys/fs/cgroup/b/memory.max", "another group's\n")
    trees.write(source, "etc/machine-id", "0123456789abcdef0123456789abcdef\n")
    trees.write(source, "proc/modules", "x" * (MAX_FILE_BYTES + 5))
    write_files(read_files(source), target, None)
    assert not (target / "etc/machine-id").exists()
    assert "server.lan" not in (target / "proc/self/mountinfo").read_text()
    assert (target / "sys/fs/cgroup/a/memory.max").exists()
    assert not (target / "sys/fs/cgroup/b").exists()
    assert (target / "proc/modules").stat().st_size == MAX_FILE_BYTES


def test_names_of_files_are_masked_too(tmp_path: Path) -> None:
    source, target = tmp_path / "machine", tmp_path / "copy"
    group = "0f" * 32
    trees.write(source, "proc/self/cgroup", f"0::/docker-{group}.scope\n")
    trees.write(source, f"sys/fs/cgroup/docker-{group}.scope/memory.max", "4096\n")
    files = read_files(source)
    masker = Masker()
    masker.learn(files.contents)
    write_files(files, target, masker)
    (path,) = (target / "sys/fs/cgroup").rglob("memory.max")
    assert group not in str(path)
    assert path.parent.name in (target / "proc/self/cgroup").read_text(), "it is still this process's group"


V1 = "12:pids:/docker/x\n4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n"
POD = f"/kubepods.slice/kubepods-burstable.slice/kubepods-pod1.slice/cri-containerd-{'0f' * 32}.scope"
TREES: dict[str, dict[str, str]] = {
    "v2": {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/memory.max": "8589934592\n",
        "sys/fs/cgroup/memory.current": "1073741824\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
    },
    "v2 named after host and user": {
        "proc/self/cgroup": "0::/user.slice/max@eiger.service/eiger.scope\n",
        "sys/fs/cgroup/user.slice/memory.max": "max\n",
        "sys/fs/cgroup/user.slice/max@eiger.service/memory.max": "8589934592\n",
        "sys/fs/cgroup/user.slice/max@eiger.service/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/user.slice/max@eiger.service/eiger.scope/memory.max": "4294967296\n",
        "sys/fs/cgroup/user.slice/max@eiger.service/eiger.scope/cpuset.cpus.effective": "0-1\n",
    },
    "v1": {
        "proc/self/cgroup": V1,
        "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "8589934592\n",
        "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "1073741824\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
    },
    "v1 in a place of its own": {
        "proc/self/cgroup": "4:memory:/eiger/x\n",
        "proc/self/mountinfo": "31 1 0:27 /eiger /mnt/eiger/memory rw - cgroup cgroup rw,memory\n",
        "mnt/eiger/memory/memory.limit_in_bytes": "6442450944\n",
        "mnt/eiger/memory/x/memory.limit_in_bytes": "8589934592\n",
    },
    "hybrid": {
        "proc/self/cgroup": "4:memory:/eiger\n0::/eiger\n",
        "sys/fs/cgroup/memory/eiger/memory.limit_in_bytes": "8589934592\n",
        "sys/fs/cgroup/unified/eiger/cgroup.procs": "1\n",
    },
    "nested pods": {
        "proc/self/cgroup": f"0::{POD}\n",
        "sys/fs/cgroup/kubepods.slice/memory.max": "17179869184\n",
        "sys/fs/cgroup/kubepods.slice/memory.current": "1073741824\n",
        "sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice/memory.max": "12884901888\n",
        f"sys/fs/cgroup{POD}/memory.max": "8589934592\n",
        f"sys/fs/cgroup{POD}/memory.current": "2147483648\n",
        f"sys/fs/cgroup{POD}/cpu.max": "250000 100000\n",
    },
}


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("names", [("eiger", "max"), ("memory", "cpu"), ("cgroup", "sys"), ("kubepods", "rw")])
@pytest.mark.parametrize("tree", TREES)
def test_masking_changes_no_decision(tree: str, names: tuple[str, str], mask: bool, tmp_path: Path) -> None:
    source, target = tmp_path / "machine", tmp_path / "copy"
    trees.write(source, "proc/meminfo", "MemTotal: 33554432 kB\nMemFree: 25165824 kB\nMemAvailable: 26214400 kB\n")
    for name, text in TREES[tree].items():
        trees.write(source, name, text)
    files = read_files(source)
    # What the answers of libraries told: names, and an address that looks like a file's line.
    masker = Masker(hosts=[names[0]], users=[names[1]]) if mask else None
    if masker is not None:
        masker.learn({"serial": "100000", "message": f"{names[1]} at 10.1.2.3, 0::/, fe80::2"})
        for name, text in files.contents.items():
            masker.learn_file(text, name.rsplit("/", 1)[-1])
    write_files(files, target, masker)
    assert memory_budget(target) == memory_budget(source)
    assert memory_budget(source).source == "cgroup"
    assert cpu_quota(target, HostFiles(target)) == cpu_quota(source, HostFiles(source))
    if mask and names[0] == "eiger":
        everything = "".join(f"{path} {path.read_text()}" for path in target.rglob("*") if path.is_file())
        assert "eiger" not in everything
        assert "0f0f" not in everything


@pytest.mark.parametrize("mask", [False, True])
async def test_a_recording_of_a_tree_replays_to_the_same_memory(mask: bool, tmp_path: Path) -> None:
    """The whole way: recorded, perhaps masked, and discovered again."""

    def build() -> Path:
        source = tmp_path / "machine"
        trees.write(source, "proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 26214400 kB\n")
        # The processor is this machine's.
        if (machine_id := Path("/etc/machine-id")).exists():
            trees.write(source, "etc/machine-id", machine_id.read_text())
        for name, text in TREES["v2"].items():
            trees.write(source, name, text)
        return source

    source = await asyncio.to_thread(build)
    there = tmp_path / "there"
    await record(there, environ=dict(os.environ), backends=["cpu"], mask=mask, root=source)
    text = await asyncio.to_thread((there / "root/proc/self/cgroup").read_text)
    assert text == "0::/\n"
    recording = await asyncio.to_thread(Recording, there)
    first, second = [(await recording.discover()).devices[0] for _ in range(2)]
    assert (first.memory_usable_source, first.memory_usable_bytes) == ("cgroup", 7 << 30)
    assert first.identity == second.identity, "stable within the recording"
    told = await asyncio.to_thread(host_fingerprint, source)
    assert (first.stable_id == f"host:{told}") is not mask
    assert first.memory_pool_id == first.stable_id


def test_no_registry_that_is_gone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--backend", "cpu", "--explain", "--record", str(tmp_path / "there")]) == 0
    shown = capsys.readouterr().out
    assert "remembers" not in shown
    assert "registry.json" not in shown


def test_environments_are_allow_listed() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0", "AWS_SECRET_ACCESS_KEY": "x", "GPURT_SECRET": "y", "PATH": "/bin"}
    assert allowed(environ) == {"CUDA_VISIBLE_DEVICES": "0"}


def test_backends_that_were_not_probed_keep_their_report() -> None:
    answers = answers_of({}, result(cpu(), reports=[absent("rocm", message="no card")]))
    assert answers["rocm"].failure is not None
    assert answers["rocm"].failure.message == "no card"
    assert not answers["rocm"].sighted


async def test_the_prober_of_a_recording_can_serve_a_service(tmp_path: Path) -> None:
    """It is a prober like any other."""
    from gpurt.discovery.service import GPUDiscoveryService

    fixture = Path(__file__).parents[1] / "fixtures/nvidia-h100"
    prober = await asyncio.to_thread(FixtureProber, fixture)
    async with GPUDiscoveryService(
        registry_path=tmp_path / "r.json", backends=["cuda"], prober=prober, environ={}
    ) as service:
        found = await service.discover_all_devices()
    assert [device.name for device in found.devices] == ["NVIDIA H100 80GB HBM3"]
