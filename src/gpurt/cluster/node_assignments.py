"""NodeAssignments: a node's side of placement. It agrees to its part of a plan, has it loaded, and says what it holds.

The worker's application supplies the loading (:class:`ShardLoader`); everything that a master could get wrong, or could
send twice, late or out of order, is settled before it is called.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Protocol

from gpurt.cluster.assignment import Acknowledgement, AssignedDevice, Assignment, Refusal, kept_of
from gpurt.cluster.commands import Assign, Step, Withdraw
from gpurt.cluster.errors import ClusterError, StaleTerm
from gpurt.cluster.promises import Promised
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.shards import MAX_INSTANCES, MAX_MESSAGE, NodePlacement, ResidentLayers, ShardReport, ShardState
from gpurt.placement.version import PlanVersion
from gpurt.types import DeviceState, GPUDevice

_log = logging.getLogger("gpurt.cluster.assignments")


class ShardLoader(Protocol):
    """What a worker's application does about its part of a plan."""

    async def load(self, assignment: Assignment) -> None:
        """Make the node hold what ``assignment`` says of its instance: load what is new, keep what lies there already
        and is in it, and let go of the rest; with no stage in it, of everything.

        Returns once it all lies there. An exception is told to the master in words, and counts as if nothing of the
        instance were left. For one instance there is one call at a time; it is cancelled when a later plan comes, or
        when the node ends.
        """
        ...


