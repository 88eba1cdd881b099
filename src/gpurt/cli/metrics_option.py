"""``--metrics ADDRESS:PORT`` of the commands that run for long."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gpurt.cli.json_logs import announce

if TYPE_CHECKING:
    from gpurt.telemetry.exporter import Take


def add_metrics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics",
        metavar="ADDRESS:PORT",
        type=_address,
        help="serve metrics for Prometheus there, e.g. 127.0.0.1:9464; a port alone is on the loopback, and port 0 "
        "any that is free (needs gpurt[api])",
    )


@asynccontextmanager
async def metrics_served(address: tuple[str, int] | None, take: Take) -> AsyncGenerator[None]:
    """Serve what ``take`` tells; without an address nothing, and without its library.

    Raises:
        MetricsUnavailable: the library is missing, or the address cannot be had.
    """
    if address is None:
        yield
        return
    from gpurt.telemetry.exporter import MetricsServer

    async with MetricsServer(take, *address) as server:
        announce("metrics are served at %s", server.url)
        yield


def _address(text: str) -> tuple[str, int]:
    from gpurt.telemetry.exporter import parse_metrics_address

    try:
        return parse_metrics_address(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
