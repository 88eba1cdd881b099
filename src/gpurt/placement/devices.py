"""The devices that layers may be put on, as the solver sees them.

Speeds are those that a layer really gets: measured ones (:mod:`gpurt.calibration`) are taken as they are, peak figures
of a table or of the vendor are multiplied by an efficiency and marked in ``estimated``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from statistics import median
from typing import Final

from pydantic import Field, model_validator

from gpurt.placement.arguments import check_kind, check_share, check_view
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.peak_rates import vendor_peak_flops
from gpurt.placement.record import LEAST_RATE, MOST_BYTES, MOST_SECONDS, PlacementRecord
from gpurt.printable import shortened
from gpurt.types import DeviceKind, DeviceSpeeds, DeviceState, GPUDevice

BANDWIDTH_EFFICIENCY: Final = 0.7
"""Share of the peak memory bandwidth that reading weights gets; an assumption, used only with peak figures."""
COMPUTE_EFFICIENCY: Final = 0.5
"""Share of the peak arithmetic rate that a layer gets; an assumption, used only with peak figures."""
DEFAULT_RESERVE: Final = 0.1
"""Share of the usable memory that is left free: fragmentation and what other processes take meanwhile."""

SAME_SPEED: Final = 0.1
"""Figures of alike devices that differ by less are one figure, taken several times: what tells them apart is noise."""

FALLBACK_SPEEDS: Final[Mapping[DeviceKind, tuple[float, float]]] = {
    DeviceKind.GPU: (300e9, 20e12),
    DeviceKind.INTEGRATED_GPU: (60e9, 2e12),
    DeviceKind.ACCELERATOR: (60e9, 10e12),
    DeviceKind.CPU: (40e9, 0.5e12),
    DeviceKind.SOFTWARE: (20e9, 0.1e12),
    DeviceKind.UNKNOWN: (40e9, 0.5e12),
}
"""Memory bandwidth (bytes/s) and arithmetic rate (FLOP/s) of a kind whose figures nobody knows: the order of magnitude
of the slower half of that kind, always marked estimated."""


class ResidentRange(PlacementRecord):
    """Layers ``start`` to ``end`` (exclusive) of a model that already lie on a device."""

    model: str
    start: int = Field(ge=0)
    end: int = Field(ge=0)

    @model_validator(mode="after")
    def _order(self) -> ResidentRange:
        if self.end < self.start:
            raise InvalidPlacementInput("it lies before start", field="end")
        return self


class PlacementDevice(PlacementRecord):
    """One device."""

    id: str = Field(min_length=1)
    """Unique in the cluster: ``node/stable key``."""
    node: str = Field(min_length=1)
    zone: str = "default"
    """Devices of one zone are close to each other: rack, site."""
    labels: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Failure domains by kind, e.g. ``{"power": "b"}``; ``node`` and ``zone`` are domains without being named here."""
    backend: str = "unknown"
    vendor: str = "unknown"
    name: str = ""
    kind: DeviceKind = DeviceKind.GPU
    usable_bytes: int = Field(ge=0, le=MOST_BYTES)
    """What may be allocated, before reserve and overhead."""
    reserve_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Left free."""
    overhead_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    """What the backend's runtime takes for itself: context, kernels."""
    memory_bandwidth: float = Field(ge=LEAST_RATE)
    """Bytes/s while weights are read."""
    compute_flops: float = Field(ge=LEAST_RATE)
    """FLOP/s in the model's data type."""
    load_bandwidth: float | None = Field(default=None, ge=LEAST_RATE)
    """Bytes/s at which weights arrive on it from where they are stored; None: not known."""
    node_load_bandwidth: float | None = Field(default=None, ge=LEAST_RATE)
    """The same for all devices of its node together, when all load at once; None: not known to be less than the sum."""
    launch_seconds: float = Field(default=0.0, ge=0, le=MOST_SECONDS)
    """Fixed time per layer."""
    dtypes: frozenset[str] | None = None
    """Data types it computes in; None: not known, not checked."""
    unsupported_operations: frozenset[str] = frozenset()
    max_allocation_bytes: int | None = Field(default=None, ge=0, le=MOST_BYTES)
    """Largest single allocation; None: no limit known."""
    memory_pool_id: str | None = None
    """Devices of one node with equal ids share their memory: at most one of them is used."""
    resident: tuple[ResidentRange, ...] = ()
    estimated: frozenset[str] = frozenset()
    """Names of the fields that come from a table and not from a measurement."""

    @property
    def budget_bytes(self) -> int:
        """What weights, cache and activations may take together. Where that is nothing, the device takes no part in
        any plan, even for layers that take nothing."""
        return max(0, self.usable_bytes - self.reserve_bytes - self.overhead_bytes)

    def domain(self, kind: str) -> str | None:
        """Its failure domain of that kind; None where it has none."""
        if kind == "node":
            return self.node
        if kind == "zone":
            return self.zone
        return self.labels.get(kind)


