"""Plain values: frozen, comparable, JSON and back, honest about what is not known."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from pydantic import ValidationError

from gpurt.types import (
    BackendReport,
    Capabilities,
    DeviceIdentity,
    DeviceKind,
    DeviceState,
    GPUDevice,
    Kernel,
    MemoryHandle,
    MemoryInfo,
    Telemetry,
)

CLASSIC = {
    "device_id": "cuda:0",
    "name": "NVIDIA H100 80GB HBM3",
    "vendor": "nvidia",
    "backend": "cuda",
    "compute_capability": "9.0",
    "memory_bytes": 85_520_809_984,
    "memory_available": 84_000_000_000,
    "compute_units": 132,
    "tensor_core_count": 528,
    "max_threads_per_block": 1024,
    "clock_rate_mhz": 1980,
    "bandwidth_gbps": 3352.0,
    "support_level": "full",
    "driver_version": "580.65.06",
    "backend_name": "cupy",
}


def test_the_classic_record_has_fifteen_fields_and_stands_alone() -> None:
    assert len(CLASSIC) == 15
    assert list(GPUDevice.model_fields)[:15] == list(CLASSIC)
    device = GPUDevice(**CLASSIC)
    assert {name: getattr(device, name) for name in CLASSIC} == CLASSIC
    assert device.state is DeviceState.HEALTHY
    assert device.stable_id == "cuda:0"


def test_device_is_frozen() -> None:
    device = GPUDevice(**CLASSIC)
    with pytest.raises(ValidationError):
        device.name = "other"
    assert hash(device) == hash(GPUDevice(**CLASSIC))


def test_device_survives_json() -> None:
    identity = DeviceIdentity(key="GPU-1a2b", uuid="GPU-1a2b", pci_address="00000000:4f:00.0")
    device = GPUDevice(**CLASSIC, identity=identity, kind=DeviceKind.GPU, backends=("cuda", "vulkan"), numa_node=1)
    assert GPUDevice.model_validate_json(device.model_dump_json()) == device
    assert device.stable_id == "GPU-1a2b"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_becomes_unknown(value: float) -> None:
    device = GPUDevice(**{**CLASSIC, "bandwidth_gbps": value})
    assert device.bandwidth_gbps is None
    json.loads(device.model_dump_json(), parse_constant=pytest.fail)
    assert Telemetry(temperature_c=value, power_w=value).temperature_c is None


@pytest.mark.parametrize("wrong", [{"memory_bytes": -1}, {"memory_available": -5}, {"device_id": ""}])
def test_impossible_device(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GPUDevice(**{**CLASSIC, **wrong})


def test_unknown_fields_and_states_of_newer_peers_are_tolerated() -> None:
    device = GPUDevice.model_validate({**CLASSIC, "state": "meditating", "kind": "quantum", "from_the_future": 1})
    assert device.state is DeviceState.UNKNOWN
    assert device.kind is DeviceKind.UNKNOWN


def test_memory_info_answers_both_ways() -> None:
    info = MemoryInfo(total_bytes=10, used_bytes=4, available_bytes=5, reserved_bytes=1)
    assert info["total_bytes"] == info.total_bytes == 10
    assert dict(info) == {"total_bytes": 10, "used_bytes": 4, "available_bytes": 5, "reserved_bytes": 1}
    assert {**info} == dict(info)
    assert len(info) == 4
    assert "used_bytes" in info
    assert "model_config" not in info
    with pytest.raises(KeyError):
        info["nope"]
    with pytest.raises(KeyError):
        info["model_dump"]


def test_report_answers_both_ways() -> None:
    report = BackendReport(name="cuda", status="unavailable", message="no driver", hint="install it")
    assert report["hint"] == report.hint
    assert set(report.keys()) == set(BackendReport.model_fields)
    assert next(iter(report.items())) == ("name", "cuda")
    assert report.values()[1] == "unavailable"


def test_kernel_is_a_small_frozen_value() -> None:
    kernel = Kernel(1, "cpu:0", "field_add", 99)
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernel.name = "field_mul"
    assert not hasattr(kernel, "__dict__")
    assert pickle.loads(pickle.dumps(kernel)) == kernel


def test_kernels_are_languages_and_none_by_default() -> None:
    assert Capabilities().kernels == frozenset()
    assert "cuda" in Capabilities(kernels=frozenset({"cuda"})).kernels


def test_handle_is_a_small_frozen_value() -> None:
    handle = MemoryHandle(1, "cpu:0", 64, 99)
    with pytest.raises(dataclasses.FrozenInstanceError):
        handle.size_bytes = 65
    assert not hasattr(handle, "__dict__")
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert len({handle, MemoryHandle(1, "cpu:0", 64, 99), MemoryHandle(1, "cpu:0", 64, 98)}) == 2


def test_telemetry_is_unknown_by_default() -> None:
    reading = Telemetry()
    assert {value for name, value in reading if name != "unavailable"} == {None}


@pytest.mark.parametrize("wrong", [{"alignment_bytes": 0}, {"chunk_bytes": 0}, {"threading": "whatever"}])
def test_impossible_capabilities(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Capabilities(**wrong)
