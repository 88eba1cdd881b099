"""Usable memory: whose figure decides, what is left free, what people ask for, and what is shared."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurt.errors import GPUError
from gpurt.sources.host import HostMemory
from gpurt.types import DeviceIdentity, DeviceKind, GPUDevice
from gpurt.usable_memory import (
    Amount,
    Figures,
    MemorySettings,
    parse_amounts,
    parse_size,
    total_usable_bytes,
    usable_memory,
    with_usable_memory,
)
from tests.discovery.records import device as record

MIB, GIB = 1 << 20, 1 << 30
POOL = "host:0123456789abcdef"


def host(total: int, usable: int, source: str = "meminfo") -> HostMemory:
    return HostMemory(total, usable, usable, source)


def gpu(device_id: str = "cuda:0", **fields: Any) -> GPUDevice:
    backend, _, index = device_id.partition(":")
    return record(int(index), backend=backend).model_copy(
        update={
            "kind": DeviceKind.GPU, "memory_bytes": 80 * GIB, "memory_available": 79 * GIB, "unified_memory": False,
            "memory_pool_id": None, "memory_usable_bytes": None, "memory_usable_source": None, **fields,
        }
    )  # fmt: skip


class TestCards:
    def test_m23_a_card_is_its_own_memory_and_not_the_hosts(self) -> None:
        found = usable_memory(Figures(12 * GIB, 11 * GIB), host=host(32 * GIB, 30 * GIB), host_pool=POOL)
        assert (found.usable_bytes, found.source, found.pool) == (11 * GIB, "driver", None)
        assert found.capacity_bytes == 12 * GIB

    def test_m38_usable_is_what_is_free_less_a_reserve(self) -> None:
        found = usable_memory(Figures(24 * GIB, 18 * GIB), reserve_bytes=512 * MIB)
        assert found.usable_bytes == 18 * GIB - 512 * MIB
        assert usable_memory(Figures(24 * GIB, 100 * MIB), reserve_bytes=512 * MIB).usable_bytes == 0

    def test_nvf_3_unknown_is_none_and_never_0(self) -> None:
        for figures in (Figures(24 * GIB, None), Figures(None, None)):
            found = usable_memory(figures, reserve_bytes=GIB)
            assert found.usable_bytes is None
            assert found.source.startswith("unknown: ")

    def test_amd_5_shared_memory_of_a_discrete_card_is_never_added(self) -> None:
        found = usable_memory(Figures(16 * GIB, 15 * GIB, shared_total_bytes=64 * GIB), host=host(128 * GIB, 120 * GIB))
        assert found.usable_bytes == 15 * GIB

    def test_m34_what_others_free_meanwhile_is_no_error(self) -> None:
        found = [usable_memory(Figures(24 * GIB, free)).usable_bytes for free in (10 * GIB, 17 * GIB, 24 * GIB)]
        assert found == [10 * GIB, 17 * GIB, 24 * GIB]


class TestUnified:
    def test_m30_gb10_follows_available_memory(self) -> None:
        figures = Figures(128 * GIB, 2 * GIB, unified=True)
        found = usable_memory(figures, host=host(121 * GIB, 116 * GIB), host_pool=POOL)
        assert (found.usable_bytes, found.source, found.pool) == (116 * GIB, "meminfo", POOL)

    def test_nvf_2_no_figures_of_its_own(self) -> None:
        """NVF-2 and M-31: NVML tells nothing; the host does."""
        found = usable_memory(
            Figures(None, None, unified=True), host=host(127600748 * 1024, 118566368 * 1024), host_pool=POOL
        )
        assert found.usable_bytes == 118566368 * 1024
        assert found.capacity_bytes == 127600748 * 1024

    def test_nvf_12_part_that_under_reports(self) -> None:
        found = usable_memory(Figures(8522825728, 7929 * MIB, unified=True), host=host(64 * GIB, 60 * GIB))
        assert (found.usable_bytes, found.capacity_bytes) == (60 * GIB, 64 * GIB)
        assert found.reported_total_bytes == 8522825728

    def test_m33_a_containers_limit_counts(self) -> None:
        found = usable_memory(Figures(None, None, unified=True), host=host(8 * GIB, 7 * GIB, "cgroup"))
        assert (found.usable_bytes, found.source) == (7 * GIB, "cgroup")
        found = usable_memory(Figures(None, None, unified=True), host=host(23 * GIB, 21 * GIB))
        assert (found.usable_bytes, found.source) == (21 * GIB, "meminfo")

    def test_m28_apu_with_a_small_part_of_its_own(self) -> None:
        """M-28 and AMD-5: VRAM 512 MiB, GTT 124 GiB."""
        figures = Figures(
            536870912, 381681664, unified=True, shared_total_bytes=133143986176, shared_free_bytes=133143986176
        )
        found = usable_memory(figures, host=host(192 * GIB, 180 * GIB), host_pool=POOL)
        assert found.usable_bytes == 381681664 + 133143986176
        assert (found.capacity_bytes, found.reported_total_bytes) == (133680857088, 536870912)
        assert (found.pool, found.source) == (POOL, "driver")
        busy = usable_memory(figures, host=host(192 * GIB, 40 * GIB), host_pool=POOL)
        assert (busy.usable_bytes, busy.source) == (381681664 + 40 * GIB, "meminfo")

    def test_m29_carved_out_memory_is_the_gpus_own(self) -> None:
        figures = Figures(96 * GIB, 90 * GIB, unified=True, shared_total_bytes=16 * GIB)
        found = usable_memory(figures, host=host(32 * GIB, 30 * GIB), host_pool=POOL)
        assert (found.usable_bytes, found.capacity_bytes, found.pool) == (90 * GIB, 96 * GIB, None)

    def test_apl_1_the_working_set_is_the_budget(self) -> None:
        """APL-1 and M-26: Metal lets one process use a part of the memory."""
        figures = Figures(128 * GIB, None, unified=True, budget_bytes=112 * GIB)
        found = usable_memory(figures, host=host(128 * GIB, 120 * GIB), host_pool=POOL)
        assert (found.usable_bytes, found.source, found.capacity_bytes) == (112 * GIB, "budget", 112 * GIB)
        busy = usable_memory(figures, host=host(128 * GIB, 50 * GIB), host_pool=POOL)
        assert (busy.usable_bytes, busy.source) == (50 * GIB, "meminfo")

    def test_unknown_host_is_unknown(self) -> None:
        assert usable_memory(Figures(8 * GIB, 7 * GIB, unified=True)).usable_bytes is None


class TestLimits:
    def test_m24_a_limit_lowers_and_does_not_raise(self) -> None:
        figures = Figures(24 * GIB, 20 * GIB)
        assert usable_memory(figures, limit=Amount(8 * GIB)).usable_bytes == 8 * GIB
        assert usable_memory(figures, limit=Amount(8 * GIB)).source == "limit"
        assert usable_memory(figures, limit=Amount(22 * GIB)).source == "driver"
        assert usable_memory(figures, limit=Amount(0)).usable_bytes == 0

    def test_m36_a_forced_budget_wins_over_the_probe(self) -> None:
        """M-26 and M-36: up to what there is."""
        figures = Figures(24 * GIB, 3 * GIB)
        assert usable_memory(figures, limit=Amount(22 * GIB, forced=True)).usable_bytes == 22 * GIB
        assert usable_memory(figures, limit=Amount(99 * GIB, forced=True)).usable_bytes == 24 * GIB

    def test_m36_a_budget_stands_in_for_what_nobody_knows(self) -> None:
        found = usable_memory(Figures(None, None), limit=Amount(6 * GIB))
        assert (found.usable_bytes, found.source) == (6 * GIB, "limit")

    def test_per_device_and_for_all_others(self) -> None:
        settings = MemorySettings.from_environ({"GPURT_MEMORY_LIMIT": " cuda:0=40GiB , 20GiB, rocm = 10 GiB "})
        first = with_usable_memory(gpu("cuda:0"), settings)
        second = with_usable_memory(gpu("cuda:1"), settings)
        amd = with_usable_memory(gpu("rocm:0"), settings)
        assert [d.memory_usable_bytes for d in (first, second, amd)] == [40 * GIB, 20 * GIB, 10 * GIB]
        assert {d.memory_usable_source for d in (first, second, amd)} == {"limit"}

    def test_the_most_exact_name_wins(self) -> None:
        identity = DeviceIdentity(key="GPU-1A1A")
        settings = MemorySettings.from_environ({"GPURT_MEMORY_LIMIT": "cuda=1GiB,gpu-1a1a=2GiB,3GiB"})
        assert with_usable_memory(gpu(identity=identity), settings).memory_usable_bytes == 2 * GIB
        assert with_usable_memory(gpu(), settings).memory_usable_bytes == GIB

    def test_reserve_by_kind_and_by_configuration(self) -> None:
        none = MemorySettings.from_environ({"GPURT_MEMORY_LIMIT": ""})
        assert with_usable_memory(gpu(), none).memory_usable_bytes == 79 * GIB - 512 * MIB
        own = MemorySettings.from_environ({"GPURT_MEMORY_RESERVE": "2GiB,cuda:1=0"})
        assert with_usable_memory(gpu(), own).memory_usable_bytes == 77 * GIB
        assert with_usable_memory(gpu("cuda:1"), own).memory_usable_bytes == 79 * GIB
        cpu = gpu("cpu:0", kind=DeviceKind.CPU)
        found = with_usable_memory(cpu, none, host=host(16 * GIB, 12 * GIB), host_pool=POOL)
        assert (found.memory_usable_bytes, found.memory_pool_id) == (12 * GIB, POOL)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("plenty", "is not a size"), ("-1GiB", "is not a size"), ("1e9", "is not a size"),
            ("cuda:0=", "is not a size"), ("=4GiB", "name is missing"), ("4GiB,8GiB", "second size"),
            ("cuda:0=1G,CUDA:0=2G", "second size"), ("5XiB", "is not a size"), ("5i", "no unit"), ("5ib", "no unit"),
            ("99999999TiB", "more than any machine"), ("nan", "is not a size"), ("٤GiB", "is not a size"),
            ("!", "is not a size"),
        ],
    )  # fmt: skip
    def test_a_bad_value_is_an_error_that_says_how_to_write_it(self, text: str, said: str) -> None:
        with pytest.raises(GPUError, match="GPURT_MEMORY_LIMIT") as caught:
            MemorySettings.from_environ({"GPURT_MEMORY_LIMIT": text})
        assert said in str(caught.value)
        assert "cuda:0=40GiB,20GiB" in str(caught.value.hint)
        assert caught.value.__cause__ is None or isinstance(caught.value.__cause__, ValueError)

    def test_force_means_nothing_for_a_reserve(self) -> None:
        with pytest.raises(GPUError, match=r"GPURT_MEMORY_RESERVE.*means nothing"):
            MemorySettings.from_environ({"GPURT_MEMORY_RESERVE": "1GiB!"})

    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("0", 0), ("1024", 1024), ("10B", 10), ("1KB", 1000), ("1KiB", 1024), ("1k", 1024), ("1.5 GiB", 3 << 29),
            ("2TB", 2 * 10**12), ("2T", 2 << 40), ("4g", 4 << 30), ("12.288GB", 12288000000), ("7MB", 7_000_000),
        ],
    )  # fmt: skip
    def test_sizes(self, text: str, size: int) -> None:
        assert parse_size(text) == size

    @settings(max_examples=1000, deadline=None)
    @given(st.text(alphabet="0123456789.,=!:kmgtibKMGTIB \t\0cudaé-+e", max_size=30) | st.text(max_size=20))
    def test_any_text_is_understood_or_refused(self, text: str) -> None:
        try:
            amounts = parse_amounts(text, "GPURT_MEMORY_LIMIT", may_force=True)
        except GPUError:
            return
        for amount in (amounts.default, *amounts.by_name.values()):
            assert amount is None or 0 <= amount.size_bytes < 1 << 63


class TestTogether:
    def test_one_pool_per_host_counts_once(self) -> None:
        none = MemorySettings()
        memory = host(121 * GIB, 116 * GIB)
        chip = gpu(unified_memory=True, kind=DeviceKind.INTEGRATED_GPU)
        cpu = gpu("cpu:0", kind=DeviceKind.CPU)
        card = gpu("cuda:1", memory_available=20 * GIB + 512 * MIB)
        devices = [with_usable_memory(each, none, host=memory, host_pool=POOL) for each in (chip, cpu, card)]
        assert [each.memory_pool_id for each in devices] == [POOL, POOL, None]
        assert total_usable_bytes(devices) == 136 * GIB

    def test_m35_unequal_devices_are_information(self) -> None:
        devices = [gpu(memory_usable_bytes=24 * GIB), gpu("cuda:1", memory_usable_bytes=16 * GIB)]
        assert total_usable_bytes([*devices, gpu("cuda:2")]) == 40 * GIB

    @settings(max_examples=1000, deadline=None)
    @given(
        figures=st.builds(
            Figures,
            *[st.none() | st.integers(0, 2**50)] * 2,
            unified=st.booleans(),
            shared_total_bytes=st.none() | st.integers(0, 2**50),
            shared_free_bytes=st.none() | st.integers(0, 2**50),
            budget_bytes=st.none() | st.integers(0, 2**50),
        ),
        usable=st.integers(0, 2**50),
        with_host=st.booleans(),
        limit=st.none() | st.builds(Amount, st.integers(0, 2**50), st.booleans()),
        reserve=st.integers(0, 2**40),
    )
    def test_never_below_0_and_never_above_what_was_asked_for(
        self, figures: Figures, usable: int, with_host: bool, limit: Amount | None, reserve: int
    ) -> None:
        found = usable_memory(
            figures, host=host(2**50, usable) if with_host else None, limit=limit, reserve_bytes=reserve
        )
        if found.usable_bytes is None:
            assert found.source.startswith("unknown")
            return
        assert found.usable_bytes >= 0
        assert found.source in ("driver", "meminfo", "budget", "limit")
        assert limit is None or found.usable_bytes <= limit.size_bytes
        assert figures.budget_bytes is None or found.usable_bytes <= figures.budget_bytes
