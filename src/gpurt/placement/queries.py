"""Which device for this? Questions about single devices, over the same records that the solver places layers on.

What nobody knows satisfies no requirement: a rate from a table (``PlacementDevice.estimated``) is no measured one, and
data types that nobody tells are not computed in. ``accept_estimates`` lets both pass. GB are 10^9 bytes (not GiB),
TFLOPS 10^12 operations a second, in the data type that the device's rate is of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypedDict

from gpurt.placement.device_arguments import given_devices
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.requirements import GB, Policy, check_amount, wanted_of


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
        devices: as :func:`~gpurt.placement.devices_from_view` makes them; none at all is no error.
        memory_requirement_gb: GB (10^9 bytes) that must be left beside reserve and overhead; 0: any.
        compute_requirement_tflops: TFLOPS (10^12 operations a second); None or 0: any.
        preferred_vendors: an order, no requirement: a device of another vendor fits as well and comes last. Names, or
            members of an enumeration whose values are names; upper and lower case are one.
        precision: data type that it must compute in (``"bfloat16"``, ``"bf16"``); None: any.
        backends: it must be one of these (``{"cuda", "rocm"}``); None: any.
        policy: which of several that fit is best.
        accept_estimates: whether a rate that nobody measured, and data types that nobody tells, meet a requirement of
            them. Where devices were not calibrated (``gpurt calibrate``), any ``compute_requirement_tflops`` and, where
            data types are not told, any ``precision`` needs it, or no device fits.

    Returns:
        All that fit, best first, and of each of the others what speaks against it. Where none fits ``device`` is None,
        ``devices`` is empty and ``refused`` says why; where there was no device at all, ``refused`` is empty, too.

    Raises:
        InvalidPlacementInput: an argument is of another kind, two devices have one id, a requirement is negative or no
            number, the data type or policy is unknown, or a vendor or backend is one that neither gpurt nor any of the
            devices knows: a misspelt name would otherwise be a preference for nobody.
    """
    found = given_devices(devices)
    wanted = wanted_of(
        found,
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
    for device in found:
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
    """The best device of :func:`choose_device`, whose arguments it takes, in its units, and whose errors it raises.

    None where none fits, also where there is no device: that is an answer, not an error. A common reason is a
    requirement of ``compute_requirement_tflops`` among devices whose rates are estimates, without
    ``accept_estimates=True``. ``choose_device(…).explain()`` says why it is this one, and why not each of the others.
    """
    found = given_devices(devices)
    wanted = wanted_of(
        found,
        memory_requirement_gb,
        compute_requirement_tflops,
        preferred_vendors,
        precision,
        backends,
        policy,
        accept_estimates,
    )
    # Asked for every request of a scheduler: no more than what decides.
    fits = (device for device in found if next(wanted.against(device), None) is None)
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
    """Every device that fits, best first, by either spelling of the requirements; empty where none does.

    ``memory_gb`` is ``memory_requirement_gb`` and ``compute_tflops`` is ``compute_requirement_tflops`` of
    :func:`choose_device`, in GB and TFLOPS; its other arguments are those of it, too.

    Raises:
        InvalidPlacementInput: both spellings of one requirement are given, or as of :func:`choose_device`.
    """
    for field, one, other in (
        ("memory_gb", memory_gb, memory_requirement_gb),
        ("compute_tflops", compute_tflops, compute_requirement_tflops),
    ):
        if one is not None and other is not None:
            raise InvalidPlacementInput("it is given in both spellings", field=field)
        if one is not None:
            check_amount(one, field)
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
    """GB (10^9 bytes): what may be placed on them, memory that devices share counted once."""


def get_cross_vendor_capabilities(devices: Iterable[PlacementDevice]) -> CrossVendorCapabilities:
    """Devices by vendor, and their memory; zeros where there are none.

    Raises:
        InvalidPlacementInput: something else is among them, or two have one id.
    """
    found = given_devices(devices)
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
