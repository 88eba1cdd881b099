"""Watching a cluster through a hub that runs elsewhere, for every command that looks, and for those that then tell
nodes what to do: no node sees it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from gpurt.cli import protected
from gpurt.errors import GPUError

if TYPE_CHECKING:
    from gpurt.cluster.bus import EventEngine
    from gpurt.cluster.errors import BusUnavailable
    from gpurt.cluster.master import Master, MasterConfig
    from gpurt.cluster.security.identity import Identity
    from gpurt.cluster.view import MasterView

CONNECT_S: Final = 5.0
"""How long a hub may take: a local one takes 20 ms, and one that is just being started again a second or two."""
DEFAULT_ENDPOINT: Final = "tcp/127.0.0.1:7447"
"""That of :mod:`gpurt.cluster.worker`, for a help text that does not import a cluster's engines."""
_MAY_WATCH: Final = ("observer", "master")
"""Roles of certificates."""


def add_arguments(parser: argparse.ArgumentParser, *, role: str = "an observer") -> None:
    """Where the hub is, and with which certificate: that of ``role``."""
    parser.add_argument(
        "--endpoint",
        "--connect",
        metavar="ENDPOINT",
        help=f"where the master listens (default: {DEFAULT_ENDPOINT}, or as in the folder of --tls)",
    )
    protected.add_arguments(parser, f"FOLDER, as gpurt cluster enrol made it for {role}")


def observer_config(args: argparse.Namespace, cluster: str | None) -> MasterConfig:
    """What to connect with. ``cluster`` None: the certificate's, else ``default``.

    Raises:
        GPUError: the certificate is missing, wrong, or of a role that may not watch.
    """
    from gpurt.cluster.master import MasterConfig

    identity = protected.identity_of(args)
    check_may_watch(identity)
    return MasterConfig(
        cluster=cluster or (identity.cluster if identity else "default"),
        endpoint=args.endpoint or (identity.endpoint if identity else DEFAULT_ENDPOINT),
        listen=False,
        tls=args.tls,
        insecure=args.insecure,
    )


def check_may_watch(identity: Identity | None) -> None:
    """
    Raises:
        GPUError: the certificate is of a role that may not watch.
    """
    if identity is not None and identity.role not in _MAY_WATCH:
        # The hub would only let it see nothing, which looks like an empty cluster.
        raise _may_not(identity, "watch a cluster", "observer")


def check_may_command(identity: Identity | None, deed: str) -> None:
    """
    Args:
        deed: what is to be done, for people.

    Raises:
        GPUError: the certificate is of a role that may give no commands.
    """
    if identity is not None and identity.role != "master":
        # The hub would let the command through to nobody, which looks like nodes that do not answer.
        raise _may_not(identity, deed, "master")


def _may_not(identity: Identity, deed: str, role: str) -> GPUError:
    article = "an" if identity.role[0] in "aeiou" else "a"
    return GPUError(
        f"the certificate of {identity.name} is that of {article} {identity.role}, which may not {deed}",
        hint=f"make one with gpurt cluster enrol NAME --role {role}",
    )


@asynccontextmanager
async def observing(
    config: MasterConfig,
    view: MasterView,
    *,
    command: str,
    connect_s: float = CONNECT_S,
    engine: EventEngine | None = None,
) -> AsyncGenerator[Master]:
    """Watch as a master does. When that fails, so does what is done meanwhile.

    Args:
        command: what to start again when the bus is closed (``gpurt top``).
        engine: in place of a zenoh session with ``config.endpoint``.

    Raises:
        BusUnavailable: no hub there, or no zenoh here.
    """
    from gpurt.cluster.errors import BusUnavailable
    from gpurt.cluster.master import run_master

    ready: asyncio.Future[Master] = asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(
        run_master(config, view, on_ready=ready.set_result, engine=engine), name="gpurt-observer"
    )
    body = asyncio.current_task()
    assert body is not None

    def failed(_: object) -> None:
        if not watching.cancelled():
            body.cancel()

    try:
        await asyncio.wait({watching, ready}, timeout=connect_s, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done() and not watching.done():
            raise _nobody(config.endpoint, connect_s)
        if watching.done():
            watching.result()
        watching.add_done_callback(failed)
        try:
            yield ready.result()
        except asyncio.CancelledError:
            if not watching.done() or watching.cancelled():
                raise
            body.uncancel()
            watching.result()
            raise BusUnavailable("the bus was closed", hint=f"start {command} again") from None
    finally:
        watching.remove_done_callback(failed)
        watching.cancel()
        await asyncio.wait({watching})


def _nobody(endpoint: str, seconds: float) -> BusUnavailable:
    from gpurt.cluster.endpoints import is_nats
    from gpurt.cluster.errors import BusUnavailable

    if is_nats(endpoint):
        return BusUnavailable(
            f"no NATS server with JetStream answers at {endpoint} within {seconds:g} s",
            hint="start one with nats-server -js, or give --endpoint",
        )
    return BusUnavailable(
        f"no hub of a cluster answers at {endpoint} within {seconds:g} s",
        hint=f"start it with gpurt master --listen {endpoint}, or give --endpoint",
    )
