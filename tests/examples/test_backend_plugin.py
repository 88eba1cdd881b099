"""examples/backend_plugin: built, installed beside gpurt, found by its entry point, and tested by its own tests."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/backend_plugin"

pytestmark = [
    pytest.mark.wide,
    *(
        pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")
        for module in ("pyopencl", "hatchling", "pip")
    ),
]

USE = """
import asyncio, sys, gpurt
async def main():
    try:
        backend = await gpurt.create_backend("intel")
    except gpurt.BackendUnavailable as exc:
        return print("refused", exc.reason)
    async with backend:
        content = bytes(range(256)) * 4096
        for device in await backend.list_devices():
            async with backend.allocation(device.device_id, len(content)) as handle:
                await backend.copy_to_device(content, handle)
                print(device.device_id, await backend.copy_from_device(handle) == content)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in it, as pip puts it there from the wheel. Needs no network."""
    folder = tmp_path_factory.mktemp("plugin")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    wheel = [*pip, "wheel", "--no-build-isolation", *offline, "-w", str(folder / "wheels"), str(EXAMPLE)]
    subprocess.run(wheel, check=True, capture_output=True, timeout=120)
    (built,) = (folder / "wheels").glob("gpurt_intel-*.whl")
    target = folder / "site"
    install = [*pip, "install", *offline, "--target", str(target), str(built)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    return target


def run(installed: Path, *arguments: str, any_vendor: bool = True) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(installed), "GPURT_INTEL_TEST_ANY_VENDOR": "1" if any_vendor else ""}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=EXAMPLE / "tests",
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )


def kit(installed: Path, chosen: str) -> int:
    """How many tests passed; none may fail."""
    command = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-k", chosen]
    ended = run(installed, *command)
    if "[no_driver]" in ended.stdout:
        pytest.skip("no OpenCL driver here")
    assert ended.returncode == 0, ended.stdout
    return int(re.findall(r"(\d+) passed", ended.stdout)[-1])


def test_it_is_found_and_gives_bytes_back(installed: Path) -> None:
    used = run(installed, "-c", USE)
    if used.stdout.startswith("refused no_driver"):
        pytest.skip("no OpenCL driver here")
    assert used.stdout.splitlines()[0] == "intel:0 True", used.stderr


def test_other_vendors_are_not_its_own(installed: Path) -> None:
    used = run(installed, "-c", USE, any_vendor=False)
    assert used.stdout.split() in (["refused", "no_device"], ["refused", "no_driver"], ["intel:0", "True"])


def test_discovery_probes_it(installed: Path) -> None:
    probed = run(installed, "-m", "gpurt.discovery.probe_child", "intel")
    if '"no_driver"' in probed.stdout:
        pytest.skip("no OpenCL driver here")
    assert '"stage":"verified"' in probed.stdout, probed.stderr
    assert '"usable":true' in probed.stdout


def test_the_driver_passes_its_kit(installed: Path) -> None:
    assert kit(installed, "TestIntelDriver") > 20


@pytest.mark.slow
def test_the_backend_passes_the_whole_kit(installed: Path) -> None:
    assert kit(installed, "TestIntelBackend") > 250
