"""Condition, processes and MIG over the real nvidia-ml-py and a stand-in for the C library, in one child process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.nvml_stub import PCI_A, PCI_B, NvmlStub, nvml_stub

from gpurt.sources.nvml_condition import NvmlProcess, NvmlProcesses

__all__ = ["nvml_stub"]

SCENARIOS = (
    "ok2 ecc1 remapped1 remap1 hot1 reset1 capped1 oldthrottle noecc procs procs2 gb10 fallen1 fields4 sentinel absurd"
)
CHILD = """
import dataclasses, json, pathlib, sys
from gpurt.errors import GPUError
from gpurt.sources.nvml import open_session
scenario_file, answers = pathlib.Path(sys.argv[1]), {}

def attempt(call):
    try:
        return dataclasses.asdict(call())
    except GPUError as error:
        return {"error": type(error).__name__}

def plain(value):
    return sorted(value) if isinstance(value, frozenset) else value

for scenario in sys.argv[3].split():
    scenario_file.write_text(scenario)
    with open_session() as session:
        answers[scenario] = {
            address: {"condition": attempt(lambda: session.condition(address)),
                      "processes": attempt(lambda: session.processes(address))}
            for address in sys.argv[2].split()
        }
print(json.dumps(answers, default=plain))
"""


@pytest.fixture(scope="module")
def answers(nvml_stub: NvmlStub, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    directory = tmp_path_factory.mktemp("condition")
    scenario_file, script = directory / "scenario", directory / "child.py"
    script.write_text(CHILD)
    argv = [str(script), str(scenario_file), f"{PCI_A} {PCI_B} 0000000f:01:00.0 0000:7f:00.0", SCENARIOS]
    child = f"import sys, runpy; sys.argv = {argv!r}; runpy.run_path(sys.argv[0])"
    result = nvml_stub.python(child, file=scenario_file)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def condition(answers: Mapping[str, Any], scenario: str, address: str = PCI_B) -> dict[str, Any]:
    return answers[scenario][address]["condition"]


def test_a_card_that_is_well(answers: Mapping[str, Any]) -> None:
    assert condition(answers, "ok2") == {
        "ecc_enabled": True, "ecc_corrected": 3, "ecc_uncorrected": 0, "ecc_uncorrected_lifetime": 0,
        "remapped_corrected": 0, "remapped_uncorrected": 0, "remap_pending": False, "remap_failed": False,
        "recovery_action": "none", "throttle": [], "slowdown_temperature_c": 87, "pcie_generation": 1, "pcie_width": 16,
        "pcie_max_generation": 5, "pcie_max_width": 16, "unavailable": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scenario", "changed"),
    [
        ("ecc1", {"ecc_uncorrected": 1, "ecc_uncorrected_lifetime": 1}),
        ("remapped1", {"ecc_uncorrected": 1, "ecc_uncorrected_lifetime": 1, "remapped_uncorrected": 1}),
        ("hot1", {"throttle": ["hardware", "hardware_thermal"]}),
        ("reset1", {"recovery_action": "reset"}),
        ("capped1", {"throttle": ["power_cap"]}),
        ("oldthrottle", {}),
    ],
)
def test_what_happens_to_one_card(answers: Mapping[str, Any], scenario: str, changed: dict[str, Any]) -> None:
    assert condition(answers, scenario) == {**condition(answers, "ok2"), **changed}
    assert condition(answers, scenario, PCI_A) == condition(answers, "ok2", PCI_A)


def test_nvi_11_pending_rows(answers: Mapping[str, Any]) -> None:
    found = condition(answers, "remap1")
    assert (found["remap_pending"], found["remap_failed"], found["remapped_uncorrected"]) == (True, False, 1)


def test_nvf_8_card_without_ecc(answers: Mapping[str, Any]) -> None:
    found = condition(answers, "noecc")
    assert found["ecc_enabled"] is found["ecc_uncorrected"] is None
    assert found["unavailable"]["ecc_uncorrected"] == "unsupported"
    assert found["pcie_width"] == 16


def test_gb10_tells_next_to_nothing_with_reasons(answers: Mapping[str, Any]) -> None:
    found = condition(answers, "gb10", "0000000f:01:00.0")
    names = [name for name, value in found.items() if value is None]
    assert set(names) == set(found["unavailable"])
    assert set(found["unavailable"].values()) == {"unsupported"}


def test_no_permission(answers: Mapping[str, Any]) -> None:
    found = condition(answers, "fields4")
    assert set(found["unavailable"].values()) == {"no_permission"}
    assert answers["fields4"][PCI_A]["processes"] == {"processes": None, "reason": "no_permission"}


@pytest.mark.parametrize("scenario", ["sentinel", "absurd"])
def test_tel_1_values_that_cannot_be(answers: Mapping[str, Any], scenario: str) -> None:
    found = condition(answers, scenario)
    expected = {"absurd": ("slowdown_temperature_c", "pcie_width", "recovery_action")}.get(
        scenario, ("ecc_uncorrected", "ecc_corrected", "slowdown_temperature_c", "pcie_width", "throttle")
    )
    for name in expected:
        assert (found[name], found["unavailable"][name]) == (None, "invalid"), name


def test_lost_and_absent_cards(answers: Mapping[str, Any]) -> None:
    assert condition(answers, "fallen1") == {"error": "DeviceLost"}
    assert condition(answers, "fallen1", PCI_A)["ecc_enabled"] is True
    assert answers["fallen1"][PCI_B]["processes"] == {"error": "DeviceLost"}
    assert condition(answers, "ok2", "0000:7f:00.0") == {"error": "DeviceNotFound"}


@pytest.mark.parametrize("scenario", ["procs", "procs2"])
def test_nvf_7_processes_whose_use_is_unknown(answers: Mapping[str, Any], scenario: str) -> None:
    """NVF-7 and NVI-7: also by an older version of the call."""
    found = answers[scenario][PCI_A]["processes"]["processes"]
    assert found == [{"pid": 645400, "used_bytes": 1 << 30}, {"pid": 645401, "used_bytes": None}]
    assert answers[scenario][PCI_B]["processes"] == {"processes": [], "reason": None}


def test_nvf_7_sum_over_the_known() -> None:
    known, unknown = NvmlProcess(1, 5), NvmlProcess(2, None)
    for processes, used, count in [
        ((known, unknown, known), 10, 1),
        ((unknown,), None, 1),
        ((), 0, 0),
        (None, None, 0),
    ]:
        found = NvmlProcesses(processes)
        assert (found.used_bytes, found.unknown_count) == (used, count)


def test_nvf_9_numbers_of_processes_are_the_drivers(answers: Mapping[str, Any]) -> None:
    """A process that this machine does not have is listed all the same, and costs nothing."""
    (first, _) = answers["procs"][PCI_A]["processes"]["processes"]
    assert first["pid"] == 645400


def test_mig_mode_is_asked_once(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    """NVF-6 has partitions; the question for them is not repeated at every look."""
    result = nvml_stub.python(
        """
import pynvml
from gpurt.sources.nvml import open_session
asked = []
real = pynvml.nvmlDeviceGetMigMode
pynvml.nvmlDeviceGetMigMode = lambda handle: (asked.append(1), real(handle))[1]
with open_session() as session:
    for _ in range(5):
        (device,) = session.devices()
        assert len(device.partitions) == 2, device
        session.telemetry(device.pci_address)
        session.condition(device.pci_address)
print(len(asked))
with open_session() as session:
    session.devices()
print(len(asked))
""",
        "mig",
    )
    assert result.stdout == "1\n2\n", result.stderr
