"""Several pipelines of one model on disjoint devices.

One after the other, each on what the former ones left, gives the first replica the best and the last one the rest. So
the devices are also divided into shares of equal capacity, and each share is solved on its own; of all divisions tried,
the best is the answer. Few devices are divided in every way there is, so that a refusal is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from gpurt.placement.aside import aside
from gpurt.placement.clock import Clock
from gpurt.placement.constraints import Constraints, ObjectiveKind
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput, PlacementCancelled, PlacementTimeout
from gpurt.placement.feasibility import Problem
from gpurt.placement.incumbent import PROVEN_GAP
from gpurt.placement.inputs import check_inputs, check_search, check_types
from gpurt.placement.replica_refusal import refused
from gpurt.placement.replica_search import CERTAIN, EVERY, ReplicaSearch
from gpurt.placement.replicated import ReplicatedPlan, alone, validate_replicas
from gpurt.placement.shares import blocks_of
from gpurt.placement.solver import DEFAULT_BUDGET, ConstraintSatisfactionPlacement, objective_kind
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology

_FIRST: Final = 0.3
"""Share of the time for the single pipeline that bounds all."""
_LOOKING: Final = 0.8
"""Share of the rest for finding the best division; then its plans are made better."""


def solve_replicas(
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
) -> ReplicatedPlan:
    """``constraints.replicas`` pipelines, none of which uses a device (or failure domain) of another.

    Blocks for up to ``time_budget`` seconds; touches no event loop. What is guaranteed:

    - The replicas are disjoint and each keeps the rules; :func:`validate_replicas` has seen them.
    - The same inputs and seed give the same replicas, as long as no search of a share is ended by the time: which
      divisions of the devices are tried is a matter of counts. Up to 16 ways to divide them are all solved, so that
      ``bound`` tells how good the best division is; of more, 20 at most: each replica on what the former ones left,
      shares of equal memory, and what blocks moved to the slowest replica make of the best.
    - ``bound`` holds for every set of replicas. Where not every division was solved it is what the best single pipeline
      says of all; it is reached where there are enough equal devices.

    Raises: as :meth:`ConstraintSatisfactionPlacement.solve_placement`. InfeasiblePlacement is certain here, too, and
    its report says how many replicas there are plans for (:class:`ReplicaReport`; where even one has none, that of a
    single pipeline): where divisions are too many to try all, PlacementTimeout says that none was found.
    """
    topology = Topology() if topology is None else topology
    constraints = Constraints() if constraints is None else constraints
    kind = objective_kind(objective)
    check_search(time_budget, target_gap, seed, cancelled)
    check_types(model, devices, topology, constraints)
    check_inputs(model, devices, topology, constraints)
    domain = constraints.replica_domain
    if domain is not None and all(device.domain(domain) is None for device in devices):
        raise InvalidPlacementInput(f"no device has a domain {domain!r}", field="constraints.replica_domain")
    devices = sorted(devices, key=lambda device: device.id)
    problem = Problem(model, tuple(devices), topology, constraints)
    found = _solved(problem, kind, Clock(time_budget, cancelled), target_gap, seed)
    validate_replicas(model, devices, topology, constraints, found)
    return found


def _solved(problem: Problem, kind: ObjectiveKind, clock: Clock, target_gap: float, seed: int) -> ReplicatedPlan:
    model, devices, topology, rules = problem
    count = rules.replicas
    # What one pipeline may use at best. Where there is none, the refusal says why.
    first = ConstraintSatisfactionPlacement().solve_placement(
        model, devices, topology, alone(rules), objective=kind, time_budget=clock.left * _FIRST,
        target_gap=target_gap, seed=seed, cancelled=clock.cancelled,
    )  # fmt: skip
    bound = first.bound or 0.0
    if kind is ObjectiveKind.THROUGHPUT:
        bound /= count
    blocks = blocks_of(devices, rules.replica_domain)
    if len(blocks) < count:
        raise refused(problem, blocks, seconds=clock.left)
    looking = Clock(clock.left * _LOOKING, clock.cancelled)
    search = ReplicaSearch(problem, blocks, kind, looking, gap=target_gap, seed=seed)
    search.run(bound)
    if search.best is None and search.ways <= CERTAIN:
        search.clock = clock
        if search.every():
            raise refused(problem, blocks, seconds=clock.left)
    if search.best is None:
        if clock.cancelled():
            raise PlacementCancelled("cancelled before there was a plan for every replica")
        raise PlacementTimeout(
            f"no plan for {count} replicas, and no proof that there is none",
            hint="a longer time_budget may find one, as may fewer replicas",
        )
    search.clock = clock
    best = search.polish(search.best)
    if search.ways <= EVERY:
        bound = max(bound, search.bound())
    return ReplicatedPlan(
        plans=tuple(best.plans), objective=kind, value=best.value, bound=min(bound, best.value) if bound else None
    )


async def solve_replicas_async(
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    topology: Topology | None = None,
    constraints: Constraints | None = None,
    *,
    objective: ObjectiveKind | str = ObjectiveKind.LATENCY,
    time_budget: float = DEFAULT_BUDGET,
    target_gap: float = PROVEN_GAP,
    seed: int = 0,
) -> ReplicatedPlan:
    """:func:`solve_replicas` on a thread of its own. When cancelled it returns at once, the thread soon."""
    return await aside(
        lambda cancelled: solve_replicas(
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
