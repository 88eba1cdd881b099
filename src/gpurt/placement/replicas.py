"""Several pipelines of one model on disjoint devices.

One after the other, each on what the former ones left, gives the first replica the best and the last one the rest. So
the devices are also divided into shares of equal capacity, and each share is solved on its own; of all divisions tried,
the best is the answer. Few devices are divided in every way there is, so that a refusal is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Final

from gpurt.placement.aside import aside
from gpurt.placement.clock import Clock
from gpurt.placement.constraints import Constraints, ObjectiveKind
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InfeasiblePlacement, InvalidPlacementInput, PlacementCancelled, PlacementTimeout
from gpurt.placement.incumbent import PROVEN_GAP
from gpurt.placement.inputs import check_inputs, check_search, check_types
from gpurt.placement.neighbourhood import limits_there
from gpurt.placement.plan import Plan
from gpurt.placement.replicated import ReplicatedPlan, alone, replicated_value, validate_replicas
from gpurt.placement.shares import Block, blocks_of, divisions
from gpurt.placement.solver import DEFAULT_BUDGET, ConstraintSatisfactionPlacement, objective_kind
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology

_DIVISIONS: Final = 4096
"""Ways to divide the devices up to which all are tried."""


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

    Blocks for up to ``time_budget`` seconds; touches no event loop. ``bound`` is what the best single pipeline says of
    all; it is reached where there are enough equal devices.

    Raises: as :meth:`ConstraintSatisfactionPlacement.solve_placement`. InfeasiblePlacement is certain here, too: where
    divisions are too many to try all, PlacementTimeout says that none was found.
    """
    topology = Topology() if topology is None else topology
    constraints = Constraints() if constraints is None else constraints
    kind = objective_kind(objective)
    check_search(time_budget, target_gap, seed)
    check_types(model, devices, topology, constraints)
    check_inputs(model, devices, topology, constraints)
    domain = constraints.replica_domain
    if domain is not None and all(device.domain(domain) is None for device in devices):
        raise InvalidPlacementInput(f"no device has a domain {domain!r}", field="constraints.replica_domain")
    devices = sorted(devices, key=lambda device: device.id)
    search = _Search(model, topology, constraints, kind, Clock(time_budget, cancelled), target_gap, seed)
    found = search.run(devices)
    validate_replicas(model, devices, topology, constraints, found)
    return found


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


