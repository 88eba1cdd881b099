"""The entry: a plan for a model on devices, as good as the time allows, checked before anybody sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from gpurt.placement.among_few import among_few
from gpurt.placement.aside import aside
from gpurt.placement.assembly import assemble
from gpurt.placement.bottleneck import least_bottleneck, least_sum
from gpurt.placement.building import build_instance
from gpurt.placement.clock import Clock
from gpurt.placement.constraints import Constraints, ObjectiveKind, Workload
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.diagnosis import counted_out, refusal
from gpurt.placement.engine import Engine
from gpurt.placement.errors import InvalidPlacementInput, PlacementCancelled, PlacementTimeout
from gpurt.placement.feasibility import Problem
from gpurt.placement.incumbent import PROVEN_GAP, Found
from gpurt.placement.inputs import check_inputs, check_search, check_types
from gpurt.placement.instance import Instance
from gpurt.placement.plan import Plan
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology
from gpurt.placement.validation import validate_plan

DEFAULT_BUDGET: Final = 10.0
"""Seconds; a plan that is proved sooner is returned sooner."""
_FIRST_TRY: Final = 0.9
"""Share of the time for the search among all devices where there are rules that may leave room for few plans."""


class ConstraintSatisfactionPlacement:
    """Places the layers of a model on devices: no rule is ever broken, and the objective is as low as time allows.

    ::

        plan = ConstraintSatisfactionPlacement().solve_placement(model=model, devices=devices, topology=topology)
        plan = await ConstraintSatisfactionPlacement().solve_placement_async(model, devices, topology)
    """

    def solve_placement(
        self,
        model: ModelSpec,
        devices: Sequence[PlacementDevice],
        topology: Topology | None = None,
        constraints: Constraints | None = None,
        *,
        objective: ObjectiveKind | str = ObjectiveKind.LATENCY,
        time_budget: float = DEFAULT_BUDGET,
        target_gap: float = PROVEN_GAP,
        seed: int = 0,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Plan:
        """A plan. Blocks for up to ``time_budget`` seconds; touches no event loop.

        Returns as soon as the plan is proved to be within ``target_gap`` of the best. The same inputs and seed give the
        same plan, unless the time ends before the search does.

        Raises: InvalidPlacementInput, InfeasiblePlacement (certain), PlacementTimeout (no plan and no proof in time),
        PlacementCancelled (``cancelled()`` became true before there was a plan).
        """
        topology = Topology() if topology is None else topology
        constraints = Constraints() if constraints is None else constraints
        kind = objective_kind(objective)
        check_search(time_budget, target_gap, seed, cancelled)
        check_types(model, devices, topology, constraints)
        if constraints.replicas > 1:
            raise InvalidPlacementInput("one pipeline is solved here: see solve_replicas", field="constraints.replicas")
        clock = Clock(time_budget, cancelled)
        check_inputs(model, devices, topology, constraints)
        # The order in which devices are given must not decide between equal plans.
        devices = sorted(devices, key=lambda device: device.id)
        problem = Problem(model, tuple(devices), topology, constraints)
        refused = counted_out(problem, seconds=_reporting(clock), cancelled=cancelled)
        if refused is not None:
            raise refused
        best: tuple[Instance, Found] | None = None
        bound = np.inf
        parts = _parts(model, devices, constraints)
        ruled = constraints.model_copy(update={"workload": Workload()}) != Constraints()
        for place, part in enumerate(parts):
            if cancelled():
                break
            first = (_FIRST_TRY if ruled else 1.0) * clock.left
            share = clock.part(max(0.01, first / (len(parts) - place)))
            instance = build_instance(model, part, topology, constraints)
            found = _solve(instance, kind, share, seed=seed, target_gap=target_gap)
            if not instance.complete:
                found = replace(found, bound=0.0)
            bound = min(bound, found.bound)
            if found.steps is not None and (best is None or found.value < best[1].value):
                best = instance, found
        if best is None and not np.isinf(bound) and not cancelled():
            best = among_few(
                problem, kind, clock, lambda few, time: _solve(few, kind, time, seed=seed, target_gap=target_gap)
            )
        if best is None:
            if cancelled():
                raise PlacementCancelled("cancelled before there was a plan")
            if np.isinf(bound):
                raise refusal(problem, seconds=_reporting(clock), cancelled=cancelled)
            raise PlacementTimeout(
                f"no plan and no proof that there is none in {time_budget:g} s",
                hint="a longer time_budget may find one, as may fewer or wider rules",
            )
        instance, found = best
        assert found.steps is not None
        plan = assemble(
            instance,
            found.steps,
            objective=kind,
            bound=bound if bound > 0 else None,
            target_gap=target_gap,
            proven_gap=PROVEN_GAP,
            solver="+".join(found.engines) + (f", bound by {found.proof}" if found.proof else ""),
            solve_seconds=clock.spent,
            seed=seed,
        )
        validate_plan(model, devices, topology, constraints, plan)
        return plan

    async def solve_placement_async(
        self,
        model: ModelSpec,
        devices: Sequence[PlacementDevice],
        topology: Topology | None = None,
        constraints: Constraints | None = None,
        *,
        objective: ObjectiveKind | str = ObjectiveKind.LATENCY,
        time_budget: float = DEFAULT_BUDGET,
        target_gap: float = PROVEN_GAP,
        seed: int = 0,
    ) -> Plan:
        """:meth:`solve_placement` on a thread of its own. When cancelled it returns at once, the thread soon."""
        return await aside(
            lambda cancelled: self.solve_placement(
                model,
                devices,
                topology,
                constraints,
                objective=objective,
                time_budget=time_budget,
                target_gap=target_gap,
                seed=seed,
                cancelled=cancelled,
            )
        )


def _reporting(clock: Clock) -> float:
    """Seconds for searches behind the report on what cannot be done."""
    return min(2.0, max(0.1, clock.left))


def objective_kind(objective: ObjectiveKind | str) -> ObjectiveKind:
    try:
        return ObjectiveKind(objective)
    except ValueError:
        names = ", ".join(kind.value for kind in ObjectiveKind)
        raise InvalidPlacementInput(f"{objective!r} is none of {names}", field="objective") from None


def _parts(
    model: ModelSpec, devices: Sequence[PlacementDevice], constraints: Constraints
) -> list[list[PlacementDevice]]:
    """Where all stages must use one backend: the devices of each."""
    if not constraints.same_backend:
        return [list(devices)]
    names = sorted({device.backend for device in devices})
    return [[device for device in devices if device.backend == name] for name in names]


def _solve(instance: Instance, kind: ObjectiveKind, clock: Clock, *, seed: int, target_gap: float) -> Found:
    if kind is ObjectiveKind.LATENCY:
        return Engine(instance, clock, seed=seed, target_gap=target_gap).run()
    if kind is ObjectiveKind.THROUGHPUT and instance.constraints.movement_seconds_per_byte > 0:
        return least_sum(instance, instance.movement_only(), clock, seed=seed, target_gap=target_gap)
    if kind is ObjectiveKind.THROUGHPUT:
        return least_bottleneck(instance, clock, seed=seed, target_gap=target_gap)
    return least_sum(instance, instance, clock, seed=seed, target_gap=target_gap)


__all__ = ["DEFAULT_BUDGET", "ConstraintSatisfactionPlacement"]