def device_from_gpu(
    device: GPUDevice,
    *,
    node: str,
    key: str | None = None,
    zone: str = "default",
    reserve: float = DEFAULT_RESERVE,
    measured: DeviceSpeeds | None = None,
    memory_bandwidth: float | None = None,
    compute_flops: float | None = None,
    load_bandwidth: float | None = None,
    dtypes: frozenset[str] | None = None,
    resident: tuple[ResidentRange, ...] = (),
) -> PlacementDevice:
    """A device of the master's view.

    A speed is what the caller gives, else what was measured (``measured``, else the record's own ``speeds``), else a
    share of the vendor's figure or, where there is none, of a table's for its kind, and marked estimated. So is an
    arithmetic rate that was measured in single precision on a device with matrix units, which layers in half precision
    exceed.

    A device whose memory nobody knows, or that must not be used, gets no usable bytes.

    Args:
        reserve: share of the usable memory that is left free, from 0 to 1.
        memory_bandwidth: bytes a second, as ``load_bandwidth``.
        compute_flops: operations a second.

    Raises:
        InvalidPlacementInput: an argument is of another kind, or a figure is one that no device has.
    """
    check_kind(device, GPUDevice, "device")
    check_kind(node, str, "node")
    check_kind(measured, DeviceSpeeds, "measured", optional=True)
    check_share(reserve, "reserve")
    usable = device.memory_usable_bytes
    if usable is None:
        usable = device.memory_available if device.memory_available is not None else device.memory_bytes
    if usable is None or not device.usable or device.state is not DeviceState.HEALTHY:
        usable = 0
    if not 0 <= usable <= MOST_BYTES:
        raise InvalidPlacementInput(
            f"{node}/{key or device.stable_id} says that it has {shortened(str(usable), 30)} bytes, and a device has "
            f"at most {MOST_BYTES:,}",
            field="device",
        )
    speeds = measured or device.speeds
    table_bandwidth, table_flops = FALLBACK_SPEEDS[device.kind]
    estimated: set[str] = set()
    if memory_bandwidth is None:
        memory_bandwidth = _rate(speeds and speeds.memory_gbps)
        if memory_bandwidth is None:
            estimated.add("memory_bandwidth")
            memory_bandwidth = (_rate(device.bandwidth_gbps) or table_bandwidth) * BANDWIDTH_EFFICIENCY
    if compute_flops is None:
        single, half = _rate(speeds and speeds.fp32_tflops, 1e12), _rate(speeds and speeds.bf16_tflops, 1e12)
        best = max(single or 0.0, half or 0.0)
        if half is None and (best == 0 or device.tensor_core_count):
            estimated.add("compute_flops")
        compute_flops = best or (vendor_peak_flops(device) or table_flops) * COMPUTE_EFFICIENCY
    together: float | None = None
    if load_bandwidth is None and speeds is not None:
        load_bandwidth = _rate(speeds.load_gbps)
        together = _rate(speeds.load_together_gbps) if load_bandwidth is not None else None
    return PlacementDevice(
        id=f"{node}/{key or device.stable_id}",
        node=node,
        zone=zone,
        backend=device.backend,
        vendor=device.vendor,
        name=device.name,
        kind=device.kind,
        usable_bytes=usable,
        reserve_bytes=int(usable * reserve),
        memory_bandwidth=memory_bandwidth,
        compute_flops=compute_flops,
        load_bandwidth=load_bandwidth,
        node_load_bandwidth=together,
        dtypes=dtypes,
        memory_pool_id=device.memory_pool_id,
        resident=resident,
        estimated=frozenset(estimated),
    )


