"""A plan for the devices that there are now, as near to the former plan as can be.

Three searches, each wider than the one before, until one has a plan that is good enough:

1. what survives stays where it is; what is lost goes to its neighbours and to spare devices, first with hardly any
   other movement, then with more of it;
2. the solver on the same devices, for a moment, and again for longer;
3. the solver on all devices: what it does not place cannot be placed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from gpurt.placement.arguments import check_kind
from gpurt.placement.constraints import Constraints, ObjectiveKind
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.equal_devices import at_home
from gpurt.placement.errors import InfeasiblePlacement, InvalidPlacementInput, PlacementTimeout
from gpurt.placement.grouping import classes_of, filter_devices
from gpurt.placement.holdings import Holdings, whole_bytes
from gpurt.placement.hysteresis import RepairPolicy
from gpurt.placement.inputs import check_inputs, check_search, check_types
from gpurt.placement.neighbourhood import neighbourhood, present_constraints
from gpurt.placement.plan import Plan
from gpurt.placement.plan_form import check_form
from gpurt.placement.repair_search import Candidate, RepairSearch, with_placed
from gpurt.placement.retelling import RepairMethod, RepairResult, Teller
from gpurt.placement.solver import DEFAULT_BUDGET, ConstraintSatisfactionPlacement
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology

_STAY: Final = 1.0
"""Price of moving one layer, as a share of the whole objective: hardly anything moves that need not."""
_SHIFT: Final = 0.004
"""The same, where up to a dozen more layers move for 5 % of the objective."""
_FAR: Final = _SHIFT / 4
"""The same, where those are no good: every layer may move."""
_SLACK: Final = 2
"""Layers that may move besides the lost ones at first: so narrow a search is the fastest."""
_FEW: Final = 5
"""Survivors up to which their order is given up, too: of more, the search cannot see enough."""
_SLOWEST: Final = (1.0, 1.25, 1.6, 2.5, np.inf)
"""Where the slowest stage counts: how much slower it may get, one after the other."""
_LOOKS: Final = (0.08, 0.4, 1.6)
"""Seconds for the solver on the neighbourhood, one after the other. The first, with all before it, is below a quarter
of a second. Movement has no price: with one, every device is unlike every other, and little is found in the time."""
_CERTAIN: Final = 1.5
"""Times the tolerance that a plan may be slower than a bound, which nothing beats. What was promised may be beaten."""
_SKIPPED: Final = 2
"""Survivors in a row that may be left out where nothing is lost and a change has to pay."""


def repair_placement(
    plan: Plan,
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    topology: Topology | None = None,
    constraints: Constraints | None = None,
    *,
    policy: RepairPolicy | None = None,
    time_budget: float = DEFAULT_BUDGET,
    seed: int = 0,
    cancelled: Callable[[], bool] = lambda: False,
) -> RepairResult:
    """A plan for ``devices``, which are those that there are now, that moves as little as can be.

    Where devices of the plan are lost, or hold less than they did, the layers concerned go elsewhere at once. Where the
    plan still stands (devices have come, or got slower or faster), it is kept unless a change near it pays for its
    loading under ``policy``. The objective is that of ``plan``, and so is the workload where no ``constraints`` are
    given; rules are no part of a plan, and have to be given again. Weights are where the plan put them, and where
    devices say that they are (``PlacementDevice.resident``). Links and rules about what has left are left out.

    Pure and deterministic, as far as no search ends by time. Blocks for tenths of a second; for up to ``time_budget``
    seconds where nothing near the former plan is possible. The plan passes :func:`validate_plan`.

    Raises: InvalidPlacementInput, InvalidPlan (``plan`` contradicts itself), InfeasiblePlacement (nothing is possible,
    and that is certain), PlacementTimeout, PlacementCancelled.
    """
    check_search(time_budget, 0.0, seed, cancelled)
    repair = Repair(plan, model, devices, topology, constraints, policy=policy, seed=seed, cancelled=cancelled)
    stays = repair.unchanged()
    if stays is None:
        return repair.replaced(time_budget)
    return repair.improved(stays) or stays


class Repair:
    """The parts of :func:`repair_placement`, for callers that decide between them."""

    def __init__(
        self,
        plan: Plan,
        model: ModelSpec,
        devices: Sequence[PlacementDevice],
        topology: Topology | None = None,
        constraints: Constraints | None = None,
        *,
        policy: RepairPolicy | None = None,
        seed: int = 0,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        check_kind(plan, Plan, "plan")
        check_types(
            model,
            devices,
            Topology() if topology is None else topology,
            Constraints() if constraints is None else constraints,
        )
        check_kind(policy, RepairPolicy, "policy", optional=True)
        check_search(DEFAULT_BUDGET, 0.0, seed)
        if plan.model != model.name or plan.layer_count != model.layer_count:
            raise InvalidPlacementInput(
                f"it is for {plan.model} with {plan.layer_count} layers, not for {model.name} with {model.layer_count}",
                field="plan",
            )
        check_form(plan)
        # A plan without its workload would count no cache, and fit where it does not.
        constraints = constraints or Constraints(workload=plan.workload)
        self.kind = plan.objective
        self.model = model
        self.devices = sorted(devices, key=lambda device: device.id)
        self.topology = (topology or Topology()).within(self.devices)
        self.rules = present_constraints(constraints, self.devices)
        self.policy = policy or RepairPolicy()
        self.seed = seed
        self.cancelled = cancelled
        check_inputs(model, self.devices, self.topology, self.rules)
        holdings = Holdings(model, plan, self.devices)
        self.teller = Teller(plan, model, self.devices, self.topology, constraints, self.policy, holdings, seed=seed)
        near = neighbourhood(plan, model, self.devices, self.topology, self.rules)
        self.search = RepairSearch(plan, model, near, self.topology, self.rules, holdings, self.kind)
        self.teller.lost = self.search.lost
        # No plan is better with fewer devices than with all: what was proved of the former plan holds.
        self.bound = min(plan.bound or 0.0, self.teller.promised)
        """Seconds of the objective, as far as it is known, that no plan on the devices looked at is below."""
        self.whole = len(near) == len(filter_devices(model, self.devices, self.rules)[0])
        """Nothing is left out of the neighbourhood."""

    def unchanged(self) -> RepairResult | None:
        """The former plan with what it gives now; None where it no longer keeps every rule."""
        found = self.search.unchanged()
        return None if found is None else self._told(found, RepairMethod.UNCHANGED)

    def improved(self, stays: RepairResult) -> RepairResult | None:
        """A plan near the former one that pays for its loading, or None."""
        found = self.search.around(self.policy.seconds_per_byte, skip=_SKIPPED)
        if found is None or not self.policy.pays(stays.value, found.value, 0.0):
            return None
        better = self._told(found, RepairMethod.INCREMENTAL)
        return better if self.policy.pays(stays.value, better.value, better.load_seconds) else None

    async def rethought(self, time_budget: float = DEFAULT_BUDGET) -> Plan:
        """A plan over all devices, in which movement has the policy's price. Its value counts that: see :meth:`told`.

        Raises: as :func:`repair_placement`. A cancelled caller goes on at once.
        """
        placed = self.teller.before.resident()
        return await ConstraintSatisfactionPlacement().solve_placement_async(
            self.model,
            [with_placed(device, self.model, placed.get(device.id)) for device in self.devices],
            self.topology,
            self.rules.model_copy(update={"movement_seconds_per_byte": self.policy.seconds_per_byte}),
            objective=self.kind,
            time_budget=time_budget,
            seed=self.seed,
        )

    def told(self, plan: Plan) -> RepairResult:
        """A plan of :meth:`rethought` under the rules of this repair, with what it takes to come to it."""
        used = [self.teller.by_id[name] for name in plan.devices]
        search = RepairSearch(plan, self.model, used, self.topology, self.rules, self.teller.holdings, self.kind)
        steps = search.steps_of(plan.stages)
        assert steps is not None, "the units of a plan's own devices are among the units of those devices"
        return self.teller.of_steps(search.instance, steps, RepairMethod.FULL)

    def replaced(self, time_budget: float = DEFAULT_BUDGET) -> RepairResult:
        """A plan where the former one cannot stay: of those near the best one known, the one that moves least."""
        share = 1 + self.policy.tolerance
        # Devices being only lost, the best plan is no better than what was promised.
        good = self.teller.promised * share
        found: list[Candidate] = []
        for candidate in self._around():
            found.append(candidate)
            if candidate.value <= good:
                return self._told(candidate, RepairMethod.INCREMENTAL)
        # Where the neighbourhood is everything and holds nothing around the survivors, only the solver's word counts.
        solved: list[Candidate] = []
        settled = False
        if found or not self.whole:
            further = self._further(found)
            # Where spare devices abound, free movement that gains nothing is taken for the end: a proof takes a second,
            # and of 216 such plans among 256 devices none was more than 4 % worse than the best.
            sought = bool(found) and not self.whole and self.kind is not ObjectiveKind.THROUGHPUT
            settled = sought and _no_better(further, found)
            found += further
            settled = settled or self._is_near_best(found, solved) or self._solve_near(found, solved)
        if not found and not settled:
            full = self._full(time_budget, needed=not solved)
            if full is not None and all(full.value <= candidate.value for candidate in solved):
                return full
        limit = share * min(candidate.value for candidate in (*found, *solved))
        best = min(
            (candidate for candidate in (*found, *solved) if candidate.value <= limit),
            key=lambda candidate: (candidate.bytes, candidate.value),
        )
        return self._told(best, RepairMethod.INCREMENTAL if best in found else RepairMethod.WIDER)

    def _around(self) -> Iterator[Candidate]:
        """Plans around the survivors, from the one that moves least on."""
        search, layer = self.search, whole_bytes(self.model)
        price = self.teller.promised / layer
        if self.kind is ObjectiveKind.THROUGHPUT:
            slowest = self.teller.promised * (1 + self.policy.tolerance)
            for factor in _SLOWEST:
                found = search.around(price * _STAY, skip=1, slowest=factor * slowest)
                if found is not None:
                    yield found
            return
        narrow = price * _STAY * layer * (search.lost + _SLACK) + self.teller.promised * 2
        least = search.around(price * _STAY, skip=0, limit=narrow) or search.around(price * _STAY, skip=1)
        limit = np.inf
        if least is not None:
            yield least
            limit = least.value + price * _SHIFT * least.bytes
        shifted = search.around(price * _SHIFT, skip=2, limit=limit)
        if shifted is not None:
            yield shifted

    def _further(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Plans around the survivors that move more; in which these are not in their old order, where there are few."""
        if self.kind is ObjectiveKind.THROUGHPUT:
            return []
        search, price = self.search, self.teller.promised / whole_bytes(self.model) * _FAR
        few = len(search.kept) <= _FEW
        limit = min((candidate.value + price * candidate.bytes for candidate in found), default=np.inf)
        other = search.around(price, skip=_FEW if few else 2, loose=few, limit=limit)
        return [] if other is None else [other]

    def _full(self, time_budget: float, *, needed: bool) -> RepairResult | None:
        """By the solver on all devices. None: not in time, and it is not ``needed``."""
        try:
            return self.teller.of_plan(self._solved(self.devices, self.rules, time_budget), RepairMethod.FULL)
        except PlacementTimeout:
            if needed:
                raise
            return None

    def _solve_near(self, found: Sequence[Candidate], solved: list[Candidate]) -> bool:
        """Add plans of the solver on the neighbourhood to ``solved``. Whether the best one known is good enough: there
        are no more looks then."""
        near, alike = self._bare()
        try:
            rules = present_constraints(self.rules, near)
        except InfeasiblePlacement:
            return False
        for seconds in _LOOKS:
            try:
                plan = self._solved(near, rules, seconds)
            except InfeasiblePlacement:
                return False
            except PlacementTimeout:
                continue
            steps = self.search.steps_of(at_home(plan.stages, alike, self.teller.holdings))
            if steps is not None:
                solved.append(self.search.candidate(steps))
            self.bound = max(self.bound, plan.bound or 0.0)
            if self._is_near_best(found, solved):
                return True
        return False

    def _bare(self) -> tuple[list[PlacementDevice], list[list[str]]]:
        """The neighbourhood with nothing on it, and sets of devices that are equal then."""
        near = [device.model_copy(update={"resident": ()}) for device in self.search.devices]
        groups = classes_of(near, self.topology.dense(near), self.rules)
        return near, [[near[index].id for index in group] for group in groups]

    def _is_near_best(self, found: Sequence[Candidate], solved: Sequence[Candidate]) -> bool:
        """Whether the best plan known is near the bound, or near what was promised of all devices."""
        tolerance = self.policy.tolerance
        least = min((candidate.value for candidate in (*found, *solved)), default=np.inf)
        return least <= max(self.teller.promised * (1 + tolerance), self.bound * (1 + _CERTAIN * tolerance))

    def _solved(self, devices: Sequence[PlacementDevice], rules: Constraints, seconds: float) -> Plan:
        return ConstraintSatisfactionPlacement().solve_placement(
            self.model,
            devices,
            self.topology.within(devices),
            rules,
            objective=self.kind,
            time_budget=seconds,
            target_gap=self.policy.tolerance / 2,
            seed=self.seed,
            cancelled=self.cancelled,
        )

    def _told(self, candidate: Candidate, method: RepairMethod) -> RepairResult:
        return self.teller.of_steps(self.search.instance, candidate.steps, method)


def _no_better(further: Sequence[Candidate], found: Sequence[Candidate]) -> bool:
    least = min(candidate.value for candidate in found)
    return all(candidate.value >= least for candidate in further)
