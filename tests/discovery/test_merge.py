"""One physical device, one record."""

from __future__ import annotations

from gpurt.discovery.merge import merge
from gpurt.types import DeviceKind, DeviceState
from tests.discovery.records import GIB, PCIS, UUIDS, cpu, device

PRIORITY = ("cuda", "rocm", "vulkan", "opencl", "cpu")


def test_pci_address_joins_different_backends() -> None:
    cuda = device(0, known="pci")
    vulkan = device(0, backend="vulkan", known="pci", memory_bytes=79 * GIB)
    (merged,) = merge([[vulkan], [cuda]], priority=PRIORITY)
    assert merged.device_id == "cuda:0"
    assert merged.backends == ("cuda", "vulkan")
    assert merged.memory_bytes == 80 * GIB


def test_uuid_joins_different_spellings_where_the_address_is_missing() -> None:
    cuda = device(0, known="both")
    vulkan = device(0, backend="vulkan", known="uuid")
    assert vulkan.identity is not None
    raw = UUIDS[0].removeprefix("GPU-").replace("-", "").upper()
    vulkan = vulkan.model_copy(update={"identity": vulkan.identity.model_copy(update={"uuid": raw})})
    opencl = device(0, backend="opencl", known="pci")
    (merged,) = merge([[cuda], [vulkan], [opencl]], priority=PRIORITY)
    assert merged.backends == ("cuda", "vulkan", "opencl")


def test_identical_cards_stay_apart() -> None:
    merged = merge(
        [[device(0), device(1)], [device(0, backend="vulkan"), device(1, backend="vulkan")]], priority=PRIORITY
    )
    assert [d.device_id for d in merged] == ["cuda:0", "cuda:1"]


def test_a_key_that_collides_inside_one_driver_is_ignored_there() -> None:
    cards = []
    for n in range(4):
        card = device(n, backend="vulkan")
        assert card.identity is not None
        cards.append(card.model_copy(update={"identity": card.identity.model_copy(update={"pci_address": PCIS[0]})}))
    assert len(merge([cards], priority=PRIORITY)) == 4
    # All four claim the address of CUDA's card 0; only the UUID tells which of them it is.
    merged = merge([[device(0)], cards[::-1]], priority=PRIORITY)
    assert [(d.stable_id, d.backends) for d in merged[:1]] == [(UUIDS[0], ("cuda", "vulkan"))]
    assert sorted(d.stable_id for d in merged) == UUIDS[:4]
    twins = [device(0, backend="vulkan"), device(0, backend="vulkan", device_id="vulkan:1")]
    assert len(merge([twins], priority=PRIORITY)) == 2


def test_two_drivers_of_one_backend_show_one_card_once() -> None:
    radv = [device(n, backend="vulkan", known="uuid", backend_name="radv") for n in (0, 1)]
    amdvlk = [device(0, backend="vulkan", known="uuid", backend_name="amdvlk", device_id="vulkan:2")]
    merged = merge([[*radv, *amdvlk]], priority=PRIORITY)
    assert [d.stable_id for d in merged] == UUIDS[:2]
    assert merged[0].backends == ("vulkan",)


def test_equal_uuids_at_different_addresses_are_different_devices() -> None:
    first, second = device(0), device(1, backend="vulkan")
    assert first.identity is not None
    assert second.identity is not None
    second = second.model_copy(update={"identity": second.identity.model_copy(update={"uuid": first.identity.uuid})})
    assert len(merge([[first], [second]], priority=PRIORITY)) == 2


def test_partitions_of_one_card_stay_apart() -> None:
    parts = []
    for gi, n in (("1/0", 1), ("2/0", 2)):
        part = device(n)
        assert part.identity is not None
        update = {"pci_address": PCIS[0], "partition": gi}
        parts.append(part.model_copy(update={"identity": part.identity.model_copy(update=update)}))
    assert len(merge([parts], priority=PRIORITY)) == 2


def test_name_and_memory_join_a_record_without_identity() -> None:
    anonymous = device(
        0,
        backend="opencl",
        known="none",
        name="H100 80GB HBM3 (OpenCL)",
        memory_bytes=int(79.6 * GIB),
        vendor="unknown",
    )
    (merged,) = merge([[device(0)], [anonymous]], priority=PRIORITY)
    assert merged.backends == ("cuda", "opencl")
    (merged,) = merge(
        [[anonymous.model_copy(update={"backend": "cuda"})], [device(0, backend="vulkan")]], priority=PRIORITY
    )
    assert merged.stable_id == UUIDS[0]


