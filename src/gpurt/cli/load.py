"""``gpurt load FILE``: weights from safetensors to a device, checked and timed, and freed again."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from gpurt.cli.running import run_command
from gpurt.errors import DeviceNotFound

if TYPE_CHECKING:
    from gpurt.backend import GPUBackend
    from gpurt.types import GPUDevice

Report = Callable[[int, int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a safetensors file, or the index of a sharded checkpoint (.json)")
    parser.add_argument("--device", metavar="ID", help="cuda:0, or cuda for its first (default: the first usable)")
    parser.add_argument("--backend", metavar="NAME", help="(default: that of --device, else the best of this machine)")
    parser.add_argument(
        "--only",
        metavar="PREFIX",
        action="append",
        help="only the tensors of this name or below it, such as model.layers.3; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="the summary as a JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when everything was loaded; every failure is a :class:`~gpurt.errors.GPUError`."""
    with _progress(shown=sys.stderr.isatty() and not args.json) as progress:
        summary = run_command(_load(args, progress))
    if args.json:
        sys.stdout.write(json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        simulated = " (simulated)" if summary["simulated"] else ""
        sys.stdout.write(
            f"{_count(len(summary['files']), 'file')}, {_count(summary['tensors'], 'tensor')}, "
            f"{summary['bytes']:,} bytes to {summary['device_id']} {summary['device_name']}{simulated} "
            f"in {summary['seconds']:.2f} s, {summary['gbps']:.2f} GB/s\n"
        )
    return 0


async def _load(args: argparse.Namespace, progress: Report) -> dict[str, Any]:
    from gpurt.factory import create_backend
    from gpurt.weights import load_safetensors

    name: str | None = args.backend or (args.device.partition(":")[0] if args.device else None)
    async with await create_backend(name) as backend:
        device = _choose(backend, args.device if ":" in (args.device or "") else None)
        began = time.perf_counter()
        async with await load_safetensors(
            args.file, backend, device.device_id, only=args.only, on_progress=progress
        ) as weights:
            await backend.synchronize(device.device_id)
            seconds = time.perf_counter() - began
            return {
                "schema": 1,
                "files": [str(path) for path in weights.files],
                "tensors": len(weights),
                "bytes": weights.size_bytes,
                "seconds": seconds,
                "gbps": weights.size_bytes / seconds / 1e9,
                "backend": backend.name,
                "device_id": device.device_id,
                "device_name": device.name,
                "simulated": device.simulated,
            }


def _choose(backend: GPUBackend, device_id: str | None) -> GPUDevice:
    for device in backend.devices:
        if device.device_id == device_id or (device_id is None and device.usable):
            return device
    known = ", ".join(device.device_id for device in backend.devices)
    if device_id is None:
        raise DeviceNotFound("no device is usable", backend=backend.name, hint="gpurt discover says why")
    raise DeviceNotFound("no such device", backend=backend.name, device_id=device_id, hint=f"devices: {known}")


@contextlib.contextmanager
def _progress(*, shown: bool) -> Generator[Report]:
    if not shown:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    # On stderr: what is piped onwards is the summary alone.
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("loading", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
