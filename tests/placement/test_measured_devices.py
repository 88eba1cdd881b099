"""Measured speeds before tables, and how long a plan's weights take to arrive."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    InvalidPlacementInput,
    ModelSpec,
    PlacementDevice,
    Plan,
    ResidentRange,
    Topology,
    device_from_gpu,
    devices_from_view,
    get_optimal_device,
    predict_load,
)
from gpurt.placement.devices import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, FALLBACK_SPEEDS
from gpurt.testing.profiles import PROFILES, Profile
from gpurt.types import DeviceIdentity, DeviceKind, DeviceSpeeds, GPUDevice

GB = 10**9


def gpu(n: int = 0, **fields: Any) -> GPUDevice:
    known: dict[str, Any] = {
        "device_id": f"cuda:{n}", "name": "NVIDIA H100", "vendor": "nvidia", "backend": "cuda",
        "compute_capability": "9.0", "memory_bytes": 80 * GB, "memory_available": 79 * GB, "compute_units": 132,
        "tensor_core_count": 528, "max_threads_per_block": 1024, "clock_rate_mhz": 1980, "bandwidth_gbps": 3350.0,
        "support_level": "full", "driver_version": "590.48.01", "backend_name": "cupy",
        "identity": DeviceIdentity(key=f"GPU-{n}"),
    }  # fmt: skip
    return GPUDevice(**(known | fields))


def speeds(**fields: Any) -> DeviceSpeeds:
    known: dict[str, Any] = {"backend": "cuda", "driver_version": "590.48.01", "measured_at": "2026-11-28T04:00:00Z"}
    return DeviceSpeeds(**(known | fields))


def test_a_table_is_marked_and_a_measurement_is_not() -> None:
    guessed = device_from_gpu(gpu(), node="a")
    assert guessed.memory_bandwidth == 3350e9 * BANDWIDTH_EFFICIENCY
    assert guessed.compute_flops == pytest.approx(67e12 * COMPUTE_EFFICIENCY, rel=0.01)
    nobody = device_from_gpu(gpu(name="GPU of nobody", compute_capability=None), node="a")
    assert nobody.compute_flops == FALLBACK_SPEEDS[DeviceKind.GPU][1] * COMPUTE_EFFICIENCY
    assert guessed.load_bandwidth is None
    assert guessed.estimated == {"memory_bandwidth", "compute_flops"}
    told = speeds(memory_gbps=2900.0, fp32_tflops=55.0, bf16_tflops=600.0, load_gbps=27.0, load_together_gbps=40.0)
    for device in (device_from_gpu(gpu(speeds=told), node="a"), device_from_gpu(gpu(), node="a", measured=told)):
        assert device.memory_bandwidth == 2900e9
        assert device.compute_flops == 600e12
        assert (device.load_bandwidth, device.node_load_bandwidth) == (27e9, 40e9)
        assert device.estimated == frozenset()


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_vendors_figures_come_before_the_table(profile: Profile) -> None:
    fields = {"name": profile.name, "vendor": profile.vendor, "kind": profile.kind}
    clocked = gpu(
        **fields,
        compute_capability=profile.compute_capability,
        compute_units=profile.compute_units,
        clock_rate_mhz=profile.clock_mhz,
    )
    named = gpu(**fields, compute_capability=None, clock_rate_mhz=None)  # as Vulkan tells of it
    for record in (clocked, named):
        device = device_from_gpu(record, node="a")
        assert "compute_flops" in device.estimated
        if profile.key not in ("gb10", "phone"):  # whose rates their vendors do not publish
            assert device.compute_flops == pytest.approx(profile.fp32_tflops * 1e12 * COMPUTE_EFFICIENCY, rel=0.01)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100X", "AMD Radeon 780M", ""])
def test_another_model_has_no_figures_of_a_like_name(name: str) -> None:
    device = device_from_gpu(gpu(name=name, compute_capability=None), node="a")
    assert device.compute_flops == FALLBACK_SPEEDS[DeviceKind.GPU][1] * COMPUTE_EFFICIENCY


def test_a_known_card_is_found_by_what_it_must_do() -> None:
    devices = devices_from_view({("a", "GPU-0"): gpu()})
    found = get_optimal_device(devices, 8, 20, ["nvidia", "amd"], accept_estimates=True)
    assert found is devices[0]
    assert get_optimal_device(devices, 8, 20, ["nvidia", "amd"]) is None, "nobody has measured it"


def test_what_the_caller_gives_has_the_last_word() -> None:
    device = device_from_gpu(
        gpu(speeds=speeds(memory_gbps=2900.0, load_gbps=27.0, load_together_gbps=40.0)),
        node="a", memory_bandwidth=1e12, load_bandwidth=1e9,
    )  # fmt: skip
    assert (device.memory_bandwidth, device.load_bandwidth, device.node_load_bandwidth) == (1e12, 1e9, None)


@pytest.mark.parametrize(("cores", "estimated"), [(528, True), (0, False), (None, False)])
def test_single_precision_is_not_all_that_matrix_units_do(cores: int | None, estimated: bool) -> None:
    device = device_from_gpu(gpu(tensor_core_count=cores, speeds=speeds(fp32_tflops=55.0)), node="a")
    assert device.compute_flops == 55e12
    assert ("compute_flops" in device.estimated) == estimated
    assert "memory_bandwidth" in device.estimated


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_figure_that_is_none_is_not_used(value: float) -> None:
    told = speeds(memory_gbps=value, fp32_tflops=value)
    assert (told.memory_gbps, told.fp32_tflops) == (None, None)
    assert device_from_gpu(gpu(speeds=told), node="a") == device_from_gpu(gpu(), node="a")


def test_alike_devices_stay_alike_and_a_slow_one_does_not() -> None:
    told = [2890.0, 2910.0, 2900.0, 1400.0]
    view = {("a", f"GPU-{n}"): gpu(n, speeds=speeds(memory_gbps=value)) for n, value in enumerate(told)}
    view["b", "GPU-9"] = gpu(9, speeds=speeds(memory_gbps=2880.0))
    devices = devices_from_view(view)
    assert [device.memory_bandwidth for device in devices] == [2895e9, 2895e9, 2895e9, 1400e9, 2880e9]


def test_the_view_takes_other_measurements_and_what_lies_there() -> None:
    there = (ResidentRange(model="m", start=0, end=4),)
    (device,) = devices_from_view(
        {("a", "GPU-0"): gpu(speeds=speeds(memory_gbps=2900.0))},
        measured={("a", "GPU-0"): speeds(memory_gbps=2000.0)},
        resident={("a", "GPU-0"): there},
    )
    assert device.memory_bandwidth == 2000e9
    assert device.resident == there


# Load time


def machine(n: int, **fields: Any) -> PlacementDevice:
    known: dict[str, Any] = {
        "id": f"a/{n}", "node": "a", "usable_bytes": 60 * GB, "memory_bandwidth": 1e12, "compute_flops": 1e14,
        "load_bandwidth": 10e9,
    }  # fmt: skip
    return PlacementDevice(**(known | fields))


MODEL = ModelSpec.uniform("m", layers=10, size_bytes=100 * GB, embedding_bytes=4 * GB, head_bytes=2 * GB)


def placed(devices: tuple[PlacementDevice, ...], model: ModelSpec = MODEL) -> Plan:
    return ConstraintSatisfactionPlacement().solve_placement(model, devices, Topology(), Constraints())


def test_devices_load_side_by_side() -> None:
    devices = (machine(0), machine(1))
    plan = placed(devices)
    load = predict_load(plan, MODEL, devices)
    held = {each.device: each.weights for stage in plan.stages for each in stage.held}
    assert {each.device: each.bytes for each in load.devices} == held
    assert sum(each.bytes for each in load.devices) == MODEL.weight_bytes
    assert load.seconds == pytest.approx(max(held.values()) / 10e9)


def test_what_a_node_can_take_together_is_the_floor() -> None:
    devices = (machine(0, node_load_bandwidth=12e9), machine(1, node_load_bandwidth=12e9))
    plan = placed(devices)
    assert predict_load(plan, MODEL, devices).seconds == pytest.approx(MODEL.weight_bytes / 12e9)
    apart = (machine(0, node_load_bandwidth=12e9), machine(1, id="b/1", node="b", node_load_bandwidth=12e9))
    load = predict_load(placed(apart), MODEL, apart)
    assert load.seconds == max(each.seconds for each in load.devices)  # type: ignore[type-var]


def test_what_is_there_is_not_loaded() -> None:
    devices = (machine(0), machine(1))
    plan = placed(devices)
    stages = {stage.devices[0]: stage for stage in plan.stages}
    there = tuple(
        device.model_copy(
            update={"resident": (ResidentRange(model="m", start=stages[device.id].start, end=stages[device.id].end),)}
        )
        for device in devices
    )
    load = predict_load(plan, MODEL, there)
    assert load.seconds == 0
    assert all(each.bytes == 0 and each.seconds == 0 for each in load.devices)


def test_nobody_knows_is_not_zero() -> None:
    devices = (machine(0), machine(1, load_bandwidth=None))
    load = predict_load(placed(devices), MODEL, devices)
    assert load.seconds is None
    assert {each.device: each.seconds is None for each in load.devices} == {"a/0": False, "a/1": True}


def test_a_plan_of_others_is_refused() -> None:
    devices = (machine(0), machine(1))
    plan = placed(devices)
    with pytest.raises(InvalidPlacementInput) as caught:
        predict_load(plan, MODEL, devices[:1])
    assert caught.value.field == "devices"
    with pytest.raises(InvalidPlacementInput) as caught:
        predict_load(plan, MODEL.model_copy(update={"name": "other"}), devices)
    assert caught.value.field == "model"


@settings(max_examples=15, deadline=None)
@given(
    tied=st.integers(0, 2 * GB),
    rates=st.lists(st.floats(1e8, 1e11), min_size=2, max_size=2),
    split=st.integers(0, 10),
)
def test_every_byte_is_loaded_once(tied: int, rates: list[float], split: int) -> None:
    model = MODEL.model_copy(update={"tied_bytes": tied})
    devices = tuple(
        machine(n, load_bandwidth=rate, resident=(ResidentRange(model="m", start=0, end=split),) if n == 0 else ())
        for n, rate in enumerate(rates)
    )
    plan = placed(devices, model)
    load = predict_load(plan, model, devices)
    moved = sum(each.moved for stage in plan.stages for each in stage.held)
    assert moved <= sum(each.bytes for each in load.devices) <= model.weight_bytes + tied
    assert load.seconds is not None
    assert load.seconds == max(each.seconds or 0.0 for each in load.devices)
