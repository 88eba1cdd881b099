"""Changes of constraints and of links: what to give up, and how much of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gpurt.placement.changes import changed
from gpurt.placement.constraints import Constraints
from gpurt.placement.feasibility import Feasibility, Problem
from gpurt.placement.field import integers
from gpurt.placement.infeasibility import ConstraintKind, Relaxation, RelaxationKind
from gpurt.placement.least import least_steps
from gpurt.placement.rule_words import layers_words, pin_words
from gpurt.placement.words import counted, listed, time_words

_NUMBERS = (
    ("max_stages", RelaxationKind.MAX_STAGES, 1),
    ("max_nodes", RelaxationKind.MAX_NODES, 1),
    ("min_stages", RelaxationKind.MIN_STAGES, -1),
    ("min_nodes", RelaxationKind.MIN_NODES, -1),
)


_Finder = tuple[RelaxationKind, Callable[[], Relaxation | None]]


class RuleRelaxations:
    """``search``: what counting leaves open is searched. ``kinds``: constraints that may be given up."""

    def __init__(
        self, problem: Problem, feasibility: Feasibility, *, search: bool, kinds: frozenset[ConstraintKind]
    ) -> None:
        self.problem, self.feasibility, self.search, self.kinds = problem, feasibility, search, kinds
        self._one_is_enough = self._largest_is_enough = False
        """Of what is required, not to require one; of what is excluded, to include the largest."""

    def all(self) -> Iterator[_Finder]:
        """Each finds one relaxation, or none."""
        given, rules = self.problem.constraints, self._possible()
        for name, kind, sign in _NUMBERS:
            if getattr(rules, name) is not None:
                yield kind, lambda name=name, kind=kind, sign=sign: self._number(name, kind, sign)
        for index in range(len(rules.domain_limits)):
            yield RelaxationKind.DOMAIN_LIMIT, lambda index=index: self._domain(index)
        for index in range(len(rules.pins)):
            yield RelaxationKind.DROP_PIN, lambda index=index: self._drop_pin(index)
        required = sorted(rules.require_devices | rules.require_nodes)
        for name in required:
            yield RelaxationKind.REQUIRE, lambda name=name: self._not_required((name,))
        if len(required) > 1:
            yield RelaxationKind.REQUIRE, lambda: None if self._one_is_enough else self._not_required(required)
        for name in sorted({entry.device for entry in rules.stage_layers}):
            change = f"allow any number of layers on {name}"
            yield (
                RelaxationKind.STAGE_LAYERS,
                lambda name=name, change=change: self._one(RelaxationKind.STAGE_LAYERS, (name,), change),
            )
        if rules.same_backend:
            change = "let stages use different backends"
            yield RelaxationKind.SAME_BACKEND, lambda: self._one(RelaxationKind.SAME_BACKEND, (), change)
        if rules.tensor_parallel_max is not None:
            yield RelaxationKind.TENSOR_PARALLEL_MAX, self._tensor_parallel
        if given.exclude_devices or given.exclude_nodes:
            yield RelaxationKind.INCLUDE, self._include
        if ConstraintKind.LINKS in self.kinds and len(self.feasibility.parts(self._any_speed())) > 1:
            yield RelaxationKind.CONNECT, self._connect
        if rules.max_link_seconds is not None:
            yield RelaxationKind.MAX_LINK_SECONDS, self._link_seconds

    def others(self) -> Iterator[_Finder]:
        """Further ones, which matter less."""
        for index in range(len(self._possible().pins)):
            yield RelaxationKind.WIDEN_PIN, lambda index=index: self._widen_pin(index)
        names = self._excluded()
        for name in names[1:] if self._largest_is_enough else names:
            yield RelaxationKind.INCLUDE, lambda name=name: self._included((name,))

    def _possible(self) -> Constraints:
        """Only the constraints that may be given up."""
        given = self.problem.constraints
        return Constraints().model_copy(
            update={kind.value: getattr(given, kind.value) for kind in self.kinds if hasattr(given, kind.value)}
        )

    def _least(self, build: Callable[[int], Relaxation], most: int, *, guess: int = 1) -> Relaxation | None:
        """``build(steps)``; the one with fewest steps that does."""
        least = least_steps(
            self.feasibility,
            lambda steps, search: self.feasibility.ask(changed(build(steps), self.problem), search=search),
            most,
            search=self.search,
            guess=guess,
        )
        if least is None:
            return None
        less = build(least.steps - 1).amount if least.steps > 1 else None
        return build(least.steps).model_copy(update={"less": less, "minimal": least.minimal})

    def _one(
        self, kind: RelaxationKind, names: Sequence[str], change: str, index: int | None = None
    ) -> Relaxation | None:
        """A change that there is only as a whole."""
        return self._least(
            lambda steps: Relaxation(kind=kind, change=change, names=tuple(names), index=index, minimal=True), 1
        )

    def _number(self, name: str, kind: RelaxationKind, sign: int) -> Relaxation | None:
        before = int(getattr(self.problem.constraints, name))
        top = self.problem.model.layer_count if sign > 0 else 1
        return self._least(
            lambda steps: Relaxation(
                kind=kind,
                change=f"set {name} to {before + sign * steps:,} instead of {before:,}",
                amount=before + sign * steps,
                before=before,
                step=1,
                minimal=True,
            ),
            abs(top - before) if (top - before) * sign > 0 else 0,
        )

    def _domain(self, index: int) -> Relaxation | None:
        limit = self.problem.constraints.domain_limits[index]
        return self._least(
            lambda steps: Relaxation(
                kind=RelaxationKind.DOMAIN_LIMIT,
                change=f"allow {counted(limit.stages + steps, 'stage')} per {limit.domain} instead of {limit.stages}",
                amount=limit.stages + steps,
                before=limit.stages,
                step=1,
                index=index,
                minimal=True,
            ),
            max(0, self.problem.model.layer_count - limit.stages),
        )

    def _drop_pin(self, index: int) -> Relaxation | None:
        pin = self.problem.constraints.pins[index]
        return self._one(RelaxationKind.DROP_PIN, (), f"drop {pin_words(pin)}", index)

    def _widen_pin(self, index: int) -> Relaxation | None:
        """The largest other devices, as few as will do."""
        problem, feasibility = self.problem, self.feasibility
        pin = problem.constraints.pins[index]
        field = feasibility.field(problem.devices)
        kept = feasibility.kept(problem)
        order = integers(kept[np.argsort(-field.raw[kept], kind="stable")])
        others = [
            device.id
            for device in (problem.devices[place] for place in order)
            if device.id not in pin.devices and device.node not in pin.nodes
        ][: pin.end - pin.start]
        return self._least(
            lambda steps: Relaxation(
                kind=RelaxationKind.WIDEN_PIN,
                change=f"let {layers_words(pin.start, pin.end)} lie on {listed(others[:steps])} as well",
                amount=steps,
                before=0,
                step=1,
                names=tuple(others[:steps]),
                index=index,
                minimal=True,
            ),
            len(others),
        )

    def _not_required(self, names: Sequence[str]) -> Relaxation | None:
        found = self._one(RelaxationKind.REQUIRE, names, f"no longer require {listed(names)}")
        self._one_is_enough |= found is not None
        return found

    def _tensor_parallel(self) -> Relaxation | None:
        before = self.problem.constraints.tensor_parallel_max
        sizes = [size for size in self.problem.model.tensor_parallel if before is not None and size > before]
        return self._least(
            lambda steps: Relaxation(
                kind=RelaxationKind.TENSOR_PARALLEL_MAX,
                change=f"allow tensor-parallel groups of {sizes[steps - 1]} devices instead of {before}",
                amount=sizes[steps - 1],
                before=before,
                minimal=True,
            ),
            len(sizes),
        )

    def _excluded(self) -> list[str]:
        """Devices and nodes, those with most memory first."""
        rules, devices = self.problem.constraints, self.problem.devices
        room: dict[str, int] = dict.fromkeys(rules.exclude_devices | rules.exclude_nodes, 0)
        for device in devices:
            for name in {device.id, device.node} & room.keys():
                room[name] += device.budget_bytes
        return sorted(room, key=lambda name: (-room[name], name))

    def _include(self) -> Relaxation | None:
        """The largest of what is excluded, as few as will do."""
        names = self._excluded()
        found = self._least(lambda steps: self._with_included(names[:steps]), len(names))
        self._largest_is_enough = found is not None and found.amount == 1
        return found

    def _included(self, names: Sequence[str]) -> Relaxation | None:
        return self._least(lambda _: self._with_included(names), 1)

    @staticmethod
    def _with_included(names: Sequence[str]) -> Relaxation:
        return Relaxation(
            kind=RelaxationKind.INCLUDE,
            change=f"no longer exclude {listed(names)}",
            amount=len(names),
            before=0,
            step=1,
            names=tuple(names),
            minimal=True,
        )

    def _any_speed(self) -> Problem:
        rules = self.problem.constraints.model_copy(update={"max_link_seconds": None})
        return self.problem._replace(constraints=rules)

    def _connect(self) -> Relaxation | None:
        """The sets of devices with most room, as few as will do."""
        problem, feasibility = self._any_speed(), self.feasibility
        field = feasibility.field(problem.devices)
        layers = feasibility.layers(problem)
        fit = layers.fit(field.raw)
        parts = sorted(feasibility.parts(problem), key=lambda part: -int(fit[part.members].sum()))
        names = [problem.devices[int(part.members[field.raw[part.members].argmax()])].id for part in parts[:64]]

        def build(steps: int) -> Relaxation:
            return Relaxation(
                kind=RelaxationKind.CONNECT,
                change=f"connect {listed(names[: steps + 1])}, with all that each of them reaches",
                amount=steps + 1,
                before=1,
                step=1,
                names=tuple(names[: steps + 1]),
                minimal=True,
            )

        def ask(steps: int, search: bool) -> bool | None:
            answer = feasibility.ask_joined(problem, names[: steps + 1])
            # The limit of hand-overs counts for the new ways as well.
            if answer is False or (answer and self.problem.constraints.max_link_seconds is None):
                return answer
            return feasibility.ask(changed(build(steps), self.problem)) if search else None

        least = least_steps(feasibility, ask, len(names) - 1, search=self.search)
        if least is None:
            return None
        less = least.steps if least.steps > 1 else None
        return build(least.steps).model_copy(update={"less": less, "minimal": least.minimal})

    def _link_seconds(self) -> Relaxation | None:
        problem, feasibility = self.problem, self.feasibility
        before = problem.constraints.max_link_seconds
        assert before is not None
        links = feasibility.links(problem)
        batch = problem.constraints.workload.batch
        payloads = {layer.activation_bytes_per_token * batch for layer in problem.model.layers[:-1]} or {0}
        seconds = np.unique(np.concatenate([links.seconds(payload).ravel() for payload in payloads]))
        values = seconds[np.isfinite(seconds) & (seconds > before)]
        return self._least(
            lambda steps: Relaxation(
                kind=RelaxationKind.MAX_LINK_SECONDS,
                change=f"allow {time_words(float(values[steps - 1]))} for a hand-over instead of {time_words(before)}",
                amount=float(values[steps - 1]),
                before=before,
                minimal=True,
            ),
            len(values),
        )
