"""Any value of any variable: nothing is raised, no device is invented, none is dropped without a reason."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurt.errors import DeviceNotFound, Unsupported
from gpurt.visibility.candidates import Candidate
from gpurt.visibility.children import env_for
from gpurt.visibility.resolver import resolve
from gpurt.visibility.variables import VARIABLES
from tests.visibility.hosts import H100, A, B, amd, intel, mig, nvidia

EXAMPLES = pytest.mark.parametrize("examples", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
HOST = [*nvidia(A, B), *mig(), *amd(3), *intel(1, 2), Candidate("vulkan:9", "qualcomm", ordinals={"vulkan": 2})]

names = [A, B, A[:8], "GPU-", "MIG-", "MIG-0000000", *(c.uuid or "" for c in mig()), f"MIG-{H100}/3/0"]
odd = [
    "gpu-93bb0002",
    "GPU-93bb0001",
    "-1",
    "0",
    "1",
    "2",
    "3",
    "9",
    "",
    " ",
    " 1",
    "0x1",
    "07",
    "0.1",
    "1.0.0",
    "+1",
    "1x",
    "all",
    "\u0661",
]
pieces = st.sampled_from([*names, *odd])
lists = st.lists(pieces, max_size=5).map(",".join)
values = lists | st.text(max_size=12) | st.sampled_from(["PCI_BUS_ID", "COMPOSITE"])
environs = st.lists(st.tuples(st.sampled_from(VARIABLES), values), max_size=4).map(dict)


@st.composite
def hosts(draw: st.DrawFn) -> list[Candidate]:
    """Some of the devices, a few of them without what identifies them, and with any numbers of Vulkan."""
    host: list[Candidate] = []
    several = st.lists(st.tuples(st.sampled_from(HOST), st.integers(0, 16)), unique_by=lambda pair: pair[0].device_id)
    for candidate, keep in draw(several):
        host.append(
            Candidate(
                candidate.device_id,
                candidate.vendor,
                uuid=candidate.uuid if keep != 1 else None,
                pci_address=candidate.pci_address if keep != 2 else None,
                partition=candidate.partition,
                parent_uuid=candidate.parent_uuid if keep != 3 else None,
                integrated=candidate.integrated,
                tiles=candidate.tiles if keep != 4 else 0,
                model=candidate.model if keep != 5 else None,
                ordinals=candidate.ordinals if keep < 9 else {"vulkan": keep - 9},
            )
        )
    return host


@EXAMPLES
def test_any_environment_of_any_host(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(environ=environs, host=hosts(), picks=st.lists(st.integers(0, 11), max_size=4))
    def check(environ: dict[str, str], host: list[Candidate], picks: list[int]) -> None:
        ids = [c.device_id for c in host]
        _each_device_is_told_of(environ, host, ids)
        counted = [c.ordinals["vulkan"] for c in host if "vulkan" in c.ordinals]
        if len(set(counted)) == len(counted):
            _a_child_sees_what_it_is_given(environ, host, list(dict.fromkeys(ids[n] for n in picks if n < len(ids))))

    check()


def _each_device_is_told_of(environ: dict[str, str], host: list[Candidate], ids: list[str]) -> None:
    visibility = resolve(environ, host)
    told = [*visibility.visible, *visibility.hidden, *visibility.uncertain]
    assert sorted(told) == sorted(ids)  # each exactly once
    assert all([*visibility.hidden.values(), *visibility.uncertain.values(), *visibility.warnings])
    for order in visibility.order.values():
        assert len(set(order)) == len(order)
        assert set(order) <= set(ids) - set(visibility.hidden)
    if not environ:
        assert set(visibility.visible) == set(ids)


def _a_child_sees_what_it_is_given(environ: dict[str, str], host: list[Candidate], wanted: list[str]) -> None:
    try:
        child = env_for(wanted, host, environ)
    except DeviceNotFound:
        assert set(wanted) & set(resolve(environ, host).hidden)
        return
    except Unsupported:
        assert any(c.device_id in wanted and c.vendor == "nvidia" for c in host)
        return
    seen = resolve(child, host)
    no_variable = {c.device_id for c in host if c.vendor == "qualcomm" and "vulkan" not in c.ordinals}
    assert set(seen.visible) == set(wanted) | no_variable
    assert seen.order.get("cuda", ()) == tuple(d for d in wanted if d.startswith("nvml"))
    assert seen.order.get("rocm", ()) == tuple(d for d in wanted if d.startswith("amd"))
