"""Why there is no plan, and the smallest changes with which there is one."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from pydantic import Field

from gpurt.placement.devices import PlacementDevice
from gpurt.placement.record import PlacementRecord
from gpurt.placement.words import counted, listed, size_words

MIB = 1 << 20
MOST_OF_A_KIND = 16
"""Changes of one kind, each of which is enough, that a report has at most: rules to drop, devices to include."""


class ConstraintKind(StrEnum):
    """What cannot be kept, in the order in which it is looked at."""

    DEVICES = "devices"
    """No device may hold any layer: ``filtered`` says why."""
    LAYER = "layer"
    """The largest layer fits on no device or group."""
    MEMORY = "memory"
    """All bytes together are more than there are."""
    LAYERS = "layers"
    """The bytes would do, but devices hold whole layers."""
    ENDS = "ends"
    """All layers would fit, but not with the embedding and the head."""
    CAPABILITY = "capability"
    """Some layers fit on no device that can compute them."""
    TENSOR_PARALLEL_MAX = "tensor_parallel_max"
    STAGE_LAYERS = "stage_layers"
    MAX_STAGES = "max_stages"
    MIN_STAGES = "min_stages"
    MAX_NODES = "max_nodes"
    MIN_NODES = "min_nodes"
    DOMAIN_LIMITS = "domain_limits"
    SAME_BACKEND = "same_backend"
    REQUIRE_DEVICES = "require_devices"
    REQUIRE_NODES = "require_nodes"
    PINS = "pins"
    LINKS = "links"
    """The devices that reach each other do not hold it."""
    MAX_LINK_SECONDS = "max_link_seconds"


class FilterReason(StrEnum):
    EXCLUDED = "excluded"
    BACKEND = "backend"
    """The model does not run on it."""
    DTYPE = "dtype"
    """It does not compute in the model's data type."""
    OPERATION = "operation"
    """It lacks an operation that every layer needs."""
    ALLOCATION = "allocation"
    """The largest tensor is larger than its largest allocation."""
    CAPABILITY = "capability"
    """Of each layer something: data type, operation or allocation."""
    NO_MEMORY = "no_memory"
    """Reserve and overhead leave nothing."""
    TOO_SMALL = "too_small"
    """Not one layer fits."""
    MEMORY_POOL = "memory_pool"
    """It shares its memory with another one, which counts."""
    NOT_CONNECTED = "not_connected"
    """It does not reach the devices that hold most."""


class FilteredDevice(PlacementRecord):
    """A device that takes no part."""

    device: str
    reason: FilterReason
    detail: str
    usable_bytes: int = Field(ge=0)
    """What it would have given, after reserve and overhead."""


class DeviceRoom(PlacementRecord):
    """A device that takes part."""

    device: str
    usable_bytes: int = Field(ge=0)
    """After reserve and overhead."""
    layers: int = Field(ge=0)
    """Whole layers that fit, alone and in the middle of the model."""
    stranded_bytes: int = Field(ge=0)
    """What these layers leave over."""


class RelaxationKind(StrEnum):
    BYTES_PER_DEVICE = "bytes_per_device"
    CONTEXT_TOKENS = "context_tokens"
    BATCH = "batch"
    PREFILL_TOKENS = "prefill_tokens"
    QUANTISATION = "quantisation"
    ADD_DEVICES = "add_devices"
    """``amount`` devices like ``device``, each on a node of its own."""
    ADD_DEVICE_OF_SIZE = "add_device_of_size"
    """One device like ``device`` with ``amount`` usable bytes."""
    INCLUDE = "include"
    """Devices or nodes in ``names`` are no longer excluded."""
    TENSOR_PARALLEL_MAX = "tensor_parallel_max"
    STAGE_LAYERS = "stage_layers"
    """Without the limits of the devices in ``names``."""
    MAX_STAGES = "max_stages"
    MIN_STAGES = "min_stages"
    MAX_NODES = "max_nodes"
    MIN_NODES = "min_nodes"
    DOMAIN_LIMIT = "domain_limit"
    """Domain limit number ``index`` is ``amount``."""
    SAME_BACKEND = "same_backend"
    """Stages may use different backends."""
    REQUIRE = "require"
    """Devices or nodes in ``names`` are no longer required."""
    DROP_PIN = "drop_pin"
    """Without pin number ``index``."""
    WIDEN_PIN = "widen_pin"
    """Pin number ``index`` allows the devices in ``names`` as well."""
    CONNECT = "connect"
    """The devices in ``names`` and all that each of them reaches now reach each other."""
    MAX_LINK_SECONDS = "max_link_seconds"


class Relaxation(PlacementRecord):
    """One change with which there is a plan: see :func:`gpurt.placement.changes.apply_relaxation`."""

    kind: RelaxationKind
    change: str
    """For people: what to do, as ``drop the pin of layer 3 to a``."""
    amount: float | int | None = None
    """The new value, or what is added."""
    before: float | int | None = None
    step: float | int | None = None
    """``amount`` is a multiple of this, and the smallest (or largest) that does."""
    less: float | int | None = None
    """The amount one step less, with which there is no plan; None where that is what there is now."""
    names: tuple[str, ...] = ()
    index: int | None = None
    device: PlacementDevice | None = None
    minimal: bool
    """Proved: with one step less there is no plan."""
    estimated: bool = False
    """The amount of bytes that follows from it is estimated."""


