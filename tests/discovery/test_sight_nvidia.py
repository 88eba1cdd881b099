"""NVIDIA's cards: tables of NVML's answers, and the real nvidia-ml-py over a stand-in for NVIDIA's library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.examine import Request, examine
from gpurt.discovery.line import ProbeLine
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.sources.nvml_table import read_nvml
from gpurt.types import DeviceKind, DeviceState
from tests.discovery.sight_rig import GIB, Machine, gpus, machine, report_of
from tests.discovery.test_remembered import Rig
from tests.support.nvml_stub import H100_TOTAL, UUID_A, UUID_B, NvmlStub, nvml_stub

__all__ = ["machine", "nvml_stub"]

MIB = 1 << 20
Table = dict[str, Any]


def card(index: int, uuid: str, bus: int, **more: Any) -> Table:
    return {
        "index": index, "name": "NVIDIA H100 80GB HBM3", "uuid": uuid, "pci_address": f"00000000:{bus:02x}:00.0",
        "memory_total_bytes": H100_TOTAL, "memory_free_bytes": H100_TOTAL - GIB, "compute_capability": "9.0",
    } | more  # fmt: skip


A, B = card(0, UUID_A, 1), card(1, UUID_B, 2)
MIG_PARTS = [
    {"uuid": f"MIG-0000000{n}-0000-1111-2222-333333333333", "name": f"MIG {n}g", "partition": f"{gi}/0",
     "memory_total_bytes": total * MIB, "memory_free_bytes": total * MIB}
    for n, gi, total in ((3, 2, 40448), (2, 3, 20096))
]  # fmt: skip


def cards(*rows: Table, **more: Any) -> Table:
    return {"driver_version": "590.48.01", "devices": list(rows)} | more


class TestTables:
    async def test_a_card_is_listed_with_all_that_nvml_told(self, machine: Machine) -> None:
        machine.record("nvml", cards(A))
        (found,) = gpus(await machine.discover("cuda"))
        assert (found.name, found.stable_id, found.driver_version) == (A["name"], UUID_A, "590.48.01")
        assert (found.memory_bytes, found.memory_available) == (H100_TOTAL, H100_TOTAL - GIB)
        assert (found.usable, found.state, found.compute_capability) == (False, DeviceState.HEALTHY, "9.0")

    async def test_a_card_of_unknown_memory_has_none(self, machine: Machine) -> None:
        machine.record("nvml", cards({"uuid": UUID_A, "memory_total_bytes": 0}))
        (found,) = gpus(await machine.discover("cuda"))
        assert (found.memory_bytes, found.memory_available) == (None, None)

    async def test_unified_memory_is_one_pool(self, machine: Machine) -> None:
        machine.record("nvml", cards(card(0, UUID_A, 1, unified_memory=True)))
        (found,) = gpus(await machine.discover("cuda"))
        assert (found.kind, found.unified_memory) == (DeviceKind.INTEGRATED_GPU, True)
        assert (found.memory_pool_id or "").startswith("host:")

    @pytest.mark.parametrize(
        ("table", "reason", "says"),
        [
            ({"error": {"reason": "driver_mismatch", "message": "two versions", "hint": "reboot"}},
             ReasonCode.DRIVER_MISMATCH, "two versions"),
            (cards(), ReasonCode.NO_DEVICE, "shows no device"),
            ([1], ReasonCode.NO_DEVICE, "not a table"),
            ({"devices": ["x"]}, ReasonCode.NO_DEVICE, "not a record"),
        ],
    )  # fmt: skip
    async def test_what_there_is_instead_of_cards(
        self, machine: Machine, table: object, reason: ReasonCode, says: str
    ) -> None:
        machine.record("nvml", table)
        report = report_of(await machine.discover("cuda"), "cuda")
        assert report.reason is reason
        assert says in report.message

    def test_nothing_real_is_asked_where_tables_are_given(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def ask() -> None:
            raise AssertionError("a real library was asked")

        for name in ("nvml.open_session", "vulkan_query.query_vulkan", "opencl_query.query_opencl"):
            monkeypatch.setattr(f"gpurt.sources.{name}", ask)
        monkeypatch.setattr("gpurt.sources.apple_query.query_apple", ask)
        monkeypatch.setattr("gpurt.sources.dxgi_calls.query_dxgi", ask)
        for backend in ("cuda", "vulkan", "opencl", "metal", "directml"):
            line = machine.sight(backend)
            assert line.reason is ReasonCode.NO_LIBRARY, line
            assert "recording" in line.message

    def test_a_recording_that_is_broken(self, machine: Machine) -> None:
        (machine.tables / "nvml.json").write_text('{"devices": [')
        assert machine.sight("cuda").reason is ReasonCode.ERROR


class TestMasks:
    @pytest.mark.parametrize("value", [MIG_PARTS[1]["uuid"], f"MIG-{UUID_A}/3/0", "MIG-00000002"])
    async def test_cvd8_both_forms_name_one_partition(self, machine: Machine, value: str) -> None:
        machine.record("nvml", cards(A | {"partitions": MIG_PARTS}))
        machine.environ = {"CUDA_VISIBLE_DEVICES": value}
        first, second = gpus(await machine.discover("cuda"))
        assert (first.memory_bytes, second.memory_bytes) == (40448 * MIB, 20096 * MIB)
        assert (first.state_reason or "").startswith("hidden_by_environment: CUDA_VISIBLE_DEVICES")
        assert "hidden" not in (second.state_reason or "")
        assert second.identity is not None
        assert (second.stable_id, second.identity.partition) == (MIG_PARTS[1]["uuid"], "3/0")

    async def test_partitions_of_which_one_process_can_have_one(self, machine: Machine) -> None:
        machine.record("nvml", cards(A | {"partitions": MIG_PARTS}))
        result = await machine.discover("cuda")
        assert "one MIG device and nothing else" in report_of(result, "cuda").message

    async def test_cvd12_a_card_hidden_from_cuda_is_hidden_from_vulkan(self, machine: Machine) -> None:
        machine.record("nvml", cards(A, B))
        machine.record("vulkan", {"devices": [_vulkan(UUID_A, 1), _vulkan(UUID_B, 2)]})
        machine.environ = {"CUDA_VISIBLE_DEVICES": UUID_B[:8]}
        machine.with_vulkan()
        for backends in (("cuda", "vulkan"), ("vulkan",)):
            machine.asked.clear()
            result = await machine.discover(*backends)
            first, second = gpus(result)
            assert (first.stable_id, first.backends) == (UUID_A, backends)
            assert (first.state_reason or "").startswith("hidden_by_environment: CUDA_VISIBLE_DEVICES")
            assert second.stable_id == UUID_B
            assert "hidden" not in (second.state_reason or "")

    async def test_a_number_means_nothing_in_another_interfaces_order(self, machine: Machine) -> None:
        machine.record("vulkan", {"devices": [_vulkan(UUID_A, 1), _vulkan(UUID_B, 2)]})
        machine.environ = {"CUDA_VISIBLE_DEVICES": "0"}
        machine.with_vulkan()
        result = await machine.discover("vulkan")
        assert len(gpus(result)) == 2
        assert not any("hidden" in (device.state_reason or "") for device in gpus(result))

    async def test_ggmls_variable_is_about_vulkan_alone(self, machine: Machine) -> None:
        machine.record("nvml", cards(A))
        machine.record("vulkan", {"devices": [_vulkan(UUID_A, 1)]})
        machine.with_vulkan()
        machine.environ = {"GGML_VK_VISIBLE_DEVICES": "-1"}
        result = await machine.discover("cuda", "vulkan")
        (found,) = gpus(result)
        assert "hidden" not in (found.state_reason or "")
        assert report_of(result, "vulkan").reason is ReasonCode.HIDDEN_BY_ENVIRONMENT
        assert report_of(result, "vulkan").message.startswith("GGML_VK_VISIBLE_DEVICES")


def _vulkan(uuid: str, bus: int) -> Table:
    return {
        "name": "NVIDIA H100 80GB HBM3", "vendor_id": 0x10DE, "device_id": 0x2330, "device_type": 2, "driver_id": 4,
        "driver_name": "NVIDIA", "driver_info": "590.48.01", "device_uuid": uuid[4:].replace("-", ""),
        "api_version": 4206847, "driver_version_code": 1, "pci_domain": 0, "pci_bus": bus, "pci_device": 0,
        "pci_function": 0, "heaps": [{"size_bytes": 79 * GIB, "device_local": True}],
    }  # fmt: skip


class TestHealth:
    @pytest.mark.parametrize(
        ("condition", "state", "says"),
        [
            ({"ecc_uncorrected": 1}, DeviceState.DEGRADED, "uncorrectable ECC"),
            ({"remap_pending": True}, DeviceState.DEGRADED, "nvidia-smi --gpu-reset"),
            ({"recovery_action": "reboot"}, DeviceState.DEGRADED, "reboot the machine"),
            ({"ecc_uncorrected": 1, "remapped_uncorrected": 1}, DeviceState.HEALTHY, "in the GPU's lifetime"),
            ({"ecc_corrected": 100}, DeviceState.HEALTHY, ""),
            ({"ecc_uncorrected": "many", "throttle": 7}, DeviceState.HEALTHY, ""),
        ],
    )
    async def test_a_condition_sets_state_and_reason(
        self, machine: Machine, condition: Table, state: DeviceState, says: str
    ) -> None:
        machine.record("nvml", cards(A, B | {"condition": condition}))
        result = await machine.discover("cuda")
        well, found = gpus(result)
        assert (well.state, found.state) == (DeviceState.HEALTHY, state)
        assert says in f"{found.state_reason} {report_of(result, 'cuda').message}"

    @pytest.mark.parametrize(
        ("celsius", "limit", "state"),
        [(86, "85", DeviceState.DEGRADED), (84, "85", DeviceState.HEALTHY), (86, None, DeviceState.HEALTHY),
         (91, None, DeviceState.DEGRADED)],
    )  # fmt: skip
    def test_heat_by_the_operators_limit_or_the_cards_own(
        self, machine: Machine, celsius: int, limit: str | None, state: DeviceState
    ) -> None:
        machine.record("nvml", cards(A | {"temperature_c": celsius, "condition": {"slowdown_temperature_c": 90}}))
        if limit is not None:
            machine.environ = {"GPURT_THERMAL_LIMIT": limit}
        assert machine.sight("cuda").devices[0].state is state

    def test_a_setting_that_cannot_be_understood_costs_no_card(self, machine: Machine) -> None:
        machine.record("nvml", cards(A | {"condition": {"ecc_uncorrected": 1}}))
        machine.environ = {"GPURT_HEALTH_XIDS": "31=harmless"}
        line = machine.sight("cuda")
        assert line.devices[0].state is DeviceState.DEGRADED
        assert "GPURT_HEALTH_XIDS" in line.message

    async def test_a_card_that_is_broken_is_broken_for_every_interface(self, machine: Machine) -> None:
        machine.record("nvml", cards(A | {"condition": {"ecc_uncorrected": 1}}))
        machine.record("vulkan", {"devices": [_vulkan(UUID_A, 1)]})
        machine.with_vulkan()
        (found,) = gpus(await machine.discover("vulkan", "cuda"))
        assert (found.state, found.usable) == (DeviceState.DEGRADED, False)


ASK = """
import json
from dataclasses import replace
from gpurt.sources.nvml import open_session
from gpurt.sources.nvml_table import read_nvml
from gpurt.discovery.sight import table_of
table = table_of("nvml")
with open_session() as session:
    there = session.devices()
