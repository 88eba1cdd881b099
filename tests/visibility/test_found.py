"""The environment of a child, from what discovery found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpurt.visibility
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import DeviceNotFound, Unsupported
from gpurt.identity import device_identity
from gpurt.testing import create_simulated
from gpurt.types import DeviceIdentity, DeviceKind, GPUDevice
from gpurt.visibility import Candidate, Visibility, env_for, resolve
from gpurt.visibility.variables import VARIABLES
from tests.discovery.records import UUIDS, cpu, device, result

CVD, ROCR, HIP, ZE = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"


def masks(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in VARIABLES}


def amd_card(n: int, uuid: str | None = "GPU-93bb000{}00000000") -> GPUDevice:
    address = f"00000000:4{n}:00.0"
    identity = device_identity(uuid=uuid and uuid.format(n), pci_address=address, fallback="")
    return device(n, backend="rocm", vendor="amd", identity=identity)


def intel_card(n: int) -> GPUDevice:
    identity = device_identity(pci_address=f"00000000:8{n}:00.0", fallback="")
    return device(n, backend="vulkan", vendor="intel", identity=identity)


def hidden(n: int, variable: str = CVD) -> GPUDevice:
    reason = f"hidden_by_environment: {variable} does not name it"
    return device(n, device_id=f"nvml:{n}", backend_name="nvml", usable=False, state_reason=reason)


def mig(gi: int, **identity: str | None) -> GPUDevice:
    told = {"key": f"MIG-part{gi}", "uuid": f"MIG-0000000{gi}-0000-1111-2222-333333333333"} | identity
    full = DeviceIdentity.model_validate({"pci_address": "00000000:01:00.0", "partition": f"{gi}/0", **told})
    return device(gi, device_id=f"nvml:0/{gi}/0", identity=full)


async def test_a_result_and_its_devices_will_do(tmp_path: Path) -> None:
    async with GPUDiscoveryService(registry_path=tmp_path / "r.json", backends=["cpu"]) as service:
        found = await service.discover_all_devices()
    assert env_for(["cpu:0"], found, os.environ) == dict(os.environ)
    assert env_for(["cpu:0"], found.devices) == env_for([found.devices[0].stable_id], found) == dict(os.environ)


def test_every_vendor_at_once() -> None:
    host = result(device(0), device(1), amd_card(0), amd_card(1), intel_card(0), intel_card(1), cpu())
    nothing = {CVD: "-1", ROCR: "-1", HIP: "-1", "GPU_DEVICE_ORDINAL": "-1", ZE: "-1"}
    child = masks(env_for(["cuda:1", "cpu:0"], host, {}))
    assert child == {**nothing, CVD: UUIDS[1], "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
    child = masks(env_for(["rocm:1", "vulkan:1"], host, {}))
    assert (child[CVD], child[ROCR], child[HIP], child[ZE]) == ("-1", "GPU-93bb000100000000", "0", "1")


@pytest.mark.parametrize("vendor", ["amd", "intel", "nvidia"])
def test_a_processor_is_no_gpu_of_its_vendor(vendor: str) -> None:
    host = result(cpu(vendor=vendor), device(0, device_id="vulkan:0", vendor=vendor, kind=DeviceKind.SOFTWARE))
    environ = {"PATH": "/bin", CVD: "0", ROCR: "0", ZE: "0"}
    assert env_for(["cpu:0"], host, environ) == environ


def test_by_its_stable_id() -> None:
    assert masks(env_for([UUIDS[1]], result(device(0), device(1)), {})) == {CVD: UUIDS[1]}
    with pytest.raises(ValueError, match="twice"):
        env_for([UUIDS[0], "cuda:0"], result(device(0)), {})


def test_an_unknown_one_and_those_that_there_are() -> None:
    with pytest.raises(DeviceNotFound, match=r"'cuda:7'; there are: cuda:0, cpu:0"):
        env_for(["cuda:7"], result(device(0), cpu()), {})
    with pytest.raises(DeviceNotFound, match="there are: none"):
        env_for(["cuda:7"], [], {})


@pytest.mark.parametrize("devices", [[3], [device(0), Candidate("a", "nvidia")]])
def test_what_are_no_devices(devices: list[GPUDevice]) -> None:
    with pytest.raises(TypeError, match="DiscoveryResult, its devices or candidates"):
        env_for([], devices, {})


def test_a_text_is_no_list_of_devices() -> None:
    with pytest.raises(TypeError, match=r"\['cuda:0'\]"):
        env_for("cuda:0", [device(0)], {})


@pytest.mark.parametrize("value", ["1", "0,-1", UUIDS[1], "-1"])
def test_what_the_environment_hides_stays_hidden(value: str) -> None:
    found_without = result(device(0), device(1))
    gone = "cuda:1" if value.startswith("0") else "cuda:0"
    with pytest.raises(DeviceNotFound, match=CVD):
        env_for([gone], found_without, {CVD: value})


def test_what_discovery_calls_hidden_is_so_as_long_as_the_variable_is_set() -> None:
    host = result(device(1, device_id="cuda:0"), hidden(0))
    with pytest.raises(DeviceNotFound, match=CVD):
        env_for(["nvml:0"], host, {CVD: "1"})
    assert masks(env_for(["nvml:0"], host, {})) == {CVD: UUIDS[0]}
    assert masks(env_for(["cuda:0"], host, {CVD: "1"})) == {CVD: UUIDS[1]}


def test_a_number_that_discovery_has_taken_for_what_it_means_is_not_counted_again() -> None:
    """Without NVML nobody shows what CUDA hides: its device 0 may be the machine's third."""
    assert masks(env_for(["cuda:0"], result(device(2, device_id="cuda:0")), {CVD: "2"})) == {CVD: UUIDS[2]}


