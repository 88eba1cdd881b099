"""``gpurt master``: the hub of a cluster and a live table of its nodes and devices, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Final

from gpurt.cli.running import run_command

REDRAW_S: Final = 0.1
"""At least between two pictures: a cluster of 200 nodes brings 1,800 changes at once."""

if TYPE_CHECKING:
    from gpurt.cluster.master import Master, MasterConfig
    from gpurt.cluster.view import MasterView


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpurt.cluster.worker import DEFAULT_ENDPOINT

    parser.add_argument("--cluster", default="default", help="name of the cluster (default: %(default)s)")
    parser.add_argument(
        "--listen", metavar="ENDPOINT", default=DEFAULT_ENDPOINT, help="where workers connect (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="every change as a JSON line on stdout")


def run(args: argparse.Namespace) -> int:
    from gpurt.cluster.master import MasterConfig

    run_command(_serve(MasterConfig(cluster=args.cluster, endpoint=args.listen), as_json=args.json))
    return 0


async def _serve(config: MasterConfig, *, as_json: bool) -> None:
    from gpurt.cluster.master import run_master
    from gpurt.cluster.view import MasterView

    view = MasterView()

    def ready(master: Master) -> None:
        sys.stderr.write(f"cluster {config.cluster}: listening at {config.endpoint}; Ctrl-C ends it\n")

    master = asyncio.create_task(run_master(config, view, on_ready=ready), name="gpurt-master")
    show = asyncio.create_task(_lines(view, as_json=as_json) if as_json or not sys.stdout.isatty() else _live(view))
    try:
        done, _ = await asyncio.wait({master, show}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (master, show):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _lines(view: MasterView, *, as_json: bool) -> None:
    from gpurt.cli.cluster_table import change_line

    async for change in view.changes():
        snapshot = view.snapshot()
        if as_json:
            record = snapshot.nodes.get(change.node or "")
            device = record.devices.get(change.device or "") if record else None
            line = json.dumps(
                {
                    "change": change.kind,
                    "node": change.node,
                    "node_state": record.state if record else None,
                    "device": change.device,
                    "record": device.device.model_dump(mode="json") if device else None,
                    "message": change.message,
                },
                allow_nan=False,
            )
        else:
            line = change_line(change, snapshot)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


async def _live(view: MasterView) -> None:
    from rich.live import Live

    from gpurt.cli.cluster_table import cluster_table

    # Room for one change: that something has changed is all that a picture of the whole needs.
    changes = view.changes(limit=1)
    with Live(cluster_table(view.snapshot()), auto_refresh=False) as live:
        async for _ in changes:
            live.update(cluster_table(view.snapshot(), max_rows=live.console.height), refresh=True)
            await asyncio.sleep(REDRAW_S)