class InfeasibilityReport(PlacementRecord):
    """What :class:`~gpurt.placement.InfeasiblePlacement` carries."""

    model: str
    constraint: ConstraintKind
    """The first that cannot be kept, in the order of :class:`ConstraintKind`: with all before it there is a plan."""
    conflicts: tuple[ConstraintKind, ...]
    """All constraints of which each, given up alone, lets the others be kept; memory is among them where more bytes
    per device would do."""
    message: str
    """One sentence with figures."""
    need_bytes: int = Field(ge=0)
    """Weights, cache, embedding, head, and the workspace of one device."""
    usable_bytes: int = Field(ge=0)
    """Of the devices that take part, each memory counted once."""
    short_bytes: int = Field(ge=0)
    layers: int = Field(ge=1)
    placeable_layers: int = Field(ge=0)
    """Most layers that the devices hold under the constraints that say how many stages, nodes and layers there may
    be: with the embedding and the head, unless ``unplaced`` says that these fit nowhere."""
    unplaced: tuple[str, ...] = ()
    """``embedding``, ``head``: what fits on no device beside one layer; ``embedding and head``: these do not both fit.
    Empty where they do, or where not even a layer fits."""
    short_layers: int = Field(ge=0)
    stranded_bytes: int = Field(ge=0)
    """Left over on all devices since they hold whole layers."""
    largest_layer_bytes: int = Field(ge=0)
    """Weights, cache and workspace of the largest layer."""
    largest_device_bytes: int = Field(ge=0)
    filtered: tuple[FilteredDevice, ...]
    devices: tuple[DeviceRoom, ...]
    relaxations: tuple[Relaxation, ...]
    """Each alone is enough. The easiest come first: rules of one's own, the cause before others; number formats;
    context, batch and prefill; one more device, or links; bytes on every device; several more devices, or one larger
    than any. Of each kind at most ``MOST_OF_A_KIND``."""
    complete: bool
    """Every kind of relaxation was tried to the end; else time was short."""

    def room(self) -> str:
        """How many layers find room: by what each device has alone, and where that is fewer, with all the rest."""
        left = f", and whole layers leave {size_words(self.stranded_bytes)} unused" if self.stranded_bytes else ""
        if self.unplaced == ("embedding and head",):
            return f"{finding_room(self.placeable_layers, self.layers)}, but not with both the embedding and the head"
        if self.unplaced:
            ends = " or ".join(f"the {name}" for name in self.unplaced)
            return f"{finding_room(self.placeable_layers, self.layers)}, but no device holds {ends} beside a layer"
        alone = min(self.layers, sum(device.layers for device in self.devices))
        if alone <= self.placeable_layers:
            return finding_room(self.placeable_layers, self.layers) + left
        return (
            f"{finding_room(alone, self.layers)} on the devices, each by itself, but only {self.placeable_layers:,} "
            "once the embedding, the head and the rules are counted in"
        )

    def explain(self) -> str:
        """Lines for people: what cannot be kept, how much is missing, who takes no part and what would help."""
        lines = [f"No plan for {self.model}: {self.message}."]
        if self.devices:
            told = f"{size_words(self.need_bytes)} are needed and {size_words(self.usable_bytes)} usable"
            if told not in self.message:
                lines.append(f"{told} on {counted(len(self.devices), 'device')}.")
            apart = any(device.reason is FilterReason.NOT_CONNECTED for device in self.filtered)
            if apart and not self.short_layers:
                # Layers are counted on all devices, bytes on those that reach each other.
                layers = f"{self.layers:,} of {counted(self.layers, 'layer')}"
                lines.append(f"{layers} would find room if all devices reached each other.")
            elif (room := self.room()) not in self.message:
                lines.append(f"{room}.")
        for reason, times in sorted(Counter(device.reason for device in self.filtered).items()):
            mine = [device for device in self.filtered if device.reason is reason]
            size = size_words(sum(device.usable_bytes for device in mine))
            lines.append(
                f"Left out, {mine[0].detail if times == 1 else reason.value.replace('_', ' ')}: "
                f"{listed([device.device for device in mine])} ({size})."
            )
        if self.relaxations:
            lines.append("Any one of these changes makes it possible:")
            lines += [
                f"  - {change.change}" + ("" if change.minimal else " (less may do)") for change in self.relaxations
            ]
        else:
            lines.append("No single change that was tried makes it possible.")
        if not self.complete:
            lines.append("Not every change was tried: time was short.")
        return "\n".join(lines)


def finding_room(found: int, layers: int) -> str:
    """``8 of 10 layers find room``."""
    return f"{found:,} of {counted(layers, 'layer')} {'finds' if found == 1 or layers == 1 else 'find'} room"


__all__ = [
    "MOST_OF_A_KIND",
    "ConstraintKind",
    "DeviceRoom",
    "FilterReason",
    "FilteredDevice",
    "InfeasibilityReport",
    "Relaxation",
    "RelaxationKind",
    "finding_room",
]
