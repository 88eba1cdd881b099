"""From replicas that cannot be to the report: how many there can be, and the changes with which there are all.

Everything is counted, on divisions of equal memory, and nothing searched: what is told to help does help, and where
counting cannot tell, nothing is promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Final

from gpurt.placement.changes import changed
from gpurt.placement.errors import InfeasiblePlacement, InvalidPlacementInput
from gpurt.placement.feasibility import Feasibility, Problem
from gpurt.placement.grouping import filter_devices
from gpurt.placement.infeasibility import Relaxation, RelaxationKind
from gpurt.placement.inputs import check_inputs
from gpurt.placement.layer_bytes import LayerBytes
from gpurt.placement.replica_report import ReplicaReport
from gpurt.placement.replicated import rules_of_share
from gpurt.placement.shares import Block, blocks_of, divisions
from gpurt.placement.words import counted, size_words

_SECONDS: Final = 2.0
_MIB: Final = 1 << 20
_TOKENS: Final = 256
_MOST_BYTES: Final = 1 << 42
"""On every device more, at most: 4 TiB."""
_MOST_DEVICES: Final = 1024


def refused(problem: Problem, blocks: Sequence[Block], *, seconds: float) -> InfeasiblePlacement:
    """The error with its report. That one replica has a plan, and so many have not, is taken as proved."""
    refusal = _Refusal(problem, blocks, monotonic() + min(_SECONDS, max(0.1, seconds)))
    report = refusal.report()
    first = f"; to make it possible, {report.relaxations[0].change}" if report.relaxations else ""
    return InfeasiblePlacement(report.message + first, constraint="replicas", report=report)


class _Refusal:
    def __init__(self, problem: Problem, blocks: Sequence[Block], deadline: float) -> None:
        self.problem, self.blocks, self.deadline = problem, blocks, deadline
        self.count = problem.constraints.replicas

    def report(self) -> ReplicaReport:
        model, devices, _, rules = self.problem
        kept, _ = filter_devices(model, devices, rules)
        usable = sum(max(device.budget_bytes for device in block) for block in blocks_of(kept, None))
        layers = LayerBytes(model, rules.workload, placed=False)
        need = self.count * (model.weight_bytes + int(layers.kv.sum()))
        most = next((count for count in self._fewer() if self._possible(self._of(replicas=count))), 1)
        apart = rules.replica_domain is not None and self._possible(self._of(replica_domain=None))
        found = [change for find in (self._devices, self._context, self._bytes) if (change := find()) is not None]
        return ReplicaReport(
            model=model.name,
            message=self._message(most),
            replicas=self.count,
            most_replicas=most,
            domain=rules.replica_domain,
            parts=len(self.blocks),
            need_bytes=need,
            usable_bytes=usable,
            short_bytes=max(0, need - usable),
            relaxations=tuple(found),
            without_domain=apart,
            complete=monotonic() < self.deadline,
        )

    def _message(self, most: int) -> str:
        asked = counted(self.count, "replica")
        domain = self.problem.constraints.replica_domain
        if len(self.blocks) < self.count:
            if domain is None:
                parts = counted(len(self.blocks), "separate device")
            else:
                parts = counted(len(self.blocks), "part") + f" of the devices that share no {domain}"
            return f"{asked} are asked for, and there {'is' if len(self.blocks) == 1 else 'are'} {parts} to serve them"
        have = "1 has one" if most == 1 else f"{most:,} have one"
        return f"no division of the devices gives a plan to each of {asked}; {have}"

    def _fewer(self) -> Iterator[int]:
        yield from range(min(self.count - 1, len(self.blocks)), 1, -1)

    def _of(self, **rules: object) -> Problem:
        return self.problem._replace(constraints=self.problem.constraints.model_copy(update=rules))

    def _possible(self, problem: Problem) -> bool:
        """Counting finds a plan for each share of some division."""
        if monotonic() >= self.deadline:
            return False
        try:
            check_inputs(*problem)
        except InvalidPlacementInput:
            return False
        count = problem.constraints.replicas
        blocks = blocks_of(problem.devices, problem.constraints.replica_domain)
        if len(blocks) < count:
            return False
        required = problem.constraints.require_devices or problem.constraints.require_nodes
        if required and count > 1:
            return False  # whose replica uses them is not counted
        nodes: dict[str, set[str]] = {}
        for device in problem.devices:
            nodes.setdefault(device.node, set()).add(device.id)
        return any(
            all(self._has_plan(problem, share, nodes) for share in shares) for shares in divisions(blocks, count)
        )

    def _has_plan(self, problem: Problem, share: Sequence[Block], nodes: dict[str, set[str]]) -> bool:
        devices = tuple(sorted((device for block in share for device in block), key=lambda device: device.id))
        rules = rules_of_share(problem.constraints, devices, nodes)
        if rules is None:
            return False
        alone = Problem(problem.model, devices, problem.topology.within(devices), rules)
        return Feasibility(self.deadline, search=0).ask(alone, search=False) is True

    def _least(self, steps: int, change: Callable[[int], Relaxation]) -> Relaxation | None:
        """The change of fewest steps that does, by halving; None where not even all of them do."""

        def does(number: int) -> bool:
            return self._possible(changed(change(number), self.problem))

        if steps < 1 or not does(steps):
            return None
        low, high = 0, steps
        while high - low > 1 and monotonic() < self.deadline:
            middle = (low + high) // 2
            low, high = (low, middle) if does(middle) else (middle, high)
        return change(high)

    def _devices(self) -> Relaxation | None:
        like = max(self.problem.devices, key=lambda device: (device.budget_bytes, device.id))

        def more(number: int) -> Relaxation:
            return Relaxation(
                kind=RelaxationKind.ADD_DEVICES,
                change=f"add {counted(number, 'device')} like {like.id} ({size_words(like.budget_bytes)} usable)",
                amount=number,
                step=1,
                device=like,
                minimal=False,
            )

        most = 1
        while most < _MOST_DEVICES and not self._possible(changed(more(most), self.problem)):
            most *= 2
            if monotonic() >= self.deadline:
                return None
        return self._least(most, more)

    def _context(self) -> Relaxation | None:
        before = self.problem.constraints.workload.context_tokens
        top = (before - 1) // _TOKENS

        def fewer(steps: int) -> Relaxation:
            amount = (top + 1 - steps) * _TOKENS
            return Relaxation(
                kind=RelaxationKind.CONTEXT_TOKENS,
                change=f"limit the context to {counted(amount, 'token')} instead of {before:,}",
                amount=amount,
                before=before,
                step=_TOKENS,
                minimal=False,
            )

        return self._least(top, fewer)

    def _bytes(self) -> Relaxation | None:
        def more(steps: int) -> Relaxation:
            size = steps * _MIB
            return Relaxation(
                kind=RelaxationKind.BYTES_PER_DEVICE,
                change=f"give every device {size_words(size)} more ({steps:,} MiB)",
                amount=size,
                before=0,
                step=_MIB,
                minimal=False,
            )

        return self._least(_MOST_BYTES // _MIB, more)
