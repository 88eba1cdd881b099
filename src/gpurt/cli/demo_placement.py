"""The demo's placement: a plan over the workers' devices, committed and loaded, and repaired when a worker is lost."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from gpurt.cli.demo_model import NAME, demo_spec, tensors_of
from gpurt.errors import GPUError, TransferFailed
from gpurt.runtime.lane import off_loop

if TYPE_CHECKING:
    from gpurt.cli.demo_screen import Screen
    from gpurt.cli.demo_worker import WorkerProcess
    from gpurt.cluster.committer import PlacementCommitter
    from gpurt.cluster.view import MasterView
    from gpurt.placement import PlacementDevice, Plan, RepairResult
    from gpurt.placement.constraints import Constraints
    from gpurt.placement.version import PlanVersion

Until = Callable[[Callable[[], bool], str], Awaitable[float]]


class DemoPlacement:
    """
    Args:
        digests: SHA-256 of every tensor as it was written.
        until: waits for something at the master, and fails where it does not come.
    """

    def __init__(
        self,
        view: MasterView,
        committer: PlacementCommitter,
        workers: Mapping[str, WorkerProcess],
        digests: Mapping[str, str],
        screen: Screen,
        until: Until,
    ) -> None:
        from gpurt.placement.version import PlanVersion

        self._view, self._committer, self._workers = view, committer, workers
        self._digests, self._screen, self._until = digests, screen, until
        self._spec, self._version = demo_spec(), PlanVersion(term=1, n=0)
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    async def place(self) -> Plan:
        """Solve, commit, and see the shards on their devices."""
        from gpurt.placement import ConstraintSatisfactionPlacement

        plan = await ConstraintSatisfactionPlacement().solve_placement_async(
            self._spec, self._devices(), None, self._rules(), time_budget=5.0
        )
        gap = "" if plan.gap is None else f", gap {plan.gap:.1%}"
        self._screen.say(
            f"solver: {plan.layer_count} layers in {len(plan.stages)} stages in {plan.solve_seconds * 1e3:.0f} ms, "
            f"{plan.status}{gap}; {'about ' if plan.predicted.estimated else ''}"
            f"{plan.predicted.latency_seconds * 1e3:.1f} ms a token"
        )
        await self._commit(plan)
        return plan

    async def repair(self) -> RepairResult:
        """A plan without the devices that are gone, in which as little moves as can be; committed and loaded."""
        from gpurt.placement import repair_placement

        before, devices, rules = self.plan, self._devices(), self._rules()
        result = await off_loop("repair", lambda: repair_placement(before, self._spec, devices, None, rules))
        self._screen.say(
            f"repair: {result.method} in {result.seconds * 1e3:.0f} ms; {result.layers_lost} layers lost, "
            f"{result.layers_moved} moved, {result.plan.layer_count - result.layers_moved} stay where they are"
        )
        await self._commit(result.plan)
        return result

    def show(self) -> None:
        """Which worker holds which layer, and which layer nobody does."""
        from gpurt.cluster.records import NodeState

        owners: list[str | None] = []
        for stage in self.plan.stages:
            node = self._view.node(stage.node)
            there = node is not None and node.state is NodeState.HEALTHY
            owners += [stage.node if there else None] * stage.layers
        self._screen.layers(owners)

    def _rules(self) -> Constraints:
        from gpurt.placement import Constraints, DomainLimit

        # One stage a node, so that a lost worker costs one part of the model.
        return Constraints(domain_limits=(DomainLimit(domain="node", stages=1),))

    def _devices(self) -> tuple[PlacementDevice, ...]:
        from gpurt.placement import devices_from_view

        snapshot = self._view.snapshot()
        # A worker opens its preferred backend, and loads through it alone.
        opened = {
            (node, key): device
            for (node, key), device in snapshot.available_devices.items()
            if device.backend == snapshot.nodes[node].gpu_backend
        }
        return devices_from_view(opened, reserve=0.0, resident=snapshot.resident)

    async def _commit(self, plan: Plan) -> None:
        self._version = self._version.next()
        self._plan = plan
        devices = self._view.snapshot().devices
        for stage in plan.stages:
            (held,) = stage.held
            device = devices[stage.node, held.device.removeprefix(f"{stage.node}/")].device
            self._screen.say(
                f"  {stage.node} {device.device_id}: layers {stage.start}-{stage.end - 1}, {held.weights >> 20} of "
                f"{held.usable >> 20} MiB"
            )
        began = time.monotonic()
        result = await self._committer.commit(plan, self._version)
        if not result.committed:
            raise GPUError(result.message, operation="demo")
        accepted = sorted(node for node, answer in result.answers.items() if answer.accepted)
        self._screen.say(
            f"plan {self._version} is committed in {(time.monotonic() - began) * 1e3:.0f} ms: "
            f"{', '.join(accepted)} {'accepts' if len(accepted) == 1 else 'accept'}"
        )
        version = self._version
        for stage in plan.stages:
            await self._until(lambda node=stage.node: self._loaded(node, version), f"{stage.node} to load its layers")
            self._check(stage.node, stage.start, stage.end)
        self.show()

    def _loaded(self, node: str, version: PlanVersion) -> bool:
        from gpurt.cluster.shards import ShardState

        record = self._view.node(node)
        shard = None if record is None else record.placement.shard(NAME)
        if shard is not None and shard.version == version and shard.state is ShardState.FAILED:
            raise GPUError(f"{node} could not load its layers: {shard.message}", operation="demo")
        told = self._workers[node].shards
        loaded = shard is not None and shard.version == version and shard.state is ShardState.LOADED
        return loaded and told is not None and told["version"] == str(version)

    def _check(self, node: str, start: int, end: int) -> None:
        told = self._workers[node].shards
        assert told is not None
        wanted = {name: self._digests[name] for name in tensors_of(start, end)}
        if told["sha256"] != wanted:
            wrong = sorted({name for name in wanted if told["sha256"].get(name) != wanted[name]} or told["sha256"])
            raise TransferFailed(f"{node} holds other bytes than were written: {', '.join(wrong)}", operation="demo")
        rate = f", {told['loaded_bytes'] / told['seconds'] / 1e9:.2f} GB/s" if told["loaded_bytes"] else ""
        self._screen.say(
            f"{node} holds layers {start}-{end - 1}: {told['loaded_bytes'] >> 20} MiB loaded{rate}, "
            f"{len(wanted)} tensors read back, SHA-256 equal"
        )
