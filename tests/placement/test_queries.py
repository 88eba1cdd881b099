"""Which device fits, over devices of several vendors: every requirement excludes, and every refusal says why."""

from __future__ import annotations

import random
from enum import Enum, StrEnum
from statistics import quantiles
from time import thread_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.backends.tflite import soc
from gpurt.placement import (
    InvalidPlacementInput,
    PlacementDevice,
    choose_device,
    get_cross_vendor_capabilities,
    get_optimal_device,
    get_optimal_device_placement,
    get_performance_estimate,
)
from gpurt.placement.devices import device_from_gpu
from gpurt.placement.vendors import VENDORS
from gpurt.sources import opencl_identity, pci
from gpurt.sources.host_isa import ARM_IMPLEMENTERS
from tests.cluster.support import device as gpu
from tests.placement.rack import A100, CPU, GB, MI250, RACK, T4, device

pytestmark = pytest.mark.wide


class Vendor(Enum):
    NVIDIA = "nvidia"
    AMD = "amd"


class Maker(StrEnum):
    AMD = "AMD"


@pytest.mark.parametrize("ask", [choose_device, get_optimal_device])
def test_a_vendor_or_backend_that_nobody_knows_is_refused(ask: Any) -> None:
    with pytest.raises(InvalidPlacementInput, match=r"'nvidea' is known to nobody.*did you mean nvidia\?") as caught:
        ask(RACK, preferred_vendors=["amd", "Nvidea"])
    assert caught.value.field == "preferred_vendors"
    with pytest.raises(InvalidPlacementInput, match=r"'cudaa' is known to nobody.*did you mean cuda\?") as caught:
        ask(RACK, backends={"cudaa"})
    assert caught.value.field == "backends"
    with pytest.raises(InvalidPlacementInput, match="known are amd, ampere"):
        ask([], preferred_vendors=["zzz"])
    # A plug-in's devices tell their own names.
    own = device("own", vendor="Acme", backend="Npu")
    found = ask([own, CPU], preferred_vendors=["acme"], backends={"Npu", "cpu"})
    assert (found.device if ask is choose_device else found) is own


def test_every_vendor_that_discovery_tells_is_known() -> None:
    told = {*pci.VENDORS.values(), *ARM_IMPLEMENTERS.values(), *opencl_identity._NAMES.values(), *soc._VENDORS.values()}
    assert told <= VENDORS


def test_nothing_fits_is_an_answer() -> None:
    estimated = [A100.model_copy(update={"estimated": frozenset({"compute_flops"})})]
    assert get_optimal_device(estimated, compute_requirement_tflops=1) is None
    assert get_optimal_device(estimated, compute_requirement_tflops=1, accept_estimates=True) is not None
    assert get_optimal_device([], 1) is None
    assert get_optimal_device_placement([], memory_gb=1) == ()
    assert choose_device([]).explain() == "there is no device"
    assert choose_device(estimated, compute_requirement_tflops=1).explain().splitlines() == [
        "no device fits",
        "a100: its arithmetic rate is not measured",
    ]
    assert get_cross_vendor_capabilities([])["cross_vendor_devices"] == 0


@pytest.mark.parametrize(
    ("preferred", "chosen"),
    [
        (["nvidia", "amd", "intel"], "a100"),
        (["amd", "nvidia", "intel"], "mi250"),
        ([Vendor.AMD, Vendor.NVIDIA], "mi250"),
        ([Maker.AMD], "mi250"),
        (["NVIDIA"], "a100"),
        ("amd", "mi250"),
        (["qualcomm"], "mi250"),  # nobody's here: the smallest that is enough
        (None, "mi250"),
    ],
)
def test_vendors_as_preferred(preferred: Any, chosen: str) -> None:
    found = get_optimal_device(
        RACK, memory_requirement_gb=20, compute_requirement_tflops=20, preferred_vendors=preferred
    )
    assert found is not None
    assert found.id == chosen


@pytest.mark.parametrize(
    ("requirements", "fitting"),
    [
        ({}, ["t4", "mi250", "a100", "cpu"]),
        ({"memory_requirement_gb": 20}, ["mi250", "a100", "cpu"]),
        ({"memory_requirement_gb": 100}, ["cpu"]),
        ({"compute_requirement_tflops": 200}, ["a100"]),
        ({"precision": "bf16"}, ["mi250", "a100", "cpu"]),
        ({"precision": "float16"}, ["t4", "mi250", "a100"]),
        ({"backends": ["cuda"]}, ["t4", "a100"]),
        ({"policy": "fastest"}, ["a100", "mi250", "t4", "cpu"]),
        ({"policy": "most_free"}, ["a100", "mi250", "t4", "cpu"]),
        ({"policy": "most_free", "preferred_vendors": ["intel"]}, ["cpu", "a100", "mi250", "t4"]),
        ({"memory_requirement_gb": 300}, []),
        ({"precision": "fp8"}, []),
    ],
)
def test_requirements_filter_and_policies_order(requirements: dict[str, Any], fitting: list[str]) -> None:
    choice = choose_device(RACK, **requirements)
    assert [each.id for each in choice.devices] == fitting
    best = get_optimal_device(RACK, **requirements)
    assert best is None if not fitting else best is choice.device
    assert set(choice.refused) == {each.id for each in RACK} - set(fitting)


