"""Intel's devices from trees of files. Names of tests carry the case that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.sources import trees
from tests.sources.trees import DRM, XE_VRAM, card, write

from gpurt.errors import ReasonCode
from gpurt.sources.intel import IntelDevice, IntelInventory, read_intel, read_intel_telemetry


def everybody(path: Path) -> bool:
    return True


@pytest.fixture
def host(tmp_path: Path) -> Path:
    trees.intel_host(tmp_path)
    return tmp_path


def both(root: Path) -> tuple[IntelDevice, IntelDevice]:
    inside, plugged = read_intel(root, everybody).devices
    return inside, plugged


class TestInventory:
    def test_int1_xe_card_by_its_tile(self, host: Path) -> None:
        _, device = both(host)
        assert (device.driver, device.pci_address, device.device_id) == ("xe", "00000000:03:00.0", 0xE20B)
        assert (device.memory_source, device.memory_total_bytes) == ("vram", XE_VRAM)
        assert (device.integrated, device.unified_memory, device.tiles) == (False, False, 1)
        assert device.memory_free_bytes is None
        assert device.unavailable["memory_free_bytes"] == "unsupported"
        assert device.max_clock_mhz == 2850

    def test_int1_amds_file_is_not_looked_at(self, host: Path) -> None:
        write(host, f"{DRM}/card1/device/mem_info_vram_total", "0\n")
        assert both(host)[1].memory_total_bytes == XE_VRAM

    @pytest.mark.parametrize("where", ["card1", "card1/device"])
    def test_int1_i915_card_by_local_memory(self, tmp_path: Path, where: str) -> None:
        card(tmp_path, 1, "0000:03:00.0", vendor="0x8086", device="0x56a0", driver="i915")
        write(tmp_path, f"{DRM}/{where}/lmem_total_bytes", "17079205888\n")
        (device,) = read_intel(tmp_path).devices
        assert (device.memory_source, device.memory_total_bytes) == ("vram", 17079205888)

    def test_int1_zero_never_wins(self, host: Path) -> None:
        (host / f"{DRM}/card1/device/tile0/physical_vram_size_bytes").write_text("0\n")
        _, device = both(host)
        assert device.memory_total_bytes is None
        assert device.unavailable["memory_total_bytes"] == "unsupported"
        write(host, f"{DRM}/card1/lmem_total_bytes", f"{XE_VRAM}\n")
        assert both(host)[1].memory_total_bytes == XE_VRAM

    def test_int1_card_whose_driver_tells_no_size(self, tmp_path: Path) -> None:
        card(tmp_path, 0, "0000:03:00.0", vendor="0x8086", device="0x56a0", driver="i915")
        (device,) = read_intel(tmp_path).devices
        assert (device.integrated, device.memory_source, device.memory_total_bytes) == (False, None, None)

    def test_int1_tiles_are_added(self, host: Path) -> None:
        write(host, f"{DRM}/card1/device/tile1/physical_vram_size_bytes", f"{XE_VRAM}\n")
        _, device = both(host)
        assert (device.memory_total_bytes, device.tiles) == (2 * XE_VRAM, 2)

    def test_int1_one_unreadable_tile_is_not_a_smaller_card(self, host: Path) -> None:
        write(host, f"{DRM}/card1/device/tile1/physical_vram_size_bytes", "much\n")
        _, device = both(host)
        assert device.memory_total_bytes is None
        assert device.unavailable["memory_total_bytes"] == "invalid"

    def test_int1_int2_gpu_inside_a_processor_has_the_hosts_memory(self, host: Path) -> None:
        device, _ = both(host)
        assert (device.driver, device.integrated, device.unified_memory) == ("i915", True, True)
        assert device.memory_total_bytes == 33554432 * 1024
        assert device.memory_free_bytes == 16777216 * 1024

    def test_int2_without_memory_of_its_own_the_cgroup_counts(self, host: Path) -> None:
        write(host, "proc/self/cgroup", "0::/a\n")
        write(host, "sys/fs/cgroup/a/memory.max", f"{4 << 30}\n")
        write(host, "sys/fs/cgroup/a/memory.current", f"{1 << 30}\n")
        device, _ = both(host)
        assert (device.memory_total_bytes, device.memory_free_bytes) == (4 << 30, 3 << 30)

    def test_a_card_where_processors_have_theirs(self, tmp_path: Path) -> None:
        files: dict[str, str | int] = {"tile0/physical_vram_size_bytes": XE_VRAM}
        card(tmp_path, 0, "0000:00:02.0", vendor="0x8086", device="0xe20b", driver="xe", files=files)
        (device,) = read_intel(tmp_path).devices
        assert (device.integrated, device.memory_total_bytes) == (False, XE_VRAM)

    def test_no_intel_at_all(self, tmp_path: Path) -> None:
        trees.mi210_host(tmp_path)
        assert read_intel(tmp_path) == IntelInventory()

    def test_a_card_whose_vendor_cannot_be_told(self, host: Path) -> None:
        (host / f"{DRM}/card1/device/vendor").write_text("intel\n")
        inventory = read_intel(host)
        assert len(inventory.devices) == 1
        assert [skipped.where for skipped in inventory.skipped] == [f"/{DRM}/card1"]

    def test_connectors_and_render_nodes_are_no_cards(self, host: Path) -> None:
        for name in ("card0-DP-1", "renderD128", "version", "card", "card01"):
            write(host, f"{DRM}/{name}/device/vendor", "0x8086\n")
        assert len(read_intel(host).devices) == 2

    def test_access(self, host: Path) -> None:
        devices = read_intel(host, lambda path: path.name == "renderD129").devices
        assert [(d.access.path, d.access.reason) for d in devices] == [
            ("/dev/dri/renderD128", ReasonCode.NO_PERMISSION),
            ("/dev/dri/renderD129", None),
        ]


class TestTelemetry:
    def test_tel3_card(self, host: Path) -> None:
        reading = read_intel_telemetry(host, both(host)[1])
        assert reading.temperature_c == 41  # of the package, not of its memory
        assert reading.clock_mhz == 0  # asleep between two jobs: a measurement
        assert reading.power_w is None
        assert reading.utilization_percent is None
        assert (reading.memory_total_bytes, reading.memory_used_bytes) == (XE_VRAM, None)
        assert set(reading.unavailable.values()) == {"unsupported"}

    def test_tel3_gpu_of_a_processor(self, host: Path) -> None:
        reading = read_intel_telemetry(host, both(host)[0])
        assert reading.clock_mhz == 300
        assert reading.memory_total_bytes == (reading.memory_used_bytes or 0) + (reading.memory_free_bytes or 0)
        assert reading.temperature_c is None

    def test_a_card_that_sleeps_is_not_woken(self, host: Path) -> None:
        (host / f"{DRM}/card1/device/power/runtime_status").write_text("suspended\n")
        device = both(host)[1]
        reading = read_intel_telemetry(host, device)
        assert device.suspended
        assert reading.unavailable["temperature_c"] == reading.unavailable["clock_mhz"] == "suspended"
        assert reading.memory_total_bytes == XE_VRAM

    def test_another_card_in_its_place(self, host: Path) -> None:
        device = both(host)[1]
        (host / f"{DRM}/card1/device/uevent").write_text("DRIVER=xe\nPCI_SLOT_NAME=0000:99:00.0\n")
        reading = read_intel_telemetry(host, device)
        assert reading.memory_total_bytes is None
        assert set(reading.unavailable.values()) == {"error"}

    @pytest.mark.parametrize("value", ["65535000", "-273150", "hot"])
    def test_tel1_impossible_temperature(self, host: Path, value: str) -> None:
        device = both(host)[1]
        (host / f"{DRM}/card1/device/hwmon/hwmon6/temp2_input").write_text(value)
        reading = read_intel_telemetry(host, device)
        # Not the memory's temperature instead: that would be another place.
        assert reading.temperature_c is None
        assert reading.unavailable["temperature_c"] == "invalid"
