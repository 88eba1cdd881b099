"""Which device for this? Questions about single devices, over the same records that the solver places layers on.

What nobody knows satisfies no requirement: a rate from a table (``PlacementDevice.estimated``) is no measured one, and
data types that nobody tells are not computed in. ``accept_estimates`` lets both pass. GB are 10^9 bytes, TFLOPS 10^12
operations a second, in the data type that the device's rate is of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, NamedTuple, TypedDict

from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.inputs import is_amount
from gpurt.placement.number_formats import known_dtype
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


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The answer to one question, with what spoke against the devices that do not fit."""

    devices: tuple[PlacementDevice, ...]
    """All that fit, best first."""
    refused: Mapping[str, tuple[str, ...]]
    """Device → every requirement that it does not meet, in words."""
    policy: Policy

    @property
    def device(self) -> PlacementDevice | None:
        """The best one; None where none fits."""
        return self.devices[0] if self.devices else None

    def explain(self) -> str:
        """A line for the choice, and one for every device that does not fit."""
        if self.device is None:
            lines = ["no device fits" if self.refused else "there is no device"]
        else:
            others = f", before {', '.join(each.id for each in self.devices[1:4])}" if self.devices[1:] else ""
            more = f" and {len(self.devices) - 4} more" if self.devices[4:] else ""
            lines = [f"{self.device.id} fits and is best by {self.policy.value}{others}{more}"]
        lines += [f"{name}: {'; '.join(reasons)}" for name, reasons in self.refused.items()]
        return "\n".join(lines)


def choose_device(
    devices: Iterable[PlacementDevice],
    memory_requirement_gb: float = 0.0,
    compute_requirement_tflops: float | None = None,
    preferred_vendors: Sequence[str | Enum] | None = None,
    *,
    precision: str | None = None,
    backends: Iterable[str] | None = None,
    policy: Policy | str = Policy.SMALLEST,
    accept_estimates: bool = False,
) -> DeviceChoice:
    """Every device that fits, and why the others do not.

    Order: vendors as preferred, those that are not named last; accelerators before processors; then ``policy``; of
    equals by id. So the same devices give the same answer in any order.

    Args:
        memory_requirement_gb: of what is left beside reserve and overhead.
        compute_requirement_tflops: None or 0: any.
        preferred_vendors: names, or members of an enumeration whose values are names; upper and lower case are one.
        precision: data type that it must compute in (``"bfloat16"``, ``"bf16"``).
        backends: it must be one of these.

    Raises:
        InvalidPlacementInput: a requirement is negative or no number, or the data type or policy is unknown.
    """
    wanted = _wanted(
        memory_requirement_gb,
        compute_requirement_tflops,
        preferred_vendors,
        precision,
        backends,
        policy,
        accept_estimates,
    )
    fits: list[PlacementDevice] = []
    refused: dict[str, tuple[str, ...]] = {}
    for device in devices:
        reasons = tuple(wanted.against(device))
        if reasons:
            refused[device.id] = reasons
        else:
            fits.append(device)
    return DeviceChoice(tuple(sorted(fits, key=wanted.order)), refused, wanted.policy)


def get_optimal_device(
    devices: Iterable[PlacementDevice],
    memory_requirement_gb: float = 0.0,
    compute_requirement_tflops: float | None = None,
    preferred_vendors: Sequence[str | Enum] | None = None,
    *,
    precision: str | None = None,
    backends: Iterable[str] | None = None,
    policy: Policy | str = Policy.SMALLEST,
    accept_estimates: bool = False,
) -> PlacementDevice | None:
    """The best device of :func:`choose_device`, whose arguments it takes; None where none fits.

    ``choose_device(…).explain()`` says why it is this one, and why not each of the others.
    """
    wanted = _wanted(
        memory_requirement_gb,
        compute_requirement_tflops,
        preferred_vendors,
        precision,
        backends,
        policy,
        accept_estimates,
    )
    # Asked for every request of a scheduler: no more than what decides.
    fits = (device for device in devices if next(wanted.against(device), None) is None)
    return min(fits, key=wanted.order, default=None)


