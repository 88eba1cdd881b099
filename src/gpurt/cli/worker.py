"""``gpurt worker``: one node of a cluster, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpurt.cli import protected
from gpurt.cli import worker_words as words
from gpurt.cli.json_logs import add_log_format, speak_for
from gpurt.cli.metrics_option import add_metrics, metrics_served
from gpurt.cli.running import run_command
from gpurt.errors import GPUError

if TYPE_CHECKING:
    from gpurt.backend import GPUBackend
    from gpurt.cli.check import Phase
    from gpurt.cli.checkpoint_shards import CheckpointShards
    from gpurt.cluster.worker import Worker

HEARD_S: Final = 2.0
"""A master that is there asks within some milliseconds."""
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpurt.cluster.worker import DEFAULT_ENDPOINT

    parser.add_argument("--node", help=f"name in the cluster (default: {default_node()}, or the certificate's)")
    parser.add_argument("--cluster", help="name of the cluster (default: default, or the certificate's)")
    parser.add_argument(
        "--connect",
        metavar="ENDPOINT",
        help=f"where the master listens (default: {DEFAULT_ENDPOINT}, or as in the folder of --tls), or "
        "nats://HOST:PORT of a NATS server",
    )
    protected.add_arguments(parser, "FOLDER, as gpurt cluster enrol made it")
    parser.add_argument("--registry", metavar="PATH", help="registry file; two workers of one machine need two")
    parser.add_argument(
        "--simulate", metavar="SPEC", help='simulated devices instead of real ones, e.g. "h100x8,m2-ultra"'
    )
    parser.add_argument("--backend", metavar="NAME", action="append", help="only this backend; may be repeated")
    parser.add_argument(
        "--interval", metavar="S", type=seconds, default=10.0, help="seconds between look-ups (default: %(default)s)"
    )
    parser.add_argument("--timeout", metavar="S", type=seconds, help="deadline of a probe in seconds")
    parser.add_argument(
        "--check",
        metavar="BYTES",
        type=byte_count,
        help="first copy this many random bytes to the first device and back, e.g. 256M, and say how fast",
    )
    parser.add_argument(
        "--link-address",
        metavar="HOST[:PORT]",
        help="where other nodes measure their way to this one (default: the address towards the master, any free port)",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="first measure the devices whose speed with this driver is not known, and tell the cluster: see gpurt "
        "calibrate",
    )
    parser.add_argument(
        "--weights",
        metavar="PATH",
        type=Path,
        help="load the layers that a master assigns from this safetensors file, or sharded checkpoint's index (.json)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read loaded layers back, and say the SHA-256 of every tensor (--json)"
    )
    parser.add_argument("--json", action="store_true", help="what happens as JSON lines on stdout")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input ends")
    add_metrics(parser)
    add_log_format(parser)


def run(args: argparse.Namespace) -> int:
    from gpurt.cluster.worker import DEFAULT_ENDPOINT, WorkerConfig

    identity = protected.identity_of(args)
    protected.check_node(identity)
    try:
        config = WorkerConfig(
            node=protected.chosen(args.node, identity and identity.name, default_node()),
            cluster=protected.chosen(args.cluster, identity and identity.cluster, "default"),
            endpoint=protected.chosen(args.connect, identity and identity.endpoint, DEFAULT_ENDPOINT),
            tls=args.tls,
            insecure=args.insecure,
            link_address=args.link_address,
            registry_path=args.registry,
            simulate=args.simulate,
            backends=args.backend,
            interval_s=args.interval,
            probe_timeout_s=args.timeout,
        )
        speak_for(config.node)
        session = _Session(
            config,
            check_bytes=args.check,
            calibrate=args.calibrate,
            weights=args.weights,
            verify=args.verify,
            as_json=args.json,
            log_events=args.log_format == "json",
        )
        run_command(session.observed(args.metrics, args.exit_with_stdin))
    except ValueError as exc:
        if isinstance(exc, GPUError):
            raise
        raise GPUError(str(exc), operation="worker") from exc
    return 0


class _Session:
    """One run of the command: says what happens, and owns the backend that it opened."""

    def __init__(
        self,
        config: Any,
        *,
        check_bytes: int | None,
        calibrate: bool,
        weights: Path | None,
        verify: bool,
        as_json: bool,
        log_events: bool = False,
    ) -> None:
        from gpurt.cluster.node_metrics import NodeMetrics

        self.metrics = NodeMetrics(config.node)
        self.log_events = log_events
        self.config = config
        self.check_bytes, self.calibrate = check_bytes, calibrate
        self.weights, self.verify = weights, verify
        self._shards: CheckpointShards | None = None
        self._worker: Worker | None = None
        self._heard = asyncio.Event()
        self.as_json = as_json

    async def observed(self, metrics: tuple[str, int] | None, exit_with_stdin: bool) -> None:
        async with metrics_served(metrics, self.metrics.take):
            await self.run(exit_with_stdin)

    async def run(self, exit_with_stdin: bool) -> None:
        from gpurt.cluster.worker import run_worker

        worker = asyncio.create_task(
            run_worker(self.config, on_ready=self._ready, on_heard=self._hear), name="gpurt-worker"
        )
        if exit_with_stdin:
            _when_stdin_ends(asyncio.get_running_loop(), worker.cancel)
        try:
            await worker
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # Ctrl-C, not the end of stdin

    async def _ready(self, worker: Worker) -> None:
        self.metrics.watch(worker)
        if self.log_events:
            from gpurt.cluster.logged import log_events

            self.logging = asyncio.create_task(log_events(self.config.node, worker.discovery.subscribe()))
        snapshot = worker.publisher.snapshot()
        # What the node is comes before what it does, but for who is not heard nothing waits.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARD_S):
                await self._heard.wait()
            self._say_joined(worker)
        self._worker, worker.publisher.on_draining = worker, self._drains
        if snapshot.draining:
            self._drains(True)
        if worker.backend is not None:
            await self._hold(worker, worker.backend)
            return
        from gpurt.factory import create_backend

        # Only what a probe found to work is opened in this process: a driver that crashes has done so elsewhere.
        working = [report.name for report in snapshot.reports if report.status == "ok"]
        async with await create_backend(candidates=working or None) as backend:
            if worker.monitoring is not None:
                # Its library tells more than the system does: of some devices it alone tells anything.
                worker.monitoring.use(backend)
            await self._hold(worker, backend)

    def _hear(self, heard: bool) -> None:
        if not heard:
            self._heard.clear()
            self._say(*words.unheard(self.config))
            return
        self._heard.set()
        if self._worker is not None:
            self._say_joined(self._worker)

    def _say_joined(self, worker: Worker) -> None:
        """Only now: a node that is connected and that no master sees has not joined anything."""
        self._say(*words.joined(self.config, [d.stable_id for d in worker.publisher.snapshot().gpu_devices]))

    def _drains(self, draining: bool) -> None:
        unkept = self._worker is not None and self._worker.publisher.fence.unkept is not None
        self._say(*words.drains(self.config.node, draining, unkept=unkept))

    async def _hold(self, worker: Worker, backend: GPUBackend) -> None:
        """Serve, and keep what is loaded until the worker ends."""
        try:
            await self._serve(worker, backend)
            await asyncio.Event().wait()
        finally:
            if self._shards is not None:
                await self._shards.close()

    async def _serve(self, worker: Worker, backend: GPUBackend) -> None:
        self.metrics.use(backend)
        device = backend.devices[0]
        self._say(
            {"event": "opened", "backend": backend.name, "device_id": device.device_id, "name": device.name},
            f"opened backend {backend.name}, first device {device.device_id} {device.name}",
        )
        if self.calibrate:
            await self._measure(worker, backend)
        if self.weights is not None:
            from gpurt.cli.checkpoint_shards import CheckpointShards

            self._shards = CheckpointShards(backend, self.weights, self._loaded, verify=self.verify)
            worker.assignments.use(self._shards)
            self._say({"event": "accepting", "weights": str(self.weights)}, f"loads layers from {self.weights}")
        if self.check_bytes is None:
            return
        from gpurt.cli.check import check_device

        total = self.check_bytes

        def progress(phase: Phase, done: int) -> None:
            self._say({"event": "progress", "phase": phase, "done": done, "total": total}, None)

        result = await check_device(backend, device.device_id, total, progress)
        self._say(
            {
                "event": "checked",
                "simulated": device.simulated,
                "host_memory": backend.name == "cpu" or device.simulated,
                **result.document(),
            },
            f"checked {result.device_id}: {total:,} bytes there and back are equal (SHA-256 {result.sha256[:16]}…), "
            f"{result.to_device_gbps:.2f} GB/s to the device, {result.from_device_gbps:.2f} GB/s back"
            + (" (simulated)" if device.simulated else ""),
        )

    async def _measure(self, worker: Worker, backend: GPUBackend) -> None:
        """Before anything else is done with the devices, which it would be measured with."""
        from gpurt.calibration import calibrate

        results = await calibrate(backend, registry_path=self.config.registry_path)
        await worker.discovery.read_measurements()
        told = {each.device.device_id: "measured" if each.fresh else each.failure or "known" for each in results}
        self._say({"event": "calibrated", "devices": told}, f"calibrated: {', '.join(map(': '.join, told.items()))}")

    def _loaded(self, told: dict[str, Any]) -> None:
        self._say(*words.loaded(told))

    def _say(self, document: dict[str, Any], text: str | None) -> None:
        if self.as_json:
            sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
        elif text is not None:
            sys.stdout.write(text + "\n")
        else:
            return
        sys.stdout.flush()


def _when_stdin_ends(loop: asyncio.AbstractEventLoop, callback: Any) -> None:
    """A thread, not the loop's own pipe support, which knows neither files nor Windows pipes."""

    def watch() -> None:
        # Not sys.stdin: the interpreter aborts at exit when a daemon thread is inside a buffered reader.
        while os.read(0, 1 << 16):
            pass
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return  # the loop has ended already

    threading.Thread(target=watch, name="gpurt:stdin", daemon=True).start()


def default_node() -> str:
    """The host's name, made to fit a node name."""
    import platform

    from gpurt.cluster.keys import RESERVED

    name = re.sub(r"[^a-z0-9_-]", "-", platform.node().lower())[:64] or "node"
    return f"{name}-node" if name in RESERVED else name


def byte_count(text: str) -> int:
    """``256M`` → bytes; units k, M, G are powers of 1024."""
    match = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of bytes such as 256M")
    return int(match[1]) * _UNITS[match[2]]


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value
