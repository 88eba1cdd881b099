"""What is asked of a device, and whether it is met."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from typing import Final, NamedTuple

from gpurt.placement.arguments import all_of_kind, check_flag, check_kind
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.inputs import is_amount
from gpurt.placement.number_formats import known_dtype
from gpurt.placement.vendors import VENDORS, check_known
from gpurt.plugins import BUILTIN_BACKENDS, known_names
from gpurt.printable import shortened
from gpurt.types import DeviceKind

GB: Final = 1e9
TFLOPS: Final = 1e12
PROCESSORS: Final = frozenset({DeviceKind.CPU, DeviceKind.SOFTWARE})


class Policy(StrEnum):
    """Which of several devices that fit is best."""

    SMALLEST = "smallest"
    """The least memory that is enough, so that large devices stay free for what needs them."""
    FASTEST = "fastest"
    """The highest arithmetic rate, then the highest memory bandwidth."""
    MOST_FREE = "most_free"
    """The most memory."""


class Wanted(NamedTuple):
    """Of one question; every requirement that it does not have is met."""

    need_bytes: float
    flops: float
    dtype: str | None
    backends: frozenset[str] | None
    policy: Policy
    ranks: Mapping[str, int]
    """Of vendors."""
    accept_estimates: bool

    def against(self, device: PlacementDevice) -> Iterator[str]:
        """Every requirement that it does not meet, in words."""
        have = device.budget_bytes
        if have < self.need_bytes:
            yield f"{self.need_bytes / GB:.2f} GB are needed, it has {have / GB:.2f}"
        if self.flops:
            if device.compute_flops < self.flops:
                yield f"{self.flops / TFLOPS:g} TFLOPS are needed, it has {device.compute_flops / TFLOPS:.3g}"
            elif "compute_flops" in device.estimated and not self.accept_estimates:
                yield "its arithmetic rate is not measured"
        if self.dtype is not None:
            if device.dtypes is None and not self.accept_estimates:
                yield f"nobody tells whether it computes in {self.dtype}"
            elif device.dtypes is not None and self.dtype not in device.dtypes:
                yield f"it does not compute in {self.dtype}"
        if self.backends is not None and device.backend not in self.backends:
            yield f"its backend is {device.backend}"

    def order(self, device: PlacementDevice) -> tuple[object, ...]:
        """The lowest is best."""
        rank = self.ranks.get(device.vendor.lower(), len(self.ranks)) if self.ranks else 0
        size, rate, bandwidth = device.budget_bytes, device.compute_flops, device.memory_bandwidth
        match self.policy:
            case Policy.SMALLEST:
                by = size, -rate, -bandwidth
            case Policy.FASTEST:
                by = -rate, -bandwidth, size
            case Policy.MOST_FREE:
                by = -size, -rate, -bandwidth
        return rank, device.kind in PROCESSORS, *by, device.id


def wanted_of(
    devices: Sequence[PlacementDevice],
    memory_requirement_gb: float,
    compute_requirement_tflops: float | None,
    preferred_vendors: Sequence[str | Enum] | None,
    precision: str | None,
    backends: Iterable[str] | None,
    policy: Policy | str,
    accept_estimates: bool,
) -> Wanted:
    """
    Raises:
        InvalidPlacementInput: a requirement that cannot be; see :func:`gpurt.placement.choose_device`.
    """
    tflops = 0.0 if compute_requirement_tflops is None else compute_requirement_tflops
    for field, value in (("memory_requirement_gb", memory_requirement_gb), ("compute_requirement_tflops", tflops)):
        check_amount(value, field)
    try:
        policy = Policy(policy)
    except ValueError:
        names = ", ".join(each.value for each in Policy)
        raise InvalidPlacementInput(f"{shortened(repr(policy))} is none of {names}", field="policy") from None
    check_flag(accept_estimates, "accept_estimates")
    ranks, names = _ranks(preferred_vendors), _names(backends)
    check_known(ranks, VENDORS, devices, lambda device: device.vendor, "preferred_vendors")
    if names is not None:
        # Backends are told apart by case: their names are those of modules.
        known = BUILTIN_BACKENDS if names <= BUILTIN_BACKENDS.keys() else known_names()  # which reads files
        check_known(sorted(names), known, devices, lambda device: device.backend, "backends")
    return Wanted(
        memory_requirement_gb * GB,
        tflops * TFLOPS,
        None if precision is None else known_dtype(precision, "precision"),
        names,
        policy,
        ranks,
        accept_estimates,
    )


def check_amount(value: object, field: str) -> None:
    """
    Raises:
        InvalidPlacementInput: it is no number from 0.
    """
    if not is_amount(value):
        raise InvalidPlacementInput(f"{shortened(repr(value))} is no amount, a number from 0", field=field)


def _ranks(vendors: Sequence[str | Enum] | None) -> dict[str, int]:
    # A lone string would be taken for a sequence of letters.
    names: object = [vendors] if isinstance(vendors, str | Enum) else () if vendors is None else vendors
    ranks: dict[str, int] = {}
    for place, name in enumerate(all_of_kind(names, object, "preferred_vendors")):
        value: object = name.value if isinstance(name, Enum) else name
        check_kind(value, str, f"preferred_vendors.{place}")
        ranks.setdefault(str(value).lower(), len(ranks))
    return ranks


def _names(backends: Iterable[str] | None) -> frozenset[str] | None:
    if isinstance(backends, str):
        raise InvalidPlacementInput(f"{backends!r} is one name: give a set of them", field="backends")
    return None if backends is None else frozenset(all_of_kind(backends, str, "backends"))
