"""What NVML tells of links, over the real nvidia-ml-py and a stand-in for the C library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.nvml_stub import PCI_A, PCI_B, NvmlStub, nvml_stub

__all__ = ["nvml_stub"]

SCENARIOS = ["ok2", "direct", "wired", "oldlinks", "vmlinks", "nolinks", "farlinks", "fallen1", "lost1", "ok1", "init9"]

# One child goes through every scenario: starting Python and importing pydantic once each would take half a minute.
CHILD = f"""
import dataclasses, json, os, pathlib, sys
from gpurt.errors import GPUError
from gpurt.sources.nvml_links import read_link

file = pathlib.Path(os.environ["GPURT_TEST_NVML_FILE"])
answers = {{}}
for scenario in sys.stdin.read().split():
    file.write_text(scenario)
    try:
        answers[scenario] = dataclasses.asdict(read_link("{PCI_A[4:]}", "{PCI_B.upper()}"))
    except GPUError as exc:
        answers[scenario] = type(exc).__name__
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(nvml_stub: NvmlStub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("links") / "scenario"
    file.write_text("ok2")
    child = CHILD.replace("sys.stdin.read()", repr(" ".join(SCENARIOS)))
    done = nvml_stub.python(child, file=Path(file))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("scenario", "nvlink", "count", "ancestor"),
    [
        ("ok2", True, 18, "one NUMA node"),
        ("direct", True, 4, "one PCIe switch"),
        ("wired", False, None, "one PCIe host bridge"),
        ("oldlinks", True, 4, "one PCIe switch"),
        ("vmlinks", True, None, "one NUMA node"),
        ("nolinks", None, None, None),
        ("farlinks", True, 18, None),
        ("fallen1", None, 18, None),
        ("lost1", None, None, None),
        ("ok1", None, None, None),
    ],
)
def test_link(answers: dict[str, Any], scenario: str, nvlink: bool | None, count: int | None, ancestor: str) -> None:
    link = answers[scenario]
    assert (link["nvlink"], link["nvlink_count"], link["ancestor"]) == (nvlink, count, ancestor)
    missing = {name for name, value in link.items() if value is None}
    assert set(link["unavailable"]) == missing
    assert set(link["unavailable"].values()) <= {"unsupported", "no_permission", "error", "invalid"}


def test_without_nvml_it_is_said_why(answers: dict[str, Any]) -> None:
    assert answers["init9"] == "BackendUnavailable"