def test_two_records_without_identity_are_never_merged() -> None:
    first = device(0, backend="vulkan", known="none")
    second = device(0, backend="opencl", known="none")
    assert len(merge([[first], [second]], priority=PRIORITY)) == 2


def test_an_ambiguous_record_without_identity_stays_alone() -> None:
    merged = merge([[device(0), device(1)], [device(0, backend="opencl", known="none")]], priority=PRIORITY)
    assert len(merged) == 3


def test_a_vendors_only_anonymous_record_joins_its_only_card() -> None:
    anonymous = device(0, backend="opencl", known="none", name="Graphics Device", memory_bytes=None)
    (merged,) = merge([[device(0)], [anonymous]], priority=PRIORITY)
    assert merged.backends == ("cuda", "opencl")


def test_the_processor_is_never_a_gpu() -> None:
    lone = device(0, backend="opencl", known="none", name="AMD EPYC", vendor="amd", memory_bytes=64 * GIB)
    merged = merge([[cpu()], [lone]], priority=PRIORITY)
    assert [d.device_id for d in merged] == ["opencl:0", "cpu:0"]


def test_unknown_is_filled_by_a_later_source_and_zero_never_wins() -> None:
    first = device(0, memory_bytes=None, memory_available=None, compute_units=None)
    second = device(0, backend="vulkan", memory_bytes=0, memory_available=70 * GIB, compute_units=114)
    (merged,) = merge([[first], [second]], priority=PRIORITY)
    assert merged.memory_bytes is None
    assert merged.memory_available == 70 * GIB
    assert merged.compute_units == 114


def test_the_usable_record_is_the_face_of_the_device() -> None:
    broken = device(0, usable=False, state=DeviceState.DEGRADED, state_reason="failed verification: x")
    (merged,) = merge([[broken], [device(0, backend="vulkan")]], priority=PRIORITY)
    assert merged.backend == "vulkan"
    assert merged.usable
    assert merged.backends == ("vulkan", "cuda")


def test_a_broken_card_is_broken_whatever_interface_shows_it() -> None:
    lost = device(0, usable=False, backend_name="nvml", state=DeviceState.LOST, state_reason="fallen off the bus")
    (merged,) = merge([[lost], [device(0, backend="vulkan")]], priority=PRIORITY)
    assert (merged.usable, merged.state, merged.state_reason) == (False, DeviceState.LOST, "fallen off the bus")


def test_the_vendors_name_is_the_devices_and_the_address_is_anybodys() -> None:
    for order in (PRIORITY, PRIORITY[::-1]):
        (merged,) = merge([[device(0, known="uuid")], [device(0, backend="vulkan")]], priority=order)
        assert merged.identity is not None
        assert (merged.stable_id, merged.identity.pci_address) == (UUIDS[0], PCIS[0])
        (merged,) = merge([[device(0)], [device(0, backend="opencl", known="pci")]], priority=order)
        assert merged.stable_id == UUIDS[0]


def test_a_later_source_knows_what_kind_of_device_it_is() -> None:
    unknown = device(0, kind=DeviceKind.UNKNOWN)
    (merged,) = merge([[unknown], [device(0, backend="vulkan", kind=DeviceKind.INTEGRATED_GPU)]], priority=PRIORITY)
    assert (merged.device_id, merged.kind) == ("cuda:0", DeviceKind.INTEGRATED_GPU)


def test_a_hidden_card_is_hidden_in_every_backend() -> None:
    seen = device(0, usable=False, backend_name="nvml", device_id="nvml:0", state_reason="hidden_by_environment: x")
    (merged,) = merge([[seen], [device(0, backend="vulkan")]], priority=PRIORITY, hidden={UUIDS[0]})
    assert not merged.usable
    assert "hidden_by_environment" in (merged.state_reason or "")


def test_order_is_priority_and_then_the_backends_own() -> None:
    merged = merge([[cpu()], [device(1, backend="vulkan")], [device(2), device(0)]], priority=PRIORITY)
    assert [d.device_id for d in merged] == ["cuda:2", "cuda:0", "vulkan:1", "cpu:0"]
