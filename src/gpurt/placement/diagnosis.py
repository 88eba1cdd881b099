"""From a problem without a plan to its report: the first constraint that cannot be kept, the figures, the changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
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
    MOST_OF_A_KIND,
    ConstraintKind,
    DeviceRoom,
    InfeasibilityReport,
    Relaxation,
    RelaxationKind,
)
from gpurt.placement.instance import Ints
from gpurt.placement.left_out import filtered_devices
from gpurt.placement.refusal_words import refusal_sentence
from gpurt.placement.room_figures import largest_groups, room_figures
from gpurt.placement.room_relaxations import RoomRelaxations
from gpurt.placement.rule_relaxations import RuleRelaxations
from gpurt.placement.topology import Topology

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
    RelaxationKind.DROP_PIN: Kind.PINS,
    RelaxationKind.WIDEN_PIN: Kind.PINS,
    RelaxationKind.CONNECT: Kind.LINKS,
    RelaxationKind.MAX_LINK_SECONDS: Kind.MAX_LINK_SECONDS,
}
_EASE: Final = (
    {RelaxationKind.QUANTISATION},
    {RelaxationKind.CONTEXT_TOKENS, RelaxationKind.BATCH, RelaxationKind.PREFILL_TOKENS},
    {RelaxationKind.CONNECT, RelaxationKind.ADD_DEVICES, RelaxationKind.ADD_DEVICE_OF_SIZE},
    {RelaxationKind.BYTES_PER_DEVICE},
    {RelaxationKind.ADD_DEVICES},
)
"""What is harder than to relax a rule, the easiest first; devices are in the last where one is not enough, or would
have to be larger than any that is there."""
_COUNTED: Final = frozenset(
    {
        Kind.DEVICES, Kind.LAYER, Kind.MEMORY, Kind.LAYERS, Kind.ENDS, Kind.TENSOR_PARALLEL_MAX, Kind.STAGE_LAYERS,
        Kind.MAX_STAGES, Kind.MIN_STAGES, Kind.MAX_NODES, Kind.MIN_NODES,
    }
)  # fmt: skip
"""Causes of bytes and numbers: counting tells them at once, and there is no search for what would help."""
_PROMPT: Final = 0.05
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
    first = f"; to make it possible, {report.relaxations[0].change}" if report.relaxations else ""
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
        kind, upto = self._cause()
        # Rules that contradict each other are told at once: what counting leaves open beside them is not searched.
        clash = self.feasibility.clash(problem)
        search = self.search or (kind not in _COUNTED and clash is None)
        filtered = filtered_devices(problem, self.feasibility, links=search)
        gone = {device.device for device in filtered}
        taking = [index for index in integers(self.kept) if problem.devices[index].id not in gone]
        room = field.raw[np.array(taking, dtype=np.intp)].clip(0)
        held = layers.fit(room)
        stranded = room - layers.need(1)[held]
        usable, need = int(room.sum()), layers.total
        # Every link taken as there.
        figures = room_figures(field, layers, self.feasibility.rules(problem), self.kept)
        helps = clash is None or not clash.lasting
        relaxations, complete = self._relaxations(kind, upto, search=search, room_helps=helps)
        largest = int((layers.weights + layers.kv + layers.workspace).max())
        conflicts = {given for each in relaxations if (given := self._given_up(each)) is not None}
        report = InfeasibilityReport(
            model=problem.model.name,
            constraint=kind,
            conflicts=tuple(sorted(conflicts, key=list(Kind).index)),
            message="",
            need_bytes=need,
            usable_bytes=usable,
            short_bytes=max(0, need - usable),
            layers=layers.count,
            placeable_layers=figures.layers,
            unplaced=figures.unplaced,
            short_layers=layers.count - figures.layers,
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
        sentence = (
            clash.text if clash is not None and kind in clash.kinds else refusal_sentence(report, problem.constraints)
        )
        return report.model_copy(update={"message": sentence})

    def _cause(self) -> tuple[ConstraintKind, ConstraintKind]:
        """The first that cannot be kept together with all before it, and the one with which that is certain."""
        if not len(self.kept):
            return Kind.DEVICES, Kind.DEVICES
        found = self._of_bytes()
        if found is not None:
            return found, found
        last = Kind.CAPABILITY
        doubtful: ConstraintKind | None = None
        for kind, problem in self._growing():
            answer = self.feasibility.ask(problem, search=self.search)
            if answer is False:
                return doubtful or kind, kind
            doubtful = (doubtful or kind) if answer is None else None
            last = kind
        return doubtful or last, last

    def _of_bytes(self) -> ConstraintKind | None:
        layers, field, kept = self.layers, self.field, self.kept
        bare = self._with(Constraints(workload=self.problem.constraints.workload))
        rules = self.feasibility.rules(bare)
        budgets = field.raw
        if not self._largest_layer_fits(rules.sizes):
            return Kind.LAYER
        counts_ends = count_layers(field, layers, rules, kept, budgets).high < layers.count
        usable = self._shared_once(budgets[kept].clip(0))
        if usable < layers.least:
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

    def _largest_layer_fits(self, sizes: tuple[int, ...]) -> bool:
        layers = self.layers
        return any(
            room >= int((-(-layers.weights // size) + -(-layers.kv // size) + layers.workspace).max())
            for size, room in largest_groups(self.field, self.kept, sizes).items()
        )

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

    def _relaxations(
        self, kind: ConstraintKind, upto: ConstraintKind, *, search: bool, room_helps: bool
    ) -> tuple[tuple[Relaxation, ...], bool]:
        # What comes after the cause cannot help: already without it there is no plan.
        kinds = frozenset(list(Kind)[: list(Kind).index(upto) + 1])
        rules = RuleRelaxations(self.problem, self.feasibility, search=search, kinds=kinds)
        room = RoomRelaxations(self.problem, self.feasibility, search=search)
        found: list[Relaxation] = []
        times: Counter[RelaxationKind] = Counter()
        complete = True
        for made, find in chain(rules.all(), room.all() if room_helps else (), rules.others()):
            if times[made] >= MOST_OF_A_KIND:
                continue
            if self.feasibility.over():
                complete = False
                break
            relaxation = find()
            if relaxation is not None:
                found.append(relaxation)
                times[made] += 1
                if self.prompt and not search:
                    self.feasibility.hurry(_PROMPT)
        largest = max((device.budget_bytes for device in self.problem.devices), default=0)
        found.sort(key=lambda each: (_ease(each, largest), self._given_up(each) is not kind))
        return tuple(found), complete

    def _given_up(self, change: Relaxation) -> ConstraintKind | None:
        if change.kind is RelaxationKind.REQUIRE:
            of_devices = self.problem.constraints.require_devices.intersection(change.names)
            return Kind.REQUIRE_DEVICES if of_devices else Kind.REQUIRE_NODES
        return _GIVEN_UP.get(change.kind)


def _ease(change: Relaxation, largest: int) -> int:
    """Rank among the changes: what is a word comes before what has to be bought. ``largest``: bytes of a device."""
    several = change.kind is RelaxationKind.ADD_DEVICES and change.amount != 1
    if several or (change.kind is RelaxationKind.ADD_DEVICE_OF_SIZE and (change.amount or 0) > largest):
        return len(_EASE)
    return next((rank for rank, kinds in enumerate(_EASE, 1) if change.kind in kinds), 0)
