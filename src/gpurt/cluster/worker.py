"""One node of a cluster: find this machine's devices and tell the master, until cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpurt.backend import GPUBackend
from gpurt.cluster.bus import EventEngine
from gpurt.cluster.endpoints import check_endpoint, engine_at, is_nats
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import BusClosed, BusUnavailable, ClusterError
from gpurt.cluster.fence import Fence
from gpurt.cluster.groups import single
from gpurt.cluster.keys import check_name
from gpurt.cluster.link_address import address_towards, split_address
from gpurt.cluster.link_measuring import LinkMeasuring
from gpurt.cluster.link_protocol import join_endpoint
from gpurt.cluster.monitoring import NodeMonitoring
from gpurt.cluster.node_assignments import NodeAssignments
from gpurt.cluster.promises import PromiseFile
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.security.loopback import check_protected
from gpurt.cluster.security.peers import load_peer_credentials
from gpurt.cluster.state import this_host
from gpurt.cluster.zenoh_engine import ZenohEngine
from gpurt.cluster.zenoh_hub import Admission
from gpurt.discovery.registry import RegistryFile
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.runtime.lane import off_loop

DEFAULT_ENDPOINT: Final = "tcp/127.0.0.1:7447"
"""zenoh's registered port."""
NAME_CHECKS_S: Final = (1.0, 2.0)
"""After each connection: another process that holds the name is there within a second."""
ADMISSION_S: Final = 2.0
"""Between two questions to a hub that refuses the node."""
GOODBYE_S: Final = 2.0
"""How long a worker that ends waits to say so."""

