"""How long a plan's weights take to arrive: bytes over bandwidth, devices and nodes side by side."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from gpurt.placement.arguments import check_kind
from gpurt.placement.costs import resident_layers
from gpurt.placement.device_arguments import given_devices
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.plan import Plan, Stage
from gpurt.placement.plan_form import check_form
from gpurt.placement.record import PlacementRecord
from gpurt.placement.spec import ModelSpec


class DeviceLoad(PlacementRecord):
    """What one device has to load."""

    device: str
    bytes: int = Field(ge=0)
    seconds: float | None = Field(ge=0)
    """Alone; None: nobody knows how fast weights arrive on it."""


class LoadPrediction(PlacementRecord):
    """The time until a plan's weights are where it wants them."""

    seconds: float | None = Field(ge=0)
    """All devices of all nodes at once; None: not known of some device that has to load."""
    devices: tuple[DeviceLoad, ...]
    """In the order of the plan."""


def predict_load(plan: Plan, model: ModelSpec, devices: Sequence[PlacementDevice]) -> LoadPrediction:
    """Seconds to load what ``plan`` wants and ``devices`` do not hold yet (``PlacementDevice.resident``). A device that
    holds the first layer holds the embedding, one that holds the last layer the head.

    Devices load at the same time. A node is done when its slowest device is, and no sooner than all its bytes have
    come at the rate of all its devices together::

        seconds = max over nodes of max(max over devices of bytes / load_bandwidth, sum of bytes / node_load_bandwidth)

    Raises:
        InvalidPlacementInput: an argument is of another kind, the plan is of another model, or a device of it is not
            among ``devices``.
        InvalidPlan: the plan contradicts itself.
    """
    check_kind(plan, Plan, "plan")
    check_kind(model, ModelSpec, "model")
    devices = given_devices(devices)
    if plan.model != model.name or plan.layer_count != model.layer_count:
        raise InvalidPlacementInput(f"the plan is of {plan.model!r}, {plan.layer_count} layers", field="model")
    check_form(plan)
    known = {device.id: device for device in devices}
    loads: list[DeviceLoad] = []
    nodes: dict[str, list[tuple[PlacementDevice, int]]] = {}
    for stage in plan.stages:
        for name in stage.devices:
            device = known.get(name)
            if device is None:
                raise InvalidPlacementInput(f"device {name!r} of the plan is not among them", field="devices")
            nbytes = _missing(stage, model, device)
            seconds = 0.0 if nbytes == 0 else device.load_bandwidth and nbytes / device.load_bandwidth
            loads.append(DeviceLoad(device=device.id, bytes=nbytes, seconds=seconds))
            nodes.setdefault(device.node, []).append((device, nbytes))
    told = [load.seconds for load in loads if load.seconds is not None]
    for there in nodes.values():
        rates = [device.node_load_bandwidth for device, nbytes in there if nbytes and device.node_load_bandwidth]
        if rates:
            told.append(sum(nbytes for _, nbytes in there) / min(rates))
    complete = all(load.seconds is not None for load in loads)
    return LoadPrediction(seconds=max(told) if complete else None, devices=tuple(loads))


def _missing(stage: Stage, model: ModelSpec, device: PlacementDevice) -> int:
    there = resident_layers(model, device)
    missing = sum(model.layers[index].weight_bytes for index in range(stage.start, stage.end) if not there[index])
    first = stage.start == 0 and not there[0]
    last = stage.end == model.layer_count and not there[-1]
    missing += model.embedding_bytes * first + model.head_bytes * last - model.tied_bytes * (first and last)
    return -(-missing // stage.tensor_parallel)
