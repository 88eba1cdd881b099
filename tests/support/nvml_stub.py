"""A C stand-in for the NVIDIA management library, so that tests drive the real nvidia-ml-py without a GPU.

Use the fixture::

    from tests.support.nvml_stub import NvmlStub, nvml_stub  # noqa: F401

    def test_something(nvml_stub: NvmlStub) -> None:
        result = nvml_stub.python("import pynvml; pynvml.nvmlInit()", "init18")

The scenarios are listed at the top of ``nvml_stub.c``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")

UUID_A = "GPU-1a1a1a1a-0000-1111-2222-333333333333"
UUID_B = "GPU-2b2b2b2b-0000-1111-2222-444444444444"
UUID_GB10 = "GPU-3c3c3c3c-0000-1111-2222-555555555555"
PCI_A = "00000000:00:09.0"
PCI_B = "00000000:00:0a.0"
PCI_GB10 = "0000000f:01:00.0"
H100_TOTAL = 85520809984
H100_RESERVED = 502267904


def build_nvml_stub(tmp_dir: Path) -> Path:
    """Compile the stub as ``tmp_dir/libnvidia-ml.so.1`` and return its path; skips the test without a compiler."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the NVML stub is an ELF library found through LD_LIBRARY_PATH")
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang) to build the NVML stub")
    library = tmp_dir / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(SOURCE)],
        check=True,
    )
    return library


@dataclass(frozen=True)
class NvmlStub:
    """Where the built stub lies."""

    library: Path

    def env(self, scenario: str = "ok2", *, file: Path | None = None, log: Path | None = None) -> dict[str, str]:
        """This process's environment with the stub in front.

        ``file`` holds the scenario instead and may be rewritten while processes run (replace it atomically);
        ``log`` collects ``init <pid>`` and ``shutdown <pid>`` lines.
        """
        env = dict(os.environ)
        inherited = env.get("LD_LIBRARY_PATH")
        env["LD_LIBRARY_PATH"] = os.pathsep.join([str(self.library.parent), *([inherited] if inherited else [])])
        env["GPURT_TEST_NVML"] = scenario
        if file is not None:
            env["GPURT_TEST_NVML_FILE"] = str(file)
        if log is not None:
            env["GPURT_TEST_NVML_LOG"] = str(log)
        return env

    def python(
        self,
        code: str,
        scenario: str = "ok2",
        *,
        file: Path | None = None,
        log: Path | None = None,
        timeout: float = 30,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in a child Python over the stub and wait for it."""
        return subprocess.run(
            [sys.executable, "-c", code],
            env=self.env(scenario, file=file, log=log),
            capture_output=True,
            text=True,
            timeout=timeout,
        )


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> NvmlStub:
    """The stub, built once a session."""
    return NvmlStub(build_nvml_stub(tmp_path_factory.mktemp("nvml")))
