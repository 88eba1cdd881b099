"""From a problem without a plan to its report: the first constraint that cannot be kept, the figures, the changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from time import monotonic
from typing import Any, Final

import numpy as np

from gpurt.placement.constraints import Constraints
from gpurt.placement.counting import count_layers
from gpurt.placement.errors import InfeasiblePlacement
from gpurt.placement.feasibility import Feasibility, Problem
from gpurt.placement.field import integers
from gpurt.placement.infeasibility import (
    ConstraintKind,
    DeviceRoom,
    InfeasibilityReport,
    Relaxation,
    RelaxationKind,
)
from gpurt.placement.instance import Ints
from gpurt.placement.left_out import filtered_devices
from gpurt.placement.room_relaxations import RoomRelaxations
from gpurt.placement.rule_relaxations import RuleRelaxations
from gpurt.placement.topology import Topology
from gpurt.placement.words import counted, size_words

Kind = ConstraintKind

_RULES: Final[tuple[tuple[ConstraintKind, tuple[str, ...]], ...]] = (
    (Kind.TENSOR_PARALLEL_MAX, ("tensor_parallel_max",)),
    (Kind.STAGE_LAYERS, ("stage_layers",)),
    (Kind.MAX_STAGES, ("max_stages",)),
    (Kind.MIN_STAGES, ("min_stages",)),
    (Kind.MAX_NODES, ("max_nodes",)),
    (Kind.MIN_NODES, ("min_nodes",)),
    (Kind.DOMAIN_LIMITS, ("domain_limits",)),
    (Kind.SAME_BACKEND, ("same_backend",)),
    (Kind.REQUIRE_DEVICES, ("require_devices",)),
    (Kind.REQUIRE_NODES, ("require_nodes",)),
    (Kind.PINS, ("pins",)),
    (Kind.MAX_LINK_SECONDS, ("max_link_seconds",)),
)
_GIVEN_UP: Final = {
    RelaxationKind.BYTES_PER_DEVICE: Kind.MEMORY,
    RelaxationKind.TENSOR_PARALLEL_MAX: Kind.TENSOR_PARALLEL_MAX,
    RelaxationKind.STAGE_LAYERS: Kind.STAGE_LAYERS,
    RelaxationKind.MAX_STAGES: Kind.MAX_STAGES,
    RelaxationKind.MIN_STAGES: Kind.MIN_STAGES,
    RelaxationKind.MAX_NODES: Kind.MAX_NODES,
    RelaxationKind.MIN_NODES: Kind.MIN_NODES,
    RelaxationKind.DOMAIN_LIMIT: Kind.DOMAIN_LIMITS,
    RelaxationKind.SAME_BACKEND: Kind.SAME_BACKEND,
    RelaxationKind.REQUIRE: Kind.REQUIRE_DEVICES,
    RelaxationKind.DROP_PIN: Kind.PINS,
    RelaxationKind.WIDEN_PIN: Kind.PINS,
    RelaxationKind.CONNECT: Kind.LINKS,
    RelaxationKind.MAX_LINK_SECONDS: Kind.MAX_LINK_SECONDS,
}
_COUNTED: Final = frozenset(
    {
        Kind.DEVICES, Kind.LAYER, Kind.MEMORY, Kind.LAYERS, Kind.ENDS, Kind.TENSOR_PARALLEL_MAX, Kind.STAGE_LAYERS,
        Kind.MAX_STAGES, Kind.MIN_STAGES, Kind.MAX_NODES, Kind.MIN_NODES,
    }
)  # fmt: skip
"""Causes of bytes and numbers: counting tells them at once, and there is no search for what would help."""
_PROMPT: Final = 0.08
"""Seconds from the beginning after which, where such a cause has one change that helps, no more are looked for."""
_FEW: Final = 64
"""Devices up to which there is a search whatever the cause."""


def counted_out(
    problem: Problem, *, seconds: float = 2.0, cancelled: Callable[[], bool] = lambda: False
) -> InfeasiblePlacement | None:
    """The error, with its report, where counting proves within milliseconds that there is no plan."""
    feasibility = _feasibility(seconds, cancelled)
    return _error(_Diagnosis(problem, feasibility, prompt=True).report()) if feasibility.impossible(problem) else None


def refusal(
    problem: Problem, *, seconds: float = 2.0, cancelled: Callable[[], bool] = lambda: False
) -> InfeasiblePlacement:
    """The error for a problem that has no plan, with its report."""
    return _error(_Diagnosis(problem, _feasibility(seconds, cancelled), prompt=True).report())


def diagnose(
    problem: Problem, *, seconds: float = 2.0, cancelled: Callable[[], bool] = lambda: False
) -> InfeasibilityReport:
    """Why a problem has no plan. That it has none is taken as proved.

    ``seconds`` are for everything. What the solver raises for causes of bytes and numbers is told within a tenth of a
    second, where there are many devices with the changes that were found until then; here, every change is tried.
    """
    return _Diagnosis(problem, _feasibility(seconds, cancelled), prompt=False).report()


def _feasibility(seconds: float, cancelled: Callable[[], bool]) -> Feasibility:
    return Feasibility(monotonic() + seconds, search=min(0.5, seconds / 4), cancelled=cancelled)


def _error(report: InfeasibilityReport) -> InfeasiblePlacement:
    first = f"; possible with {report.relaxations[0].change}" if report.relaxations else ""
    return InfeasiblePlacement(report.message + first, constraint=report.constraint.value, report=report)


class _Diagnosis:
    def __init__(self, problem: Problem, feasibility: Feasibility, *, prompt: bool) -> None:
        self.problem, self.feasibility, self.prompt = problem, feasibility, prompt
        self.field = feasibility.field(problem.devices)
        self.layers = feasibility.layers(problem)
        self.kept = feasibility.kept(problem)
        self.search = len(self.kept) <= _FEW

    def report(self) -> InfeasibilityReport:
        problem, layers, field = self.problem, self.layers, self.field
        kind = self._cause()
        filtered = filtered_devices(problem, self.feasibility, links=self.search or kind not in _COUNTED)
        gone = {device.device for device in filtered}
        taking = [index for index in integers(self.kept) if problem.devices[index].id not in gone]
        room = field.raw[np.array(taking, dtype=np.intp)].clip(0)
        held = layers.fit(room)
        stranded = room - layers.need(1)[held]
        usable, need = int(room.sum()), layers.total
        # Under the rules of number, every link taken as there.
        placeable = self.feasibility.bound(problem).high if len(self.kept) else 0
        relaxations, complete = self._relaxations(kind)
        largest = int((layers.weights + layers.kv + layers.workspace).max())
        conflicts = tuple(dict.fromkeys(_GIVEN_UP[each.kind] for each in relaxations if each.kind in _GIVEN_UP))
        report = InfeasibilityReport(
            model=problem.model.name,
            constraint=kind,
            conflicts=tuple(sorted(conflicts, key=list(Kind).index)),
            message="",
            need_bytes=need,
            usable_bytes=usable,
            short_bytes=max(0, need - usable),
            layers=layers.count,
            placeable_layers=placeable,
            short_layers=layers.count - placeable,
            stranded_bytes=int(stranded.sum()),
            largest_layer_bytes=largest,
            largest_device_bytes=int(field.raw[self.kept].clip(0).max()) if len(self.kept) else 0,
            filtered=filtered,
            devices=tuple(
                DeviceRoom.model_construct(
                    device=problem.devices[index].id, usable_bytes=size, layers=number, stranded_bytes=rest
                )
                for index, size, number, rest in zip(
                    taking, integers(room), integers(held), integers(stranded), strict=True
                )
            ),
            relaxations=relaxations,
            complete=complete,
        )
        return report.model_copy(update={"message": _message(report, problem.constraints)})

    def _cause(self) -> ConstraintKind:
        """The first that cannot be kept together with all before it."""
        if not len(self.kept):
            return Kind.DEVICES
        found = self._of_bytes()
        if found is not None:
            return found
        last = Kind.CAPABILITY
        doubtful: ConstraintKind | None = None
        for kind, problem in self._growing():
            answer = self.feasibility.ask(problem, search=self.search)
            if answer is False:
                return doubtful or kind
            doubtful = (doubtful or kind) if answer is None else None
            last = kind
        return doubtful or last

    def _of_bytes(self) -> ConstraintKind | None:
        layers, field, kept = self.layers, self.field, self.kept
        bare = self._with(Constraints(workload=self.problem.constraints.workload))
        rules = self.feasibility.rules(bare)
        budgets = field.raw
        if not self._largest_layer_fits(rules.sizes):
            return Kind.LAYER
        counts_ends = count_layers(field, layers, rules, kept, budgets).high < layers.count
        usable = self._shared_once(budgets[kept].clip(0))
        if usable < int(layers.weights.sum() + layers.kv.sum()) + layers.both:
            return Kind.MEMORY
        if not counts_ends:
            return None
        inner = count_layers(field, layers, rules, kept, budgets, part=(False, False)).high
        return Kind.LAYERS if inner < layers.count else Kind.ENDS

    def _shared_once(self, room: Ints) -> int:
        total = int(room.sum())
        place = {index: position for position, index in enumerate(integers(self.kept))}
        for pool in self.field.pools:
            sizes = [int(room[place[index]]) for index in pool if index in place]
            total -= sum(sizes) - max(sizes, default=0)
        return total

    def _largest_layer_fits(self, sizes: Sequence[int]) -> bool:
        layers, field, kept = self.layers, self.field, self.kept
        order = kept[np.lexsort((-field.raw[kept], field.cell[kept]))]
        cell = field.cell[order]
        for size in sizes:
            need = int((-(-layers.weights // size) + -(-layers.kv // size) + layers.workspace).max())
            if size == 1:
                fits = bool((field.raw[kept] >= need).any())
            else:
                last = order[size - 1 :][cell[size - 1 :] == cell[: len(cell) - size + 1]]
                fits = bool((field.raw[last] >= need).any())
            if fits:
                return True
        return False

    def _with(self, rules: Constraints, topology: Topology | None = None) -> Problem:
        """With these rules, the exclusions of the problem, and links between all unless a topology is given."""
        own = self.problem.constraints
        rules = rules.model_copy(update={"exclude_devices": own.exclude_devices, "exclude_nodes": own.exclude_nodes})
        return self.problem._replace(constraints=rules, topology=topology or Topology())

    def _growing(self) -> Iterator[tuple[ConstraintKind, Problem]]:
        """The problem with one constraint after the other, each with all before it."""
        own = self.problem.constraints
        update: dict[str, Any] = {"workload": own.workload}
        plain = Constraints()
        yield Kind.CAPABILITY, self._with(plain.model_copy(update=update))
        for kind, names in _RULES:
            if kind is Kind.MAX_LINK_SECONDS:
                yield Kind.LINKS, self._with(plain.model_copy(update=update), self.problem.topology)
            given = {name: getattr(own, name) for name in names}
            if all(value == getattr(plain, name) for name, value in given.items()):
                continue
            update |= given
            topology = self.problem.topology if kind is Kind.MAX_LINK_SECONDS else None
            yield kind, self._with(plain.model_copy(update=update), topology)

    def _relaxations(self, kind: ConstraintKind) -> tuple[tuple[Relaxation, ...], bool]:
        search = self.search or kind not in _COUNTED
        # What comes after the cause cannot help: already without it there is no plan.
        upto = frozenset(list(Kind)[: list(Kind).index(kind) + 1])
        rules = RuleRelaxations(self.problem, self.feasibility, search=search, kinds=upto)
        room = RoomRelaxations(self.problem, self.feasibility, search=search)
        found: list[Relaxation] = []
        complete = True
        for find in chain(rules.all(), room.all()):
            if self.feasibility.over():
                complete = False
                break
            relaxation = find()
            if relaxation is not None:
                found.append(relaxation)
                if self.prompt and not search:
                    self.feasibility.hurry(_PROMPT)
        # What gives up the cause itself comes first.
        found.sort(key=lambda each: _GIVEN_UP.get(each.kind) is not kind)
        return tuple(found), complete


def _message(report: InfeasibilityReport, rules: Constraints) -> str:
    kind = report.constraint
    short = f"{report.placeable_layers:,} of {counted(report.layers, 'layer')} find room"
    stranded = f", since whole layers leave {size_words(report.stranded_bytes)} unused"
    if kind is Kind.DEVICES:
        return f"none of {counted(len(report.filtered), 'device')} can take part"
    if kind is Kind.LAYER:
        return (
            f"the largest layer takes {size_words(report.largest_layer_bytes)} and the largest device has "
            f"{size_words(report.largest_device_bytes)}"
        )
    if kind is Kind.MEMORY:
        return (
            f"{size_words(report.need_bytes)} are needed and {size_words(report.usable_bytes)} usable, "
            f"{size_words(report.short_bytes)} short; {report.room()}{stranded}"
        )
    if kind is Kind.LAYERS:
        return f"{report.room()}{stranded}"
    if kind is Kind.ENDS:
        return f"{short} beside the embedding and the head"
    if kind is Kind.CAPABILITY:
        return "some layers find no room on the devices that can compute them"
    if kind is Kind.LINKS:
        return "the devices that reach each other do not hold it"
    value = getattr(rules, kind.value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            f"with {kind.value} {value:g} only {short}"
            if report.short_layers
            else f"{kind.value} {value:g} cannot be kept"
        )
    if kind is Kind.DOMAIN_LIMITS:
        limits = ", ".join(f"{counted(limit.stages, 'stage')} per {limit.domain}" for limit in rules.domain_limits)
        return f"with at most {limits} only {short}"
    others = f"{kind.value.replace('_', ' ')} cannot be kept together with the other constraints"
    return f"{others}; {short}" if report.short_layers else others