def test_partitions_by_their_own_name_whatever_names_their_card() -> None:
    host = [mig(1), mig(2)]
    assert masks(env_for(["nvml:0/2/0"], host, {CVD: UUIDS[0]}))[CVD].startswith("MIG-00000002-")
    with pytest.raises(Unsupported, match="one MIG device"):
        env_for(["nvml:0/1/0", "nvml:0/2/0"], host, {})


def test_a_partition_without_a_name_is_named_by_its_card() -> None:
    host = [device(0), mig(1, uuid=None)]
    assert masks(env_for(["nvml:0/1/0"], host, {})) == {CVD: f"MIG-{UUIDS[0]}/1/0"}
    with pytest.raises(Unsupported, match="UUID"):
        env_for(["nvml:0/1/0"], [mig(1, uuid=None)], {})


def test_the_card_in_a_partitions_old_name() -> None:
    host = [mig(1, uuid=f"MIG-{UUIDS[0]}/1/0"), mig(2, uuid=f"MIG-{UUIDS[1]}/2/0")]
    with pytest.raises(DeviceNotFound, match=CVD):
        env_for(["nvml:0/2/0"], host, {CVD: UUIDS[0]})


def test_an_amd_card_without_a_name_only_where_it_is_alone() -> None:
    assert masks(env_for(["rocm:0"], [amd_card(0, None)], {}))[ROCR] == "0"
    for host, environ in ([[amd_card(0, None), amd_card(1)], {}], [[amd_card(0, None)], {ROCR: "0"}]):
        with pytest.raises(Unsupported, match="ROCm"):
            env_for(["rocm:0"], host, environ)


def test_vulkans_own_uuid_is_no_name_for_other_interfaces() -> None:
    vulkans = amd_card(0, None)
    assert vulkans.identity is not None
    identity = vulkans.identity.model_copy(update={"uuid": "00000000-4000-0000-0000-000000000000"})
    assert masks(env_for(["rocm:0"], [vulkans.model_copy(update={"identity": identity})], {}))[ROCR] == "0"


def test_what_no_variable_hides() -> None:
    apple = device(0, backend="metal", vendor="apple", kind=DeviceKind.INTEGRATED_GPU)
    with pytest.raises(Unsupported, match="vendor apple"):
        env_for(["cpu:0"], result(apple, cpu()), {})
    assert env_for(["metal:0"], result(apple, cpu()), {}) == {}


async def test_simulated_devices_are_not_of_this_machine() -> None:
    async with create_simulated("h100x2") as backend:
        host = (*backend.devices, device(0), cpu())
        assert masks(env_for(["cuda:0"], host, {})) == {CVD: UUIDS[0]}
        with pytest.raises(Unsupported, match="simulated"):
            env_for(["simulated:0"], backend, {})


def test_the_names_are_there_and_cost_nothing_before_they_are_used() -> None:
    assert set(gpurt.visibility.__all__) <= set(dir(gpurt.visibility))
    assert (resolve({}, []), callable(resolve)) == (Visibility(), True)
    program = (
        "import sys, gpurt.visibility.variables as v, gpurt.visibility.resolver as r; "
        "assert 'gpurt.visibility.children' not in sys.modules; "
        "from gpurt.visibility import resolve; assert resolve is r.resolve"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    program = "import sys, gpurt.visibility; assert not [m for m in sys.modules if m.startswith('gpurt.visibility.')]"
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError):
        _ = gpurt.visibility.nonsense


def test_any_object_with_devices() -> None:
    assert isinstance(result(device(0)), DiscoveryResult)
    assert env_for([], result(device(0)), {}) == {CVD: "-1"}
