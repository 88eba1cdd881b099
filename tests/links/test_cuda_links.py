"""Links of NVIDIA GPUs: the CUDA backend over a stand-in runtime, the real nvidia-ml-py over a stand-in library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.nvml_stub import UUID_A, UUID_B, NvmlStub, nvml_stub

__all__ = ["nvml_stub"]

ROOT = Path(__file__).parents[2]

# One child goes through every scenario: starting Python and importing pydantic once each would take half a minute.
CHILD = """
import asyncio, json, os, pathlib, sys
import pytest
from tests.support.fake_cuda import FakeRuntime, install
from gpurt.backends.cuda_backend import CUDABackend
from gpurt.links import measure_links

scenario, registry = pathlib.Path(os.environ["GPURT_TEST_NVML_FILE"]), sys.argv[1]
patch = pytest.MonkeyPatch()

async def links(name, peers):
    scenario.write_text("init9" if name == "init9" else "ok2")
    runtime = install(patch, FakeRuntime(peers=peers))
    patch.setattr(runtime, "deviceGetPCIBusId", lambda index: ("0000:00:09.0", "0000:00:0A.0")[index])
    async with CUDABackend(registry_path=registry) as backend:
        scenario.write_text(name)
        found = await measure_links(backend, max_bytes=256 << 10, registry_path=registry)
    return [link.model_dump(mode="json") for link in found], sorted(runtime.enabled)

print(json.dumps({f"{name} {peers}": asyncio.run(links(name, peers)) for name, peers in json.loads(sys.argv[2])}))
"""

SCENARIOS = [
    *(["wired", True], ["direct", True], ["nolinks", True], ["vmlinks", True], ["init9", True]),
    *(["ok2", False], ["nolinks", False], ["ok2", True]),
]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry") / "registry.json"


@pytest.fixture(scope="module")
def answers(nvml_stub: NvmlStub, tmp_path_factory: pytest.TempPathFactory, registry: Path) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("nvml") / "scenario"
    file.write_text("ok2")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(registry), json.dumps(SCENARIOS)],
        cwd=ROOT,
        env=nvml_stub.env(file=file) | {"PYTHONPATH": str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("scenario", "link_type", "wiring", "peers", "reason"),
    [
        ("ok2 True", "nvlink", "18 NVLinks", True, None),
        ("direct True", "nvlink", "4 NVLinks", True, None),
        ("vmlinks True", "nvlink", "NVLink", True, None),
        ("wired True", "pcie", "one PCIe host bridge", True, None),
        ("nolinks True", "unknown", None, True, "NVML does not tell of NVLinks: unsupported"),
        ("init9 True", "unknown", None, True, "NVML: the NVIDIA kernel driver is not loaded"),
        ("ok2 False", "host", "18 NVLinks", False, "the devices do not reach each other's memory"),
        ("nolinks False", "host", None, False, "the devices do not reach each other's memory"),
    ],
)
def test_links(
    answers: dict[str, Any], scenario: str, link_type: str, wiring: str | None, peers: bool, reason: str | None
) -> None:
    links, enabled = answers[scenario]
    assert [(link["src_device_id"], link["dst_device_id"]) for link in links] == [
        ("cuda:0", "cuda:1"),
        ("cuda:1", "cuda:0"),
    ]
    for link in links:
        assert (link["link_type"], link["wiring"], link["peer_access"], link["link_reason"]) == (
            *(link_type, wiring, peers, reason),
        )
        assert link["bandwidth_gbps"] > 0
        assert link["latency_us"] > 0
        assert link["bytes_measured"] == 256 << 10
    assert enabled == ([[0, 1], [1, 0]] if peers else [])


def test_topology_is_in_the_registry_by_lasting_names(answers: dict[str, Any], registry: Path) -> None:
    topology = json.loads(registry.read_text())["topology"]
    ends = {(link["src"], link["dst"]): link for link in topology}
    assert ends[UUID_A, UUID_B]["link_type"] == ends[UUID_B, UUID_A]["link_type"] == "nvlink"
    assert ends[UUID_A, UUID_B]["driver_version"] == "590.48.01"
    assert [ends[UUID_A, UUID_B], ends[UUID_B, UUID_A]] == answers["ok2 True"][0]
    assert len([link for link in topology if link["src"].startswith("GPU-")]) == 2
