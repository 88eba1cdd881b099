"""What README says about a backend of one's own, pasted into a project and run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = README[README.index("## Add a backend") :]

USE = """
import asyncio, gpurt
async def main():
    async with await gpurt.create_backend("toy") as backend:
        (device,) = await backend.list_devices()
        print(device.device_id, device.kind)
asyncio.run(main())
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The section's files, and the entry point as an installer would write it."""
    for name, source in re.findall(r"^```python no-run\n# (\w+\.py)\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(source)
    (entry_point,) = re.findall(r"^```toml\n\[project\.entry-points\.\"(.+?)\"\]\n(.*?)^```", SECTION, re.M | re.S)
    installed = tmp_path / "toy_backend-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{entry_point[0]}]\n{entry_point[1].replace(chr(34), '')}")
    return tmp_path


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Run as a module or a command, Python looks for modules in the current directory.
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)


def kit(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=.", *arguments)


def test_the_backend_is_found_by_its_entry_point(project: Path) -> None:
    used = run(project, "-c", USE)
    assert used.stdout.split() == ["toy:0", "gpu"], used.stderr


def test_the_kit_passes_in_strict_mode(project: Path) -> None:
    quick = "TestToyDriver or round_trip or shutdown or handle"
    ended = kit(project, "test_toy_backend.py", "-k", f"({quick}) and not large")
    assert ended.returncode == 0, ended.stdout
    assert "passed" in ended.stdout


@pytest.mark.parametrize(
    ("options", "remedy"),
    [([], "decorate it with @pytest_asyncio.fixture"), (["-p", "no:asyncio"], "pip install pytest-asyncio")],
)
def test_a_fixture_that_nothing_runs_is_told_once(project: Path, options: list[str], remedy: str) -> None:
    path = project / "test_toy_backend.py"
    source = path.read_text().replace("pytest_asyncio.fixture", "pytest.fixture").replace("import pytest_asyncio\n", "")
    path.write_text(source)
    ended = kit(project, "test_toy_backend.py", "-k", "TestToyBackend", "-rN", *options)
    assert ended.returncode == 1
    assert "1 error" in ended.stdout
    assert ended.stdout.count(remedy) == 1