def get_optimal_device_placement(
    devices: Iterable[PlacementDevice],
    *,
    memory_gb: float | None = None,
    compute_tflops: float | None = None,
    memory_requirement_gb: float | None = None,
    compute_requirement_tflops: float | None = None,
    policy: Policy | str = Policy.SMALLEST,
    accept_estimates: bool = False,
) -> tuple[PlacementDevice, ...]:
    """Every device that fits, best first, by either spelling of the requirements.

    Raises:
        InvalidPlacementInput: both spellings of one requirement are given.
    """
    for field, one, other in (
        ("memory_gb", memory_gb, memory_requirement_gb),
        ("compute_tflops", compute_tflops, compute_requirement_tflops),
    ):
        if one is not None and other is not None:
            raise InvalidPlacementInput("it is given in both spellings", field=field)
    return choose_device(
        devices,
        next((value for value in (memory_gb, memory_requirement_gb) if value is not None), 0.0),
        compute_tflops if compute_tflops is not None else compute_requirement_tflops,
        policy=policy,
        accept_estimates=accept_estimates,
    ).devices


class CrossVendorCapabilities(TypedDict):
    """What devices of all vendors have together."""

    cross_vendor_devices: int
    vendor_distribution: dict[str, int]
    """Devices of each vendor, by name; they add up to ``cross_vendor_devices``."""
    available_memory_gb: float
    """What may be placed on them, memory that devices share counted once."""


def get_cross_vendor_capabilities(devices: Iterable[PlacementDevice]) -> CrossVendorCapabilities:
    """Devices by vendor, and their memory."""
    found = tuple(devices)
    pools: dict[tuple[str, ...], int] = {}
    for device in found:
        pool = device.memory_pool_id
        key = (device.id,) if pool is None else (device.node, pool)
        pools[key] = max(pools.get(key, 0), device.budget_bytes)
    vendors = Counter(device.vendor for device in found)
    return CrossVendorCapabilities(
        cross_vendor_devices=len(found),
        vendor_distribution=dict(sorted(vendors.items())),
        available_memory_gb=sum(pools.values()) / GB,
    )


class _Wanted(NamedTuple):
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


def _wanted(
    memory_requirement_gb: float,
    compute_requirement_tflops: float | None,
    preferred_vendors: Sequence[str | Enum] | None,
    precision: str | None,
    backends: Iterable[str] | None,
    policy: Policy | str,
    accept_estimates: bool,
) -> _Wanted:
    tflops = 0.0 if compute_requirement_tflops is None else compute_requirement_tflops
    for field, value in (("memory_requirement_gb", memory_requirement_gb), ("compute_requirement_tflops", tflops)):
        if not is_amount(value):
            raise InvalidPlacementInput(f"{shortened(repr(value))} is no amount", field=field)
    try:
        policy = Policy(policy)
    except ValueError:
        names = ", ".join(each.value for each in Policy)
        raise InvalidPlacementInput(f"{policy!r} is none of {names}", field="policy") from None
    return _Wanted(
        memory_requirement_gb * GB,
        tflops * TFLOPS,
        None if precision is None else known_dtype(precision, "precision"),
        _names(backends),
        policy,
        _ranks(preferred_vendors),
        accept_estimates,
    )


def _ranks(vendors: Sequence[str | Enum] | None) -> dict[str, int]:
    # A lone string would be taken for a sequence of letters.
    names = [vendors] if isinstance(vendors, str) else vendors or ()
    ranks: dict[str, int] = {}
    for name in names:
        value = name.value if isinstance(name, Enum) else name
        ranks.setdefault(str(value).lower(), len(ranks))
    return ranks


def _names(backends: Iterable[str] | None) -> frozenset[str] | None:
    if isinstance(backends, str):
        raise InvalidPlacementInput(f"{backends!r} is one name: give a set of them", field="backends")
    return None if backends is None else frozenset(backends)
