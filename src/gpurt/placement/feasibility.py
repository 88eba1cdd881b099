"""Whether there is any plan: counted where counting decides, laid out where that succeeds, searched for at last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.clashes import Clash, first_clash
from gpurt.placement.clock import Clock
from gpurt.placement.constraints import Constraints
from gpurt.placement.counting import Bound, count_layers
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.field import Field, integers
from gpurt.placement.grouping import filter_devices
from gpurt.placement.holding import Holding, bytes_suffice, room_for_every_kind
from gpurt.placement.instance import Ints
from gpurt.placement.layer_bytes import LayerBytes
from gpurt.placement.laying import Layer
from gpurt.placement.number_rules import Rules
from gpurt.placement.plan_search import FEW, search_plan, with_bytes
from gpurt.placement.reaching import Together, always_connected, together
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import LinkMatrix, Topology

_HANDFUL: Final = 6
"""Devices."""


class Problem(NamedTuple):
    """What a plan is asked for."""

    model: ModelSpec
    devices: tuple[PlacementDevice, ...]
    topology: Topology
    constraints: Constraints


class Feasibility:
    """Answers for many variations of a problem; what they have in common is worked out once.

    ``deadline``: on :func:`time.monotonic`; past it nothing is searched any more. ``search``: seconds of one search,
    0: counting only.
    """

    def __init__(self, deadline: float, *, search: float = 0.5, cancelled: Callable[[], bool] = lambda: False) -> None:
        self.begin = monotonic()
        self.deadline, self.search, self.cancelled = deadline, search, cancelled
        self._fields: dict[int, tuple[Sequence[PlacementDevice], Field]] = {}
        self._layers: dict[tuple[object, ...], tuple[ModelSpec, LayerBytes]] = {}
        self._kept: dict[tuple[object, ...], tuple[object, NDArray[np.intp], list[tuple[str, str]]]] = {}
        self._holdings: dict[tuple[object, ...], tuple[object, Holding]] = {}
        self._connected: dict[int, tuple[Topology, bool]] = {}
        self._links: dict[tuple[object, ...], tuple[object, LinkMatrix]] = {}
        self._parts: dict[tuple[object, ...], tuple[object, list[Together]]] = {}

    def over(self) -> bool:
        return self.cancelled() or monotonic() >= self.deadline

    def impossible(self, problem: Problem) -> bool:
        """Counting proves that there is no plan."""
        return self._counted(problem, 0, lay=False)[0] is False

    def hurry(self, seconds: float) -> None:
        """So many seconds from the beginning are enough."""
        self.deadline = min(self.deadline, self.begin + seconds)

    def ask(self, problem: Problem, *, more_bytes: int | Ints = 0, search: bool = True) -> bool | None:
        """Whether there is a plan; None: not known. ``more_bytes`` on every device, or on each."""
        # Among a handful of devices it takes less time to try all orders than to count.
        if self.search and len(self.kept(problem)) <= _HANDFUL and not self.over():
            tried = self._searched(problem, more_bytes, engine=False)
            if tried is not None:
                return tried
        counted, wider = self._counted(problem, more_bytes)
        if counted is not None or not wider or not search or not self.search or self.over():
            return counted
        return self._searched(problem, more_bytes, engine=True)

    def bound(self, problem: Problem) -> Bound:
        """Layers that the devices hold, every link taken as there."""
        field, layers, rules = self.field(problem.devices), self.layers(problem), self.rules(problem)
        return count_layers(field, layers, rules, self.kept(problem), field.raw)

    def field(self, devices: Sequence[PlacementDevice]) -> Field:
        key = id(devices)
        if key not in self._fields:
            self._fields[key] = devices, Field(devices)
        return self._fields[key][1]

    def with_devices(self, problem: Problem, like: PlacementDevice, count: int) -> Problem:
        """With so many more devices that take part, each on a node of its own in the zone of ``like``."""
        wider = problem._replace(devices=with_devices(problem.devices, like, count))
        self._fields[id(wider.devices)] = wider.devices, self.field(problem.devices).plus(wider.devices)
        kept = np.concatenate([self.kept(problem), np.arange(len(problem.devices), len(wider.devices))])
        self._kept[self._kept_key(wider)] = wider.devices, kept.astype(np.intp), self.removed(problem)
        return wider

    def layers(self, problem: Problem) -> LayerBytes:
        model, rules = problem.model, problem.constraints
        placed = bool(rules.pins) or rules.movement_seconds_per_byte > 0
        key = id(model), rules.workload, placed
        if key not in self._layers:
            self._layers[key] = model, LayerBytes(model, rules.workload, placed=placed)
        return self._layers[key][1]

    def rules(self, problem: Problem) -> Rules:
        return Rules(problem.model, problem.constraints, self.field(problem.devices))

    def clash(self, problem: Problem) -> Clash | None:
        """Rules that contradict each other, whatever the devices hold."""
        field, kept = self.field(problem.devices), self.kept(problem)
        return first_clash(problem.constraints, field, self.rules(problem), kept, problem.model.layer_count)

    def kept(self, problem: Problem) -> NDArray[np.intp]:
        """Devices that some layer may be on, memory left out of account."""
        model, devices, rules = problem.model, problem.devices, problem.constraints
        key = self._kept_key(problem)
        if key not in self._kept:
            _, removed = filter_devices(model, devices, rules)
            gone = {name for name, rule in removed if rule != "memory"}
            index = [place for place, device in enumerate(devices) if device.id not in gone]
            self._kept[key] = devices, np.array(index, dtype=np.intp), removed
        return self._kept[key][1]

    def removed(self, problem: Problem) -> list[tuple[str, str]]:
        """Devices that take no part, as :func:`gpurt.placement.grouping.filter_devices` tells it."""
        self.kept(problem)
        return self._kept[self._kept_key(problem)][2]

    @staticmethod
    def _kept_key(problem: Problem) -> tuple[object, ...]:
        model, rules = problem.model, problem.constraints
        layers = {id(layer): layer for layer in model.layers}.values()
        asked = frozenset((each.dtype, each.operations, each.largest_tensor_bytes) for each in layers)
        return id(problem.devices), model.backends, model.dtype, asked, rules.exclude_devices, rules.exclude_nodes

    def links(self, problem: Problem) -> LinkMatrix:
        """Between the devices that take part."""
        _, devices, topology, _ = problem
        kept = self.kept(problem)
        key = id(topology), id(devices), kept.tobytes()
        if key not in self._links:
            chosen = [devices[index] for index in integers(kept)]
            inside = topology.within(chosen) if len(chosen) < len(devices) else topology
            self._links[key] = (topology, devices), inside.dense(chosen)
        return self._links[key][1]

    def parts(self, problem: Problem) -> list[Together]:
        """Sets of kept devices that reach each other."""
        model, devices, topology, rules = problem
        kept = self.kept(problem)
        if rules.max_link_seconds is None and self._always_connected(topology):
            return [Together(kept, None, None)] if len(kept) else []
        groups = max(self.rules(problem).sizes) > 1
        key = id(topology), id(devices), kept.tobytes(), rules.max_link_seconds, rules.workload.batch, groups
        if key not in self._parts:
            field = self.field(devices)
            found = together(model, self.links(problem), rules, field.cell[kept], groups=groups)
            self._parts[key] = (
                (topology, devices),
                [Together(kept[part.members], part.onward, part.back) for part in found],
            )
        return self._parts[key][1]

    def _always_connected(self, topology: Topology) -> bool:
        if id(topology) not in self._connected:
            self._connected[id(topology)] = topology, always_connected(topology)
        return self._connected[id(topology)][1]

    def _holding(self, problem: Problem) -> Holding | None:
        """None where every device that takes part may hold every layer."""
        model, devices, _, rules = problem
        layers = {id(layer): layer for layer in model.layers}.values()
        if not rules.pins and len({(each.dtype, each.operations, each.largest_tensor_bytes) for each in layers}) == 1:
            return None
        key = id(model), id(devices), rules.pins
        if key not in self._holdings:
            self._holdings[key] = (model, devices), Holding(model, rules, devices)
        return self._holdings[key][1]

    def _counted(self, problem: Problem, more_bytes: int | Ints, *, lay: bool = True) -> tuple[bool | None, bool]:
        """The verdict of counting, and whether a search may know more."""
        field, layers, rules = self.field(problem.devices), self.layers(problem), self.rules(problem)
        if self.clash(problem) is not None:
            return False, False
        budgets = field.raw + more_bytes
        rule = problem.constraints
        free = rule.max_link_seconds is None and not rule.same_backend and self._always_connected(problem.topology)
        # Whatever reaches what: all devices together must do.
        if not free and count_layers(field, layers, rules, self.kept(problem), budgets).high < layers.count:
            return False, False
        unknown = False
        for part in _large_enough(self.parts(problem), budgets, layers.least):
            answer = self._of_part(problem, rules, part, budgets, lay=lay)
            if answer:
                return True, False
            unknown |= answer is None
        return (None, True) if unknown else (False, False)

    def devices_that_do(self, problem: Problem) -> list[PlacementDevice] | None:
        """Some devices on which there is a plan that keeps the rules of number, where counting knows them."""
        field, layers, rules = self.field(problem.devices), self.layers(problem), self.rules(problem)
        for part in self.parts(problem):
            for chosen in self._by_backend(problem, field, part.members):
                bound = count_layers(field, layers, rules, chosen, field.raw)
                if bound.low >= layers.count and bound.devices and part.direct and layers.uniform:
                    return [problem.devices[index] for index in bound.devices]
        return None

    def laid(self, problem: Problem) -> list[tuple[tuple[PlacementDevice, ...], int]] | None:
        """A plan that keeps the rules, laid down without a look at its time: of each stage its devices, and the layer
        before which it ends."""
        field, layers, rules = self.field(problem.devices), self.layers(problem), self.rules(problem)
        holding = self._holding(problem) or Holding(problem.model, problem.constraints, problem.devices)
        for part in self.parts(problem):
            for chosen in self._by_backend(problem, field, part.members):
                layout = Layer(field, layers, rules, holding, chosen, field.raw, part).laid()
                if layout is not None:
                    return [(tuple(problem.devices[at] for at in integers(members)), end) for members, end in layout]
        return None

    def ask_joined(self, problem: Problem, names: Sequence[str]) -> bool | None:
        """Whether there is a plan on the devices named and all that each of them reaches, if they all reached each
        other directly."""
        place = self.field(problem.devices).place
        wanted = {place[name] for name in names}
        parts = [part for part in self.parts(problem) if wanted & set(integers(part.members))]
        members = np.sort(np.concatenate([part.members for part in parts]))
        budgets = self.field(problem.devices).raw
        answer = self._of_part(problem, self.rules(problem), Together(members, None, None), budgets, lay=True)
        return None if answer and not all(part.direct for part in parts) else answer

    def _of_part(self, problem: Problem, rules: Rules, part: Together, budgets: Ints, *, lay: bool) -> bool | None:
        """The verdict of counting for the devices of one part."""
        field, layers = self.field(problem.devices), self.layers(problem)
        unknown = False
        for chosen in self._by_backend(problem, field, part.members):
            if not bytes_suffice(layers, rules, chosen, budgets):
                continue
            bound = count_layers(field, layers, rules, chosen, budgets)
            if bound.high < layers.count:
                continue
            holding = self._holding(problem)
            here = holding is None or bool(holding.holds[chosen].all() and holding.takes[chosen].all())
            if here and layers.uniform and part.direct and bound.low >= layers.count:
                return True
            holding = holding or Holding(problem.model, problem.constraints, problem.devices)
            if not here and not room_for_every_kind(field, layers, rules, holding, chosen, budgets):
                continue
            unknown = True
            # Where nothing but numbers matters, counting knows already what can be laid out.
            known = here and layers.uniform and part.direct and len(chosen) > FEW
            if lay and not known and Layer(field, layers, rules, holding, chosen, budgets, part).laid():
                return True
        return None if unknown else False

    @staticmethod
    def _by_backend(problem: Problem, field: Field, members: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        if not problem.constraints.same_backend:
            return [members]
        names: dict[str, list[int]] = {}
        for index in integers(members):
            names.setdefault(field.devices[index].backend, []).append(index)
        return [np.array(found, dtype=np.intp) for found in names.values()]

    def _searched(self, problem: Problem, more_bytes: int | Ints, *, engine: bool) -> bool | None:
        model, devices, topology, rules = problem
        field = self.field(devices)
        sets = (chosen for part in self.parts(problem) for chosen in self._by_backend(problem, field, part.members))

        def clock() -> Clock:
            return Clock(max(0.01, min(self.search, self.deadline - monotonic())), self.over)

        return search_plan(model, topology, rules, field, sets, more_bytes, clock, engine=engine)


def _large_enough(parts: list[Together], budgets: Ints, need: int) -> list[Together]:
    """Those whose devices have so many bytes together: of a thousand devices on their own, no one has to be asked."""
    if not parts:
        return []
    sizes = np.array([len(part.members) for part in parts], dtype=np.intp)
    room = np.maximum(budgets[np.concatenate([part.members for part in parts])], 0)
    held = np.add.reduceat(room, np.cumsum(sizes) - sizes)
    return [part for part, size in zip(parts, integers(held), strict=True) if size >= need]


def with_devices(devices: Sequence[PlacementDevice], like: PlacementDevice, count: int) -> tuple[PlacementDevice, ...]:
    """With so many more, each on a node of its own in the zone of ``like``."""
    taken = {device.id for device in devices} | {device.node for device in devices}
    new: list[PlacementDevice] = []
    number = 0
    while len(new) < count:
        number += 1
        name = f"new-{number}"
        if name not in taken:
            new.append(like.model_copy(update={"id": name, "node": name, "memory_pool_id": None, "resident": ()}))
    return (*devices, *new)


__all__ = ["Feasibility", "Problem", "with_bytes", "with_devices"]
