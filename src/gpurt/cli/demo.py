"""``gpurt demo``: a whole cluster on this machine in a few seconds, with a crash in the middle.

This process is the master and the hub. Three worker processes find their devices and publish them. A small model of
random bytes is placed on two of them, and they load the layers that the plan gives them, which is checked by SHA-256.
One of the two is killed with SIGKILL, seen as suspect and then lost; the plan is repaired, and the layers that were
lost are loaded by the others. It is started again, and recognised by the same device identities. Everything lives in
one temporary directory and ends with this process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpurt.cli.demo_model import LAYERS, write_model
from gpurt.cli.running import run_command
from gpurt.errors import GPUError
from gpurt.runtime.lane import off_loop

if TYPE_CHECKING:
    from gpurt.cli.demo_screen import Screen
    from gpurt.cli.demo_worker import WorkerProcess
    from gpurt.cluster.committer import PlacementCommitter
    from gpurt.cluster.master import Master
    from gpurt.cluster.view import MasterView
    from gpurt.placement import RepairResult

STEP_TIMEOUT_S: Final = 40.0
"""No step takes a tenth of this on an idle machine; past it the demo fails and says what it waited for."""
_LOOK_S: Final = 0.005
"""Fine enough for figures in hundredths of a second."""
WORKERS: Final = ("worker-1", "worker-2", "worker-3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--simulate",
        metavar="SPEC",
        help='give the workers simulated devices in turn, e.g. "h100x8,m2-ultra"; entries run short: from the first',
    )
    parser.add_argument("--plain", action="store_true", help="plain lines, as without a terminal")


def run(args: argparse.Namespace) -> int:
    from gpurt.cli.demo_screen import make_screen

    simulated = _share(args.simulate) if args.simulate is not None else {}
    screen = make_screen(live=sys.stdout.isatty() and not args.plain)
    directory = Path(tempfile.mkdtemp(prefix="gpurt-demo-"))
    try:
        with screen:
            summary = run_command(_Demo(directory, simulated, screen).run())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    screen.summary(summary)
    return 0


def _share(spec: str) -> dict[str, str]:
    """Entries of the specification in turn to the workers."""
    from gpurt.testing.profiles import parse_simulation

    try:
        parse_simulation(spec)
    except ValueError as exc:
        raise GPUError(str(exc), operation="demo --simulate") from exc
    entries = [entry.strip() for entry in spec.split(",") if entry.strip()]
    shares = {name: ",".join(entries[index :: len(WORKERS)]) for index, name in enumerate(WORKERS)}
    return {name: share or entries[0] for name, share in shares.items()}


@dataclass
class Summary:
    """What the demo measured; seconds of this process's monotonic clock."""

    first_event_s: float = 0.0
    """From starting the workers to the first device event at the master."""
    suspect_s: float = 0.0
    """From SIGKILL to ``suspect``."""
    lost_s: float = 0.0
    """From SIGKILL to ``lost``."""
    placed_s: float = 0.0
    """From asking the solver until every layer was loaded and checked."""
    whole_s: float = 0.0
    """From ``lost`` until every layer was loaded and checked again."""
    resync_s: float = 0.0
    """From starting the worker again to ``back`` with its devices."""
    total_s: float = 0.0
    devices: int = 0
    stages: int = 0
    held_bytes: int = 0
    simulated: bool = False
    repair: RepairResult | None = None


