"""Whole workloads on devices, several on one where they fit: for what is not split into layers.

A model that may be split is the solver's (:class:`~gpurt.placement.ConstraintSatisfactionPlacement`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import Field, field_validator

from gpurt.placement.arguments import all_of_kind
from gpurt.placement.device_arguments import given_devices
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.number_formats import known_dtype
from gpurt.placement.record import MOST_BYTES, PlacementRecord
from gpurt.placement.words import counted, listed, size_words, time_words

SEARCH_STEPS: Final = 50_000
"""Partial assignments that are looked at in search of one that places everything: a fraction of a second."""


class WorkloadRequest(PlacementRecord):
    """Something that runs on one device."""

    name: str = Field(min_length=1)
    memory_bytes: int = Field(ge=0, le=MOST_BYTES)
    """That it holds there."""
    flops: float = Field(default=0.0, ge=0)
    """Operations of one step, for balance; 0: it takes no time that matters."""
    dtype: str | None = None
    """Data type that the device must compute in; None: any device will do."""
    backends: frozenset[str] | None = None
    """It runs on one of these; None: on any."""

    @field_validator("dtype")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        try:
            return None if value is None else known_dtype(value, "dtype")
        except InvalidPlacementInput as error:
            raise ValueError(error.message) from None  # the record names the field


@dataclass(frozen=True, slots=True)
class WorkloadPlacement:
    """Which workload runs where. No device holds more than it has."""

    devices: Mapping[str, str]
    """Workload → device, in the order in which the workloads were given."""
    unplaced: Mapping[str, str]
    """Workload → why it is nowhere."""
    held_bytes: Mapping[str, int]
    """Device → what its workloads hold; those without any are there with 0."""
    busy_seconds: Mapping[str, float]
    """Device → time of one step of all its workloads."""
    certain: bool
    """Either everything is placed, or it is proved that not everything can be."""

    def explain(self) -> str:
        """A line for every used device, and one for every workload that is nowhere."""
        lines: list[str] = []
        for device, size in self.held_bytes.items():
            names = [name for name, place in self.devices.items() if place == device]
            if names:
                busy = self.busy_seconds[device]
                time = f", {time_words(busy)} a step" if busy else ""
                lines.append(f"{device}: {listed(names)}; {size_words(size)}{time}")
        lines += [f"{name} is not placed: {reason}" for name, reason in self.unplaced.items()]
        if self.unplaced:
            proof = "no assignment places" if self.certain else "no assignment was found that places"
            lines.append(f"{proof} all {counted(len(self.devices) + len(self.unplaced), 'workload')}")
        return "\n".join(lines)


def optimize_workload_placement(
    workloads: Sequence[WorkloadRequest], devices: Sequence[PlacementDevice]
) -> WorkloadPlacement:
    """Place as much as fits, so that the busiest device is done early.

    The longest step first, each on the device that would be done first with it, memory permitting; where that leaves
    something out, a search for an assignment with everything, largest first; where there is none, what fitted.
    Deterministic, and the order of the devices does not count. Memory that devices share is one. Without a device
    nothing is placed, and ``unplaced`` says so.

    Raises:
        InvalidPlacementInput: an argument is of another kind, or two workloads or two devices are called the same; the
            field says which one (``workloads.1.name``).
    """
    workloads = all_of_kind(workloads, WorkloadRequest, "workloads")
    devices = given_devices(devices)
    seen: set[str] = set()
    for place, request in enumerate(workloads):
        if request.name in seen:
            raise InvalidPlacementInput(f"{request.name!r} is there twice", field=f"workloads.{place}.name")
        seen.add(request.name)
    return _Assignment(workloads, sorted(devices, key=lambda device: device.id)).best()


class _Assignment:
    def __init__(self, workloads: Sequence[WorkloadRequest], devices: Sequence[PlacementDevice]) -> None:
        self.workloads = workloads
        self.devices = devices
        self.pools: list[int] = []
        """The piece of memory of each device, by number."""
        self.room: list[int] = []
        numbers: dict[tuple[str, ...], int] = {}
        for device in devices:
            pool = device.memory_pool_id
            number = numbers.setdefault((device.id,) if pool is None else (device.node, pool), len(numbers))
            if number == len(self.room):
                self.room.append(0)
            self.pools.append(number)
            self.room[number] = max(self.room[number], device.budget_bytes)
        self.able = [[index for index, device in enumerate(devices) if _able(each, device)] for each in workloads]

    def best(self) -> WorkloadPlacement:
        count = len(self.workloads)
        quick = self._greedy(sorted(range(count), key=lambda work: (-self._least(work), -self._bytes(work), work)))
        if len(quick) == count:
            return self._told(quick, certain=True)
        whole, certain = self._search(sorted(range(count), key=lambda work: (-self._bytes(work), work)))
        if whole is not None:
            return self._told(whole, certain=True)
        large = self._greedy(sorted(range(count), key=lambda work: (self._bytes(work), work)))
        return self._told(max(quick, large, key=len), certain=certain)

    def _bytes(self, work: int) -> int:
        return self.workloads[work].memory_bytes

    def _seconds(self, work: int, device: int) -> float:
        return self.workloads[work].flops / self.devices[device].compute_flops

    def _least(self, work: int) -> float:
        return min((self._seconds(work, device) for device in self.able[work]), default=0.0)

    def _greedy(self, order: Sequence[int]) -> dict[int, int]:
        room, busy, placed = list(self.room), [0.0] * len(self.devices), dict[int, int]()
        for work in order:
            fits = [device for device in self.able[work] if room[self.pools[device]] >= self._bytes(work)]
            if not fits:
                continue

            def done(device: int, work: int = work) -> tuple[float, int]:
                return busy[device] + self._seconds(work, device), room[self.pools[device]]

            device = min(fits, key=done)
            placed[work] = device
            room[self.pools[device]] -= self._bytes(work)
            busy[device] += self._seconds(work, device)
        return placed

    def _search(self, order: Sequence[int]) -> tuple[dict[int, int] | None, bool]:
        """An assignment of all, or None; and whether that is certain."""
        if sum(map(self._bytes, order)) > sum(self.room):
            return None, True
        options = [self._in_pools(work) for work in range(len(self.workloads))]
        # Pieces of memory with equal room that the same workloads may be in are one to this question.
        kinds = [frozenset(work for work in order if pool in options[work]) for pool in range(len(self.room))]
        room = list(self.room)

        def choices(work: int) -> Iterator[int]:
            tried: set[tuple[int, frozenset[int]]] = set()
            # The tightest place first: it leaves the larger ones whole.
            for pool in sorted(options[work], key=lambda each: (room[each], each)):
                if room[pool] >= self._bytes(work) and (room[pool], kinds[pool]) not in tried:
                    tried.add((room[pool], kinds[pool]))
                    yield pool

        path: list[int] = []
        """The piece of memory of each workload so far, in their order."""
        open_choices: list[Iterator[int]] = []
        for _ in range(SEARCH_STEPS):
            if len(path) == len(order):
                return {work: options[work][pool] for work, pool in zip(order, path, strict=True)}, True
            if len(open_choices) == len(path):
                open_choices.append(choices(order[len(path)]))
            pool = next(open_choices[-1], None)
            if pool is not None:
                room[pool] -= self._bytes(order[len(path)])
                path.append(pool)
                continue
            open_choices.pop()
            if not path:
                return None, True
            room[path.pop()] += self._bytes(order[len(path)])
        return None, False

    def _in_pools(self, work: int) -> dict[int, int]:
        """Every piece of memory that the workload may be in, with the fastest device there that can run it."""
        found: dict[int, int] = {}
        for device in sorted(self.able[work], key=lambda each: self._seconds(work, each)):
            found.setdefault(self.pools[device], device)
        return found

    def _told(self, placed: Mapping[int, int], *, certain: bool) -> WorkloadPlacement:
        held = dict.fromkeys((device.id for device in self.devices), 0)
        busy = dict.fromkeys(held, 0.0)
        names: dict[str, str] = {}
        unplaced: dict[str, str] = {}
        for work, request in enumerate(self.workloads):
            if work in placed:
                name = names[request.name] = self.devices[placed[work]].id
                held[name] += request.memory_bytes
                busy[name] += self._seconds(work, placed[work])
            else:
                unplaced[request.name] = self._why(work)
        return WorkloadPlacement(names, unplaced, held, busy, certain)

    def _why(self, work: int) -> str:
        request = self.workloads[work]
        if not self.devices:
            return "there is no device"
        if not self.able[work]:
            return f"no device {_asked(request)}"
        most = max(self.room[self.pools[device]] for device in self.able[work])
        if most < request.memory_bytes:
            return f"it holds {size_words(request.memory_bytes)}, and no device has more than {size_words(most)}"
        return f"its {size_words(request.memory_bytes)} are left on no device beside the others"


def _asked(request: WorkloadRequest) -> str:
    """What it asks of a device, in words."""
    asked: list[str] = []
    if request.backends is not None:
        asked.append(f"is of {' or '.join(sorted(request.backends)) or 'no backend at all'}")
    if request.dtype is not None:
        asked.append(f"computes in {request.dtype}")
    return " and ".join(asked)


def _able(request: WorkloadRequest, device: PlacementDevice) -> bool:
    if request.backends is not None and device.backend not in request.backends:
        return False
    # As for layers: data types that nobody tells are not checked.
    return request.dtype is None or device.dtypes is None or request.dtype in device.dtypes
