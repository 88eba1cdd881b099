"""Plans that follow the devices: at once where some are lost, after thought where others could serve better."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from threading import Event
from types import TracebackType
from typing import Any, Final, Self

from gpurt.placement.arguments import all_of_kind, check_kind
from gpurt.placement.assembly import objective_value
from gpurt.placement.constraints import Constraints
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InfeasiblePlacement, PlacementError, PlacementTimeout
from gpurt.placement.hysteresis import Hysteresis, RepairPolicy
from gpurt.placement.inputs import check_search
from gpurt.placement.plan import Plan
from gpurt.placement.record import PlacementRecord
from gpurt.placement.repair import Repair
from gpurt.placement.retelling import RepairResult
from gpurt.placement.solver import DEFAULT_BUDGET
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology
from gpurt.placement.version import PlanVersion
from gpurt.runtime.lane import off_loop

_LOG = logging.getLogger(__name__)
_NOTICED: Final = 0.2
"""Share by which a speed or a memory has to change before anything is worked out again: measured values differ by that
much from run to run."""


class ProposedPlan(PlacementRecord):
    """A plan that should be taken instead of the one before, and what that takes."""

    version: PlanVersion
    plan: Plan
    repair: RepairResult


@dataclass(frozen=True, slots=True)
class FailedRepair:
    """There is no plan for the devices that there are now."""

    error: PlacementError


@dataclass(frozen=True, slots=True)
class _End:
    """No proposal comes any more."""

    error: BaseException | None


@dataclass(frozen=True, slots=True)
class _Change:
    devices: tuple[PlacementDevice, ...]
    topology: Topology


class Replanner:
    """Follows the devices with plans of one model.

    ::

        async with Replanner(model, plan, version, constraints) as replanner:
            replanner.change(devices, topology)      # whenever they changed; the newest counts
            async for proposed in replanner:
                ...

    Where devices of the plan are lost, a plan with least movement comes at once. Then a full plan is sought in the
    background. It is proposed, as is a better use of devices that came or changed their speed, where the gain pays for
    the loading, has lasted, and is not the next of many (:class:`RepairPolicy`, :class:`Hysteresis`). Each proposal
    counts as taken: the next starts from it, with the version that follows. A change while the full plan is sought ends
    that search.

    Nothing blocks the loop: plans are worked out on threads. Bound to the loop on entering, not before.

    Args:
        plan: the one that is in use, of ``version``.
        clock: seconds that do not go back; ``sleep`` waits for them.
    """

    def __init__(
        self,
        model: ModelSpec,
        plan: Plan,
        version: PlanVersion,
        constraints: Constraints | None = None,
        *,
        policy: RepairPolicy | None = None,
        time_budget: float = DEFAULT_BUDGET,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        check_kind(plan, Plan, "plan")
        check_kind(model, ModelSpec, "model")
        check_kind(version, PlanVersion, "version")
        check_kind(constraints, Constraints, "constraints", optional=True)
        check_kind(policy, RepairPolicy, "policy", optional=True)
        check_search(time_budget, 0.0, seed)
        self.model = model
        self.plan = plan
        self.version = version
        self.constraints = constraints or Constraints()
        self.policy = policy or RepairPolicy()
        self.time_budget = time_budget
        self.seed = seed
        self._clock = clock
        self._sleep = sleep
        self._hysteresis = Hysteresis(self.policy)
        self._latest: _Change | None = None
        self.thinking = False
        """A change is still being thought about; what comes of it is in the plan or among the proposals."""
        self._changed = asyncio.Event()
        self._proposals: asyncio.Queue[ProposedPlan | FailedRepair | _End] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None

    def change(self, devices: Sequence[PlacementDevice], topology: Topology | None = None) -> None:
        """What there is now. Returns at once; nothing happens where it is what there was, but for noise.

        A changed topology is one that is another object: give the same one as long as its links are the same.

        Raises: InvalidPlacementInput, where these are no devices or no topology.
        """
        found = all_of_kind(devices, PlacementDevice, "devices")
        check_kind(topology, Topology, "topology", optional=True)
        now = _Change(found, topology or (self._latest.topology if self._latest else Topology()))
        if self._latest is None or _differs(self._latest, now) or self._breaks(now.devices):
            self._latest = now
            self.thinking = self._worker is None or not self._worker.done()
            self._changed.set()

    async def __aenter__(self) -> Self:
        if self._worker is not None:
            raise PlacementError("a replanner is entered once", hint="make another one")
        self._worker = asyncio.create_task(self._run(), name="gpurt:replanner")
        self._worker.add_done_callback(self._end)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[ProposedPlan | FailedRepair]:
        """Proposals in the order of their versions, until the replanner is left. Each goes to one of those who iterate;
        the end, or the error that was the end, to all of them."""
        while not isinstance(item := await self._proposals.get(), _End):
            yield item
        self._proposals.put_nowait(item)
        if item.error is not None:
            raise item.error

    def _end(self, worker: asyncio.Task[None]) -> None:
        self.thinking = False
        self._proposals.put_nowait(_End(None if worker.cancelled() else worker.exception()))

    async def _run(self) -> None:
        while True:
            self.thinking = self._changed.is_set()
            await self._changed.wait()
            self._changed.clear()
            assert self._latest is not None
            try:
                better = await self._at_once(self._latest)
            except PlacementError as error:
                self._proposals.put_nowait(FailedRepair(error))
                continue
            await self._unless_changed(self._later(self._latest, better))

    async def _unless_changed(self, work: Coroutine[Any, Any, None]) -> None:
        """To its end, or until there is something newer."""
        rest = asyncio.ensure_future(work)
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({rest, changed}, return_when=asyncio.FIRST_COMPLETED)
            if rest.done():
                rest.result()
        finally:
            rest.cancel()
            changed.cancel()
            await asyncio.gather(rest, changed, return_exceptions=True)

    async def _at_once(self, change: _Change) -> RepairResult | None:
        """Replace what cannot stay. Else: a better use of the devices near the plan, where there is one."""
        stop = Event()

        def work() -> tuple[RepairResult | None, RepairResult | None]:
            repair = self._repair(change, stop)
            stays = repair.unchanged()
            return stays, repair.replaced(self.time_budget) if stays is None else repair.improved(stays)

        try:
            stays, other = await off_loop("repair", work)
        finally:
            stop.set()
        if stays is None:
            assert other is not None
            self._hysteresis.forced()
            self._propose(other)
            return None
        self.plan = stays.plan
        # A gain is seen from now on, whatever the search for a full plan takes; a change without one breaks its run.
        self._hysteresis.wait(other is not None, self._clock())
        return other

    async def _later(self, change: _Change, better: RepairResult | None) -> None:
        """The best of what pays, once it has paid for long enough."""
        repair = await off_loop("repair", lambda: self._repair(change))
        options = [better] if better is not None else []
        try:
            plan = await repair.rethought(self.time_budget)
        except (InfeasiblePlacement, PlacementTimeout) as error:
            _LOG.debug("no full plan of %s for %d devices: %s", self.model.name, len(change.devices), error)
        else:
            full = await off_loop("repair", lambda: repair.told(plan))
            before = objective_value(self.plan.objective, self.plan.predicted)
            if full.changed and self.policy.pays(before, full.value, full.load_seconds):
                options.append(full)
        if not options:
            self._hysteresis.wait(False, self._clock())
            return
        price = self.policy.seconds_per_byte
        best = min(options, key=lambda option: option.value + price * option.bytes_moved)
        while wait := self._hysteresis.wait(True, self._clock()):
            await self._sleep(wait)
        self._hysteresis.moved(self._clock())
        self._propose(best)

    def _repair(self, change: _Change, stop: Event | None = None) -> Repair:
        return Repair(
            self.plan,
            self.model,
            change.devices,
            change.topology,
            self.constraints,
            policy=self.policy,
            seed=self.seed,
            cancelled=stop.is_set if stop is not None else lambda: False,
        )

    def _propose(self, repair: RepairResult) -> None:
        self.plan, self.version = repair.plan, self.version.next()
        self._proposals.put_nowait(ProposedPlan(version=self.version, plan=repair.plan, repair=repair))

    def _breaks(self, devices: Sequence[PlacementDevice]) -> bool:
        """Whether the plan no longer fits: then even a small change counts."""
        budgets = {device.id: device.budget_bytes for device in devices}
        return any(
            held.weights + held.kv + held.activations > budgets.get(held.device, 0)
            for stage in self.plan.stages
            for held in stage.held
        )


def _differs(before: _Change, now: _Change) -> bool:
    if before.topology is not now.topology or len(before.devices) != len(now.devices):
        return True
    known = {device.id: device for device in before.devices}
    return any(device.id not in known or _device_differs(known[device.id], device) for device in now.devices)


def _device_differs(before: PlacementDevice, now: PlacementDevice) -> bool:
    if before == now:
        return False
    for old, new in (
        (before.budget_bytes, now.budget_bytes),
        (before.memory_bandwidth, now.memory_bandwidth),
        (before.compute_flops, now.compute_flops),
    ):
        if abs(new - old) > _NOTICED * max(old, new):
            return True
    return _lasting(before) != _lasting(now)


def _lasting(device: PlacementDevice) -> PlacementDevice:
    """Without what is measured again and again, and without what lies on it."""
    return device.model_copy(
        update={
            "usable_bytes": 0, "reserve_bytes": 0, "overhead_bytes": 0, "memory_bandwidth": 1.0, "compute_flops": 1.0,
            "load_bandwidth": None, "launch_seconds": 0.0, "resident": (), "estimated": frozenset[str](),
        }
    )  # fmt: skip
