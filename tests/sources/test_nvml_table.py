"""NVML's answers as a table: what is read of it, and that no table whatever raises or invents anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tests.sources.test_tables_fuzz import EXAMPLES, accounted, junk, run

from gpurt.discovery.merge import merge
from gpurt.discovery.sight_nvidia import look
from gpurt.discovery.sight_record import View
from gpurt.errors import ReasonCode
from gpurt.sources.condition import DeviceCondition, RecoveryAction, Throttle
from gpurt.sources.nvml_device import NvmlPartition
from gpurt.sources.nvml_table import read_nvml
from gpurt.types import DeviceState

UUID = "GPU-1a1a1a1a-0000-1111-2222-333333333333"
PART = {"uuid": "MIG-5e5e5e5e-0000-1111-2222-777777777777", "partition": "2/0", "memory_total_bytes": 40 << 30}
CARD: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3", "uuid": UUID, "pci_address": "0000:09:00.0", "memory_total_bytes": 80 << 30,
    "memory_free_bytes": 0, "memory_bandwidth_gbps": 3352.3, "compute_capability": "9.0", "core_count": 16896,
    "multiprocessor_count": 132, "max_clock_mhz": 1980, "numa_node": 0, "state": "lost", "reason": "gone",
    "temperature_c": 41,
    "condition": {"ecc_enabled": True, "ecc_uncorrected": 2, "recovery_action": "reset", "throttle": ["thermal"]},
}  # fmt: skip


def test_everything_that_is_told() -> None:
    found = read_nvml({"driver_version": "590.48.01", "devices": [CARD | {"partitions": [PART]}]})
    (card,) = found.devices
    assert (card.index, card.uuid, card.pci_address) == (0, UUID, "00000000:09:00.0")
    assert (card.memory_total_bytes, card.memory_free_bytes, card.memory_used_bytes) == (80 << 30, 0, None)
    assert card.unavailable == {"memory_used_bytes": "unsupported", "memory_reserved_bytes": "unsupported"}
    assert (card.state, card.reason, card.numa_node) == (DeviceState.LOST, "gone", 0)
    assert card.partitions == (NvmlPartition(PART["uuid"], None, "2/0", 40 << 30, None, None),)
    condition = found.conditions[0]
    assert (condition.ecc_enabled, condition.ecc_uncorrected) == (True, 2)
    assert (condition.recovery_action, condition.throttle) == (RecoveryAction.RESET, {Throttle.THERMAL})
    assert (found.temperatures, found.driver_version) == ({0: 41.0}, "590.48.01")


def test_one_broken_value_costs_one_field() -> None:
    broken = {"uuid": "GPU-x", "pci_address": "here", "memory_total_bytes": 2**64 - 1, "state": "tired"}
    (card,) = read_nvml(
        {"devices": [CARD | broken | {"condition": {"throttle": 7, "recovery_action": "pray"}}]}
    ).devices
    assert (card.uuid, card.pci_address, card.memory_total_bytes, card.state) == (None, None, None, "healthy")
    assert {card.unavailable[name] for name in ("uuid", "pci_address", "memory_total_bytes")} == {"invalid"}
    assert card.name == CARD["name"]


def test_a_library_that_could_not_be_asked() -> None:
    absence = read_nvml({"error": {"reason": "no_permission", "message": "not yours", "hint": "be root"}}).absence
    assert absence is not None
    assert (absence.reason, absence.message, absence.hint) == (ReasonCode.NO_PERMISSION, "not yours", "be root")


def test_reasons_are_kept() -> None:
    (card,) = read_nvml({"devices": [{"errors": {"memory_total_bytes": "no_permission"}}]}).devices
    assert card.unavailable["memory_total_bytes"] == "no_permission"


class _Recorded(View):
    """The table of the example, in place of a file."""

    recorded: object = None

    def table(self, source: str, ask: object) -> object:
        return type(self).recorded


_KEYS = sorted({*CARD, "partitions", "errors", "unified_memory"})
_VALUES = st.sampled_from(list(CARD.values()))
_CARDS = st.builds(
    lambda changes, gone: {key: value for key, value in {**CARD, **changes}.items() if key not in gone},
    st.dictionaries(st.sampled_from(_KEYS), junk | _VALUES | st.lists(junk | st.just(PART), max_size=3), max_size=4),
    st.lists(st.sampled_from(_KEYS), max_size=4),
)
_CONDITIONS = st.dictionaries(
    st.sampled_from([*DeviceCondition.__dataclass_fields__]), junk | st.sampled_from([0, 1, 3, True, ["thermal"]])
)
_TABLES = st.fixed_dictionaries(
    {
        "devices": st.lists(_CARDS | st.builds(lambda c: {**CARD, "condition": c}, _CONDITIONS) | junk, max_size=4)
        | junk
    },
    optional={"driver_version": junk, "error": junk},
)


@EXAMPLES
def test_any_table(examples: int) -> None:
    def check(table: Any) -> None:
        found = read_nvml(table)
        whole = isinstance(table, dict) and "error" not in table
        if whole:
            accounted(table.get("devices"), found.devices, found.skipped, "devices")
        else:
            assert found.devices == ()
            assert found.absence is not None or found.skipped
        for card in found.devices:
            assert all(reason for reason in card.unavailable.values())
        _Recorded.recorded = table
        line = list(look(_Recorded({}, tables=Path("recorded"))))[-1]
        assert len(line.devices) == sum(max(1, len(card.partitions)) for card in found.devices)
        assert line.devices or line.reason is not None
        assert not any(device.usable or device.memory_bytes == 0 for device in line.devices)
        assert len(merge([line.devices], priority=("cuda",))) == len(line.devices)
        line.model_dump_json()

    run(examples, _TABLES | junk, check)
