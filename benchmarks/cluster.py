"""What a cluster costs, over zenoh on this machine, each figure against its target.

    python benchmarks/cluster.py [--json] [--nodes 1000] [--processes 200] [--idle-seconds 60] [PART]…

Parts: ``latency`` (1,000 events a second), ``rate`` (as many as they go), ``growth`` (the price of an event in a small
and in a large cluster), ``processes`` (real node processes: memory, a late joiner, kill -9), ``nodes`` (simulated
nodes in four processes: the master's memory, its idle load, and all of them after its restart), ``idle`` (what
workers say while nothing changes). Several take a minute or more.

The processor time of an event is the firmer figure on a machine that does other things beside: its turn comes when it
comes, and the rate on the clock is that of publisher and master together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

from cluster_programs import AT_ONCE, CLUSTER, event_of, host
from cluster_running import MIB, Figure, Process, healthy, new_endpoint, observing, started, until
from gpurt.benchmarks.clocks import summary
from gpurt.cluster.bus import EventReceived
from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.envelope import Envelope
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.state import NodeSnapshot, encode_snapshot
from gpurt.cluster.view import MasterView
from gpurt.testing.simulated_nodes import simulated_result

HOSTS = 4
"""Processes that share the simulated nodes."""


async def latency(options: argparse.Namespace) -> list[Figure]:
    endpoint, count = new_endpoint(), 5000
    taken: list[float] = []

    def on_event(event: Envelope) -> None:
        sent = event.document().get("sent")
        if sent is not None:
            taken.append((time.monotonic() - sent) * 1e3)

    async with observing(endpoint, on_event=on_event), started("publish", endpoint, "p", 1000, count) as publisher:
        await publisher.line()
        publisher.process.stdin.write(b"\n")  # pyright: ignore[reportOptionalMemberAccess]
        await until(lambda: len(taken) == count, 60)
    figures = summary(taken)
    return [
        Figure("latency", "1 KB event, 1,000/s, another process to the folded view, p50", figures["p50"], "ms", 1),
        Figure("latency", "the same, p99", figures["p99"], "ms", 10),
    ]


async def rate(options: argparse.Namespace) -> list[Figure]:
    endpoint, count = new_endpoint(), 5 * AT_ONCE
    async with observing(endpoint) as (view, observer), started("publish", endpoint, "p", 0, count) as publisher:
        await publisher.line()
        await until(lambda: view.node("p") is not None, 10)
        first = view.node("p").seq  # pyright: ignore[reportOptionalMemberAccess]
        processor, begin = time.process_time(), time.monotonic()
        for sent in range(AT_ONCE, count + 1, AT_ONCE):
            publisher.process.stdin.write(b"\n")  # pyright: ignore[reportOptionalMemberAccess]
            await until(lambda sent=sent: view.node("p").seq == first + sent, 120)  # pyright: ignore[reportOptionalMemberAccess]
        seconds, worked = time.monotonic() - begin, time.process_time() - processor
        counters = observer.counters("p")
    return [
        Figure("rate", "events through bus, decode and view, per second of processor", count / worked, "/s", 2e4, True),
        Figure("rate", "the same on the clock, with the publisher on this machine", count / seconds, "/s"),
        Figure("rate", "of them not applied one by one", counters.superseded, "", 0),
    ]


async def growth(options: argparse.Namespace) -> list[Figure]:
    sizes, events, rounds = (8, 64, 512, 1000), 8000, 5
    costs: dict[int, list[float]] = {size: [] for size in sizes}
    clusters = {size: await _filled(size, events) for size in sizes}
    for turn in range(rounds + 1):
        for size, cluster in clusters.items():
            cost = await _one_turn(cluster, turn, events)
            if turn:  # the first warms up
                costs[size].append(cost)
    for _, _, run, _ in clusters.values():
        run.cancel()
    medians = {size: statistics.median(values) for size, values in costs.items()}
    least = min(medians.values())
    return [
        *(Figure("growth", f"an event among {size:,} nodes", medians[size], "µs") for size in sizes),
        Figure("growth", "dearest of them over cheapest", max(medians.values()) / least, "times", 1.5),
    ]


_Cluster = tuple[InProcessBus, MasterView, "asyncio.Task[None]", list[str]]


async def _filled(size: int, events: int) -> _Cluster:
    bus = InProcessBus(CLUSTER, buffer_items=4 * size + 1024)
    names = [f"n{number}" for number in range(size)]
    for number, name in enumerate(names):
        engine = InProcessEngine(bus)
        await engine.start()
        state = NodeSnapshot(
            node=name, epoch=str(EPOCH), seq=0, host=host(number), gpu_devices=simulated_result(name, 8).devices
        )
        await engine.join(name, encode_snapshot(state))
    watcher = InProcessEngine(bus)
    await watcher.start()
    view = MasterView()
    run = asyncio.create_task(ClusterObserver(watcher, view, resync_interval_s=3600).run())
    await until(lambda: healthy(view) == size, 120)
    return bus, view, run, names


EPOCH = Epoch.new(1)


async def _one_turn(cluster: _Cluster, turn: int, events: int) -> float:
    """µs of processor for each of about ``events`` events, which come from all nodes in turn."""
    bus, view, _, names = cluster
    each = events // len(names)
    found = {name: simulated_result(name, 8) for name in names}
    items = [
        EventReceived(name, event_of(name, EPOCH, turn * each + at + 1, found[name], size_bytes=1024))
        for at in range(each)
        for name in names
    ]
    begin = time.process_time()
    for start in range(0, len(items), 512):
        for item in items[start : start + 512]:
            bus.deliver(item)
        last = items[min(start + 511, len(items) - 1)].node
        wanted = turn * each + (min(start + 511, len(items) - 1)) // len(names) + 1
        while view.node(last).seq < wanted:  # noqa: ASYNC110  # pyright: ignore[reportOptionalMemberAccess]
            await asyncio.sleep(0)
    return (time.process_time() - begin) / len(items) * 1e6


async def processes(options: argparse.Namespace) -> list[Figure]:
    endpoint, count = new_endpoint(), options.processes
    figures: list[Figure] = []
    async with observing(endpoint) as (view, _), started("forked", endpoint, count, 8) as nodes:
        said = await nodes.line()
        added = sorted(float(pair[0]) for pair in said["added"])
        pids: list[int] = said["pids"]
        await until(lambda: healthy(view) == count, 60)
        joins: list[float] = []
        for _ in range(5):
            begin = time.monotonic()
            async with observing(endpoint, listen=False) as (late, _):
                await until(lambda late=late: healthy(late) == count, 60)
                joins.append(time.monotonic() - begin)
        seen: list[float] = []
        changes = view.changes()
        for pid in pids[:10]:
            os.kill(pid, 9)
            begin = time.monotonic()
            async with asyncio.timeout(30):
                while (await anext(changes)).kind is not ChangeKind.NODE_SUSPECT:
                    pass
            seen.append((time.monotonic() - begin) * 1e3)
        figures += [
            Figure("processes", f"late joiner to all of {count} node processes, median of 5", _median(joins), "s", 1),
            Figure("processes", "the same, worst", max(joins), "s", 1),
            Figure("processes", "kill -9 to suspect, median of 10", _median(seen), "ms", 250),
            Figure("processes", "the same, worst", max(seen), "ms", 250),
            Figure("processes", "memory added by bus and node, USS, median process", _median(added) / MIB, "MiB", 10),
            Figure("processes", "the same, largest", added[-1] / MIB, "MiB", 10),
        ]
        async with started("single", endpoint, 8) as node:
            said = await node.line()
            figures += [
                Figure("processes", "the same in a process started on its own", said["added"] / MIB, "MiB", 10),
                Figure("processes", "all of that process, with interpreter and libraries", said["whole"] / MIB, "MiB"),
            ]
    return figures


async def nodes(options: argparse.Namespace) -> list[Figure]:
    endpoint, count = new_endpoint(), options.nodes
    each = -(-count // HOSTS)
    async with contextlib.AsyncExitStack() as stack:
        master = await Process.start("master", endpoint)
        try:
            await master.line()
            begin = time.monotonic()
            parts = [
                await stack.enter_async_context(started("nodes", endpoint, at, min(each, count - at), 8))
                for at in range(0, count, each)
            ]
            for part in parts:
                await part.line()
            await _all_there(master, count)
            joined = time.monotonic() - begin
            await asyncio.sleep(5)
            before = await master.ask()
            await asyncio.sleep(options.idle_seconds)
            after = await master.ask()
        finally:
            await master.kill()
        begin = time.monotonic()
        async with started("master", endpoint) as again:
            await again.line()
            listening = time.monotonic()
            await _all_there(again, count)
            resynced, restarted = time.monotonic() - listening, time.monotonic() - begin
    idle = (after["cpu"] - before["cpu"]) / (after["seconds"] - before["seconds"])
    said = (after["events"] - before["events"]) / count / (after["seconds"] - before["seconds"]) * 60
    return [
        Figure("nodes", f"master of {count:,} nodes of 8 devices, resident memory", after["rss"] / MIB, "MB", 300),
        Figure("nodes", "its load while nothing happens", 100 * idle, "% of a core", 5),
        Figure("nodes", "events of a node in 60 s meanwhile", said, "", 1),
        Figure("nodes", "a new master listens to all nodes and devices known", resynced, "s", 10),
        Figure("nodes", "the same with the start of its process", restarted, "s"),
        Figure("nodes", "all nodes started and known", joined, "s"),
    ]


async def _all_there(master: Process, count: int) -> None:
    async with asyncio.timeout(300):
        while (said := await master.ask())["healthy"] < count or said["devices"] < 8 * count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def idle(options: argparse.Namespace) -> list[Figure]:
    endpoint, count = new_endpoint(), 2
    words = [
        sys.executable,
        "-m",
        "gpurt",
        "worker",
        "--connect",
        endpoint,
        "--cluster",
        CLUSTER,
        "--simulate",
        "h100x8",
    ]
    with tempfile.TemporaryDirectory() as folder:
        async with observing(endpoint) as (view, _):
            workers = [
                await asyncio.create_subprocess_exec(
                    *words, "--node", f"w{n}", "--registry", f"{folder}/w{n}.json", stdout=asyncio.subprocess.DEVNULL
                )
                for n in range(count)
            ]
            try:
                await until(lambda: healthy(view) == count, 120)
                await asyncio.sleep(10)  # they look their devices up a first time
                before = sum(record.seq for record in view.snapshot().nodes.values())
                await asyncio.sleep(options.idle_seconds)
                after = sum(record.seq for record in view.snapshot().nodes.values())
            finally:
                for worker in workers:
                    worker.kill()
                    await worker.wait()
    said = (after - before) / count * 60 / options.idle_seconds
    return [Figure("idle", "events of a whole worker in 60 s in which nothing changes", said, "", 1)]


def _median(values: list[float]) -> float:
    return statistics.median(values)


PARTS: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, list[Figure]]]] = {
    part.__name__: part for part in (latency, rate, growth, processes, nodes, idle)
}


def show(figure: Figure) -> str:
    verdict = "" if figure.met is None else "met" if figure.met else "MISSED"
    bound = "" if figure.target is None else f"{'≥' if figure.more_is_better else '≤'} {figure.target:,g}"
    value = f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:.3g}"
    return f"{figure.part:10} {figure.name:62} {value:>8} {figure.unit:12} {bound:>9} {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(PARTS)}")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--nodes", type=int, default=1000, help="simulated nodes (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=200, help="node processes (default: %(default)s)")
    parser.add_argument("--idle-seconds", type=float, default=60, help="of silence (default: %(default)s)")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no parts: {' '.join(sorted(unknown))}; choose from {' '.join(PARTS)}")
    figures: list[Figure] = []
    for name in options.parts or PARTS:
        found = asyncio.run(PARTS[name](options))
        figures += found
        for figure in [] if options.json else found:
            print(show(figure), flush=True)
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    if options.json:
        print(json.dumps({"machine": machine, "figures": [asdict(f) | {"met": f.met} for f in figures]}, indent=2))
    else:
        print(f"{machine['cpus']} processors, load {machine['load']:.1f} at the end")
    return int(any(figure.met is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