class _Search:
    def __init__(
        self,
        model: ModelSpec,
        topology: Topology,
        constraints: Constraints,
        kind: ObjectiveKind,
        clock: Clock,
        target_gap: float,
        seed: int,
    ) -> None:
        self.model = model
        self.topology = topology
        self.constraints = constraints
        self.kind = kind
        self.clock = clock
        self.target_gap = target_gap
        self.seed = seed
        self.solver = ConstraintSatisfactionPlacement()
        self.nodes: dict[str, set[str]] = {}
        """Devices of each node."""
        self.solved: dict[frozenset[str], Plan | None] = {}
        """By the devices of a share; None: certainly none."""

    def run(self, devices: Sequence[PlacementDevice]) -> ReplicatedPlan:
        count, clock = self.constraints.replicas, self.clock
        for device in devices:
            self.nodes.setdefault(device.node, set()).add(device.id)
        blocks = blocks_of(devices, self.constraints.replica_domain)
        if len(blocks) < count:
            kind = self.constraints.replica_domain or "device"
            raise InfeasiblePlacement(f"{count} replicas, and {len(blocks)} of {kind}", constraint="replicas")
        # What one pipeline may use at best. Where there is none, the refusal says why.
        rules = alone(self.constraints)
        first = self.solver.solve_placement(
            self.model, devices, self.topology, rules, objective=self.kind, time_budget=clock.left * 0.3,
            target_gap=self.target_gap, seed=self.seed, cancelled=clock.cancelled,
        )  # fmt: skip
        bound = first.bound
        if bound is not None and self.kind is ObjectiveKind.THROUGHPUT:
            bound /= count
        best: tuple[float, list[Plan]] | None = None
        certain = count ** (len(blocks) - 1) <= _DIVISIONS
        tries = [self._one_by_one(blocks), *(self._shares(shares) for shares in divisions(blocks, count))]
        for place, attempt in enumerate(tries):
            if clock.over():
                break
            plans = attempt(clock.left / (len(tries) - place) * (0.8 if certain else 1.0))
            if plans is not None:
                value = replicated_value(self.kind, plans)
                if best is None or value < best[0]:
                    best = value, plans
            if best is not None and bound is not None and best[0] - bound <= self.target_gap * best[0]:
                break
        if best is None and certain:
            best = self._every_division(blocks)
        if best is None:
            if clock.cancelled():
                raise PlacementCancelled("cancelled before there was a plan for every replica")
            raise PlacementTimeout(f"no plan for {count} replicas, and no proof that there is none")
        value, plans = best
        return ReplicatedPlan(
            plans=tuple(plans), objective=self.kind, value=value, bound=None if bound is None else min(bound, value)
        )

    def _solve(self, share: Sequence[PlacementDevice], seconds: float) -> Plan | None:
        """A plan on these devices alone; None where there is none, or none in time."""
        key = frozenset(device.id for device in share)
        if key in self.solved:
            return self.solved[key]
        rules = self._rules(share)
        if rules is None:
            self.solved[key] = None
            return None
        try:
            plan = self.solver.solve_placement(
                self.model, share, self.topology.within(share), rules, objective=self.kind,
                time_budget=max(0.01, seconds), target_gap=self.target_gap, seed=self.seed,
                cancelled=self.clock.cancelled,
            )  # fmt: skip
        except (InfeasiblePlacement, InvalidPlacementInput):
            # All inputs together are valid: what contradicts itself on a share alone (pins that name one device of it
            # by turns) only says that there is no plan on that share.
            plan = None
        except (PlacementTimeout, PlacementCancelled):
            return None
        self.solved[key] = plan
        return plan

    def _rules(self, share: Sequence[PlacementDevice]) -> Constraints | None:
        """The rules as far as they speak of these devices; None where a pin names none of them."""
        rules = self.constraints
        ids, nodes = {device.id for device in share}, {device.node for device in share}
        pins = [pin.model_copy(update={"devices": pin.devices & ids, "nodes": pin.nodes & nodes}) for pin in rules.pins]
        if any(not pin.devices and not pin.nodes for pin in pins):
            return None
        return alone(rules).model_copy(
            update={
                "pins": tuple(pins),
                "exclude_devices": rules.exclude_devices & ids,
                "exclude_nodes": rules.exclude_nodes & nodes,
                "require_devices": rules.require_devices & ids,
                # A node that is divided may be used by another share.
                "require_nodes": frozenset(name for name in rules.require_nodes & nodes if self.nodes[name] <= ids),
                "stage_layers": tuple(entry for entry in rules.stage_layers if entry.device in ids),
                "domain_limits": limits_there(rules, share),
            }
        )

    def _one_by_one(self, blocks: Sequence[Block]) -> Callable[[float], list[Plan] | None]:
        """Each replica on what the former ones left; what is required is asked of all shares at the end."""

        def attempt(seconds: float) -> list[Plan] | None:
            left = list(blocks)
            plans: list[Plan] = []
            for number in range(self.constraints.replicas):
                if self.clock.over():
                    return None
                share = [device for block in left for device in block]
                plan = self._solve(share, seconds / self.constraints.replicas)
                if plan is None:
                    return None
                used = set(plan.devices)
                mine = [block for block in left if any(device.id in used for device in block)]
                left = [block for block in left if block not in mine]
                plans.append(plan)
                if len(left) < self.constraints.replicas - number - 1:
                    return None
            return plans if self._required(plans) else None

        return attempt

    def _shares(self, shares: Sequence[Sequence[PlacementDevice]]) -> Callable[[float], list[Plan] | None]:
        def attempt(seconds: float) -> list[Plan] | None:
            plans: list[Plan] = []
            for share in shares:
                if self.clock.over():
                    return None
                plan = self._solve(share, seconds / len(shares))
                if plan is None:
                    return None
                plans.append(plan)
            return plans if self._required(plans) else None

        return attempt

    def _required(self, plans: Sequence[Plan]) -> bool:
        used = {name for plan in plans for name in plan.devices}
        nodes = {stage.node for plan in plans for stage in plan.stages}
        return self.constraints.require_devices <= used and self.constraints.require_nodes <= nodes

    def _every_division(self, blocks: Sequence[Block]) -> tuple[float, list[Plan]] | None:
        """The best of all divisions. Raises :class:`InfeasiblePlacement` where none does and all were tried."""
        count = self.constraints.replicas
        best: tuple[float, list[Plan]] | None = None
        known = True
        for owner in product(range(count), repeat=len(blocks) - 1):
            if self.clock.over():
                return best
            # Replicas are alike: the first block is in the first one.
            shares = [
                [device for block, mine in zip(blocks, (0, *owner), strict=True) if mine == number for device in block]
                for number in range(count)
            ]
            if not all(shares):
                continue
            plans: list[Plan] = []
            for share in shares:
                if self.clock.over():
                    return best
                plan = self._solve(share, self.clock.left)
                if plan is None:
                    known &= frozenset(device.id for device in share) in self.solved
                    break
                plans.append(plan)
            else:
                if not self._required(plans):
                    known = False
                    continue
                value = replicated_value(self.kind, plans)
                if best is None or value < best[0]:
                    best = value, plans
        if best is None and known:
            raise InfeasiblePlacement(
                f"one replica has a plan, and no division of the devices gives one to each of {count}",
                constraint="replicas",
            )
        return best
