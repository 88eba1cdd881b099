"""docs/adding-a-backend.md: its driver, its tests and its entry point, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs/adding-a-backend.md"

USE = """
import asyncio, gpurt
async def main():
    async with await gpurt.create_backend("mapped") as backend:
        (device,) = await backend.list_devices()
        async with backend.allocation("mapped:0", 1 << 20) as handle:
            await backend.copy_to_device(b"m" * (1 << 20), handle)
            print(device.kind, await backend.copy_from_device(handle) == b"m" * (1 << 20))
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's files, and its entry point as an installer would write it."""
    folder = tmp_path_factory.mktemp("guide")
    text = GUIDE.read_text(encoding="utf-8")
    for name, source in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(source)
    (toml,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    project = tomllib.loads(toml)["project"]
    installed = folder / f"{project['name']}-{project['version']}.dist-info"
    installed.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (installed / "METADATA").write_text(metadata)
    ((group, points),) = project["entry-points"].items()
    lines = [f"{name} = {target}" for name, target in points.items()]
    (installed / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    return folder


def run(project: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=project,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )


def kit(project: Path, chosen: str) -> str:
    ended = run(
        project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=.", "-k", chosen,
        GPURT_TEST_REQUIRE="mapped",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    return ended.stdout.splitlines()[-1]


@pytest.mark.wide
def test_the_driver_passes_its_kit(project: Path) -> None:
    assert int(re.findall(r"(\d+) passed", kit(project, "TestMappedDriver"))[0]) > 20


@pytest.mark.slow
def test_the_backend_passes_the_whole_kit(project: Path) -> None:
    assert int(re.findall(r"(\d+) passed", kit(project, "TestMappedBackend"))[0]) > 250


def test_it_is_found_by_its_entry_point(project: Path) -> None:
    used = run(project, "-c", USE)
    assert used.stdout.split() == ["software", "True"], used.stderr


def test_discovery_probes_it(project: Path) -> None:
    probed = run(project, "-m", "gpurt.discovery.probe_child", "mapped")
    assert '"stage":"verified"' in probed.stdout, probed.stderr


def test_every_field_and_method_is_explained() -> None:
    from gpurt.driver import Driver
    from gpurt.types import Capabilities

    text = GUIDE.read_text(encoding="utf-8")
    names = {name for name in vars(Driver) if not name.startswith("_")} - {"name", "capabilities", "inline_copy_bytes"}
    missing = [name for name in {*names, *Capabilities.model_fields} if f"`{name}" not in text]
    assert sorted(missing) == []