_log = logging.getLogger("gpurt.cluster.worker")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """
    Raises:
        InvalidName: node, cluster or endpoint malformed. InsecureEndpoint: others could reach it unprotected.
        ValueError: ``telemetry_s`` is no time.
    """

    node: str
    cluster: str = "default"
    endpoint: str = DEFAULT_ENDPOINT
    """Of a master, or ``nats://HOST:PORT`` of a NATS server."""
    registry_path: str | os.PathLike[str] | None = None
    """None: the user's own registry. Two workers of one machine need two."""
    simulate: str | None = None
    """Simulated devices instead of real ones, e.g. ``"h100x8,m2-ultra"``."""
    backends: Sequence[str] | None = None
    """Only these backends."""
    interval_s: float = 10.0
    """Between two look-ups of the devices."""
    probe_timeout_s: float | None = None
    telemetry_s: float | None = 1.0
    """Between two readings of each device; None reads and listens to none."""
    tls: str | os.PathLike[str] | None = None
    """Folder with the certificate to show, from ``gpurt cluster enrol``."""
    insecure: bool = False
    """Without one, use an endpoint that others can reach all the same."""
    link_address: str | None = None
    """``HOST`` or ``HOST:PORT`` where other nodes measure their way to this one; None: the address by which this
    machine reaches the hub, and a free port."""
    links: bool = True
    """Listen there; False: the ways to this node are measured by nobody."""

    def __post_init__(self) -> None:
        check_name(self.node, "node")
        check_name(self.cluster, "cluster")
        check_endpoint(self.endpoint)
        check_protected(self.endpoint, tls=self.tls is not None, insecure=self.insecure)
        if self.link_address is not None:
            host, port = split_address(self.link_address)
            tls = self.tls is not None
            check_protected(join_endpoint(host, port or 1, tls=tls), tls=tls, insecure=self.insecure)
        if self.telemetry_s is not None and not self.telemetry_s > 0:
            raise ValueError(f"telemetry_s must be a positive number of seconds or None, not {self.telemetry_s!r}")


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that has joined, as ``on_ready`` gets it."""

    config: WorkerConfig
    publisher: NodePublisher
    discovery: GPUDiscoveryService
    backend: GPUBackend | None
    """The simulated backend, initialised; None when the devices are real."""
    assignments: NodeAssignments
    """Parts of models that masters assign to this node; give it what loads them (``use``)."""
    monitoring: NodeMonitoring | None = None
    """Readings and health of the devices; give it a backend that you open (``use``), and it reads through it, too."""


async def run_worker(
    config: WorkerConfig,
    *,
    on_ready: Callable[[Worker], Awaitable[None]] | None = None,
    on_heard: Callable[[bool], None] | None = None,
    engine: EventEngine | None = None,
) -> None:
    """Run a node until cancelled; then say goodbye. Waits for a hub that is not there yet.

    A hub lets in every certificate of its authority, so to be connected does not mean to be seen. Where nobody asks for
    the node within 10 s, or later for 150 s, a warning says what may be wrong.

    What the registry remembers, or else what can be seen before any driver is opened, is told at once, marked as such,
    and replaced by what discovery finds.

    Args:
        on_ready: awaited as a task of its own once the node has joined with devices that were looked up now. When
            it returns, the worker goes on.
        on_heard: called on the loop with True when somebody who watches the cluster (a master, or ``gpurt top``) has
            asked for the node, and with False when nobody does (any more); at every change.
        engine: in place of the one that ``config.endpoint`` means. Started and closed here.

    Raises:
        NodeNameTaken: the name is in use. BusUnavailable: no library for the bus. ValueError: ``simulate`` malformed.
        CredentialsRefused: what ``config.tls`` names is missing, expired or refused by the hub.
    """
    registry = RegistryFile(config.registry_path)
    epoch = Epoch.new(await off_loop("epoch", registry.next_epoch))
    host = await off_loop("host", this_host)
    engine = engine or engine_at(config.endpoint, cluster=config.cluster, tls=config.tls, insecure=config.insecure)
    async with AsyncExitStack() as stack:
        backend = None
        if config.simulate is not None:
            backend = await stack.enter_async_context(_simulated(config.simulate, config.node))
        discovery = await stack.enter_async_context(
            GPUDiscoveryService(
                backend,
                registry_path=registry.path,
                backends=None if backend else config.backends,
                probe_timeout=config.probe_timeout_s,
                interval=config.interval_s,
            )
        )
        publisher = NodePublisher(
            engine,
            config.node,
            host=host,
            epoch=epoch,
            rediscover=discovery.discover_all_devices,
            fence=Fence(PromiseFile(registry.path, config.cluster, config.node)),
        )
        assignments = NodeAssignments(publisher)
        links = await _measurable(config, publisher)
        stack.push_async_callback(links.aclose)
        stack.push_async_callback(engine.close)
        stack.push_async_callback(_say_goodbye, publisher)
        stack.push_async_callback(assignments.aclose)
        try:
            async with asyncio.TaskGroup() as group:
                early: list[DiscoveryResult] = []
                known = asyncio.Event()

                def take_preview(result: DiscoveryResult) -> None:
                    early.append(result)
                    known.set()

                # Patient: a worker is started again when it ends, and a driver that crashes or hangs must not be asked
                # in that loop.
                found = group.create_task(
                    discovery.discover_all_devices(patient=True, on_preview=take_preview),
                    name="gpurt-worker-discovery",
                )
                found.add_done_callback(lambda _: known.set())
                await engine.start()
                name_unsure, admission_unsure = asyncio.Event(), asyncio.Event()

                def returned() -> None:
                    name_unsure.set()
                    admission_unsure.set()

                engine.on_return = returned
                group.create_task(_follow_admission(config, engine, admission_unsure), name="gpurt-worker-admission")
                await known.wait()
                if early:
                    await publisher.start(early[0])
                    await publisher.publish_snapshot(await found)
                else:
                    await publisher.start(await found)
                group.create_task(_keep_name(publisher, name_unsure), name="gpurt-worker-name")
                group.create_task(publisher.answer_rivals(), name="gpurt-worker-rivals")
                group.create_task(_follow_attention(config, publisher, on_heard), name="gpurt-worker-attention")
                monitoring = None
                if config.telemetry_s is not None:
                    monitoring = NodeMonitoring(discovery, publisher, interval_s=config.telemetry_s)
                    if backend is not None:
                        monitoring.use(backend)
                    group.create_task(monitoring.run(), name="gpurt-worker-monitoring")
                worker = Worker(config, publisher, discovery, backend, assignments, monitoring)
                if on_ready is not None:
                    group.create_task(_run(on_ready, worker))
                await publisher.follow(discovery.subscribe())
        except BaseExceptionGroup as failed:
            raise single(failed) from None


async def _keep_name(publisher: NodePublisher, returned: asyncio.Event) -> None:
    """Look after each connection whether the name is used twice: when the hub comes back, any of them may be first."""
    while True:
        for pause in NAME_CHECKS_S:
            await asyncio.sleep(pause)
            with contextlib.suppress(BusUnavailable):  # the next connection is another chance
                await publisher.settle_name()
        await returned.wait()
        returned.clear()


async def _follow_admission(config: WorkerConfig, engine: EventEngine, returned: asyncio.Event) -> None:
    """Say what a hub has against the node, once it is connected and whenever that changes. A NATS server is asked
    nothing: it knows of no roster and of no cluster."""
    if not isinstance(engine, ZenohEngine):
        return
    told: str | None = None
    while True:
        with contextlib.suppress(BusUnavailable, BusClosed):
            refused = why_refused(config, await engine.admission(config.node))
            if refused is not None and refused != told:
                _log.warning("the hub at %s does not take node %s: %s", config.endpoint, config.node, refused)
            elif refused is None and told is not None:
                _log.warning("the hub at %s takes node %s now", config.endpoint, config.node)
            told = refused
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if told is None else ADMISSION_S):
                await returned.wait()
        returned.clear()


def why_refused(config: WorkerConfig, answer: Admission | None) -> str | None:
    """What the hub has against the node, and what to do; None: nothing."""
    if answer is None:
        return None
    if answer.cluster != config.cluster:
        return (
            f"another cluster is there: {answer.cluster!r}, not {config.cluster!r}; start the worker with "
            f"--cluster {answer.cluster}, or connect it to the other hub"
        )
    if not answer.listed:
        return (
            "it is not on the hub's roster, or was revoked: gpurt cluster enrol it where the authority is, and copy "
            "hub/roster.json to the hub's folder where that is a copy; the worker need not be started again"
        )
    return None


async def _follow_attention(
    config: WorkerConfig, publisher: NodePublisher, on_heard: Callable[[bool], None] | None
) -> None:
    def say(heard: bool, seconds: float) -> None:
        if not heard:
            _log.warning(
                "no master has heard node %s at %s for %.0f s: %s",
                config.node,
                config.endpoint,
                seconds,
                why_unheard(config),
            )
        if on_heard is not None:
            on_heard(heard)

    await publisher.attention.follow(say)


def why_unheard(config: WorkerConfig) -> str:
    """What may be the reason that no master has heard a node whose connection is open."""
    nobody = f"no master of cluster {config.cluster} runs"
    if config.tls is None or is_nats(config.endpoint):
        return nobody
    return (
        "its name is not on the hub's roster (gpurt cluster enrol; a hub with a copy of the folder needs the new "
        f"roster.json), it was revoked, or {nobody}"
    )


async def _run(on_ready: Callable[[Worker], Awaitable[None]], worker: Worker) -> None:
    await on_ready(worker)


async def _measurable(config: WorkerConfig, publisher: NodePublisher) -> LinkMeasuring:
    """Takes the command to measure, and lets others measure where that is possible: a node has better things to do
    than to be measured, so it does not end where it is not."""
    tls = config.tls
    credentials = None if tls is None else partial(load_peer_credentials, tls)
    links = LinkMeasuring(publisher, credentials=credentials, insecure=config.insecure)
    if not config.links:
        return links
    try:
        if config.link_address is None:
            host, port = await off_loop("address", lambda: address_towards(config.endpoint)), 0
        else:
            host, port = split_address(config.link_address)
        await links.start(host, port)
    except OSError as exc:
        _log.warning("the ways to node %s cannot be measured: %s", config.node, exc)
    return links


async def _say_goodbye(publisher: NodePublisher) -> None:
    try:
        async with asyncio.timeout(GOODBYE_S):
            await publisher.leave()
    except (TimeoutError, ClusterError) as exc:
        # The others will see the connection close.
        _log.info("node %s leaves without a goodbye: %s", publisher.node, exc)


def _simulated(spec: str, node: str) -> GPUBackend:
    from gpurt.testing.simulated import create_simulated

    # The node's name is the seed: its devices keep their identity when it is started again.
    return create_simulated(spec, seed=node)
