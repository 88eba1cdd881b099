"""CUDA_VISIBLE_DEVICES, entry by entry. Expected values: PyTorch's parser and reports of real machines."""

from __future__ import annotations

import dataclasses

import pytest

from gpurt.visibility.candidates import Candidate
from gpurt.visibility.resolver import resolve
from tests.visibility.hosts import H100, MIG, A, B, mig, nvidia

CVD = "CUDA_VISIBLE_DEVICES"
GTX = Candidate("nvml:0", "nvidia", uuid=A, pci_address="00000000:01:00.0", model="GTX 1660 SUPER")
RTX = Candidate("nvml:1", "nvidia", uuid=B, pci_address="00000000:02:00.0", model="RTX 3090")


def order(value: str | None, candidates: list[Candidate]) -> tuple[int, ...]:
    """Positions of the candidates in the order in which a process counts them."""
    environ = {} if value is None else {CVD: value}
    positions = {candidate.device_id: n for n, candidate in enumerate(candidates)}
    return tuple(positions[device] for device in resolve(environ, candidates).visible)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, (0, 1, 2, 3, 4, 5, 6, 7)),
        ("", ()),
        ("-1", ()),
        ("none", ()),
        ("void", ()),
        ("all", ()),
        ("NoDevFiles", ()),
        ("0,1", (0, 1)),
        ("1,0", (1, 0)),
        ("0,0", ()),
        ("0,1,1", ()),
        ("0,1,2,3,0", ()),
        ("0,-1,1", (0,)),
        ("0,1,8,2,3", (0, 1)),
        ("8", ()),
        ("0,1,2,3,-1,5,6,7", (0, 1, 2, 3)),
        ("0,1,2,3,-1,0,6,7", (0, 1, 2, 3)),
        ("1gpu2,2ampere", (1, 2)),
        ("0, 1", (0, 1)),
        (" 0, 1", (0, 1)),
        ("+1", (1,)),
        ("0-2", (0,)),
        ("0x1", (0,)),
        ("0,,1", (0,)),
        (",0", ()),
        ("00000000000000000000000000003", (3,)),
        ("9" * 5000, ()),
        ("\u0661", ()),
    ],
)
def test_cvd1_to_cvd6_by_index(value: str | None, expected: tuple[int, ...]) -> None:
    assert order(value, nvidia(*[None] * 8)) == expected


def test_cvd1_order_is_meaning() -> None:
    visibility = resolve({CVD: "1,0"}, nvidia(A, B))
    assert visibility.visible == visibility.order["cuda"] == ("nvml:1", "nvml:0")
    assert visibility.hidden == {}


@pytest.mark.parametrize("value", ["", "-1", "none"])
def test_cvd2_an_empty_list_hides_every_device(value: str) -> None:
    visibility = resolve({CVD: value}, nvidia(A, B))
    assert visibility.visible == visibility.order["cuda"] == ()
    assert set(visibility.hidden) == {"nvml:0", "nvml:1"}
    assert all(CVD in why for why in visibility.hidden.values())


def test_cvd3_a_duplicate_is_named() -> None:
    visibility = resolve({CVD: "0,1,2,3,0"}, nvidia(*[None] * 8))
    assert visibility.visible == ()
    (warning,) = visibility.warnings
    assert "0 is named twice" in warning


def test_cvd4_an_index_beyond_the_count_ends_the_list() -> None:
    visibility = resolve({CVD: "0,1,8,2,3"}, nvidia(*[None] * 8))
    assert visibility.visible == ("nvml:0", "nvml:1")
    assert "'8'" in visibility.warnings[0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"{B},{A}", (1, 0)),
        ("GPU-2b2b,GPU-1a1a1a1a", (1, 0)),
        ("GPU-", ()),
        # CUDA reads no further than the UUID is long, as it does on two H200.
        ("GPU-2b2b2b2b-0000-1111-2222-444444444444 and more,GPU-1a1a", (1, 0)),
        ("GPU-2b2b2b2b-0000-1111-2222-44444444444 and more,GPU-1a1a", ()),
        ("GPU-2B2B2B2B", (1,)),
        (f"{A}, {B}", (0,)),
        (f"{A},{A}", ()),
        ("GPU-3c3c,GPU-1a1a", ()),
        ("GPU-1a1a,GPU-3c3c", (0,)),
        (f"{A},0", (0,)),
        ("MIG-x,GPU-1a1a", ()),
    ],
)
def test_cvd7_by_uuid(value: str, expected: tuple[int, ...]) -> None:
    assert order(value, nvidia(A, B)) == expected


