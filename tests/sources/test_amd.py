"""AMD's devices from trees of files. Names of tests carry the case that they stand for."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.sources import trees
from tests.sources.trees import CPU, KFD, MI210, VEGA10, VEGA10_BANK, amd_card, kfd_node, write

from gpurt.errors import ReasonCode
from gpurt.identity import device_identity
from gpurt.sources.amd import AmdDevice, AmdInventory, read_amd
from gpurt.sources.amd_gfx import effective_gfx, gfx_name
from gpurt.sources.amd_telemetry import read_amd_telemetry
from gpurt.sources.device_nodes import may_open


def everybody(path: Path) -> bool:
    return True


def nobody(path: Path) -> bool:
    return False


def only(root: Path) -> AmdDevice:
    (device,) = read_amd(root, everybody).devices
    return device


def replaced(root: Path, name: str, text: str) -> None:
    assert (root / name).exists()
    (root / name).write_text(text)


class TestWhatIsThere:
    def test_mi210_every_field(self, tmp_path: Path) -> None:
        trees.mi210_host(tmp_path)
        device = only(tmp_path)
        assert (device.name, device.codename, device.gfx) == ("AMD Instinct MI210", "aldebaran", "gfx90a")
        assert (device.uuid, device.serial) == (trees.MI210_UUID, "692231000131")
        assert (device.pci_address, device.partition) == ("00000000:03:00.0", None)
        assert device.compute_units == 104  # not 8 * 14 = 112: those count what is fused off
        assert (device.rocm_index, device.kfd_node, device.card, device.render_minor) == (0, 2, 1, 130)
        assert device.memory.source == "vram"
        assert device.memory.total_bytes == device.vram_total_bytes == 68702699520
        assert device.memory.free_bytes == 68702699520 - 11735040
        assert (device.memory_width_bits, device.memory_clock_mhz, device.max_clock_mhz) == (4096, 1600, 1700)
        assert (device.numa_node, device.integrated, device.unified_memory) == (1, False, False)
        assert device.access.reason is None
        assert set(device.unavailable) == {"compute_partition", "memory_partition", "driver_version"}

    def test_d22_amd_card_of_an_older_host_is_listed(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, CPU)
        kfd_node(tmp_path, 1, VEGA10, VEGA10_BANK, used=trees.VEGA10_USED)
        device = only(tmp_path)
        assert device.pci_address == "00000000:19:00.0"
        assert device.compute_units == 64
        assert (device.memory_width_bits, device.memory_clock_mhz) == (2048, 945)

    def test_no_amd_at_all(self, tmp_path: Path) -> None:
        assert read_amd(tmp_path) == AmdInventory()

    def test_cards_of_other_vendors_are_none_of_ours(self, tmp_path: Path) -> None:
        trees.intel_host(tmp_path)
        assert read_amd(tmp_path) == AmdInventory()

    def test_a_card_that_the_compute_driver_does_not_show(self, tmp_path: Path) -> None:
        amd_card(tmp_path, 0, "0000:01:00.0", {"mem_info_vram_total": 2147483648}, device="0x6611")
        device = only(tmp_path)
        assert (device.rocm_index, device.kfd_node, device.gfx) == (None, None, None)
        assert device.memory.total_bytes == 2147483648
        assert device.access.path == "/dev/kfd"

    def test_a_card_without_graphics_device_is_told_of(self, tmp_path: Path) -> None:
        for address, code, driver in (("0000:41:00.0", "0x030000", "vfio-pci"), ("0000:42:00.0", "0x120000", None)):
            base = f"sys/bus/pci/devices/{address}"
            write(tmp_path, f"{base}/vendor", "0x1002\n")
            write(tmp_path, f"{base}/class", f"{code}\n")
            if driver:
                write(tmp_path, f"{base}/uevent", f"DRIVER={driver}\n")
        write(tmp_path, "sys/bus/pci/devices/0000:41:00.1/vendor", "0x1002\n")  # its sound device
        write(tmp_path, "sys/bus/pci/devices/0000:41:00.1/class", "0x040300\n")
        inventory = read_amd(tmp_path)
        assert inventory.devices == ()
        first, second = inventory.skipped
        assert (first.where, second.where) == ("00000000:41:00.0", "00000000:42:00.0")
        assert "vfio-pci" in first.why
        assert "no driver" in second.why

    def test_names_of_libdrm_by_device_and_revision(self, tmp_path: Path) -> None:
        table = "# List of AMDGPU IDs\n\n1.0.0\n73BF,\tC0,\tAMD Radeon RX 6900 XT\n73BF,\tC1,\tAMD Radeon RX 6800 XT\n"
        write(tmp_path, "usr/share/libdrm/amdgpu.ids", table)
        amd_card(tmp_path, 0, "0000:01:00.0", {"revision": "0xc1"}, device="0x73bf")
        assert only(tmp_path).name == "AMD Radeon RX 6800 XT"

    def test_two_cards_are_in_the_order_of_rocm(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, CPU)
        kfd_node(tmp_path, 10, MI210)
        kfd_node(tmp_path, 2, {**MI210, "location_id": 0x8300, "drm_render_minor": 129, "unique_id": 7})
        devices = read_amd(tmp_path).devices
        assert [(d.rocm_index, d.kfd_node, d.pci_address) for d in devices] == [
            (0, 2, "00000000:83:00.0"),
            (1, 10, "00000000:03:00.0"),
        ]


class TestPartitions:
    @pytest.mark.parametrize("scheme", ["function", "top bits"])
    def test_each_partition_is_a_device_of_one_card(self, tmp_path: Path, scheme: str) -> None:
        trees.partitioned_host(tmp_path, scheme=scheme)
        devices = read_amd(tmp_path, everybody).devices
        assert [d.partition for d in devices] == ["0", "1", "2", "3"]
        assert {d.pci_address for d in devices} == {"00000000:05:00.0"}
        assert {d.uuid for d in devices} == {"GPU-abcdef0123456789"}
        assert [d.render_minor for d in devices] == [128, 129, 130, 131]
        assert {d.compute_partition for d in devices} == {"QPX"}
        # Each has its part of the memory, not the card's.
        assert {d.memory.total_bytes for d in devices} == {51539607552}
        assert [d.memory.used_bytes for d in devices] == [0, 1, 2, 3]
        keys = {
            device_identity(uuid=d.uuid, pci_address=d.pci_address, partition=d.partition, fallback="").key
            for d in devices
        }
        assert len(keys) == 4

    def test_functions_of_a_card_that_the_container_does_not_show(self, tmp_path: Path) -> None:
        for part in range(3):
            kfd_node(tmp_path, part, {**MI210, "location_id": 0x0500 | part, "drm_render_minor": 128 + part})
        assert [(d.pci_address, d.partition) for d in read_amd(tmp_path).devices] == [
            ("00000000:05:00.0", str(part)) for part in range(3)
        ]

    def test_load_of_the_card_is_not_said_to_be_the_partitions(self, tmp_path: Path) -> None:
        trees.partitioned_host(tmp_path, scheme="top bits")
        device = read_amd(tmp_path, everybody).devices[2]
        reading = read_amd_telemetry(tmp_path, device)
        assert reading.utilization_percent is None
        assert reading.unavailable["utilization_percent"] == "unsupported"
        assert (reading.memory_total_bytes, reading.memory_used_bytes) == (51539607552, 2)
        assert (reading.temperature_c, reading.power_w) == (40, 140)


class TestGfx:
    @pytest.mark.parametrize(
        ("version", "name"),
        [(90402, "gfx942"), (90010, "gfx90a"), (110501, "gfx1151"), (100300, "gfx1030"), (90012, "gfx90c")],
    )
    def test_amd1_names(self, version: int, name: str) -> None:
        assert gfx_name(version) == name

    @pytest.mark.parametrize("version", [None, 0, -1, 9, 90099, 99999999, 2**63])
    def test_amd1_what_is_no_version_has_no_default(self, version: int | None) -> None:
        assert gfx_name(version) is None

    def test_amd1_it_is_a_line_of_the_properties(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, {**MI210, "gfx_target_version": 90402})
        write(tmp_path, f"{KFD}/0/gfx_target_version", "90403\n")
        assert only(tmp_path).gfx == "gfx942"

    def test_amd1_absent_is_unknown(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, VEGA10)
        device = only(tmp_path)
        assert device.gfx is None
        assert device.unavailable["gfx"] == "unsupported"

    def test_amd7_an_override_is_not_the_identity(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, CPU)
        kfd_node(tmp_path, 1, {**MI210, "gfx_target_version": 100301})
        device = only(tmp_path)
        environ = {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}
        assert device.gfx == "gfx1031"
        assert effective_gfx(device.gfx, environ, device.kfd_node) == "gfx1030"
        assert effective_gfx(device.gfx, {}, device.kfd_node) == "gfx1031"

    def test_amd7_an_override_for_one_node_comes_first(self) -> None:
        environ = {"HSA_OVERRIDE_GFX_VERSION": "10.3.0", "HSA_OVERRIDE_GFX_VERSION_2": "11.0.0"}
        assert [effective_gfx("gfx1031", environ, node) for node in (1, 2)] == ["gfx1030", "gfx1100"]

    @pytest.mark.parametrize("value", ["", "10.3", "gfx1030", "10.3.0.1", "99.99.99", "\u0967\u0966.3.0"])
    def test_amd7_what_is_no_version_overrides_nothing(self, value: str) -> None:
        assert effective_gfx("gfx1031", {"HSA_OVERRIDE_GFX_VERSION": value}, 1) == "gfx1031"


class TestNodes:
    def test_amd2_processors_are_no_gpus(self, tmp_path: Path) -> None:
        trees.mi210_host(tmp_path)
        for node in range(3):
            (tmp_path / f"{KFD}/{node}/gpu_id").unlink()
        inventory = read_amd(tmp_path)
        assert len(inventory.devices) == 1
        assert [skipped.where for skipped in inventory.skipped] == [f"/{KFD}/0", f"/{KFD}/1"]
        assert all("processor" in skipped.why for skipped in inventory.skipped)

    def test_a_node_that_cannot_be_read_is_told_of(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, MI210)
        write(tmp_path, f"{KFD}/1/gpu_id", "7\n")
        write(tmp_path, f"{KFD}/2/properties", "")
        inventory = read_amd(tmp_path)
        assert len(inventory.devices) == 1
        assert [skipped.where for skipped in inventory.skipped] == [f"/{KFD}/1", f"/{KFD}/2"]

    def test_amd4_old_kernel(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, VEGA10, VEGA10_BANK)
        device = only(tmp_path)
        assert device.pci_address == "00000000:19:00.0"
        assert device.uuid == "GPU-c34ec50444dd0a6c"

    def test_amd4_one_bad_value_costs_its_key(self, tmp_path: Path) -> None:
        text = trees.lines({**MI210, "unique_id": "n/a"}) + "\n\nnew_key 17 18\nlonely\n  \n"
        kfd_node(tmp_path, 0, MI210)
        replaced(tmp_path, f"{KFD}/0/properties", text)
        device = only(tmp_path)
        assert device.uuid is None
        assert device.unavailable["uuid"] == "invalid"
        assert (device.compute_units, device.gfx, device.pci_address) == (104, "gfx90a", "00000000:03:00.0")

    def test_amd4_domain_beyond_zero(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, {**MI210, "domain": 0x10000})
        assert only(tmp_path).pci_address == "00010000:03:00.0"

    def test_amd8_ids_are_text(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, {**MI210, "unique_id": 16404946649897475633})
        uuid = only(tmp_path).uuid
        assert uuid == f"GPU-{16404946649897475633:016x}"
        # A reader whose numbers are doubles gives back what it was given.
        assert json.loads(json.dumps({"uuid": uuid}), parse_int=float)["uuid"] == uuid


class TestMemory:
    def test_amd3_bank_where_the_old_key_says_zero(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, MI210, {"heap_type": 1, "size_in_bytes": 68702699520})
        assert only(tmp_path).memory.total_bytes == 68702699520

    def test_amd3_banks_before_the_old_key(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, {**VEGA10, "local_mem_size": 1}, VEGA10_BANK, used=trees.VEGA10_USED)
        memory = only(tmp_path).memory
        assert (memory.total_bytes, memory.used_bytes) == (17163091968, trees.VEGA10_USED)

    def test_amd3_old_key_where_there_is_no_bank(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, VEGA10, {"heap_type": 0, "size_in_bytes": 270037725184})
        assert only(tmp_path).memory.total_bytes == 17163091968

    def test_amd3_visible_and_hidden_banks_are_added(self, tmp_path: Path) -> None:
        kfd_node(tmp_path, 0, MI210, {"heap_type": 1, "size_in_bytes": 100}, {"heap_type": 2, "size_in_bytes": 900})
        assert only(tmp_path).memory.total_bytes == 1000

    @pytest.mark.parametrize("size", ["", "lots", "-1", "0", str(2**63)])
    def test_amd3_neither_is_none_and_never_zero(self, tmp_path: Path, size: str) -> None:
        kfd_node(tmp_path, 0, MI210, {"heap_type": 1, "size_in_bytes": 100}, {"heap_type": 2, "size_in_bytes": size})
        device = only(tmp_path)
        assert device.memory.source is None
        assert device.memory.total_bytes is None
        assert device.unavailable["memory_total_bytes"] in ("invalid", "unsupported")

    def test_amd5_apu(self, tmp_path: Path) -> None:
        trees.strix_halo_host(tmp_path)
        device = only(tmp_path)
        assert device.integrated
        assert device.unified_memory
        assert device.memory.source == "gtt"
        assert device.memory.total_bytes == trees.STRIX_HALO_GTT
        assert device.memory.free_bytes == trees.STRIX_HALO_GTT - 1073741824
        assert (device.vram_total_bytes, device.gtt_total_bytes) == (trees.STRIX_HALO_VRAM, trees.STRIX_HALO_GTT)
        assert device.vram_used_bytes == trees.STRIX_HALO_VRAM_USED
        assert (device.gfx, device.codename, device.uuid) == ("gfx1151", None, None)

    @pytest.mark.parametrize("gtt", [115964116992, 137438953472])
    def test_m28_512_mib_of_vram_and_gtt_of_the_host(self, tmp_path: Path, gtt: int) -> None:
        trees.strix_halo_host(tmp_path, gtt=gtt)
        assert only(tmp_path).memory.total_bytes == gtt

    def test_m29_carve_out_is_neither_the_hosts_memory_nor_the_sum(self, tmp_path: Path) -> None:
        trees.strix_halo_host(tmp_path, vram=96 << 30, gtt=16 << 30)
        device = only(tmp_path)
        assert device.integrated
        assert not device.unified_memory
        assert device.memory.total_bytes == 96 << 30
        assert device.memory.free_bytes == (96 << 30) - trees.STRIX_HALO_VRAM_USED

    def test_amd5_gtt_of_a_card_is_never_added(self, tmp_path: Path) -> None:
        # A small card in a host with much memory: the ratio is that of an APU.
        kfd_node(tmp_path, 0, {**MI210, "gfx_target_version": 100304})
        amd_card(tmp_path, 0, "0000:03:00.0", {"mem_info_vram_total": 4 << 30, "mem_info_gtt_total": 64 << 30})
        device = only(tmp_path)
        assert device.integrated is False
        assert device.memory.total_bytes == 4 << 30

    @pytest.mark.parametrize(
        ("properties", "files", "integrated"),
        [
            ({"cpu_cores_count": 4, "gfx_target_version": 80001}, {}, True),  # older APUs are one node
            ({"gfx_target_version": 90402, "device_id": 0x74A0}, {}, True),  # MI300A
            ({"gfx_target_version": 90402, "device_id": 0x74A1}, {}, False),  # MI300X
            ({"gfx_target_version": 130000}, {"hwmon/hwmon0/in1_label": "vddnb"}, True),
            ({"gfx_target_version": 130000}, {"mem_info_gtt_total": 8 << 30}, True),
            ({"gfx_target_version": 130000}, {"mem_info_gtt_total": 7 << 30}, False),
            ({"gfx_target_version": 130000}, {}, None),
        ],
    )  # fmt: skip
    def test_amd5_what_tells_an_apu(
        self, tmp_path: Path, properties: dict[str, int], files: dict[str, Any], integrated: bool | None
    ) -> None:
        kfd_node(tmp_path, 0, {**MI210, **properties})
        amd_card(tmp_path, 0, "0000:03:00.0", {"mem_info_vram_total": 1 << 30, **files})
        device = only(tmp_path)
        assert device.integrated is integrated
        assert ("integrated" in device.unavailable) is (integrated is None)

    def test_more_used_than_there_is_is_no_figure(self, tmp_path: Path) -> None:
        amd_card(tmp_path, 0, "0000:03:00.0", {"mem_info_vram_total": 100, "mem_info_vram_used": 101})
        device = only(tmp_path)
        assert (device.memory.total_bytes, device.memory.used_bytes, device.memory.free_bytes) == (100, None, None)
        assert device.unavailable["memory_used_bytes"] == device.unavailable["memory_free_bytes"] == "invalid"

    def test_a_driver_that_comes_up_shows_no_size(self, tmp_path: Path) -> None:
        amd_card(tmp_path, 0, "0000:03:00.0", {"mem_info_vram_total": 0})
        assert only(tmp_path).memory.total_bytes is None


class TestAccess:
    def test_amd6_not_in_the_group(self, tmp_path: Path) -> None:
        trees.mi210_host(tmp_path)
        (tmp_path / "dev/kfd").chmod(0o660)
        (device,) = read_amd(tmp_path, nobody).devices
        group = (tmp_path / "dev/kfd").stat().st_gid
        assert device.access.reason is ReasonCode.NO_PERMISSION
        assert device.access.group == group
        assert f"group id {group}" in device.access.message
        assert "0660" in device.access.message
        assert device.memory.total_bytes  # it is listed all the same

    def test_amd6_render_node_of_another_group(self, tmp_path: Path) -> None:
        trees.mi210_host(tmp_path)
        (device,) = read_amd(tmp_path, lambda path: path.name == "kfd").devices
        assert (device.access.path, device.access.reason) == ("/dev/dri/renderD130", ReasonCode.NO_PERMISSION)

    def test_amd6_no_compute_node(self, tmp_path: Path) -> None:
        trees.mi210_host(tmp_path)
        (tmp_path / "dev/kfd").unlink()
        device = only(tmp_path)
        assert device.access.reason is ReasonCode.NO_DRIVER
        assert "/dev/kfd" in device.access.message

    def test_permissions_of_this_process_are_the_systems(self, tmp_path: Path) -> None:
        file = write(tmp_path, "node", "")
        assert may_open(file)
        assert not may_open(tmp_path / "missing")
        if os.geteuid() != 0:
            file.chmod(0o440)
            assert not may_open(file)


class TestTelemetry:
    def test_tel3_units(self, tmp_path: Path) -> None:
        trees.mi210_host(tmp_path)
        reading = read_amd_telemetry(tmp_path, only(tmp_path))
        assert (reading.temperature_c, reading.power_w, reading.clock_mhz) == (46, 67, 800)
        assert reading.utilization_percent == 3
        assert reading.memory_total_bytes == 68702699520
        assert reading.memory_used_bytes == 11735040
        assert dict(reading.unavailable) == {"memory_reserved_bytes": "unsupported"}

    @pytest.mark.parametrize("value", ["2147483632", "4294967295", "101", "-1", "nan", "", "1e1", "12 %"])
    def test_tel1_impossible_load_is_no_value(self, tmp_path: Path, value: str) -> None:
        trees.mi210_host(tmp_path)
        device = only(tmp_path)
        replaced(tmp_path, "sys/class/drm/card1/device/gpu_busy_percent", f"{value}\n")
        reading = read_amd_telemetry(tmp_path, device)
        assert reading.utilization_percent is None
        assert reading.unavailable["utilization_percent"] == ("invalid" if value else "unsupported")

    @pytest.mark.parametrize(
        ("file", "field", "value"),
        [
            ("temp1_input", "temperature_c", "-273000"),
            ("temp1_input", "temperature_c", "65535000"),
            ("power1_average", "power_w", "4294967295000"),
            ("freq1_input", "clock_mhz", "-1"),
        ],
    )
    def test_tel1_impossible_sensors(self, tmp_path: Path, file: str, field: str, value: str) -> None:
        trees.mi210_host(tmp_path)
        device = only(tmp_path)
        replaced(tmp_path, f"sys/class/drm/card1/device/hwmon/hwmon4/{file}", value)
        if field == "clock_mhz":
            (tmp_path / "sys/class/drm/card1/device/pp_dpm_sclk").unlink()
        reading = read_amd_telemetry(tmp_path, device)
        assert getattr(reading, field) is None
        assert reading.unavailable[field] == "invalid"

    def test_power_of_newer_drivers(self, tmp_path: Path) -> None:
        trees.mi210_host(tmp_path)
        device = only(tmp_path)
        hwmon = tmp_path / "sys/class/drm/card1/device/hwmon/hwmon4"
        (hwmon / "power1_average").rename(hwmon / "power1_input")
        assert read_amd_telemetry(tmp_path, device).power_w == 67

    def test_clock_from_the_table_of_levels(self, tmp_path: Path) -> None:
        trees.mi210_host(tmp_path)
        device = only(tmp_path)
        (tmp_path / "sys/class/drm/card1/device/hwmon/hwmon4/freq1_input").unlink()
        reading = read_amd_telemetry(tmp_path, device)
        assert reading.clock_mhz == 800
        assert "clock_mhz" not in reading.unavailable

    def test_a_card_that_sleeps_is_not_woken(self, tmp_path: Path) -> None:
        trees.mi210_host(tmp_path)
        replaced(tmp_path, "sys/class/drm/card1/device/power/runtime_status", "suspended\n")
        device = only(tmp_path)
        reading = read_amd_telemetry(tmp_path, device)
        assert device.suspended
        assert reading.temperature_c is reading.power_w is reading.clock_mhz is reading.utilization_percent is None
        assert {reading.unavailable[name] for name in ("temperature_c", "power_w", "clock_mhz")} == {"suspended"}
        assert reading.memory_used_bytes == 11735040

    def test_another_card_in_its_place(self, tmp_path: Path) -> None:
        trees.mi210_host(tmp_path)
        device = only(tmp_path)
        replaced(tmp_path, "sys/class/drm/card1/device/uevent", "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:99:00.0\n")
        replaced(tmp_path, f"{KFD}/2/properties", trees.lines({**MI210, "unique_id": 7}))
        reading = read_amd_telemetry(tmp_path, device)
        assert reading.memory_total_bytes is None
        assert set(reading.unavailable.values()) == {"error"}

    def test_a_file_that_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trees.mi210_host(tmp_path)
        device = only(tmp_path)
        real = os.open

        def guarded(path: Any, *args: Any, **kwargs: Any) -> int:
            if Path(path).name == "gpu_busy_percent":
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", guarded)
        assert read_amd_telemetry(tmp_path, device).unavailable["utilization_percent"] == "no_permission"
