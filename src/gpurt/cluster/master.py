"""The master's side: the hub of the bus and a view of the cluster, until cancelled."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from gpurt.cluster.board import ReadingsBoard
from gpurt.cluster.bus import EventEngine
from gpurt.cluster.endpoints import check_endpoint, engine_at
from gpurt.cluster.keys import check_name
from gpurt.cluster.observer import RESYNC_INTERVAL_S, ClusterObserver
from gpurt.cluster.readings import DeviceReadings
from gpurt.cluster.records import NodeState
from gpurt.cluster.security.loopback import check_protected
from gpurt.cluster.view import MasterView
from gpurt.cluster.worker import DEFAULT_ENDPOINT


@dataclass(frozen=True, slots=True)
class MasterConfig:
    """
    Raises:
        InvalidName: cluster or endpoint malformed. InsecureEndpoint: others could reach it unprotected.
    """

    cluster: str = "default"
    endpoint: str = DEFAULT_ENDPOINT
    """Where to listen, or ``nats://HOST:PORT`` of a NATS server to watch through."""
    listen: bool = True
    """Be the hub; False: watch a cluster through a hub that runs elsewhere."""
    resync_interval_s: float = RESYNC_INTERVAL_S
    tls: str | os.PathLike[str] | None = None
    """Folder with the certificate to show, from ``gpurt cluster enrol`` (``hub`` to listen)."""
    insecure: bool = False
    """Without one, use an endpoint that others can reach all the same."""

    def __post_init__(self) -> None:
        check_name(self.cluster, "cluster")
        check_endpoint(self.endpoint)
        check_protected(self.endpoint, tls=self.tls is not None, insecure=self.insecure)


@dataclass(frozen=True, slots=True)
class Master:
    """A master that listens, as ``on_ready`` gets it."""

    config: MasterConfig
    engine: EventEngine
    observer: ClusterObserver
    board: ReadingsBoard
    """What nodes measure. ``board.changes()`` tells of whom there is something new."""

    def readings(self, node: str) -> dict[str, DeviceReadings]:
        """What the devices of a node told last, by device key, each with its age as of now.

        Empty for a node that nobody knows, that has left, or that has told nothing; best effort, so a device may be
        missing. Of a node that is suspect or lost they are what it told before, and as old as their age says.
        """
        record = self.observer.view.node(node)
        if record is None or record.state is NodeState.LEFT:
            return {}
        return {key: each for key, each in self.board.readings(node).items() if key in record.devices}


async def run_master(
    config: MasterConfig,
    view: MasterView,
    *,
    on_ready: Callable[[Master], None] | None = None,
    engine: EventEngine | None = None,
) -> None:
    """Keep ``view`` true until cancelled, and hear what its nodes measure.

    Args:
        on_ready: called once workers can connect and no event can be missed any more, with the
            :class:`Master`: ``master.readings(node)`` are the newest readings of a node's devices.
        engine: in place of the one that ``config.endpoint`` means. Started and closed here.

    Raises:
        BusUnavailable: no library for the bus, or the address is in use. CredentialsRefused: what ``config.tls`` names.
    """
    engine = engine or engine_at(
        config.endpoint,
        cluster=config.cluster,
        listen=config.listen,
        tls=config.tls,
        insecure=config.insecure,
    )
    observer = ClusterObserver(engine, view, resync_interval_s=config.resync_interval_s)
    try:
        await engine.start()
        async with ReadingsBoard(engine, refusals=view.refusals) as board:
            await observer.run(lambda: on_ready(Master(config, engine, observer, board)) if on_ready else None)
    finally:
        await engine.close()