class TestMig:
    @pytest.mark.parametrize(
        "value", ["MIG-00000002-0000-1111-2222-999999999999", "MIG-00000002", f"MIG-{H100}/3/0", f"MIG-{H100[:8]}"]
    )
    def test_cvd8_both_forms(self, value: str) -> None:
        visibility = resolve({CVD: value}, mig())
        if value == f"MIG-{H100[:8]}":
            assert visibility.visible == ()  # names all four
        else:
            assert visibility.visible == visibility.order["cuda"] == ("nvml:9/3/0",)

    def test_cvd8_one_ci_is_not_the_beginning_of_another(self) -> None:
        parts = [
            dataclasses.replace(part, uuid=None, partition=f"1/{n}") for n, part in zip((1, 10), mig(), strict=False)
        ]
        assert resolve({CVD: f"MIG-{H100}/1/1"}, parts).visible == ("nvml:9/2/0",)

    def test_cvd8_a_process_sees_one_and_the_rest_is_told(self) -> None:
        visibility = resolve({}, mig())
        assert len(visibility.visible) == 4
        assert visibility.order["cuda"] == ("nvml:9/2/0",)
        assert "one MIG device" in visibility.warnings[0]

    def test_cvd8_two_named_ones_are_for_two_processes(self) -> None:
        value = "MIG-00000004,MIG-00000001"
        visibility = resolve({CVD: value}, mig())
        assert visibility.visible == ("nvml:9/10/0", "nvml:9/2/0")
        assert visibility.order["cuda"] == ("nvml:9/10/0",)
        assert set(visibility.hidden) == {"nvml:9/3/0", "nvml:9/9/0"}

    def test_cvd8_numbers_count_cards(self) -> None:
        host = [*nvidia(A), *mig()]
        assert resolve({CVD: "1"}, host).order["cuda"] == ("nvml:9/2/0",)
        assert resolve({CVD: "0"}, host).order["cuda"] == ("nvml:0",)
        assert resolve({CVD: "2"}, host).visible == ()

    def test_cvd8_a_card_by_uuid_means_its_partitions(self) -> None:
        assert resolve({CVD: H100}, [*nvidia(A), *mig()]).order["cuda"] == ("nvml:9/2/0",)

    def test_cvd8_with_partitions_whole_cards_are_not_shown(self) -> None:
        visibility = resolve({}, [*nvidia(A), *mig()])
        assert visibility.order["cuda"] == ("nvml:9/2/0",)
        assert visibility.hidden == {}

    @pytest.mark.parametrize(("value", "expected"), [(MIG, (2,)), (f"{MIG},{A}", (2,))])
    def test_cvd8_the_first_entry_decides(self, value: str, expected: tuple[int, ...]) -> None:
        part = Candidate("nvml:2", "nvidia", uuid=MIG, pci_address="00000000:03:00.0", partition="3/0")
        assert order(value, [*nvidia(A, B), part]) == expected


class TestOrderOfCuda:
    def test_cvd9_i39_without_the_order_a_number_is_nobody(self) -> None:
        visibility = resolve({CVD: "0"}, [GTX, RTX])
        assert visibility.visible == ()
        assert visibility.hidden == {}
        assert set(visibility.uncertain) == {"nvml:0", "nvml:1"}
        assert "UUID" in visibility.uncertain["nvml:0"]
        assert "cuda" not in visibility.order

    def test_cvd9_i39_with_the_order_of_the_bus(self) -> None:
        environ = {CVD: "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert resolve(environ, [RTX, GTX]).visible == ("nvml:0",)

    def test_cvd9_i39_with_cudas_own_numbers(self) -> None:
        host = [dataclasses.replace(GTX, ordinals={"cuda": 1}), dataclasses.replace(RTX, ordinals={"cuda": 0})]
        visibility = resolve({CVD: "0"}, host)
        assert visibility.visible == visibility.order["cuda"] == ("nvml:1",)

    def test_cvd9_i39_a_uuid_is_a_name_in_any_order(self) -> None:
        assert resolve({CVD: A}, [GTX, RTX]).order["cuda"] == ("nvml:0",)

    def test_cvd9_i39_all_of_them_are_visible_in_any_order(self) -> None:
        visibility = resolve({CVD: "1,0"}, [GTX, RTX])
        assert set(visibility.visible) == {"nvml:0", "nvml:1"}
        assert visibility.uncertain == {}
        assert "cuda" not in visibility.order

    @pytest.mark.parametrize("value", ["-1", "", "0,0"])
    def test_cvd9_none_of_them_is_none_in_any_order(self, value: str) -> None:
        assert set(resolve({CVD: value}, [GTX, RTX]).hidden) == {"nvml:0", "nvml:1"}

    def test_i40_the_third_card(self) -> None:
        assert resolve({CVD: "2"}, nvidia(*[None] * 4)).visible == ("nvml:2",)


@pytest.mark.parametrize("value", ["0,1,1", "0-2", "9", "GPU-dead", f"{A},{A}"])
def test_cvd6_what_a_person_did_not_mean_is_said(value: str) -> None:
    assert resolve({CVD: value}, nvidia(A, B)).warnings


@pytest.mark.parametrize("value", [None, "", "-1", "0", "1,0", A])
def test_what_a_person_did_mean_is_not(value: str | None) -> None:
    assert resolve({} if value is None else {CVD: value}, nvidia(A, B)).warnings == ()
