"""The wheel of CuPy for ROCm as pip installs it: what it says without ROCm, and the whole kit through its real binding.

Below the binding is a HIP runtime in C over host memory (``tests/support/hip_stub.c``), so that what is tested is how
CuPy is called: argument order, flags, errors, what HIP's properties have and lack.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fake_hip import recorded

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests/support/hip_stub.c"
LIBRARIES = ("libamdhip64.so.7", "librocfft.so.0", "libroctracer64.so.4")
"""What CuPy's runtime module is linked against."""

pytestmark = [
    pytest.mark.slow,  # 73 MB to download, 370 MB on the disk
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="there is no other wheel of CuPy for ROCm"
    ),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), "cupy-rocm-7-0>=14"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"the wheel cannot be had: {done.stderr[-300:]}")
    yield place
    shutil.rmtree(place)  # pytest would keep three of them


@pytest.fixture(scope="module")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the stand-in for ROCm's libraries."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for ROCm")
    place = tmp_path_factory.mktemp("rocm")
    for name in LIBRARIES:
        options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{name}"]
        subprocess.run([compiler, *options, "-o", str(place / name), str(STUB)], check=True)
    return place


def python(wheel: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(wheel), str(ROOT), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environ},
        timeout=300,
    )


OPEN = """
import pathlib, sys
from gpurt.backends.rocm_backend import ROCmDriver
from gpurt.errors import BackendUnavailable
try:
    for device in ROCmDriver(environ={}, root=pathlib.Path(sys.argv[1])).open():
        print(device.model_dump_json())
except BackendUnavailable as exc:
    print(exc.reason, exc.code, exc.message, exc.install_hint, sep=" | ")
print(sorted(name for name in sys.modules if name in ("cupy", "amdsmi")))
"""


def test_without_rocm_it_says_what_is_missing(wheel: Path, tmp_path: Path) -> None:
    asked = python(wheel, "-c", OPEN, str(recorded("amd-mi210", tmp_path)))
    said, loaded = asked.stdout.splitlines()
    reason, _, message, hint = said.split(" | ")
    assert reason == "no_library"
    assert message.startswith("CuPy for ROCm is installed, and ROCm's libamdhip64.so.7 cannot be loaded: ImportError:")
    assert "rocm-hip-runtime" in hint
    assert loaded == "[]"
    assert asked.stderr == ""


def test_without_a_card_it_says_so(wheel: Path, rocm: Path) -> None:
    asked = python(wheel, "-c", OPEN, "/nonexistent", LD_LIBRARY_PATH=str(rocm))
    assert asked.stdout.startswith("no_device | 100 | HIP works and finds no device")


def test_cuda_does_not_take_it(wheel: Path, rocm: Path) -> None:
    code = (
        "from gpurt.backends.cupy.loading import load_runtime\n"
        "try:\n    load_runtime('cuda', hip=False, install_hint='pip install this')\n"
        "except Exception as exc:\n    print(exc.reason, exc.message, exc.install_hint, sep=' | ')\n"
    )
    expected = (
        "no_library | the installed CuPy is built for ROCm, not for CUDA | "
        "pip uninstall -y cupy-rocm-7-0, then pip install this\n"
    )
    assert python(wheel, "-c", code, LD_LIBRARY_PATH=str(rocm)).stdout == expected


def test_a_card_is_what_the_kernel_and_the_binding_say(wheel: Path, rocm: Path, tmp_path: Path) -> None:
    environ = {"LD_LIBRARY_PATH": str(rocm), "HIP_STUB_CARDS": "0000:03:00.0", "HIP_STUB_BYTES": str(68702699520)}
    asked = python(wheel, "-c", OPEN, str(recorded("amd-mi210", tmp_path)), **environ)
    card, loaded = asked.stdout.splitlines()
    for text in (
        '"name":"AMD Instinct MI210"',
        '"compute_capability":"gfx90a"',
        '"uuid":"GPU-93bb3629c01aea1c"',
        '"memory_bytes":68702699520',
        '"compute_units":104',
        '"clock_rate_mhz":1700',
        '"max_threads_per_block":1024',
        '"driver_version":"HIP 7.0"',
    ):
        assert text in card
    assert loaded == "[]"  # importing all of CuPy would take half a second


KIT = """
import pytest
from gpurt.backends.rocm_backend import ROCmDriver
from gpurt.testing import BackendConformance, DriverConformance
from gpurt.testing.kit.base import load_factory, shutdown_quietly
from pathlib import Path


class TestBackend(BackendConformance):
    factory = "tests.support.cupy_backends:real_hip"
    large_bytes = 16 << 20

    @pytest.fixture
    async def backend(self):
        backend = load_factory(self.factory)
        await backend.initialize()
        yield backend
        await shutdown_quietly(backend)


class TestDriver(DriverConformance):
    @pytest.fixture
    def driver(self):
        return ROCmDriver(environ={}, root=Path("/nonexistent"))
"""


def test_the_whole_kit_through_the_real_binding(wheel: Path, rocm: Path, tmp_path: Path) -> None:
    (tmp_path / "test_kit.py").write_text(KIT)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    environ = {
        "LD_LIBRARY_PATH": str(rocm),
        "HIP_STUB_CARDS": "0000:03:00.0,0000:04:00.0",
        "HIP_STUB_BYTES": str(256 << 20),
        "GPURT_TEST_REQUIRE": "rocm",
    }
    done = python(wheel, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", str(tmp_path), **environ)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 300
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+: (.*)$", done.stdout, re.MULTILINE)
    allowed = ("memory is not visible to the host", "no largest allocation is claimed", "HIPRTC cannot be loaded")
    assert all(any(each in reason for each in allowed) for reason in reasons), reasons
