"""The environment of a child that is to see exactly some of the devices."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from gpurt.errors import DeviceNotFound, Unsupported
from gpurt.visibility.candidates import Candidate, candidate_of
from gpurt.visibility.children import env_for
from gpurt.visibility.resolver import resolve
from gpurt.visibility.variables import VARIABLES
from tests.discovery.records import UUIDS, device
from tests.visibility.hosts import H100, A, B, amd, intel, mig, nvidia

CVD, ROCR, HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"


def masks(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in VARIABLES}


def test_nvidia_by_uuid_in_the_given_order() -> None:
    assert masks(env_for(["nvml:1", "nvml:0"], nvidia(A, B), {})) == {CVD: f"{B},{A}"}


def test_the_rest_of_the_environment_stays() -> None:
    environ = {"PATH": "/bin", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    child = env_for(["nvml:0"], nvidia(A, B), environ)
    assert child == {**environ, CVD: A}
    assert CVD not in environ


@pytest.mark.parametrize("uuids", [(None, None), (A, A)])
def test_nvidia_without_a_uuid_of_its_own_is_counted_by_address(uuids: tuple[str | None, str | None]) -> None:
    host = [dataclasses.replace(c, model=str(n)) for n, c in enumerate(nvidia(*uuids))]
    environ = env_for(["nvml:1"], host, {})
    assert masks(environ) == {CVD: "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert resolve(environ, host).visible == ("nvml:1",)


def test_nvidia_that_nothing_names() -> None:
    host = [dataclasses.replace(c, pci_address=None) for c in nvidia(None, None)]
    with pytest.raises(Unsupported, match="UUID"):
        env_for(["nvml:0"], host, {})


def test_mig_by_either_name() -> None:
    assert masks(env_for(["nvml:9/3/0"], mig(), {}))[CVD].startswith("MIG-00000002-")
    nameless = [dataclasses.replace(part, uuid=None) for part in mig()]
    assert masks(env_for(["nvml:9/3/0"], nameless, {})) == {CVD: f"MIG-{H100}/3/0"}


@pytest.mark.parametrize("wanted", [["nvml:9/2/0", "nvml:9/3/0"], ["nvml:0", "nvml:9/2/0"]])
def test_two_mig_devices_are_for_two_children(wanted: list[str]) -> None:
    with pytest.raises(Unsupported, match="one MIG device"):
        env_for(wanted, [*nvidia(A), *mig()], {})


def test_amd_by_uuid_and_counted_anew_for_hip() -> None:
    child = masks(env_for(["amd:3", "amd:1"], amd(4), {CVD: "3,1", "GPU_DEVICE_ORDINAL": "3,1"}))
    assert child == {
        ROCR: "GPU-93bb000300000000,GPU-93bb000100000000",
        HIP: "0,1",
        "GPU_DEVICE_ORDINAL": "0,1",
    }


def test_amd_partitions_share_a_uuid() -> None:
    host = [dataclasses.replace(c, uuid="GPU-abcdef0123456789", partition=str(n)) for n, c in enumerate(amd(4))]
    child = env_for(["amd:2"], host, {})
    assert child[ROCR] == "2"
    assert resolve(child, host).order["rocm"] == ("amd:2",)


def test_amd_beside_nvidia_does_not_obey_cudas_variable() -> None:
    host = [*nvidia(A), *amd(2)]
    child = env_for(["amd:1"], host, {})
    assert child[CVD] == "-1"
    visibility = resolve(child, host)
    assert (visibility.order["rocm"], visibility.order["cuda"]) == (("amd:1",), ())


def test_no_devices_hide_all() -> None:
    host = [*nvidia(A), *amd(2), *intel(2)]
    assert resolve(env_for([], host, {}), host).visible == ()


def test_variables_of_absent_vendors_are_left_alone() -> None:
    environ = {CVD: "7", ROCR: "7", "ZE_AFFINITY_MASK": "7"}
    assert env_for([], [Candidate("cpu:0", "unknown")], environ) == environ


def test_vulkan_is_told_where_its_numbers_are_known() -> None:
    host = [dataclasses.replace(c, ordinals={"vulkan": 5 - n}) for n, c in enumerate(nvidia(A, B))]
    assert env_for(["nvml:1"], host, {})["GGML_VK_VISIBLE_DEVICES"] == "4"


def test_intel_with_all_its_tiles() -> None:
    host = intel(2, 2)
    assert env_for(["intel:2"], host, {})["ZE_AFFINITY_MASK"] == "2,3"
    assert env_for(["intel:2"], host, {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"})["ZE_AFFINITY_MASK"] == "1"
    assert env_for(["intel:0"], host, {})["ZE_AFFINITY_MASK"] == "4"


def test_what_the_operator_hides_stays_hidden() -> None:
    with pytest.raises(DeviceNotFound, match=CVD):
        env_for(["nvml:0"], nvidia(A, B), {CVD: "1"})


@pytest.mark.parametrize("wanted", [["nvml:7"], ["cuda:0"]])
def test_unknown_device(wanted: list[str]) -> None:
    with pytest.raises(DeviceNotFound):
        env_for(wanted, nvidia(A, B), {})


def test_a_device_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        env_for(["nvml:0", "nvml:0"], nvidia(A, B), {})


def test_every_choice_of_a_mixed_host_is_what_the_child_sees() -> None:
    host = [*nvidia(A, B), *amd(2), *intel(1, 2)]
    ids = [c.device_id for c in host]
    for size in range(len(ids) + 1):
        for wanted in itertools.combinations(ids, size):
            visibility = resolve(env_for(wanted, host, {}), host)
            assert set(visibility.visible) == set(wanted)
            assert visibility.order["cuda"] == tuple(d for d in wanted if d.startswith("nvml"))
            assert visibility.order["rocm"] == tuple(d for d in wanted if d.startswith("amd"))
            assert visibility.warnings == ()


def test_records_of_devices_are_candidates() -> None:
    candidates = [candidate_of(device(n)) for n in range(2)]
    wanted = candidates[1].device_id
    assert env_for([wanted], candidates, {})[CVD] == UUIDS[1]
