"""The ways in which the stand-in library misbehaves, as others' tests rely on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.support.nvml_stub import NvmlStub, nvml_stub

__all__ = ["nvml_stub"]

INIT = "import pynvml; pynvml.nvmlInit(); print('went on')"


@pytest.mark.parametrize(
    ("scenario", "status", "printed"),
    [
        ("segv", -signal.SIGSEGV, ""),
        ("abort", -signal.SIGABRT, ""),
        ("exit3", 3, ""),
        ("noise", 0, "NVRM: chatter on standard output\nwent on\n"),
        ("ok2", 0, "went on\n"),
    ],
)
def test_end_of_the_process(nvml_stub: NvmlStub, scenario: str, status: int, printed: str) -> None:
    result = nvml_stub.python(INIT, scenario)
    assert (result.returncode, result.stdout) == (status, printed)


def test_garbage_is_not_even_text(nvml_stub: NvmlStub) -> None:
    result = subprocess.run([sys.executable, "-c", INIT], env=nvml_stub.env("garbage"), capture_output=True, timeout=30)
    assert result.returncode == 0
    with pytest.raises(UnicodeDecodeError):
        result.stdout.decode()


def test_null_handle_is_fatal(nvml_stub: NvmlStub) -> None:
    result = nvml_stub.python("import pynvml; pynvml.nvmlInit(); pynvml.nvmlDeviceGetName(None)")
    assert result.returncode == -signal.SIGABRT


def test_hang_ends_only_by_a_signal(nvml_stub: NvmlStub) -> None:
    code = "import sys, pynvml; print('in', flush=True); pynvml.nvmlInit()"
    with subprocess.Popen([sys.executable, "-c", code], env=nvml_stub.env("hang"), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"in\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.2)
        child.kill()
    assert child.returncode == -signal.SIGKILL


def test_grandchild_outlives_its_parent_and_keeps_the_pipe(nvml_stub: NvmlStub) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", INIT], env=nvml_stub.env("forkchild"), stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert child.wait(30) == 0
        os.killpg(child.pid, 0)  # somebody of the group is still there
    finally:
        os.killpg(child.pid, signal.SIGKILL)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.read() == b""  # ends only because the grandchild is gone
