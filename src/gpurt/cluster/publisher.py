"""NodePublisher: a node's own voice on the bus.

The state that ``snapshot`` answers with is replaced before the event that says so goes out. A receiver may hence
see a change twice, which the sequence number tells, but never miss one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from gpurt.cluster.attention import Attention
from gpurt.cluster.bus import EventEngine, OnAsked
from gpurt.cluster.command_table import CommandTable
from gpurt.cluster.commands import Drain, Rediscover, Undrain, encode_answer
from gpurt.cluster.device_news import DEVICE_KINDS, report_after
from gpurt.cluster.envelope import EventKind, encode, make_event
from gpurt.cluster.epoch import Epoch, Position
from gpurt.cluster.errors import ClusterError, MalformedEvent, NodeNameTaken, StaleTerm
from gpurt.cluster.fence import Fence
from gpurt.cluster.keys import check_name
from gpurt.cluster.peer_links import NodeLinks
from gpurt.cluster.readings import DeviceReadings, encode_readings
from gpurt.cluster.shards import NodePlacement
from gpurt.cluster.state import (
    HostInfo,
    NodeFields,
    NodeSnapshot,
    decode_snapshot,
    device_keys,
    encode_snapshot,
    summarize_devices,
)
from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.discovery.result import DiscoveryResult
from gpurt.types import BackendReport, GPUDevice

RIVAL_S: Final = 0.5
"""Until another process that has looked who uses the name is gone."""
NAME_CHECK_S: Final = 1.0
"""How long to wait for somebody who already uses our name."""

_log = logging.getLogger("gpurt.cluster.publisher")

LookUp = Callable[[], Awaitable[DiscoveryResult]]


class NodePublisher:
    """
    Args:
        engine: started by the caller, and closed by the caller.
        node: name in the cluster.
        epoch: of this run; make it with ``Epoch.new(registry.next_epoch())``.
        rediscover: answers the master's command ``rediscover``; None: the command is refused.
        fence: what masters of this cluster were promised; None: nothing, and nothing outlives the process.
    """

    def __init__(
        self,
        engine: EventEngine,
        node: str,
        *,
        host: HostInfo,
        epoch: Epoch,
        rediscover: LookUp | None = None,
        fence: Fence | None = None,
    ) -> None:
        self.node = check_name(node, "node")
        self.epoch = epoch
        self._engine = engine
        self._host = host
        self._rediscover = rediscover
        self._seq = 0
        self.fence = fence or Fence()
        self.commands = CommandTable(self.fence, self._tell_term)
        """Who answers masters; to be filled before ``start``."""
        self.commands.handle(Rediscover, self._look_again)
        self.commands.handle(Drain, self._drain, on_stale=_refuse_stale)
        self.commands.handle(Undrain, self._drain, on_stale=_refuse_stale)
        self._devices: dict[str, GPUDevice] = {}
        self._reports: dict[str, BackendReport] = {}
        self._fields = NodeFields()
        self._placement = NodePlacement()
        self._links = NodeLinks()
        self._joined = False
        self._lock = asyncio.Lock()
        self.on_asked: OnAsked | None = None
        """Somebody who may have come just now has asked for the snapshot, and has heard no readings of before."""
        self._looking, self._looked_at = False, 0
        self._rival = asyncio.Event()
        self.attention = Attention()
        """Whether anybody asks for the snapshot at all."""
        self.on_draining: Callable[[bool], None] | None = None
        """Called on the loop when the node was told to drain, or to take part again."""

    @property
    def position(self) -> Position:
        """Of the last event."""
        return Position(self.epoch, self._seq)

    @property
    def devices(self) -> Mapping[str, GPUDevice]:
        """By key, as they were told last."""
        return self._devices

    def snapshot(self) -> NodeSnapshot:
        """What the node says of itself now."""
        return NodeSnapshot(
            node=self.node,
            epoch=str(self.epoch),
            seq=self._seq,
            host=self._host,
            gpu_devices=tuple(self._devices.values()),
            reports=tuple(self._reports.values()),
            placement=self._held(),
            links=self._links,
            **self._fields.model_dump(),
        )

    async def start(self, result: DiscoveryResult) -> None:
        """Join with the devices of ``result``.

        Raises:
            NodeNameTaken: another live process answers under this name. Two that start at the same moment may both
                get through; the master then reports a conflict.
        """
        async with self._lock:
            await self.fence.load()
            self._engine.on_quiet = self._asked_quietly
            replies = await self._engine.snapshot(self.node, timeout=NAME_CHECK_S)
            if replies:
                raise self._name_taken(replies[0].payload)
            self._replace(result)
            if self.fence.draining:
                _log.info("node %s was told to drain before it was started again, and still does", self.node)
            # Before it is: whoever is cancelled in the middle of joining may have been seen, and has to say goodbye.
            self._joined = True
            try:
                await self._engine.join(self.node, encode_snapshot(self.snapshot()), self.commands.answer, self._asked)
            except Exception:
                self._joined = False
                raise
            # Told to those who knew an earlier run of this node and have not noticed that it ended.
            await self._send_snapshot()

    async def settle_name(self) -> None:
        """Look whether another live process uses this name. Who has held it for longer keeps it.

        To be called some time after each connection: two that could not see each other before may have joined both.

        Raises:
            NodeNameTaken: the other one does. This one is gone without a goodbye, which would be taken for the other's.
        """
        if not self._joined:
            return
        runs: dict[str, tuple[NodeSnapshot, float]] = {}
        self._looking, self._looked_at = True, 0
        try:
            replies = await self._engine.snapshot(self.node, timeout=NAME_CHECK_S, quiet=True)
        finally:
            self._looking = False
        if self._looked_at > 1:  # once by this process itself
            self._rival.set()
        for reply in replies:
            with contextlib.suppress(MalformedEvent):  # not of a publisher's
                told = decode_snapshot(reply.payload, node=self.node)
                runs[told.epoch] = told, reply.held_s
        mine = runs.pop(str(self.epoch), None)
        if mine is None or not runs:
            return
        first, held = min(runs.values(), key=lambda run: (-run[1], run[0].epoch))
        other = f"process {first.host.pid} on {first.host.hostname} (host {first.host.fingerprint})"
        if (-mine[1], mine[0].epoch) <= (-held, first.epoch):
            _log.error(
                "node name %r is also used by %s, for %.1f s; this process has held it for %.1f s and keeps it: start "
                "the other one under another name",
                *(self.node, other, held, mine[1]),
            )
            self._rival.set()
            return
        async with self._lock:
            self._joined = False
        raise NodeNameTaken(
            f"node name {self.node!r} of cluster {self._engine.cluster!r} is held by {other} for {held:.1f} s, and by "
            f"this process for {mine[1]:.1f} s only: it ends",
            hint="choose another node name, or end that process",
        )

    async def answer_rivals(self) -> NoReturn:
        """Say again what this node is, whenever another process has used its name: that one ends without a goodbye, and
        who watches may believe that it is still the node."""
        while True:
            await self._rival.wait()
            await asyncio.sleep(RIVAL_S)
            self._rival.clear()
            async with self._lock:
                if self._joined:
                    await self._send_snapshot()

    async def publish_snapshot(self, result: DiscoveryResult) -> None:
        """Replace everything by ``result``. Says nothing when nothing is new.

        Raises:
            ClusterError: not started, or the bus refused.
        """
        async with self._lock:
            self._check_joined()
            before = self.snapshot()
            self._replace(result)
            if self.snapshot() != before:
                await self._send_snapshot()

    async def publish_event(self, event: DeviceEvent) -> None:
        """Tell one change.

        Raises:
            ClusterError: not started, or the bus refused.
        """
        if event.type is EventType.SNAPSHOT:
            if event.snapshot is not None:
                await self.publish_snapshot(event.snapshot)
            return
        async with self._lock:
            self._check_joined()
            if event.device is None:
                await self._send_backend(event)
            else:
                await self._send_device(event, event.device)

    async def publish_placement(self, placement: NodePlacement) -> None:
        """Tell what the node holds. Before it has joined, that is part of its first state.

        Raises:
            ClusterError: the bus refused.
        """
        async with self._lock:
            if placement == self._placement:
                return
            self._placement = placement
            if self._joined:
                await self._send(EventKind.NODE_PLACEMENT, data=self._placement_data())

    async def publish_links(self, links: NodeLinks) -> None:
        """Tell what is known of the ways to other nodes. Before the node has joined, that is part of its first state.

        Raises:
            ClusterError: the bus refused.
        """
        async with self._lock:
            if links == self._links:
                return
            self._links = links
            if self._joined:
                await self._send(EventKind.NODE_LINKS, data={"links": links.model_dump(mode="json")})

    async def drain(self, draining: bool = True) -> None:
        """Take part in no new placement, or in placements again; also after the next start of this node.

        Raises:
            ClusterError: not started, or the bus refused.
        """
        async with self._lock:
            self._check_joined()
            await self.fence.set_draining(draining)
            if self._fields.draining != draining:
                self._fields = self._fields.model_copy(update={"draining": draining})
                await self._send(EventKind.NODE_PLACEMENT, data=self._placement_data())
                _log.info("node %s %s", self.node, "is draining" if draining else "takes new placements again")
                if self.on_draining is not None:
                    self.on_draining(draining)

    async def publish_telemetry(self, devices: Sequence[DeviceReadings]) -> None:
        """Tell readings, best effort; nothing when not joined. They are no events and have no number.

        Raises:
            ClusterError: the bus refused.
        """
        if self._joined:
            for payload in encode_readings(self.node, str(self.epoch), devices):
                await self._engine.publish_telemetry(payload)

    async def follow(self, events: AsyncIterable[DeviceEvent]) -> None:
        """Tell every event until they end."""
        async for event in events:
            await self.publish_event(event)

    async def leave(self) -> None:
        """Say goodbye and disappear. Does nothing when not started."""
        async with self._lock:
            if not self._joined:
                return
            self._joined = False
            await self._send(EventKind.NODE_LEAVING)
            await self._engine.leave()

    def _asked_quietly(self) -> None:
        self._looked_at += 1
        if not self._looking:
            self._rival.set()

    def _asked(self) -> None:
        self.attention.asked()
        if self.on_asked is not None:
            self.on_asked()

    # Inside; the lock is held

    def _replace(self, result: DiscoveryResult) -> None:
        self._devices = device_keys(result.devices)
        self._reports = {report.name: report for report in result.reports}
        self._summarize(result.timestamp, result.discovery_status)

    def _summarize(self, timestamp: str | None, status: str | None) -> None:
        fields = summarize_devices(self._devices.values(), timestamp=timestamp, status=status)
        self._fields = fields.model_copy(update={"draining": self.fence.draining})

    def _held(self) -> NodePlacement:
        return self._placement.model_copy(update={"term": self.fence.term})

    def _placement_data(self) -> dict[str, Any]:
        return {
            "placement": self._held().model_dump(mode="json"),
            "node": self._fields.model_dump(mode="json"),
        }

    async def _send_device(self, event: DeviceEvent, device: GPUDevice) -> None:
        kind = DEVICE_KINDS.get(event.type)
        if kind is None:
            _log.warning("an event of type %s is not for the cluster", event.type)
            return
        key = f"{device.stable_id}@{device.device_id}"
        key = key if key in self._devices else device.stable_id
        if kind is EventKind.DEVICE_REMOVED:
            self._devices.pop(key, None)
        else:
            self._devices[key] = device
        self._summarize(event.observed_at, self._fields.discovery_status)
        data: dict[str, Any] = {
            "device": device.model_dump(mode="json"),
            "event": event.type.value,
            "previous_state": event.previous_state,
            "reason": event.reason,
            "node": self._fields.model_dump(mode="json"),
        }
        await self._send(kind, subject=key, data=data)

    async def _send_backend(self, event: DeviceEvent) -> None:
        if event.backend is None:
            return
        available = event.type is EventType.BACKEND_AVAILABLE
        report = self._reports[event.backend] = report_after(self._reports.get(event.backend), event, event.backend)
        self._summarize(event.observed_at, self._fields.discovery_status)
        kind = EventKind.BACKEND_SELECTED if available else EventKind.BACKEND_FAILED
        data = {"report": report.model_dump(mode="json"), "node": self._fields.model_dump(mode="json")}
        await self._send(kind, data=data)

    async def _send_snapshot(self) -> None:
        self._seq += 1
        snapshot = self.snapshot()
        self._seq -= 1
        await self._send(EventKind.NODE_SNAPSHOT, data=snapshot.document())

    async def _send(self, kind: EventKind, *, subject: str | None = None, data: dict[str, Any] | None = None) -> None:
        """The next event. One that is too large goes as a notice, on which receivers ask for the snapshot."""
        position = Position(self.epoch, self._seq + 1)

        def event(kind: EventKind, subject: str | None, data: dict[str, Any] | None) -> bytes:
            made = make_event(
                kind, cluster=self._engine.cluster, node=self.node, position=position, subject=subject, data=data
            )
            return encode(made)

        try:
            payload = event(kind, subject, data)
        except MalformedEvent as exc:
            _log.info("the news is too large for an event, so receivers will ask: %s", exc)
            payload = event(EventKind.NODE_SNAPSHOT, None, None)
        self._seq = position.seq
        await self._engine.set_state(encode_snapshot(self.snapshot()))
        await self._engine.publish(payload)

    def _check_joined(self) -> None:
        if not self._joined:
            raise ClusterError(f"node {self.node} has not joined", hint="await publisher.start(result)")

    def _name_taken(self, payload: bytes) -> NodeNameTaken:
        who = "another process"
        with contextlib.suppress(MalformedEvent):
            host = decode_snapshot(payload, node=self.node).host
            who = f"process {host.pid} on {host.hostname} (host {host.fingerprint})"
        return NodeNameTaken(
            f"node name {self.node!r} of cluster {self._engine.cluster!r} is in use by {who}",
            hint="choose another node name, or end that process",
        )

    # Commands

    async def _tell_term(self) -> None:
        async with self._lock:
            if self._joined:
                await self._send(EventKind.NODE_PLACEMENT, data=self._placement_data())

    async def _look_again(self, command: Rediscover) -> bytes:
        if self._rediscover is None:
            raise ClusterError(f"node {self.node} cannot look up its devices again")
        result = await self._rediscover()
        await self.publish_snapshot(result)
        return encode_answer(status=result.discovery_status, devices=len(result.devices))

    async def _drain(self, command: Drain | Undrain) -> bytes:
        await self.drain(isinstance(command, Drain))
        return encode_answer(draining=self.fence.draining, term=self.fence.term, unkept=self.fence.unkept)


def _refuse_stale(error: StaleTerm) -> bytes:
    return encode_answer(refused=error.message, term=error.latest)
