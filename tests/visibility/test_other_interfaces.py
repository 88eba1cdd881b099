"""Devices that another interface than their vendor's shows: names mean them, numbers do not."""

from __future__ import annotations

import pytest

from gpurt.visibility.candidates import Candidate
from gpurt.visibility.resolver import resolve

A, B = "GPU-1a1a1a1a-0000-1111-2222-333333333333", "GPU-2b2b2b2b-0000-1111-2222-444444444444"


def shown(position: int, uuid: str | None, vendor: str = "nvidia") -> Candidate:
    return Candidate(f"vulkan:{position}", vendor, uuid, numbered=False, ordinals={"vulkan": position})


@pytest.mark.parametrize(
    ("value", "hidden"),
    [
        ("GPU-2b2b", {"vulkan:0"}), (f"{A},{B}", set()), ("GPU-ffff", {"vulkan:0", "vulkan:1"}),
        ("MIG-00000001", {"vulkan:0", "vulkan:1"}), ("", {"vulkan:0", "vulkan:1"}), ("-1", {"vulkan:0", "vulkan:1"}),
        ("NoDevFiles", {"vulkan:0", "vulkan:1"}), ("0", set()), (" +1,0", set()), ("7", set()),
    ],
)  # fmt: skip
def test_names_hide_and_numbers_say_nothing(value: str, hidden: set[str]) -> None:
    seen = resolve({"CUDA_VISIBLE_DEVICES": value}, [shown(0, A), shown(1, B)])
    assert set(seen.hidden) == hidden
    assert set(seen.visible) == {"vulkan:0", "vulkan:1"} - hidden


def test_two_drivers_may_show_one_card() -> None:
    seen = resolve({"CUDA_VISIBLE_DEVICES": "GPU-1a"}, [shown(0, A), shown(1, A), shown(2, B)])
    assert seen.visible == ("vulkan:0", "vulkan:1")


def test_of_a_card_without_a_name_nobody_can_tell() -> None:
    seen = resolve({"CUDA_VISIBLE_DEVICES": "GPU-1a"}, [shown(0, A), shown(1, None)])
    assert (seen.hidden, set(seen.uncertain)) == ({}, {"vulkan:1"})


def test_amds_numbers_are_not_vulkans() -> None:
    environ = {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}
    seen = resolve(environ, [shown(0, None, "amd"), shown(1, None, "amd")])
    assert seen.visible == ("vulkan:0", "vulkan:1")


def test_a_card_of_nvidia_that_is_not_listed_counts_for_amd() -> None:
    cards = [Candidate("amdgpu:0", "amd"), Candidate("amdgpu:1", "amd")]
    environ = {"CUDA_VISIBLE_DEVICES": "1"}
    assert resolve(environ, cards).visible == ("amdgpu:1",)
    assert len(resolve(environ, cards, nvidia_present=True).visible) == 2


def test_vulkans_own_variable_still_counts_them() -> None:
    seen = resolve({"GGML_VK_VISIBLE_DEVICES": "1"}, [shown(0, A), shown(1, B)])
    assert seen.order["vulkan"] == ("vulkan:1",)
    assert (seen.hidden, set(seen.hidden_from["vulkan"])) == ({}, {"vulkan:0"})