def _rate(figure: float | None, unit: float = 1e9) -> float | None:
    """A figure of so many a second; None where nobody knows it, and where it is of no device there is."""
    rate = None if figure is None else figure * unit
    return rate if rate is not None and 1 <= rate < inf else None


def devices_from_view(
    available: Mapping[tuple[str, str], GPUDevice],
    *,
    zones: Mapping[str, str] | None = None,
    reserve: float = DEFAULT_RESERVE,
    measured: Mapping[tuple[str, str], DeviceSpeeds] | None = None,
    resident: Mapping[tuple[str, str], tuple[ResidentRange, ...]] | None = None,
    held: Mapping[tuple[str, str], int] | None = None,
) -> tuple[PlacementDevice, ...]:
    """The devices of a master's view: give ``ClusterSnapshot.available_devices``. ``zones`` maps nodes to zones.

    ``resident``: the layers that lie on devices already, ``ClusterSnapshot.resident``. ``held``: bytes that the model
    to be placed takes on them now, ``ClusterSnapshot.held_bytes``; the new plan has them again.

    Each has the speeds that its node measured, unless ``measured`` has others. Of devices of one node that are alike,
    figures within a tenth of their median are that median, so that what is equal remains so to the solver. Software
    devices are left out: they compute on the processor that is listed beside them.

    Raises:
        InvalidPlacementInput: an argument is of another kind; the place of a device is (node, key).
    """
    check_view(available, GPUDevice, "available")
    for field, value in (("zones", zones), ("measured", measured), ("resident", resident), ("held", held)):
        check_kind(value, Mapping, field, optional=True)
    check_share(reserve, "reserve")
    found = tuple(
        device_from_gpu(
            with_room(device, (held or {}).get((node, key), 0)),
            node=node,
            key=key,
            zone=(zones or {}).get(node, "default"),
            reserve=reserve,
            measured=(measured or {}).get((node, key)),
            resident=(resident or {}).get((node, key), ()),
        )
        for (node, key), device in available.items()
        if device.kind is not DeviceKind.SOFTWARE
    )
    return _levelled(found)


def with_room(device: GPUDevice, size: int) -> GPUDevice:
    """As the device would be with so many bytes more of its memory free; never more than it has."""
    if size == 0:
        return device
    most = device.memory_bytes

    def more(free: int | None) -> int | None:
        grown = None if free is None else free + size
        return grown if grown is None or most is None else min(grown, most)

    return device.model_copy(
        update={
            "memory_usable_bytes": more(device.memory_usable_bytes),
            "memory_available": more(device.memory_available),
        }
    )


def _levelled(devices: tuple[PlacementDevice, ...]) -> tuple[PlacementDevice, ...]:
    groups: dict[tuple[object, ...], list[PlacementDevice]] = {}
    for device in devices:
        groups.setdefault(_look(device), []).append(device)

    def level(device: PlacementDevice) -> PlacementDevice:
        alike = groups[_look(device)]
        if len(alike) == 1:
            return device
        update: dict[str, float] = {}
        for field in ("memory_bandwidth", "compute_flops", "load_bandwidth"):
            mine: float | None = getattr(device, field)
            if mine is None:
                continue
            middle = median(value for each in alike if (value := getattr(each, field)) is not None)
            if abs(mine - middle) <= SAME_SPEED * middle:
                update[field] = middle
        return device.model_copy(update=update)

    return tuple(map(level, devices))


def _look(device: PlacementDevice) -> tuple[object, ...]:
    # What is measured and what comes from a table is not noise around one figure.
    return device.node, device.backend, device.vendor, device.name, device.estimated
