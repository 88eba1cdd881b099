"""Which engine an address means: ``nats://HOST:PORT`` a NATS server, everything else zenoh."""

from __future__ import annotations

import os

from gpurt.cluster import nats_settings, zenoh_settings
from gpurt.cluster.bus import EventEngine
from gpurt.cluster.nats_engine import NatsEngine
from gpurt.cluster.zenoh_engine import ZenohEngine


def is_nats(endpoint: str) -> bool:
    return endpoint.startswith(nats_settings.SCHEME)


def check_endpoint(endpoint: str) -> str:
    """``endpoint`` itself.

    Raises:
        InvalidName: malformed.
    """
    check = nats_settings.check_nats_endpoint if is_nats(endpoint) else zenoh_settings.check_endpoint
    return check(endpoint)


def engine_at(
    endpoint: str,
    *,
    cluster: str,
    listen: bool = False,
    tls: str | os.PathLike[str] | None = None,
    insecure: bool = False,
) -> EventEngine:
    """The engine for ``endpoint``, not started.

    Args:
        listen: be the hub, with zenoh. A NATS server is a program of its own.

    Raises:
        InvalidName, InsecureEndpoint: as the engines.
    """
    if is_nats(endpoint):
        return NatsEngine(cluster=cluster, endpoint=endpoint, tls=tls, insecure=insecure)
    return ZenohEngine(cluster=cluster, endpoint=endpoint, listen=listen, tls=tls, insecure=insecure)
