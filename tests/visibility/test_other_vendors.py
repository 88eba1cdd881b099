"""The variables of AMD, Intel and Vulkan, and masks that hold whichever interface shows a device."""

from __future__ import annotations

import dataclasses

import pytest

from gpurt.visibility.candidates import Candidate
from gpurt.visibility.resolver import resolve
from tests.visibility.hosts import A, B, amd, intel, nvidia

CVD, ROCR, HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
OPENCL, ZE, VK = "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "GGML_VK_VISIBLE_DEVICES"


def with_vulkan(candidates: list[Candidate], *numbers: int) -> list[Candidate]:
    return [dataclasses.replace(c, ordinals={"vulkan": n}) for c, n in zip(candidates, numbers, strict=True)]


def rocm(environ: dict[str, str], candidates: list[Candidate]) -> list[int]:
    return [int(device.removeprefix("amd:")) for device in resolve(environ, candidates).order["rocm"]]


class TestRocm:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("0,3", [0, 3]),
            ("3,0", [3, 0]),
            ("", []),
            ("-1", []),
            (" 1 , 2 ", [1, 2]),
            ("0x2", [2]),
            ("02", [2]),
            ("08", []),
            ("1gpu", []),
            ("0,9,1", [0]),
            ("1,2,1,3", [1, 2]),
            ("0,,1", [0]),
            ("GPU-93bb000200000000,GPU-93bb0000", [2, 0]),
            ("gpu-93bb0003", [3]),
            ("GPU-93bb", []),
            ("GPU-", []),
            ("GPU-93bb000200000000f", []),
        ],
    )
    def test_rocr_rules(self, value: str, expected: list[int]) -> None:
        assert rocm({ROCR: value}, amd(4)) == expected

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("2,3", [2, 3]),
            ("3,1", [3, 1]),
            ("-1", []),
            ("0, 1", [0]),
            ("+1", []),
            ("01", []),
            ("0,9,1", [0]),
            ("1,2,1,3", [1, 2, 3]),
            ("1,", [1]),
            (",1", []),
            ("GPU-93bb0002,GPU-93bb0000", [2, 0]),
            ("GPU-93bb", [0]),
            ("gpu-93bb0002", []),
        ],
    )
    def test_hip_rules(self, value: str, expected: list[int]) -> None:
        assert rocm({HIP: value}, amd(4)) == expected

    def test_hip_empty_is_not_set_and_that_is_said(self) -> None:
        visibility = resolve({HIP: ""}, amd(2))
        assert visibility.order["rocm"] == ("amd:0", "amd:1")
        assert "-1" in visibility.warnings[0]

    def test_cvd10_rocr_first(self) -> None:
        visibility = resolve({ROCR: "0,3", HIP: "1"}, amd(4))
        assert visibility.visible == visibility.order["rocm"] == ("amd:3",)
        assert {d: why.split()[0] for d, why in visibility.hidden.items()} == {
            "amd:0": HIP,
            "amd:1": ROCR,
            "amd:2": ROCR,
        }

    def test_cvd10_the_same_index_in_both_is_explained(self) -> None:
        visibility = resolve({ROCR: "1", HIP: "1"}, amd(4))
        assert visibility.visible == ()
        assert "ROCR_VISIBLE_DEVICES leaves 1 of 4 devices, counted anew from 0" in visibility.warnings[0]

    def test_cvd11_hip_alone(self) -> None:
        assert resolve({HIP: "2,3"}, amd(4)).order["rocm"] == ("amd:2", "amd:3")

    def test_cvd11_cudas_variable_counts_what_rocr_leaves(self) -> None:
        visibility = resolve({ROCR: "1", CVD: "0,1"}, amd(4))
        assert visibility.visible == ("amd:1",)
        assert "'1' is no device" in visibility.warnings[0]

    def test_cvd11_hip_before_cuda(self) -> None:
        assert resolve({HIP: "2", CVD: "0,1"}, amd(4)).visible == ("amd:2",)

    def test_d15_cudas_variable_is_not_about_amd_where_nvidia_is(self) -> None:
        visibility = resolve({CVD: "-1"}, [*nvidia(A), *amd(2)])
        assert visibility.visible == ("amd:0", "amd:1")
        assert set(visibility.hidden) == {"nvml:0"}
        # And yet HIP obeys it, which is what a person must hear.
        assert visibility.order["rocm"] == ()
        assert "set HIP_VISIBLE_DEVICES" in visibility.warnings[0]

    def test_opencls_variable_is_about_opencl(self) -> None:
        visibility = resolve({ROCR: "1,2", OPENCL: "1"}, amd(3))
        assert visibility.order["amd_opencl"] == ("amd:2",)
        assert visibility.order["rocm"] == visibility.visible == ("amd:1", "amd:2")
        assert set(visibility.hidden_from["amd_opencl"]) == {"amd:1"}

    def test_a_device_without_uuid(self) -> None:
        assert rocm({ROCR: "GPU-XX"}, amd(2, uuids=False)) == []
        assert rocm({HIP: "GPU-XX"}, amd(2, uuids=False)) == [0]


