"""The policy is data: what condemns, and how it is configured."""

from __future__ import annotations

import pytest

from gpurt.errors import GPUError
from gpurt.health import HealthPolicy, XidEffect


def test_nvi_10_application_xids_do_not_condemn_and_hardware_ones_do() -> None:
    policy = HealthPolicy()
    for xid in (13, 31, 43, 45, 68, 109):
        assert policy.effect(xid) is XidEffect.APPLICATION, xid
    assert policy.effect(79) is XidEffect.LOST
    for xid in (48, 64, 94, 95, 140):
        assert policy.effect(xid) is XidEffect.DEGRADED, xid
    assert policy.effect(63) is XidEffect.NOTICE
    assert policy.effect(4711) is XidEffect.DEGRADED


def test_nvi_10_the_list_is_configuration() -> None:
    policy = HealthPolicy.from_environ({"GPURT_HEALTH_XIDS": " 79=notice, 31=LOST ,other=application"})
    assert policy.effect(79) is XidEffect.NOTICE
    assert policy.effect(31) is XidEffect.LOST
    assert policy.effect(4711) is XidEffect.APPLICATION
    assert policy.effect(48) is XidEffect.DEGRADED
    assert HealthPolicy.from_environ({}) == HealthPolicy()
    assert HealthPolicy.from_environ({"GPURT_THERMAL_LIMIT": " 85.5 "}).thermal_threshold_c == 85.5


@pytest.mark.parametrize("text", ["79", "79=", "79=dead", "=lost", "x=lost", "-1=lost", "٣=lost", "1" * 5000 + "=lost"])
def test_a_bad_list_is_an_error_that_says_how_to_write_it(text: str) -> None:
    with pytest.raises(GPUError, match="GPURT_HEALTH_XIDS") as caught:
        HealthPolicy.from_environ({"GPURT_HEALTH_XIDS": text})
    assert "31=application" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["hot", "nan", "inf", "0", "-3", "300"])
def test_a_bad_temperature_is_an_error(text: str) -> None:
    with pytest.raises(GPUError, match="GPURT_THERMAL_LIMIT"):
        HealthPolicy.from_environ({"GPURT_THERMAL_LIMIT": text})


def test_impossible_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        HealthPolicy(recover_after=0)
    with pytest.raises(ValueError, match="negative"):
        HealthPolicy(xid_hold_s=-1)