class _Demo:
    def __init__(self, directory: Path, simulated: dict[str, str], screen: Screen) -> None:
        self.directory = directory
        self.weights = directory / "model.safetensors"
        self.simulated = simulated
        self.screen = screen
        self.summary = Summary()
        self.workers: dict[str, WorkerProcess] = {}

    async def run(self) -> Summary:
        from gpurt.cluster.master import MasterConfig, run_master
        from gpurt.cluster.view import MasterView

        began = time.monotonic()
        self.endpoint = f"tcp/127.0.0.1:{_free_port()}"
        view, ready = MasterView(), asyncio.get_running_loop().create_future()
        config = MasterConfig(cluster="demo", endpoint=self.endpoint)
        master = asyncio.create_task(run_master(config, view, on_ready=ready.set_result), name="demo-master")
        watch = asyncio.create_task(self._watch(view), name="demo-watch")
        play = asyncio.create_task(self._play(view, ready), name="demo-play")
        try:
            done, _ = await asyncio.wait({master, watch, play}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            play.cancel()
            with contextlib.suppress(asyncio.CancelledError, GPUError):
                await play
            await asyncio.gather(*(worker.end() for worker in self.workers.values()))
            for task in (watch, master):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, GPUError):
                    await task
        self.summary.total_s = time.monotonic() - began
        return self.summary

    async def _watch(self, view: MasterView) -> None:
        async for change in view.changes():
            self.screen.change(change, view.snapshot())

    async def _play(self, view: MasterView, ready: asyncio.Future[Master]) -> None:
        await self._until(ready.done, "the master's hub to listen")
        from gpurt.cluster.committer import PlacementCommitter

        committer = PlacementCommitter(ready.result().engine, view)
        running = asyncio.create_task(committer.run(), name="demo-committer")
        try:
            await self._story(view, committer)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, GPUError):
                await running

    async def _story(self, view: MasterView, committer: PlacementCommitter) -> None:
        from gpurt.cluster.records import NodeState

        self.screen.say(f"master listens at {self.endpoint}; starting {len(WORKERS)} workers")
        started = time.monotonic()
        for name in WORKERS:
            await self._start(name)
        digests = await off_loop("demo-model", lambda: write_model(self.weights))
        self.screen.say(
            f"a model of {LAYERS} layers, {self.weights.stat().st_size >> 20} MiB of random bytes, is written"
        )
        seen = await self._until(lambda: bool(view.snapshot().devices), "the first device")
        self.summary.first_event_s = seen - started

        def joined(name: str) -> bool:
            node = view.node(name)
            return node is not None and node.state is NodeState.HEALTHY and bool(node.devices)

        await self._until(lambda: all(joined(name) for name in WORKERS), "all workers to join")
        await self._until(lambda: all(each.accepting for each in self.workers.values()), "all workers to take a plan")
        self.summary.devices = len(view.snapshot().devices)

        from gpurt.cli.demo_placement import DemoPlacement

        placement = DemoPlacement(view, committer, self.workers, digests, self.screen, self._until)
        began = time.monotonic()
        plan = await placement.place()
        self.summary.placed_s = time.monotonic() - began
        self.summary.stages = len(plan.stages)
        self.summary.held_bytes = sum(held.weights for stage in plan.stages for held in stage.held)
        self.summary.simulated = bool(self.simulated)

        victim = plan.stages[-1].node
        before = _identities(view, victim)
        self.screen.say(f"killing {victim} with SIGKILL")
        killed = time.monotonic()
        self.workers[victim].kill()
        seen = await self._until(lambda: _state(view, victim) is not NodeState.HEALTHY, f"{victim} to be suspect")
        self.summary.suspect_s = seen - killed
        placement.show()
        lost = await self._until(lambda: _state(view, victim) is NodeState.LOST, f"{victim} to be lost")
        self.summary.lost_s = lost - killed
        self.summary.repair = await placement.repair()
        self.summary.whole_s = time.monotonic() - lost

        self.screen.say(f"starting {victim} again")
        started = time.monotonic()
        await self._start(victim)
        seen = await self._until(lambda: joined(victim), f"{victim} to be back")
        self.summary.resync_s = seen - started
        after = _identities(view, victim)
        if after != before:
            raise GPUError(f"{victim} came back with other devices: {sorted(after)} instead of {sorted(before)}")
        self.screen.say(
            f"{victim} is back with the same {len(after)} device {'identity' if len(after) == 1 else 'identities'}"
        )

    async def _start(self, name: str) -> None:
        from gpurt.cli.demo_worker import WorkerProcess

        old = self.workers.get(name)
        if old is not None:
            await old.end()
        worker = self.workers[name] = WorkerProcess(name, self.directory, self.endpoint, self.simulated.get(name))
        await worker.start(self.weights, lambda done, total: self.screen.progress(name, done, total))

    async def _until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait for something at the master or in a worker; returns when it was seen.

        Raises:
            GPUError: a worker has ended by itself, or it takes too long.
        """
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while not condition():
            for worker in self.workers.values():
                worker.raise_if_ended()
            if time.monotonic() > deadline:
                tails = "\n".join(worker.stderr_tail() for worker in self.workers.values())
                raise GPUError(f"waited {STEP_TIMEOUT_S:g} s for {what}\n{tails}", operation="demo")
            await asyncio.sleep(_LOOK_S)
        seen = time.monotonic()
        await asyncio.sleep(_LOOK_S)  # the news is shown by another task; what follows from it comes after
        return seen


def _state(view: MasterView, name: str) -> object:
    node = view.node(name)
    return node.state if node else None


def _identities(view: MasterView, name: str) -> set[str]:
    node = view.node(name)
    return set(node.devices) if node else set()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