class TestLevelZero:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("0", ["intel:1"]),
            ("2", ["intel:0"]),
            ("2,0", ["intel:1", "intel:0"]),  # a set: the order is Level Zero's
            ("", ["intel:1", "intel:2", "intel:0"]),
            ("default", ["intel:1", "intel:2", "intel:0"]),
            ("9,1", ["intel:2"]),
            ("-1", []),
            ("x", []),
        ],
    )
    def test_cards_before_the_processors_gpu(self, value: str, expected: list[str]) -> None:
        assert list(resolve({ZE: value}, intel(1, 1)).visible) == expected

    def test_by_address(self) -> None:
        assert resolve({ZE: "0", "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}, intel(1, 1)).visible == ("intel:0",)

    def test_tiles_count_as_devices(self) -> None:
        host = intel(2, 2, integrated=False)
        assert resolve({ZE: "1"}, host).visible == ("intel:1",)
        assert resolve({ZE: "2"}, host).visible == ("intel:2",)
        assert resolve({ZE: "0.1"}, host).visible == ()

    def test_composite_devices_have_tiles(self) -> None:
        host, environ = intel(2, 2, integrated=False), {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
        assert resolve({ZE: "1", **environ}, host).visible == ("intel:2",)
        assert resolve({ZE: "0.1", **environ}, host).visible == ("intel:1",)
        assert resolve({ZE: "0.2,2", **environ}, host).visible == ()

    def test_entries_without_effect_are_told(self) -> None:
        assert "'9'" in resolve({ZE: "9,0"}, intel(1)).warnings[0]
        assert resolve({ZE: "-1"}, intel(1)).warnings == ()


class TestVulkan:
    def test_cvd12_a_mask_is_about_the_device(self) -> None:
        visibility = resolve({CVD: B}, with_vulkan(nvidia(A, B), 0, 1))
        assert visibility.order["vulkan"] == visibility.order["cuda"] == ("nvml:1",)
        assert set(visibility.hidden) == {"nvml:0"}

    def test_cvd12_of_amd_and_of_intel(self) -> None:
        host = with_vulkan([*amd(2), *intel(1)], 3, 2, 0, 1)
        visibility = resolve({ROCR: "1", ZE: "0"}, host)
        assert visibility.order["vulkan"] == ("intel:1", "amd:1")

    def test_numbers_count_what_vulkan_counts(self) -> None:
        visibility = resolve({CVD: B, VK: "1,0"}, with_vulkan(nvidia(A, B), 0, 1))
        assert visibility.order["vulkan"] == ("nvml:1",)

    def test_minus_one_turns_vulkan_off_and_not_the_gpus(self) -> None:
        visibility = resolve({VK: "-1"}, with_vulkan(nvidia(A, B), 0, 1))
        assert visibility.order["vulkan"] == ()
        assert visibility.visible == ("nvml:0", "nvml:1")
        assert set(visibility.hidden_from["vulkan"]) == {"nvml:0", "nvml:1"}

    def test_a_device_of_vulkan_alone_is_gone_with_it(self) -> None:
        host = [Candidate("vulkan:0", "qualcomm", ordinals={"vulkan": 0}), Candidate("apple:0", "apple")]
        assert resolve({VK: ""}, host).visible == ("apple:0",)
        assert VK in resolve({VK: ""}, host).hidden["vulkan:0"]

    @pytest.mark.parametrize(
        ("value", "expected"),
        [("1,0", [1, 0]), ("1 0", [1, 0]), ("0,7", []), ("1x", [1]), ("x,0", []), ("0,x,1", [0]), ("0,0", [0])],
    )
    def test_rules_of_ggml(self, value: str, expected: list[int]) -> None:
        order = resolve({VK: value}, with_vulkan(nvidia(A, B), 0, 1)).order["vulkan"]
        assert [int(device[-1]) for device in order] == expected

    def test_nothing_is_said_where_the_masked_card_is_uncertain(self) -> None:
        first, second = with_vulkan(nvidia(A, B), 0, 1)
        visibility = resolve({CVD: "0"}, [first, dataclasses.replace(second, model="other")])
        assert "vulkan" not in visibility.order


def test_no_variables_hide_nothing() -> None:
    host = [*nvidia(A, B), *amd(2), *intel(1), Candidate("cpu:0", "unknown")]
    visibility = resolve({}, host)
    assert set(visibility.visible) == {c.device_id for c in host}
    assert visibility.hidden == visibility.uncertain == visibility.hidden_from == {}
    assert visibility.warnings == ()
