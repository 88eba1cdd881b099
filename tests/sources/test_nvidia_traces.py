"""No process is started to ask for an NVIDIA device where nothing hints at one, and always where something does."""

import os
import sys
from pathlib import Path

import pytest
from tests.support.nvml_stub import NvmlStub, nvml_stub

from gpurt.discovery.probe import ChildProber
from gpurt.errors import ReasonCode
from gpurt.sources.nvidia_traces import has_nvidia_traces

__all__ = ["nvml_stub"]


def test_an_empty_host_has_none(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(b"\0libc.so.6\0/lib/libc.so.6")
    bus = tmp_path / "sys/bus/pci/devices/0000:00:02.0"
    bus.mkdir(parents=True)
    (bus / "vendor").write_text("0x8086\n")
    assert not has_nvidia_traces(tmp_path, {})
    (bus / "vendor").write_text("0x10de\n")
    assert has_nvidia_traces(tmp_path, {})


@pytest.mark.parametrize(
    "trace",
    [
        "proc/driver/nvidia/version",
        "sys/module/nvidia/version",
        "dev/nvidiactl",
        "dev/dxg",
        "dev/nvhost-ctrl",
        "etc/nv_tegra_release",
        "usr/lib/libnvidia-ml.so.1",
        "usr/local/nvidia/lib64/libcuda.so.1",
        "opt/driver/libnvidia-ml.so.1",
    ],
)
def test_any_trace_is_one(tmp_path: Path, trace: str) -> None:
    environ = {"LD_LIBRARY_PATH": "/usr/nowhere:/opt/driver"}
    assert not has_nvidia_traces(tmp_path, environ)
    (tmp_path / trace).parent.mkdir(parents=True)
    (tmp_path / trace).touch()
    assert has_nvidia_traces(tmp_path, environ)


def test_a_library_that_the_loader_knows_is_one(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(b"\0libnvidia-ml.so.1\0/somewhere/libnvidia-ml.so.1\0")
    assert has_nvidia_traces(tmp_path, {})


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
async def test_a_probe_without_traces_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurt.discovery.probe.has_nvidia_traces", lambda root, environ: False)

    async def never(self: ChildProber, name: str, environ: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(ChildProber, "_start", never)
    outcome = await ChildProber().probe("cuda", deadline=10.0, environ={})
    assert outcome.failure is not None
    assert outcome.failure.reason is ReasonCode.NO_DRIVER
    assert outcome.failure.hint


async def test_a_probe_with_a_library_in_the_path_asks_it(nvml_stub: NvmlStub) -> None:
    outcome = await ChildProber().probe("cuda", deadline=20.0, environ=nvml_stub.env("ok2"))
    assert len(outcome.sighted) == 2
    assert os.path.exists(nvml_stub.library)
