"""The exact stage where positions matter: a constraint programme solved by OR-Tools CP-SAT.

A circuit through the used units, with a depot between last and first; each unit has a start and a number of layers, and
an optional table says which pairs of both it may have and what they cost. Used for pins, unlike layers and movement,
where the integer programme of arcs cannot say what a stage costs.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

import numpy as np

from gpurt.placement.exact_highs import ExactResult
from gpurt.placement.instance import Instance
from gpurt.placement.relaxation import Step

_SCALE: Final = 1 << 30
"""Costs as integers: a share of the upper limit of the objective."""
PAIR_LIMIT: Final = 60_000
"""Stages (unit, start, number) up to which the programme is tried."""


def cpsat_available() -> bool:
    return importlib.util.find_spec("ortools") is not None


def stage_count(instance: Instance) -> int:
    """How many stages there are to choose from."""
    cost = instance.cost
    places = instance.layers if instance.movable else 1
    inner = int(np.isfinite(cost.inner).sum()) * places
    return inner + int(np.isfinite(cost.first).sum() + np.isfinite(cost.last).sum() + np.isfinite(cost.whole).sum())


def solve_cpsat(
    instance: Instance,
    best: float,
    start: Sequence[Step] | None,
    *,
    deadline: float,
    stop: Callable[[], bool],
    gap: float,
) -> ExactResult:
    """As :func:`gpurt.placement.exact_highs.solve_highs`, for plans of any number of stages."""
    cp_model: Any = importlib.import_module("ortools.sat.python.cp_model")

    layers = instance.layers
    copies = _copies(instance)
    nodes = [(unit, copy) for unit in range(instance.size) for copy in range(copies[unit])]
    model: Any = cp_model.CpModel()
    upper = best if np.isfinite(best) else _ceiling(instance)
    scale = _SCALE / upper if upper > 0 else 1.0

    def price(value: float) -> int:
        return int(value * scale)

    terms: list[Any] = []
    used: list[Any] = []
    begins: list[Any] = []
    ends: list[Any] = []
    for place, (unit, _) in enumerate(nodes):
        use = model.new_bool_var(f"use{place}")
        begin = model.new_int_var(0, layers - 1, f"begin{place}")
        end = model.new_int_var(0, layers, f"end{place}")
        value = model.new_int_var(0, _SCALE * 2, f"value{place}")
        table = _stages(instance, unit)
        rows = [(1, s, e, price(v)) for s, e, v in table if price(v) <= _SCALE]
        # Unused is a row as any other: tables that hold only under a condition make the solver abort.
        model.add_allowed_assignments([use, begin, end, value], [(0, 0, 0, 0), *rows])
        used.append(use)
        begins.append(begin)
        ends.append(end)
        terms.append(value)
    arcs: list[tuple[int, int, Any]] = []
    firsts: list[Any] = []
    lasts: list[Any] = []
    depot = len(nodes)
    for place in range(len(nodes)):
        arcs.append((place, place, ~used[place]))
        first, last = model.new_bool_var(f"first{place}"), model.new_bool_var(f"last{place}")
        firsts.append(first)
        lasts.append(last)
        arcs += [(depot, place, first), (place, depot, last)]
        model.add(begins[place] == 0).only_enforce_if(first)
        model.add(ends[place] == layers).only_enforce_if(last)
    kinds = sorted(set(instance.boundary[1:layers].tolist())) if layers > 1 else [0]
    for one, (u, _) in enumerate(nodes):
        for other, (v, _) in enumerate(nodes):
            if one == other:
                continue
            hops = instance.hop[:, u, v]
            if not np.isfinite(hops).any():
                continue
            arc = model.new_bool_var(f"arc{one}_{other}")
            arcs.append((one, other, arc))
            model.add(begins[other] == ends[one]).only_enforce_if(arc)
            if len(kinds) == 1:
                terms.append(arc * price(float(hops[kinds[0]])))
            else:
                way = model.new_int_var(0, _SCALE * 2, f"way{one}_{other}")
                rows = [
                    (1, at, price(float(hops[instance.boundary[at]])))
                    for at in range(1, layers)
                    if np.isfinite(hops[instance.boundary[at]])
                ]
                model.add_allowed_assignments([arc, ends[one], way], [*((0, at, 0) for at in range(layers + 1)), *rows])
                terms.append(way)
            back = instance.back[v, u]
            both = model.new_bool_var(f"back{one}_{other}")
            # From other (last) back to one (first).
            model.add_bool_or(~firsts[one], ~lasts[other], both)
            if np.isfinite(back):
                terms.append(both * price(float(back)))
            else:
                model.add(both == 0)
    model.add_circuit(arcs)
    for row, limit in zip(instance.rows.T, instance.limits, strict=True):
        takes = [(place, int(row[unit])) for place, (unit, _) in enumerate(nodes) if row[unit]]
        if takes:
            model.add(sum(used[place] * take for place, take in takes) <= int(limit))
        elif limit < 0:
            return ExactResult(None, np.inf, True)
    _node_rules(instance, model, nodes, used)
    for place, (unit, copy) in enumerate(nodes):
        if copy:
            # Copies are alike: the earlier one is used first.
            model.add_implication(used[place], used[place - 1])
            model.add(begins[place] > begins[place - 1]).only_enforce_if(used[place])
        if start is None:
            continue
        chosen = sorted((step for step in start if step.unit == unit), key=lambda step: step.start)
        model.add_hint(used[place], int(copy < len(chosen)))
        if copy < len(chosen):
            model.add_hint(begins[place], chosen[copy].start)
            model.add_hint(ends[place], chosen[copy].end)
    model.minimize(sum(terms))
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, deadline - monotonic())
    solver.parameters.num_workers = 2
    solver.parameters.relative_gap_limit = gap / 4

    def watch_bound(_: float) -> None:
        if stop():
            solver.stop_search()

    class Watch(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            if stop():
                self.stop_search()

    solver.best_bound_callback = watch_bound
    status = solver.solve(model, Watch())
    if status == cp_model.INFEASIBLE:
        return ExactResult(None, best if np.isfinite(best) else np.inf, True)
    # Every term was rounded down, so that the bound needs no correction.
    bound = max(0.0, solver.best_objective_bound / scale * (1 - 1e-12))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ExactResult(None, bound, False)
    order = sorted(
        (place for place in range(len(nodes)) if solver.value(used[place])), key=lambda p: solver.value(begins[p])
    )
    return ExactResult(tuple(nodes[place][0] for place in order), bound, status == cp_model.OPTIMAL)


def _copies(instance: Instance) -> list[int]:
    found: list[int] = []
    for uses in instance.uses:
        takes = uses > 0
        found.append(int((instance.available[takes] // uses[takes]).min()))
    return found


def _stages(instance: Instance, unit: int) -> list[tuple[int, int, float]]:
    """(start, end, cost) of every stage on a unit."""
    layers = instance.layers
    span = instance.cost.inner.shape[2] - 1
    found: list[tuple[int, int, float]] = []
    for begin in range(layers):
        for end in range(begin + 1, min(layers, begin + span) + 1):
            value = instance.cost.value(unit, begin, end, layers)
            if np.isfinite(value):
                found.append((begin, end, value))
    return found


def _ceiling(instance: Instance) -> float:
    """No plan costs more."""

    def most(table: np.ndarray) -> float:
        finite = table[np.isfinite(table)]
        return float(finite.max()) if len(finite) else 0.0

    cost = instance.cost
    stage = max(most(cost.inner), most(cost.first), most(cost.last), most(cost.whole))
    return (stage + most(instance.hop)) * instance.layers + most(instance.back) + 1e-9


def _node_rules(instance: Instance, model: Any, nodes: Sequence[tuple[int, int]], used: Sequence[Any]) -> None:
    constraints = instance.constraints
    if constraints.max_nodes is None and constraints.min_nodes <= 1:
        return
    open_: list[Any] = []
    for node in sorted(set(instance.node.tolist())):
        flag = model.new_bool_var(f"node{node}")
        mine = [used[place] for place, (unit, _) in enumerate(nodes) if instance.node[unit] == node]
        model.add_max_equality(flag, mine)
        open_.append(flag)
    if constraints.max_nodes is not None:
        model.add(sum(open_) <= constraints.max_nodes)
    model.add(sum(open_) >= constraints.min_nodes)
