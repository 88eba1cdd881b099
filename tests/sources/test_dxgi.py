"""Adapters of Windows from recorded tables. Names of tests carry the case that they stand for."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gpurt.errors import ReasonCode
from gpurt.sources.dxgi import DxgiAdapter, directml_ordinal, ranked, read_dxgi
from gpurt.sources.dxgi_calls import DESCRIBED, LOCAL, DxgiError, query_dxgi, record_dxgi
from gpurt.types import DeviceKind

GIB = 1 << 30
Table = dict[str, Any]


def adapter(name: str, vendor: int, device: int, luid: int, bus: int | None, **more: Any) -> Table:
    row: Table = {
        "name": name, "vendor_id": vendor, "device_id": device, "subsystem_id": 0x16F3103C, "revision": 0xA1,
        "luid": f"{luid:016x}", "flags": 0, "dedicated_video_bytes": 0, "dedicated_system_bytes": 0,
        "shared_system_bytes": 16 * GIB, "driver_version": "32.0.15.9186",
    }  # fmt: skip
    if bus is not None:
        row |= {"pci_bus": bus, "pci_device": 0, "pci_function": 0}
    return row | more


RTX_4090 = adapter(
    "NVIDIA GeForce RTX 4090", 0x10DE, 0x2684, 0xD3A1, 1, dedicated_video_bytes=25757220864,
    local_budget_bytes=24 * GIB, local_usage_bytes=GIB, non_local_budget_bytes=15 * GIB, non_local_usage_bytes=0,
)  # fmt: skip
UHD_770 = adapter(
    "Intel(R) UHD Graphics 770", 0x8086, 0x4680, 0xC1B2, 0, pci_device=2, dedicated_video_bytes=134217728,
    local_budget_bytes=15 * GIB, local_usage_bytes=0, non_local_budget_bytes=0, non_local_usage_bytes=0,
)  # fmt: skip
EGPU = RTX_4090 | {
    "name": "AMD Radeon RX 7900 XTX", "vendor_id": 0x1002, "device_id": 0x744C, "luid": "000000000000e999",
    "pci_bus": 62,
}  # fmt: skip
WARP = adapter("Microsoft Basic Render Driver", 0x1414, 0x8C, 0x9F01, None, flags=2, subsystem_id=0)
REMOTE = RTX_4090 | {"name": "Microsoft Remote Display Adapter", "flags": 1, "luid": "0" * 12 + "0777"}


def table(*adapters: Table, order: list[int] | None = None, **more: Any) -> Table:
    chosen = range(len(adapters)) if order is None else order
    return {
        "size_bits": 64,
        "adapters": list(adapters),
        "high_performance": [adapters[i]["luid"] for i in chosen],
    } | more


def one(row: Table, **more: Any) -> DxgiAdapter:
    (found,) = read_dxgi(table(row, **more)).adapters
    return found


class TestTable:
    def test_both_orders(self) -> None:
        inventory = read_dxgi(table(UHD_770, RTX_4090, WARP, order=[1, 0, 2]))
        assert [a.index for a in inventory.adapters] == [0, 1, 2]
        assert [a.high_performance_index for a in inventory.adapters] == [1, 0, 2]
        assert inventory.skipped == ()

    def test_everything_that_is_told(self) -> None:
        found = one(RTX_4090)
        assert found == DxgiAdapter(
            0, 0, "NVIDIA GeForce RTX 4090", 0x10DE, 0x2684, 0x16F3103C, 0xA1, "000000000000d3a1",
            "00000000:01:00.0", "32.0.15.9186", DeviceKind.GPU, False, 25757220864, 0, 16 * GIB,
            24 * GIB, GIB, 15 * GIB, 0, {},
        )  # fmt: skip
        assert (found.memory_source, found.memory_total_bytes, found.memory_free_bytes) == (
            "dedicated", 25757220864, 23 * GIB,
        )  # fmt: skip

    def test_gpu_inside_a_processor_has_what_windows_lets_it_use(self) -> None:
        found = one(UHD_770)
        assert (found.kind, found.memory_source) == (DeviceKind.INTEGRATED_GPU, "host")
        assert found.memory_total_bytes == 134217728 + 16 * GIB

    def test_without_budgets_nobody_knows_whether_it_has_memory_of_its_own(self) -> None:
        found = one(adapter("GPU", 0x10DE, 1, 1, 1, dedicated_video_bytes=GIB))
        assert (found.kind, found.memory_source) == (DeviceKind.UNKNOWN, None)
        assert found.memory_free_bytes is None
        assert found.unavailable["local_budget_bytes"] == "unsupported"

    def test_windows_without_the_second_order(self) -> None:
        found = read_dxgi({"adapters": [RTX_4090]}).adapters[0]
        assert (found.high_performance_index, found.unavailable["high_performance_index"]) == (None, "unsupported")
        found = read_dxgi({"adapters": [RTX_4090], "errors": {"high_performance": "error"}}).adapters[0]
        assert found.unavailable["high_performance_index"] == "error"

    def test_second_order_with_an_adapter_of_its_own(self) -> None:
        inventory = read_dxgi(table(RTX_4090, high_performance=["00000000deadbeef", "000000000000D3A1", 7]))
        assert inventory.adapters[0].high_performance_index == 1
        assert [(s.where, "deadbeef" in s.why) for s in inventory.skipped] == [
            ("high_performance[0]", True), ("high_performance[2]", False),
        ]  # fmt: skip

    def test_luid_of_two_names_neither(self) -> None:
        inventory = read_dxgi(table(RTX_4090, UHD_770 | {"luid": RTX_4090["luid"]}))
        assert [a.luid for a in inventory.adapters] == [None, None]
        assert [a.unavailable["luid"] for a in inventory.adapters] == ["ambiguous", "ambiguous"]

    @pytest.mark.parametrize(
        ("broken", "field"),
        [
            ({"vendor_id": -1}, "vendor_id"),
            ({"vendor_id": 4318.0}, "vendor_id"),
            ({"local_budget_bytes": True}, "local_budget_bytes"),
            ({"luid": "d3a1"}, "luid"),
            ({"luid": "0" * 16}, "luid"),
            ({"pci_bus": 70000}, "pci_address"),
            ({"dedicated_video_bytes": 2**63}, "dedicated_video_bytes"),
            ({"name": 5}, "name"),
        ],
    )
    def test_one_broken_value_costs_one_field(self, broken: Table, field: str) -> None:
        found = one(RTX_4090 | broken)
        assert getattr(found, field) is None
        assert found.unavailable[field] == "invalid"
        assert not set(found.unavailable) - {field, "high_performance_index"}

    @pytest.mark.parametrize("broken", [None, [], "dxgi", {}, {"adapters": 5}, {"adapters": [5, "x"]}])
    def test_what_is_no_table_is_said(self, broken: object) -> None:
        inventory = read_dxgi(broken)
        assert inventory.adapters == ()
        assert inventory.skipped

    def test_names_stay_on_one_line(self) -> None:
        assert one(RTX_4090 | {"name": "RTX\x1b[2J\n4090\ud800\0left over"}).name == "RTX [2J 4090"


class TestChoice:
    def test_dml1_warp_is_never_taken_by_itself(self) -> None:
        inventory = read_dxgi(table(WARP, RTX_4090))
        assert [a.kind for a in inventory.adapters] == [DeviceKind.SOFTWARE, DeviceKind.GPU]
        assert [a.name for a in inventory.ranked()] == ["NVIDIA GeForce RTX 4090"]

    def test_dml1_warp_alone_is_no_device(self) -> None:
        assert read_dxgi(table(WARP)).ranked() == ()
        assert one(WARP | {"flags": 0}).selectable is False  # some versions of Windows do not flag it

    def test_dml1_adapter_of_a_remote_session_is_not_taken(self) -> None:
        assert [a.name for a in read_dxgi(table(REMOTE, UHD_770)).ranked()] == ["Intel(R) UHD Graphics 770"]
        assert one(REMOTE).remote

    def test_dml2_adapters_keep_their_keys_when_one_goes(self) -> None:
        before = read_dxgi(table(UHD_770, RTX_4090, EGPU)).adapters
        after = read_dxgi(table(UHD_770, EGPU)).adapters
        assert [a.index for a in before if a.name == EGPU["name"]] == [2]
        assert [a.index for a in after if a.name == EGPU["name"]] == [1]
        assert (after[1].luid, after[1].registry_key) == (before[2].luid, before[2].registry_key)
        assert len({a.registry_key for a in before}) == 3

    def test_dml2_key_outlives_the_boot_and_the_luid_does_not(self) -> None:
        before, after = one(RTX_4090), one(RTX_4090 | {"luid": "000000000000ffff"})
        assert before.luid != after.luid
        assert before.registry_key == after.registry_key == "dxgi:10de-2684-16f3103c@00000000:01:00.0"

    def test_dml2_without_the_place_on_the_bus_there_is_no_key(self) -> None:
        assert one(adapter("GPU", 0x10DE, 0x2684, 1, None)).registry_key is None

    def test_dml3_sizes_of_64_bits_win(self) -> None:
        found = one(RTX_4090 | {"adapter_ram_bytes": 4293918720, "registry_memory_bytes": 1})
        assert found.dedicated_video_bytes == 25757220864

    def test_dml3_registry_stands_in(self) -> None:
        row = {k: v for k, v in RTX_4090.items() if k != "dedicated_video_bytes"}
        found = one(row | {"registry_memory_bytes": 25757220864, "adapter_ram_bytes": 4293918720})
        assert found.dedicated_video_bytes == 25757220864

    @pytest.mark.parametrize("size", [4293918720, (4 << 30) - (2 << 20), 2**32 - 1])
    def test_dml3_full_field_of_32_bits_is_unknown(self, size: int) -> None:
        row = {k: v for k, v in RTX_4090.items() if k != "dedicated_video_bytes"}
        found = one(row | {"adapter_ram_bytes": size})
        assert (found.dedicated_video_bytes, found.unavailable["dedicated_video_bytes"]) == (None, "invalid")
        assert found.memory_total_bytes is None

    def test_dml3_smaller_value_of_32_bits_counts(self) -> None:
        row = {k: v for k, v in UHD_770.items() if k != "dedicated_video_bytes"}
        assert one(row | {"adapter_ram_bytes": 1073741824}).dedicated_video_bytes == 1073741824

    def test_dml3_process_of_32_bits_cannot_tell_large_sizes(self) -> None:
        found = one(RTX_4090 | {"dedicated_video_bytes": 4293918720}, size_bits=32)
        assert found.dedicated_video_bytes is None

    def test_dml3_zero_gives_way(self) -> None:
        assert one(RTX_4090 | {"dedicated_video_bytes": 0, "registry_memory_bytes": 8}).dedicated_video_bytes == 8
        assert one(RTX_4090 | {"dedicated_video_bytes": 0}).dedicated_video_bytes == 0

    @pytest.mark.parametrize("rows", [(UHD_770, RTX_4090), (RTX_4090, UHD_770)])
    def test_dml4_own_ranking_whatever_the_order(self, rows: tuple[Table, ...]) -> None:
        assert read_dxgi(table(*rows)).ranked()[0].name == "NVIDIA GeForce RTX 4090"

    def test_dml4_all_kinds(self) -> None:
        small = RTX_4090 | {"name": "small", "dedicated_video_bytes": 8 * GIB, "luid": "0" * 12 + "0008"}
        untold = adapter("untold", 0x1234, 1, 5, None, dedicated_video_bytes=64 * GIB)
        found = ranked(read_dxgi(table(WARP, untold, UHD_770, small, RTX_4090)).adapters)
        assert [a.name for a in found] == [r["name"] for r in (RTX_4090, small, UHD_770, untold, WARP)]

    def test_dml5_ordinal_is_derived_and_said_with_the_adapter_it_is_meant_for(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        best = read_dxgi(table(UHD_770, RTX_4090, order=[1, 0])).ranked()[0]
        with caplog.at_level(logging.INFO, "gpurt.sources.dxgi"):
            ordinal = directml_ordinal(best)
        assert (ordinal.device_id, ordinal.name, ordinal.verified) == (1, "NVIDIA GeForce RTX 4090", False)
        assert "device_id 1" in caplog.text
        assert "NVIDIA GeForce RTX 4090" in caplog.text


class RecordedAdapter:
    def __init__(self, row: Table, opened: list[str]) -> None:
        self.row, self.opened = row, opened
        opened.append(row["luid"])

    def description(self) -> Table:
        if "description" in self.row:
            raise self.row["description"]
        return {key: self.row[key] for key in DESCRIBED}

    def memory(self, group: int) -> tuple[int, int]:
        if "memory" in self.row:
            raise self.row["memory"]
        return (24 * GIB, GIB) if group == LOCAL else (15 * GIB, 0)

    def pci_location(self) -> tuple[int, int, int]:
        return self.row["pci_bus"], 0, 0

    def driver_version(self) -> str:
        raise DxgiError("CheckInterfaceSupport", 0x887A0004)

    def close(self) -> None:
        self.opened.remove(self.row["luid"])


class RecordedDxgi:
    size_bits = 64

    def __init__(self, *rows: Table, end: Exception | None = None, preference: Exception | None = None) -> None:
        self.rows, self.end, self.preference = rows, end, preference
        self.opened: list[str] = []
        self.closed = 0

    def adapter(self, index: int) -> RecordedAdapter | None:
        if index < len(self.rows):
            return RecordedAdapter(self.rows[index], self.opened)
        if self.end:
            raise self.end
        return None

    def preferred(self, index: int, preference: int) -> RecordedAdapter | None:
        if self.preference:
            raise self.preference
        return RecordedAdapter(self.rows[-1 - index], self.opened) if index < len(self.rows) else None

    def close(self) -> None:
        self.closed += 1


class TestCalls:
    def test_record_and_read(self) -> None:
        calls = RecordedDxgi(UHD_770, RTX_4090)
        inventory = read_dxgi(query_dxgi(lambda: calls))
        assert [a.high_performance_index for a in inventory.adapters] == [1, 0]
        assert inventory.adapters[1].dedicated_video_bytes == 25757220864
        assert inventory.adapters[1].local_usage_bytes == GIB
        assert inventory.adapters[1].unavailable == {"driver_version": "unsupported"}
        assert (calls.opened, calls.closed) == ([], 1)

    def test_failing_calls_cost_their_fields(self) -> None:
        denied = RTX_4090 | {"memory": DxgiError("QueryVideoMemoryInfo", 0x80070005)}
        crashed = UHD_770 | {"description": OSError("access violation")}
        calls = RecordedDxgi(denied, crashed, preference=DxgiError("QueryInterface", 0x80004002))
        first, second = read_dxgi(record_dxgi(calls)).adapters
        assert (first.name, first.unavailable["local_budget_bytes"]) == ("NVIDIA GeForce RTX 4090", "no_permission")
        assert first.unavailable["high_performance_index"] == "unsupported"
        assert (second.name, second.unavailable["name"]) == (None, "error")
        assert second.pci_address == "00000000:00:00.0"
        assert calls.opened == []

    def test_list_that_breaks_off(self) -> None:
        calls = RecordedDxgi(RTX_4090, end=DxgiError("EnumAdapters1", 0x887A0020))
        inventory = read_dxgi(record_dxgi(calls))
        assert len(inventory.adapters) == 1
        assert "0x887a0020" in inventory.skipped[0].why
        absent = read_dxgi(record_dxgi(RecordedDxgi(end=DxgiError("EnumAdapters1", 0x887A0020)))).absence
        assert absent is not None
        assert absent.reason is ReasonCode.ERROR

    def test_list_without_an_end(self) -> None:
        class Endless(RecordedDxgi):
            def adapter(self, index: int) -> RecordedAdapter | None:
                return super().adapter(0)

        assert len(record_dxgi(Endless(RTX_4090))["adapters"]) == 64

    def test_no_dxgi_here(self) -> None:
        def fails() -> RecordedDxgi:
            raise OSError("dxgi.dll")

        broken = read_dxgi(query_dxgi(fails)).absence
        assert broken is not None
        assert (broken.reason, "dxgi.dll" in broken.message) == (ReasonCode.ERROR, True)

    @pytest.mark.skipif("sys.platform == 'win32'")
    def test_other_systems_have_none(self) -> None:
        absence = read_dxgi(query_dxgi()).absence
        assert absence is not None
        assert absence.reason is ReasonCode.WRONG_PLATFORM