@dataclass(slots=True)
class _Instance:
    offered: Assignment | None = None
    active: Assignment | None = None
    master: str | None = None
    """Who has sent that."""
    state: ShardState = ShardState.LOADING
    message: str | None = None
    resident: tuple[ResidentLayers, ...] = ()
    task: asyncio.Task[None] | None = None
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One call of the loader at a time; a cancelled one may take its time."""

    @property
    def released(self) -> bool:
        """Everything has been let go of. An offer that nobody called off may be left."""
        return self.active is not None and not self.active.stages and self.state is ShardState.LOADED


class _Refused(Exception):
    def __init__(self, reason: Refusal, message: str, device: str | None = None, short: int | None = None) -> None:
        super().__init__(message)
        self.reason, self.device, self.short = reason, device, short


class NodeAssignments:
    """
    Args:
        publisher: the node's voice, not started yet: from now on it takes assignments.
    """

    def __init__(self, publisher: NodePublisher) -> None:
        self._publisher = publisher
        self._fence = publisher.fence
        self._loader: ShardLoader | None = None
        self._instances: dict[str, _Instance] = {}
        self._lock = asyncio.Lock()
        self._unloadable: tuple[str, PlanVersion] | None = None
        """Of which plan it was said last that nobody loads here: a master asks again and again."""
        self._announcing: set[asyncio.Task[None]] = set()
        publisher.commands.handle(Assign, self._take, on_stale=self._refuse_stale)
        publisher.commands.handle(Withdraw, self._withdraw, on_stale=self._refuse_stale)

    def use(self, loader: ShardLoader | None) -> None:
        """From now on parts are loaded through ``loader``, also those that could not be loaded before; without one,
        they are refused. Masters are told."""
        self._loader = loader
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # told with whatever is told next
        task = loop.create_task(self._begin_again(), name="gpurt-cluster-loader")
        self._announcing.add(task)
        task.add_done_callback(self._announcing.discard)

    async def _begin_again(self) -> None:
        async with self._lock:
            for held in tuple(self._instances.values()):
                if self._loader is not None and held.active is not None and held.state is ShardState.FAILED:
                    await self._activate(held.active, held.master)
        await self._announce()

    def placement(self) -> NodePlacement:
        """What the node holds now."""
        shards = tuple(
            ShardReport(
                instance=name,
                model=held.active.model,
                version=held.active.version,
                state=held.state,
                plan=held.active.plan,
                master=held.master,
                nodes=held.active.nodes,
                message=held.message,
                resident=held.resident,
            )
            for name, held in sorted(self._instances.items())
            if held.active is not None and not held.released
        )
        return NodePlacement(term=self._fence.term, loader=self._loader is not None, shards=shards)

    def assignment(self, instance: str) -> Assignment | None:
        """The part that the node follows now; None: none."""
        held = self._instances.get(instance)
        return None if held is None else held.active

    async def aclose(self) -> None:
        """Take no more, cancel what is being loaded, and wait for it."""
        self._loader = None
        tasks = [held.task for held in self._instances.values() if held.task is not None]
        tasks += self._announcing
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # The command

    async def _take(self, command: Assign) -> bytes:
        assignment = command.assignment
        async with self._lock:
            try:
                if command.step is Step.ABORT:
                    self._forget_offer(assignment)
                elif command.step is Step.OFFER:
                    await self._agree(assignment)
                else:
                    await self._follow(assignment, command.master)
                acknowledgement = self._accepted(assignment)
            except StaleTerm as exc:
                return self._refuse_stale(exc)
            except _Refused as exc:
                self._say_refused(assignment, exc)
                acknowledgement = Acknowledgement(
                    accepted=False,
                    term=self._fence.term,
                    reason=exc.reason,
                    message=str(exc)[:MAX_MESSAGE],
                    device=exc.device,
                    short_bytes=exc.short,
                )
        return acknowledgement.model_dump_json().encode()

    async def _withdraw(self, command: Withdraw) -> bytes:
        async with self._lock:
            held = self._instances.get(command.instance)
            active = None if held is None else held.active
            if (
                active is not None
                and active.stages
                and (active.version, active.plan) == (command.version, command.plan)
            ):
                _log.warning(
                    "plan %s of %s is withdrawn: another master of term %d has decided on another one of this version",
                    *(command.version, command.instance, command.version.term),
                )
                nothing = active.model_copy(update={"stages": ()})
                try:
                    # From now on this version is of no plan here: the one that was withdrawn is not followed again.
                    await self._promise(nothing, activated=True)
                except StaleTerm as exc:
                    return self._refuse_stale(exc)
                await self._activate(nothing, None)
        return Acknowledgement(accepted=True, term=self._fence.term).model_dump_json().encode()

    def _say_refused(self, assignment: Assignment, refused: _Refused) -> None:
        plan = (assignment.instance, assignment.version)
        if refused.reason is Refusal.NO_LOADER:
            if plan == self._unloadable:
                return
            self._unloadable = plan
        _log.warning("plan %s of %s is refused: %s", assignment.version, assignment.instance, refused)

    def _refuse_stale(self, error: StaleTerm) -> bytes:
        _log.warning("an assignment is refused: %s", error)
        refused = Acknowledgement(
            accepted=False, term=error.latest, reason=Refusal.STALE_TERM, message=error.message[:MAX_MESSAGE]
        )
        return refused.model_dump_json().encode()

    # Inside; the lock is held

    async def _agree(self, assignment: Assignment) -> None:
        """Promise to be offered no earlier plan; nothing happens when this very one was agreed to before."""
        promised = self._fence.promised(assignment.instance)
        if promised is not None:
            self._compare(assignment, promised.offered)
        await self._take_on(assignment)

    async def _follow(self, assignment: Assignment, master: str | None) -> None:
        """Promise to follow no earlier plan, and begin. A later one may have been offered: whether it comes to anything
        is not known here."""
        promised = self._fence.promised(assignment.instance)
        if promised is not None:
            if promised.activated is not None:
                self._compare(assignment, promised.activated)
            if promised.offered.version == assignment.version:
                self._compare(assignment, promised.offered)
        await self._take_on(assignment)
        await self._promise(assignment, activated=True)
        await self._activate(assignment, master)

    def _compare(self, assignment: Assignment, promised: Promised) -> None:
        if assignment.version < promised.version:
            message = f"plan {assignment.version} is older than plan {promised.version}, which was agreed to"
            raise _Refused(Refusal.STALE_VERSION, message)
        if assignment.version == promised.version and assignment.digest != promised.digest:
            message = f"another plan {assignment.version} was agreed to before"
            raise _Refused(Refusal.STALE_VERSION, message)

    async def _take_on(self, assignment: Assignment) -> None:
        held = self._instances.get(assignment.instance)
        if held is not None and assignment in (held.active, held.offered):
            return
        self._check(assignment, held)
        await self._promise(assignment)
        held = self._instances.setdefault(assignment.instance, _Instance())
        if held.offered is None or held.offered.version < assignment.version:
            held.offered = assignment

    async def _promise(self, assignment: Assignment, *, activated: bool = False) -> None:
        empty, digest = not assignment.stages, assignment.digest
        await self._fence.promise(assignment.instance, assignment.version, digest, activated=activated, empty=empty)

    def _check(self, assignment: Assignment, held: _Instance | None) -> None:
        if not assignment.stages:
            return
        if self._fence.draining:
            raise _Refused(Refusal.DRAINING, "the node is draining")
        if self._loader is None:
            raise _Refused(Refusal.NO_LOADER, "nobody loads models on this node yet")
        if held is None and len(self._instances) >= MAX_INSTANCES:
            raise _Refused(Refusal.TOO_MANY, f"the node holds parts of {MAX_INSTANCES} instances already")
        devices = self._publisher.devices
        for key, wanted in assignment.devices.items():
            device = devices.get(key)
            if device is None:
                raise _Refused(Refusal.UNKNOWN_DEVICE, f"there is no device {key}", key)
            if not device.usable or device.state is not DeviceState.HEALTHY:
                why = device.state_reason or device.state
                raise _Refused(Refusal.DEVICE_UNAVAILABLE, f"device {key} cannot be used: {why}", key)
            self._check_memory(key, device, wanted, assignment.instance)

    def _check_memory(self, key: str, device: GPUDevice, wanted: AssignedDevice, instance: str) -> None:
        """A device that does not tell its memory is not judged: loading shows."""
        told = (device.memory_usable_bytes, device.memory_available, device.memory_bytes)
        usable = next((size for size in told if size is not None), None)
        if usable is None:
            return
        for name, held in self._instances.items():
            there = None if held.active is None else held.active.devices.get(key)
            if there is None:
                continue
            if name == instance and held.state is ShardState.LOADED:
                usable += there.total_bytes  # replaced by what is wanted now
            elif name != instance and held.state is ShardState.LOADING:
                usable -= there.total_bytes  # on its way
        if wanted.total_bytes > usable:
            short = wanted.total_bytes - usable
            message = (
                f"device {key} should hold {wanted.total_bytes} bytes and has room for {max(0, usable)}: "
                f"{short} bytes are missing"
            )
            raise _Refused(Refusal.NOT_ENOUGH_MEMORY, message, key, short)

    async def _activate(self, assignment: Assignment, master: str | None) -> None:
        held = self._instances[assignment.instance]
        if held.offered is not None and held.offered.version <= assignment.version:
            held.offered = None
        if held.active == assignment and held.state is not ShardState.FAILED:
            return
        if held.task is not None:
            held.task.cancel()
        held.resident = kept_of(held.resident, assignment.resident())
        held.active, held.state, held.message, held.master = assignment, ShardState.LOADING, None, master
        held.task = asyncio.create_task(self._load(held, assignment), name="gpurt-cluster-load")
        await self._announce()

    def _forget_offer(self, assignment: Assignment) -> None:
        held = self._instances.get(assignment.instance)
        if held is None or held.offered is None or held.offered.version != assignment.version:
            return
        held.offered = None
        if held.active is None or held.released:
            del self._instances[assignment.instance]

    def _accepted(self, assignment: Assignment) -> Acknowledgement:
        held = self._instances.get(assignment.instance)
        state = held.state if held is not None and held.active == assignment else None
        message = held.message if held is not None and state is ShardState.FAILED else None
        return Acknowledgement(accepted=True, term=self._fence.term, state=state, message=message or "")

    # A task for each plan of an instance

    async def _load(self, held: _Instance, assignment: Assignment) -> None:
        async with held.loading:
            try:
                if self._loader is not None:
                    await self._loader.load(assignment)
                elif assignment.stages:
                    raise ClusterError("nobody loads models on this node any more")
            except (Exception, asyncio.CancelledError) as exc:
                task = asyncio.current_task()
                if isinstance(exc, asyncio.CancelledError) and (task is None or task.cancelling()):
                    raise
                # Else something inside the loader was cancelled, and nobody has called the plan off.
                _log.warning("plan %s of %s has failed: %r", assignment.version, assignment.instance, exc)
                outcome = ShardState.FAILED, (str(exc) or type(exc).__name__)[:MAX_MESSAGE], ()
            else:
                outcome = ShardState.LOADED, None, assignment.resident()
        if held.active is not assignment:
            return  # the loader has ended in spite of its cancellation
        held.state, held.message, held.resident = outcome
        if held.released and held.offered is None:
            del self._instances[assignment.instance]
        await self._announce()

    async def _announce(self) -> None:
        try:
            await self._publisher.publish_placement(self.placement())
        except ClusterError as exc:
            _log.warning("what the node holds could not be told: %s", exc)