recorded = read_nvml(json.loads(json.dumps(table)))
def known(device):  # what is free of the host's memory has changed meanwhile
    changing = {"memory_free_bytes": 0, "memory_used_bytes": 0} if device.unified_memory else {}
    return replace(device, unavailable={}, **changing)
same = [known(each) for each in there] == [known(each) for each in recorded.devices]
same = same and all(a.unavailable.items() <= b.unavailable.items() for a, b in zip(there, recorded.devices))
print(json.dumps([same, table]))
"""


class TestLive:
    @pytest.mark.parametrize("scenario", ["ok2", "mig", "gb10", "orin", "lost1", "nov2"])
    def test_a_recording_reads_like_the_machine(self, nvml_stub: NvmlStub, scenario: str) -> None:
        ran = nvml_stub.python(ASK, scenario)
        assert ran.returncode == 0, ran.stderr
        same, _ = json.loads(ran.stdout)
        assert same

    def test_a_recording_of_a_broken_library_says_why(self, nvml_stub: NvmlStub) -> None:
        ran = nvml_stub.python("import json; from gpurt.discovery.sight import table_of\n"
                               "print(json.dumps(table_of('nvml')))", "init18")  # fmt: skip
        absence = read_nvml(json.loads(ran.stdout)).absence
        assert absence is not None
        assert absence.reason is ReasonCode.DRIVER_MISMATCH
        assert absence.hint

    @pytest.mark.parametrize(
        ("scenario", "state"),
        [("ecc1", DeviceState.DEGRADED), ("reset1", DeviceState.DEGRADED), ("hot1", DeviceState.DEGRADED),
         ("remapped1", DeviceState.HEALTHY), ("fallen1", DeviceState.LOST), ("capped1", DeviceState.HEALTHY)],
    )  # fmt: skip
    async def test_the_childs_probe_tells_how_cards_are(
        self, nvml_stub: NvmlStub, tmp_path: Path, scenario: str, state: DeviceState
    ) -> None:
        environ = nvml_stub.env(scenario)
        service = GPUDiscoveryService(tmp_path / "registry.json", backends=["cuda"], environ=environ)
        async with service:
            first, second = (await service.discover_all_devices()).devices
        assert (first.state, second.state) == (DeviceState.HEALTHY, state)
        assert state is DeviceState.HEALTHY or second.state_reason

    @pytest.mark.parametrize(("scenario", "opened_again"), [("ecc1", True), ("hot1", False)])
    async def test_health_is_that_of_now_and_the_verification_that_of_then(
        self, nvml_stub: NvmlStub, tmp_path: Path, scenario: str, opened_again: bool
    ) -> None:
        rig = Rig(nvml_stub, tmp_path)
        await rig.discover()
        assert rig.opened == 1
        rig.scenario = scenario
        first, second = (await rig.discover()).devices
        assert (first.usable, second.usable, second.state) == (True, False, DeviceState.DEGRADED)
        assert rig.opened == 1 + opened_again
        rig.scenario = "ok2"
        # Memory that has lost data is verified anew before it is trusted; a card that was hot is only cooler.
        assert all(device.usable for device in (await rig.discover()).devices)
        assert rig.opened == 1 + 2 * opened_again

    async def test_a_sensor_that_never_answers_does_not_cost_the_cards(
        self, nvml_stub: NvmlStub, tmp_path: Path
    ) -> None:
        environ = nvml_stub.env("hang_field")
        service = GPUDiscoveryService(tmp_path / "registry.json", backends=["cuda"], environ=environ, probe_timeout=2.0)
        async with service:
            result = await service.discover_all_devices()
        assert [device.stable_id for device in result.devices] == [UUID_A, UUID_B]
        assert {device.state for device in result.devices} == {DeviceState.UNRESPONSIVE}
        assert "condition" in report_of(result, "cuda").message

    def test_a_question_that_fails_costs_its_answer_alone(self, nvml_stub: NvmlStub) -> None:
        code = (
            "import gpurt.sources.nvml as nvml\n"
            "def broken(self, address): raise RuntimeError('what NVML never raises')\n"
            "nvml.NvmlSession.condition = broken\n"
            "from gpurt.discovery.sight import sight\n"
            "print(sight('cuda', environ={}).model_dump_json())"
        )
        line = ProbeLine.model_validate_json(nvml_stub.python(code).stdout)
        assert [device.stable_id for device in line.devices] == [UUID_A, UUID_B]
        assert line.reason is None

    def test_nothing_is_looked_at_in_a_process_that_must_not_die(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def ask() -> None:
            raise AssertionError("a driver was loaded")

        def refuse(name: str, *_: object) -> None:
            raise BackendUnavailable("not installed", backend=name, reason=ReasonCode.NO_LIBRARY)

        monkeypatch.setattr("gpurt.sources.vulkan_query.query_vulkan", ask)
        monkeypatch.setattr("gpurt.discovery.contact.contact", refuse)
        lines: list[ProbeLine] = []
        examine("vulkan", lines.append, Request, may_die=False)
        assert [line.stage for line in lines] == ["doing", "failed"]
        assert lines[-1].reason is ReasonCode.NO_LIBRARY
        lines.clear()
        examine("vulkan", lines.append, Request)
        seen = [line for line in lines if line.stage == "sighted"]
        assert seen[-1].reason is ReasonCode.ERROR  # a reader's mistake, told
        assert lines[-1].stage == "failed"
