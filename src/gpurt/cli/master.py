"""``gpurt master``: a live table of the nodes and devices of a cluster, and its hub unless that runs elsewhere, until
Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from gpurt.cli import observing, protected
from gpurt.cli.json_logs import add_log_format, announce
from gpurt.cli.metrics_option import add_metrics, metrics_served
from gpurt.cli.running import run_command

REDRAW_S: Final = 0.1
"""At least between two pictures: a cluster of 200 nodes brings 1,800 changes at once."""
READINGS_S: Final = 1.0
"""At least between two lines of readings of one node, and at most between two pictures."""

if TYPE_CHECKING:
    from gpurt.cluster.changes import Change, Changes
    from gpurt.cluster.master import Master, MasterConfig
    from gpurt.cluster.readings import DeviceReadings
    from gpurt.cluster.records import ClusterSnapshot
    from gpurt.cluster.view import MasterView


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpurt.cluster.worker import DEFAULT_ENDPOINT

    parser.add_argument("--cluster", help="name of the cluster (default: default, or the certificate's)")
    hub = parser.add_mutually_exclusive_group()
    hub.add_argument(
        "--listen",
        metavar="ENDPOINT",
        help=f"where workers connect (default: {DEFAULT_ENDPOINT}; with --tls every address of this machine, or "
        "loopback where the hub was made for that), or "
        "nats://HOST:PORT of a NATS server where all connect",
    )
    hub.add_argument(
        "--connect", metavar="ENDPOINT", help="be no hub: join the one that listens there, as gpurt hub does"
    )
    protected.add_arguments(
        parser, "FOLDER: the folder hub that gpurt cluster init made, or with --connect one enrolled as master"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="every change as a JSON line on stdout, and what devices measure, at most once a second per node",
    )
    add_metrics(parser)
    add_log_format(parser)


def run(args: argparse.Namespace) -> int:
    from gpurt.cluster.master import MasterConfig
    from gpurt.cluster.worker import DEFAULT_ENDPOINT

    identity = protected.identity_of(args)
    if args.connect is not None:
        observing.check_may_watch(identity)
    config = MasterConfig(
        cluster=protected.chosen(args.cluster, identity and identity.cluster, "default"),
        endpoint=protected.chosen(
            args.listen if args.connect is None else args.connect,
            identity and identity.listen_endpoint,
            DEFAULT_ENDPOINT,
        ),
        listen=args.connect is None,
        tls=args.tls,
        insecure=args.insecure,
    )
    run_command(_serve(config, as_json=args.json, metrics=args.metrics, log_changes=args.log_format == "json"))
    return 0


async def _serve(
    config: MasterConfig, *, as_json: bool, metrics: tuple[str, int] | None = None, log_changes: bool = False
) -> None:
    from gpurt.cluster import logged
    from gpurt.cluster.endpoints import is_nats
    from gpurt.cluster.master import run_master
    from gpurt.cluster.metrics import MasterMetrics
    from gpurt.cluster.view import MasterView
    from gpurt.cluster.zenoh_settings import calm_runtime

    if config.listen:
        calm_runtime()
    view, measured = MasterView(), MasterMetrics(config.cluster)
    listening: asyncio.Future[Master] = asyncio.get_running_loop().create_future()

    def ready(master: Master) -> None:
        listening.set_result(master)
        measured.watch(master)
        doing = "listening at" if config.listen and not is_nats(config.endpoint) else "watching through"
        announce("cluster %s: %s %s; Ctrl-C ends it", config.cluster, doing, config.endpoint)

    tasks = [asyncio.create_task(run_master(config, view, on_ready=ready), name="gpurt-master")]
    if log_changes:
        tasks.append(asyncio.create_task(logged.log_changes(view)))
    if as_json or log_changes or not sys.stdout.isatty():
        tasks.append(asyncio.create_task(_lines(view, as_json=as_json)))
        if as_json:
            tasks.append(asyncio.create_task(_readings(listening)))
    else:
        tasks.append(asyncio.create_task(_live(view, lambda node: _told(listening, node))))
    try:
        async with metrics_served(metrics, measured.take):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _lines(view: MasterView, *, as_json: bool) -> None:
    from gpurt.cli.cluster_table import change_line

    async for change in view.changes():
        snapshot = view.snapshot()
        if as_json:
            _write(json.dumps(change_document(change, snapshot), allow_nan=False))
        elif not change.minor:
            _write(change_line(change, snapshot))


def change_document(change: Change, snapshot: ClusterSnapshot) -> dict[str, Any]:
    """One change as plain JSON values; one of a whole node brings the node's summary."""
    from gpurt.cluster.state import NodeFields

    record = snapshot.nodes.get(change.node or "")
    device = record.devices.get(change.device or "") if record else None
    document: dict[str, Any] = {
        "change": change.kind,
        "node": change.node,
        "node_state": record.state if record else None,
        "draining": record.draining if record else None,
        "device": change.device,
        "available": device.available if device else None,
        "record": device.device.model_dump(mode="json") if device else None,
        "message": change.message,
    }
    if change.missed:
        document["missed"] = change.missed
    if record is not None and change.device is None:
        document["summary"] = {name: getattr(record, name) for name in NodeFields.model_fields}
    return document


async def _readings(listening: asyncio.Future[Master]) -> None:
    """A line for each node whose devices measure something else than before, every second at most."""
    # Shielded: who waits for the master does not decide whether it comes.
    master = await asyncio.shield(listening)
    async for node in master.board.changes(READINGS_S):
        record = master.observer.view.node(node)
        told = master.readings(node)
        if record is not None and told:
            document = {
                "change": "readings",
                "node": node,
                "node_state": record.state,
                "readings": {key: _document(each) for key, each in told.items()},
            }
            _write(json.dumps(document, allow_nan=False))


def _document(readings: DeviceReadings) -> dict[str, Any]:
    return readings.model_dump(mode="json", exclude={"device"}) | {"age_s": round(readings.age_s, 3)}


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _told(listening: asyncio.Future[Master], node: str) -> Mapping[str, DeviceReadings]:
    return listening.result().readings(node) if listening.done() else {}


async def _live(view: MasterView, readings: Callable[[str], Mapping[str, DeviceReadings]]) -> None:
    from rich.live import Live

    from gpurt.cli.cluster_table import cluster_table

    # Room for one change: that something has changed is all that a picture of the whole needs.
    changes = view.changes(limit=1)
    with Live(cluster_table(view.snapshot()), auto_refresh=False) as live:
        changed: asyncio.Task[object] | None = None
        try:
            while True:
                picture = cluster_table(view.snapshot(), readings=readings, max_rows=live.console.height)
                live.update(picture, refresh=True)
                await asyncio.sleep(REDRAW_S)
                changed = changed or asyncio.create_task(_next(changes))
                # Readings grow old also where nobody says anything.
                await asyncio.wait({changed}, timeout=READINGS_S)
                if changed.done():
                    changed.result()
                    changed = None
        finally:
            if changed is not None:
                changed.cancel()


async def _next(changes: Changes) -> Change:
    return await anext(changes)