def test_every_failed_requirement_is_told() -> None:
    choice = choose_device(RACK, 100, 500, ["nvidia"], precision="bfloat16", backends=["rocm"])
    assert choice.device is None
    lines = choice.explain().splitlines()
    assert lines[0] == "no device fits"
    assert lines[3] == (
        "t4: 100.00 GB are needed, it has 15.00; 500 TFLOPS are needed, it has 65; it does not compute in bfloat16; "
        "its backend is cuda"
    )
    assert choose_device(()).explain() == "there is no device"
    assert choose_device(RACK).explain() == "t4 fits and is best by smallest, before mi250, a100, cpu"


def test_reserve_and_overhead_are_not_offered() -> None:
    tight = device("a", 10 * GB, reserve_bytes=GB, overhead_bytes=GB)
    assert get_optimal_device([tight], 8) is tight
    assert get_optimal_device([tight], 8.000001) is None


def test_what_nobody_knows_satisfies_no_requirement() -> None:
    unknown = device_from_gpu(gpu(memory_usable_bytes=70 * GB), node="n")
    assert get_optimal_device([unknown], 20) is unknown
    assert get_optimal_device([unknown], 20, 5) is None
    assert get_optimal_device([unknown], 20, precision="bf16") is None
    assert get_optimal_device([unknown], 20, 5, precision="bf16", accept_estimates=True) is unknown
    text = choose_device([unknown], 20, 5, precision="bf16").explain()
    assert "its arithmetic rate is not measured" in text
    assert "nobody tells whether it computes in bfloat16" in text


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"memory_requirement_gb": -1}, "memory_requirement_gb"),
        ({"compute_requirement_tflops": float("nan")}, "compute_requirement_tflops"),
        ({"policy": "cheapest"}, "policy"),
        ({"precision": "float9"}, "precision"),
    ],
)
def test_wrong_requirements_name_their_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPlacementInput) as caught:
        choose_device(RACK, **wrong)
    assert caught.value.field == field


@given(st.permutations(RACK), st.sampled_from(["smallest", "fastest", "most_free"]), st.floats(0, 300))
def test_the_order_of_devices_does_not_count(shuffled: list[PlacementDevice], policy: str, gigabytes: float) -> None:
    choice = choose_device(shuffled, gigabytes, policy=policy)
    assert choice.devices == choose_device(RACK, gigabytes, policy=policy).devices
    assert all(each.budget_bytes >= gigabytes * GB for each in choice.devices)


def test_both_spellings_of_the_requirements() -> None:
    first = get_optimal_device_placement(RACK, memory_gb=8, compute_tflops=10)
    assert [each.id for each in first] == ["t4", "mi250", "a100"]
    assert first == get_optimal_device_placement(RACK, memory_requirement_gb=8, compute_requirement_tflops=10)
    with pytest.raises(InvalidPlacementInput, match="both spellings") as caught:
        get_optimal_device_placement(RACK, memory_gb=8, memory_requirement_gb=8)
    assert caught.value.field == "memory_gb"


def test_capabilities_across_vendors_add_up() -> None:
    shared = [device(name, 16 * GB, vendor="apple", memory_pool_id="host") for name in ("m1-gpu", "m1-cpu")]
    told = get_cross_vendor_capabilities((*RACK, *shared))
    assert told["cross_vendor_devices"] == 6 == sum(told["vendor_distribution"].values())
    assert told["vendor_distribution"] == {"amd": 1, "apple": 2, "intel": 1, "nvidia": 2}
    assert told["available_memory_gb"] == pytest.approx(80 + 64 + 15 + 256 + 16), "shared memory counts once"
    assert get_cross_vendor_capabilities(())["cross_vendor_devices"] == 0


def test_a_product_takes_two_operations_a_term() -> None:
    told = get_performance_estimate(A100, m=4096, n=4096, k=4096)
    assert told.flops == 2 * 4096**3
    assert told.compute_seconds == pytest.approx(2 * 4096**3 / 312e12)
    assert told.seconds == told.compute_seconds
    assert told.limited_by == "compute"
    assert told.tflops == pytest.approx(312)
    thin = get_performance_estimate(A100, m=1, n=4096, k=4096)
    assert thin.limited_by == "memory"
    assert thin.seconds == pytest.approx((4096 + 4096**2 + 4096) * 2 / 2e12)
    assert not thin.estimated


def test_an_estimate_says_what_is_not_measured() -> None:
    told = get_performance_estimate(device_from_gpu(gpu(), node="n"), m=2, n=2, k=2)
    assert told.estimated == {"compute_flops", "memory_bandwidth"}
    assert told.explain().endswith("not measured: compute_flops, memory_bandwidth")
    with pytest.raises(InvalidPlacementInput) as caught:
        get_performance_estimate(A100, m=0, n=1, k=1)
    assert caught.value.field == "m"


@pytest.mark.slow
def test_a_question_about_a_hundred_devices_is_answered_within_a_millisecond() -> None:
    dice = random.Random(1)
    many = [
        dice.choice(RACK).model_copy(update={"id": f"d{index}", "usable_bytes": dice.randrange(8, 200) * GB})
        for index in range(100)
    ]
    seconds: list[float] = []
    for _ in range(2000):
        begin = thread_time()
        assert get_optimal_device(many, 24, 20, ["nvidia", "amd", "intel"]) is not None
        seconds.append(thread_time() - begin)
    # Time of this thread: what else the machine does is not asked.
    assert quantiles(seconds, n=100)[98] < 1e-3


def test_cards_of_the_rack_are_what_they_seem() -> None:
    assert [each.budget_bytes // GB for each in (A100, MI250, T4, CPU)] == [80, 64, 15, 256]
