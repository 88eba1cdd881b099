"""Devices divided among replicas: which divisions are tried, and what is known of each share.

All that is counted here are divisions and shares, never seconds: a search of a share that ends by itself gives the same
answer on every machine, and so does the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final, NamedTuple

from gpurt.placement.clock import Clock
from gpurt.placement.constraints import ObjectiveKind
from gpurt.placement.errors import InfeasiblePlacement, InvalidPlacementInput, PlacementCancelled, PlacementTimeout
from gpurt.placement.feasibility import Feasibility, Problem
from gpurt.placement.plan import Plan
from gpurt.placement.replicated import replicated_value, rules_of_share
from gpurt.placement.shares import Block, divisions, moved
from gpurt.placement.solver import ConstraintSatisfactionPlacement

CERTAIN: Final = 4096
"""Ways to divide the devices up to which all are tried before replicas are refused."""
EVERY: Final = 16
"""Ways up to which all are solved, so that the best is the best there is."""
TRIED: Final = 20
"""Divisions that are solved at most where there are more."""
ROUGH: Final = 0.01
"""Gap at which the plan of a share is good enough to compare divisions."""

Shares = Sequence[Sequence[Block]]


class Division(NamedTuple):
    """A plan for each share."""

    value: float
    plans: list[Plan]
    shares: Shares


class ReplicaSearch:
    def __init__(
        self, problem: Problem, blocks: Sequence[Block], kind: ObjectiveKind, clock: Clock, *, gap: float, seed: int
    ) -> None:
        self.problem, self.blocks, self.kind, self.clock = problem, blocks, kind, clock
        self.gap, self.seed = gap, seed
        self.count = problem.constraints.replicas
        self.solver = ConstraintSatisfactionPlacement()
        self.nodes: dict[str, set[str]] = {}
        """Devices of each node."""
        for device in problem.devices:
            self.nodes.setdefault(device.node, set()).add(device.id)
        self.ways = self.count ** (len(blocks) - 1)
        """To divide the blocks; divisions that differ in the order of shares count several times."""
        self.best: Division | None = None
        self._solved: dict[frozenset[str], Plan | None] = {}
        """By the devices of a share; None: certainly none."""
        self._tried: set[frozenset[frozenset[str]]] = set()

    def run(self, bound: float) -> None:
        """Look for the best division, until one is proved to be within the gap of ``bound``."""
        for shares in self._candidates():
            if self.clock.over() or (self.ways > EVERY and len(self._tried) >= TRIED):
                break
            self._offer(shares)
            if self.best is not None and self.best.value - bound <= self.gap * self.best.value:
                break

    def every(self) -> bool:
        """Try every division until one does. Whether it is certain that none does."""
        certain = True
        for shares in self.all_divisions():
            if self.clock.over():
                return False
            self._offer(shares)
            if self.best is not None:
                return False
            certain &= any(map(self._ruled_out, shares))
        return certain

    def bound(self) -> float:
        """No division has a lower value, by the bounds of its shares; 0 where some division was not solved."""
        least = float("inf")
        for shares in self.all_divisions():
            if any(map(self._ruled_out, shares)):
                continue
            plans = [self._solved.get(_names(share)) for share in shares]
            bounds = [0.0 if plan is None else plan.bound or 0.0 for plan in plans]
            if not all(bounds):
                return 0.0
            worth = 1 / sum(1 / each for each in bounds) if self.kind is ObjectiveKind.THROUGHPUT else max(bounds)
            least = min(least, worth)
        return least if least < float("inf") else 0.0

    def polish(self, best: Division) -> Division:
        """The same division, each share solved as closely as is asked for."""
        plans = list(best.plans)
        for number, (plan, share) in enumerate(zip(best.plans, best.shares, strict=True)):
            if plan.gap is not None and plan.gap <= self.gap:
                continue
            if self.clock.over():
                break
            closer = self._solve(share, self.clock.left / (len(plans) - number), self.gap, again=True)
            if closer is not None and closer.value <= plan.value:
                plans[number] = closer
        return Division(replicated_value(self.kind, plans), plans, best.shares)

    def all_divisions(self) -> Iterator[Shares]:
        # Replicas are alike: the first block is in the first one.
        for owner in product(range(self.count), repeat=len(self.blocks) - 1):
            shares: list[list[Block]] = [[] for _ in range(self.count)]
            for block, mine in zip(self.blocks, (0, *owner), strict=True):
                shares[mine].append(block)
            if all(shares):
                yield shares

    def _candidates(self) -> Iterator[Shares]:
        if self.ways <= EVERY:
            yield from self.all_divisions()
            return
        one_by_one = self._one_by_one()
        if one_by_one is not None:
            yield one_by_one
        yield from divisions(self.blocks, self.count)
        while self.best is not None:
            best = self.best
            slow = max(range(self.count), key=lambda number: (best.plans[number].value, -number))
            for shares in moved(best.shares, slow, [set(plan.devices) for plan in best.plans]):
                yield shares
                if self.best is not best:
                    break
            else:
                return

    def _offer(self, shares: Shares) -> None:
        key = frozenset(map(_names, shares))
        if key in self._tried:
            return
        self._tried.add(key)
        if any(self._impossible(share) for share in shares):
            return
        plans: list[Plan] = []
        for number, share in enumerate(shares):
            # Until there is any, the time has to reach for other divisions, too.
            among = 1 if self.best is not None else 2 * (self.count - number)
            plan = None if self.clock.over() else self._solve(share, self.clock.left / among, max(self.gap, ROUGH))
            if plan is None:
                return
            if self._hopeless(plan):
                return
            plans.append(plan)
        if not self._required(plans):
            return
        value = replicated_value(self.kind, plans)
        if self.best is None or value < self.best.value:
            self.best = Division(value, plans, shares)

    def _hopeless(self, plan: Plan) -> bool:
        """No division with this share is better than the best."""
        if self.best is None or self.kind is ObjectiveKind.THROUGHPUT or plan.bound is None or self.ways <= EVERY:
            return False
        return plan.bound >= self.best.value

    def _one_by_one(self) -> Shares | None:
        """Each replica on what the former ones left, in shares of what they use; the last one has the rest."""
        left = list(self.blocks)
        shares: list[list[Block]] = []
        for number in range(self.count - 1):
            plan = None if self.clock.over() else self._solve(left, self.clock.left / (2 * self.count), ROUGH)
            if plan is None:
                return None
            used = set(plan.devices)
            shares.append([block for block in left if any(device.id in used for device in block)])
            left = [block for block in left if not any(device.id in used for device in block)]
            if len(left) < self.count - number - 1:
                return None
        return [*shares, left]

    def _impossible(self, share: Sequence[Block]) -> bool:
        """Counting proves that there is no plan on these blocks."""
        if _names(share) not in self._solved:
            problem = self._of(share)
            # Seconds do not decide: counting is done when it is done.
            if problem is None or Feasibility(float("inf"), search=0).impossible(problem):
                self._solved[_names(share)] = None
        return self._ruled_out(share)

    def _ruled_out(self, share: Sequence[Block]) -> bool:
        """Certainly no plan."""
        return self._solved.get(_names(share), self) is None

    def _solve(self, share: Sequence[Block], seconds: float, gap: float, *, again: bool = False) -> Plan | None:
        """A plan on these blocks alone; None where there is none, or none in time."""
        key = _names(share)
        if key in self._solved and not again:
            return self._solved[key]
        problem = self._of(share)
        if problem is None:
            return None
        try:
            plan = self.solver.solve_placement(
                *problem, objective=self.kind, time_budget=max(0.01, seconds), target_gap=gap, seed=self.seed,
                cancelled=self.clock.cancelled,
            )  # fmt: skip
        except (InfeasiblePlacement, InvalidPlacementInput):
            # All inputs together are valid: what contradicts itself on a share alone (pins that name one device of it
            # by turns) only says that there is no plan on that share.
            plan = None
        except (PlacementTimeout, PlacementCancelled):
            return None
        self._solved[key] = plan
        return plan

    def _of(self, share: Sequence[Block]) -> Problem | None:
        """The problem of a share alone; None where a pin names none of its devices."""
        model, _, topology, _ = self.problem
        devices = sorted((device for block in share for device in block), key=lambda device: device.id)
        rules = rules_of_share(self.problem.constraints, devices, self.nodes)
        return None if rules is None else Problem(model, tuple(devices), topology.within(devices), rules)

    def _required(self, plans: Sequence[Plan]) -> bool:
        used = {name for plan in plans for name in plan.devices}
        nodes = {stage.node for plan in plans for stage in plan.stages}
        rules = self.problem.constraints
        return rules.require_devices <= used and rules.require_nodes <= nodes


def _names(share: Sequence[Block]) -> frozenset[str]:
    return frozenset(device.id for block in share for device in block)
