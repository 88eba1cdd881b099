"""The hub alone: where masters, workers and those who watch connect. It keeps nothing and watches nobody, so a master
may end and start again without a node noticing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

from gpurt.cluster.worker import DEFAULT_ENDPOINT
from gpurt.cluster.zenoh_engine import ZenohEngine


@dataclass(frozen=True, slots=True)
class HubConfig:
    cluster: str = "default"
    endpoint: str = DEFAULT_ENDPOINT
    """Where to listen. A NATS server is a hub by itself."""
    tls: str | os.PathLike[str] | None = None
    """Folder with the hub's certificate, from ``gpurt cluster init``."""
    insecure: bool = False
    """Without one, use an endpoint that others can reach all the same."""


async def run_hub(config: HubConfig, *, on_ready: Callable[[], None] | None = None) -> None:
    """Be the hub until cancelled.

    Args:
        on_ready: called once others can connect.

    Raises:
        InvalidName: cluster or endpoint malformed. InsecureEndpoint: others could reach it unprotected.
        BusUnavailable: no library for the bus, or the address is in use. CredentialsRefused: what ``config.tls`` names.
    """
    engine = ZenohEngine(
        cluster=config.cluster, endpoint=config.endpoint, listen=True, tls=config.tls, insecure=config.insecure
    )
    try:
        await engine.start()
        if on_ready is not None:
            on_ready()
        await asyncio.Event().wait()
    finally:
        await engine.close()
