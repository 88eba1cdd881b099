from __future__ import annotations

import pytest

from gpurt.identity import device_identity, normalize_pci_address, normalize_uuid

UUID = "1a1a1a1a-0000-1111-2222-333333333333"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:01:00.0", "00000000:01:00.0"),
        ("00000000:00:0A.0", "00000000:00:0a.0"),
        ("0000000F:01:00.0", "0000000f:01:00.0"),
        ("01:00.0", "00000000:01:00.0"),
        ("10000:e1:1f.7", "00010000:e1:1f.7"),
        (b"0000:81:00.0\0\0rest", "00000000:81:00.0"),
        (" 0000:01:00.0\n", "00000000:01:00.0"),
        ("0000:01:00.8", None),
        ("0000:01:20.0", None),
        ("0000:01:00", None),
        ("gpu", None),
        ("", None),
        (b"\xff", None),
        (None, None),
    ],
)
def test_pci_addresses_have_one_spelling(text: str | bytes | None, expected: str | None) -> None:
    assert normalize_pci_address(text) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"GPU-{UUID}", f"GPU-{UUID}"),
        (f"GPU-{UUID.upper()}".encode() + b"\0", f"GPU-{UUID}"),
        (UUID, f"GPU-{UUID}"),
        (UUID.replace("-", ""), f"GPU-{UUID}"),
        (bytes.fromhex(UUID.replace("-", "")), f"GPU-{UUID}"),
        (f"MIG-{UUID}", f"MIG-{UUID}"),
        (f"MIG-GPU-{UUID}/3/0", f"MIG-GPU-{UUID}/3/0"),
        (bytes(16), None),
        ("GPU-00000000-0000-0000-0000-000000000000", None),
        ("GPU-1a1a", None),
        (b"", None),
        (None, None),
    ],
)
def test_uuids_have_one_spelling(value: str | bytes | None, expected: str | None) -> None:
    assert normalize_uuid(value) == expected


def test_raw_uuid_of_another_kind_gets_the_given_prefix() -> None:
    assert normalize_uuid(UUID, prefix="MIG-") == f"MIG-{UUID}"


def test_identity_prefers_uuid_then_pci_address_then_an_unstable_name() -> None:
    full = device_identity(uuid=f"GPU-{UUID}", pci_address="0000:01:00.0", serial="17", fallback="cuda:H100:0")
    assert (full.key, full.stable, full.pci_address, full.serial) == (f"GPU-{UUID}", True, "00000000:01:00.0", "17")
    by_address = device_identity(pci_address="01:00.0", fallback="cuda:H100:0")
    assert (by_address.key, by_address.stable, by_address.uuid) == ("pci:00000000:01:00.0", True, None)
    unknown = device_identity(pci_address="garbage", fallback="cuda:H100:0")
    assert (unknown.key, unknown.stable, unknown.pci_address) == ("cuda:H100:0", False, None)


def test_partitions_of_one_device_differ() -> None:
    keys = {
        device_identity(uuid=f"GPU-{UUID}", partition=partition, fallback="x").key for partition in (None, "2/0", "3/0")
    }
    assert keys == {f"GPU-{UUID}", f"GPU-{UUID}/2/0", f"GPU-{UUID}/3/0"}
    assert device_identity(pci_address="01:00.0", partition="3/0", fallback="x").key == "pci:00000000:01:00.0/3/0"


def test_partition_with_its_own_uuid_has_one_key_whether_or_not_its_number_is_known() -> None:
    numbered = device_identity(uuid=f"MIG-{UUID}", partition="3/0", fallback="x")
    assert numbered.key == device_identity(uuid=f"MIG-{UUID}", fallback="y").key
    assert numbered.partition == "3/0"
