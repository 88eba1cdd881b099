"""Any bytes in any file of a host: nothing is raised, no device is invented, none is dropped without a reason."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.sources import trees
from tests.sources.trees import DRM, KFD, MI210, VEGA10, VEGA10_BANK

from gpurt.sources.amd import AmdDevice, read_amd
from gpurt.sources.amd_kfd import KfdNode, read_node
from gpurt.sources.amd_telemetry import read_amd_telemetry
from gpurt.sources.intel import IntelDevice, read_intel, read_intel_telemetry
from gpurt.sources.sysfs import read
from gpurt.types import Telemetry

EXAMPLES = pytest.mark.parametrize("examples", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
# A whole host takes milliseconds to read.
HOSTS = pytest.mark.parametrize("examples", [150, pytest.param(10_000, marks=pytest.mark.slow)])
REASONS = {"unsupported", "no_permission", "error", "invalid", "suspended"}

odd = ["0", "1", "9", "-1", "416", "4294967295", "4294967296", "18446744073709551615", "2147483632", "1_000"]
words = st.text(max_size=6) | st.sampled_from(
    [
        *odd,
        str(2**65),
        "0x1002",
        "0x8086",
        "1e9",
        "NaN",
        "\uff19",
        "ip discovery",
        "\0",
        "\n",
        "7" * 5000,
        *MI210,
        *VEGA10_BANK,
    ]
)
contents = (
    st.lists(st.tuples(words, words).map(" ".join), max_size=6).map("\n".join).map(str.encode)
    | words.map(str.encode)
    | st.binary(max_size=24)
)
changes_of_keys = st.lists(st.tuples(st.sampled_from(list(MI210)), words), max_size=3).map(dict)


def complete(device: AmdDevice | IntelDevice | KfdNode | Telemetry, names: set[str]) -> None:
    """Every figure is a possible one, and every one that is missing has its reason."""
    for name in names:
        value = getattr(device, name)
        if value is None:
            assert device.unavailable[name] in REASONS, name
        elif isinstance(value, int | float):
            assert 0 <= value < 2**63 or name == "temperature_c", name


def figures(kind: type, *others: str) -> set[str]:
    return {item.name for item in fields(kind)} - {"unavailable", *others}


@EXAMPLES
def test_any_properties_of_a_node(examples: int, tmp_path: Path) -> None:
    node = trees.kfd_node(tmp_path, 0, MI210, VEGA10_BANK, used=1)
    properties, bank = node / "properties", node / "mem_banks/0/properties"
    names = figures(KfdNode, "node", "partition", "gpu_id", "codename", "cpu_cores")

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(own=contents, of_bank=contents, changes=changes_of_keys)
    @example(own=b"simd_count 9", of_bank=b"heap_type 1\nsize_in_bytes 0", changes={})
    @example(own=b"", of_bank=b"", changes={})
    def check(own: bytes, of_bank: bytes, changes: dict[str, str]) -> None:
        properties.write_bytes(trees.lines({**MI210, **changes}).encode() + own if changes else own)
        bank.write_bytes(of_bank)
        found = read_node(tmp_path, 0)
        if isinstance(found, KfdNode):
            complete(found, names)
        else:
            assert found.why

    check()


@contextmanager
def changed(root: Path, changes: dict[str, bytes | None]) -> Iterator[None]:
    """Files with other contents, or without them, until the end of the block."""
    kept = {name: (root / name).read_bytes() for name in changes}
    try:
        for name, content in changes.items():
            if content is None:
                (root / name).unlink()
            else:
                (root / name).write_bytes(content)
        yield
    finally:
        for name, content in kept.items():
            (root / name).write_bytes(content)


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and "class/drm" not in str(p))


@HOSTS
def test_any_file_of_a_host_of_amd(examples: int, tmp_path: Path) -> None:
    host = tmp_path / "host"
    trees.partitioned_host(host, scheme="function", parts=2)
    trees.kfd_node(host, 7, VEGA10, VEGA10_BANK)
    trees.amd_card(host, 3, "0000:19:00.0", {"mem_info_vram_total": 100, "hwmon/hwmon2/temp1_input": 1}, render=140)
    nodes = {f"/{KFD}/{n}" for n in (0, 1, 2, 7)}
    before = read_amd(host)
    names = figures(AmdDevice, "rocm_index", "kfd_node", "partition", "memory", "access", "suspended")

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(changes=st.dictionaries(st.sampled_from(files(host)), contents | st.none(), max_size=3))
    def check(changes: dict[str, bytes | None]) -> None:
        with changed(host, changes):
            inventory = read_amd(host)
            told = [f"/{KFD}/{d.kfd_node}" for d in inventory.devices if d.kfd_node is not None]
            told += [skipped.where for skipped in inventory.skipped if skipped.where.startswith(f"/{KFD}/")]
            assert sorted(told) == sorted(nodes)
            assert len(inventory.devices) <= 3 + 2  # nodes that are GPUs; cards that lost their node
            for device in inventory.devices:
                complete(device, names)
            for device in before.devices:
                complete(read_amd_telemetry(host, device), set(Telemetry.model_fields) - {"unavailable"})

    check()


@HOSTS
def test_any_file_of_a_host_of_intel(examples: int, tmp_path: Path) -> None:
    host = tmp_path / "host"
    trees.intel_host(host)
    shutil.rmtree(host / DRM / "card0/gt")
    before = read_intel(host)
    names = figures(IntelDevice, "card", "access", "suspended")
    addresses = {"00000000:00:02.0", "00000000:03:00.0"}
    vendors = {f"sys/bus/pci/devices/{address}/vendor" for address in ("0000:00:02.0", "0000:03:00.0")}

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(changes=st.dictionaries(st.sampled_from(files(host)), contents | st.none(), max_size=3))
    def check(changes: dict[str, bytes | None]) -> None:
        with changed(host, changes):
            inventory = read_intel(host)
            assert len(inventory.devices) <= 2
            if not vendors & set(changes):
                assert {d.card for d in inventory.devices} == {0, 1}
                assert {d.pci_address for d in inventory.devices} <= addresses | {None} or any(
                    "uevent" in name for name in changes
                )
            for device in inventory.devices:
                complete(device, names)
            for device in before.devices:
                complete(read_intel_telemetry(host, device), set(Telemetry.model_fields) - {"unavailable"})

    check()


def test_what_is_no_file(tmp_path: Path) -> None:
    trees.write(tmp_path, "long", "1" * (3 << 20))
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    long, reason = read(tmp_path / "long")
    assert reason is None
    assert len(long or "") < 2 << 20
    assert read(tmp_path / "pipe") == ("", None)
    for name in ("directory", "loop", "missing", "no\0name"):
        text, reason = read(tmp_path / name)
        assert text is None
        assert reason in REASONS
