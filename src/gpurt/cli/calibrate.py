"""``gpurt calibrate``: what the devices really do, beside what would be assumed of them, kept for placement."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from gpurt.cli.progress import Report, progress
from gpurt.cli.running import run_command
from gpurt.errors import GPUError
from gpurt.printable import printable, quoted

if TYPE_CHECKING:
    from gpurt.calibration import Calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", metavar="ID", action="append", help="cuda:0, say; may be repeated (default: every usable one)"
    )
    parser.add_argument("--backend", metavar="NAME", help="(default: that of --device, else the best of this machine)")
    parser.add_argument("--again", action="store_true", help="measure what is known for this driver, too")
    parser.add_argument("--busy", action="store_true", help="measure devices that somebody uses, too")
    parser.add_argument(
        "--weights",
        metavar="DIR",
        help="where a file of up to 256 MiB is written, loaded and removed (default: the directory of temporary files)",
    )
    parser.add_argument("--registry", metavar="PATH", help="registry file (default: the user's own)")
    parser.add_argument("--json", action="store_true", help="a JSON object on stdout")
    parser.epilog = (
        "About two seconds a device. On each it takes at most 512 MiB, and at most a quarter of what is free; what is "
        "known for the present driver is shown and not measured again. Devices that are more than 10 % busy are left "
        "alone, where their backend tells."
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when every device has figures of now or of earlier, 1 when one has not or was left alone."""
    backends = {name.partition(":")[0] for name in args.device or ()}
    if args.backend is None and len(backends) > 1:
        raise GPUError("devices of one backend at a time", operation="calibrate --device", hint="run it once for each")
    if args.weights is not None and not os.access(args.weights, os.W_OK | os.X_OK):
        what = "cannot be written to" if os.path.isdir(args.weights) else "is no directory"
        raise GPUError(f"{quoted(args.weights)} {what}", operation="calibrate --weights")
    with progress("gpurt calibrate: measures the devices, about two seconds each") as tell:
        results = run_command(_calibrate(args, args.backend or next(iter(backends), None), tell))
    if args.json:
        document = {"schema": 1, "devices": [_document(result) for result in results]}
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        _show(results)
    return 1 if any(result.speeds is None or result.failure for result in results) else 0


async def _calibrate(args: argparse.Namespace, name: str | None, tell: Report) -> tuple[Calibration, ...]:
    from gpurt.calibration import calibrate
    from gpurt.factory import create_backend

    async with await create_backend(name) as backend:
        return await calibrate(
            backend,
            args.device,
            again=args.again,
            busy=args.busy,
            registry_path=args.registry,
            weights_directory=args.weights,
            on_device=lambda device, done, total: tell(f"{device.device_id} {printable(device.name)}", done, total),
        )


def _document(result: Calibration) -> dict[str, Any]:
    device = result.device
    assumed = _assumed(result)
    return {
        "device_id": device.device_id,
        "name": device.name,
        "stable_id": device.stable_id,
        "fresh": result.fresh,
        "failure": result.failure,
        "measured": None if result.speeds is None else result.speeds.model_dump(mode="json"),
        "assumed": {"memory_gbps": assumed[0], "tflops": assumed[1]},
    }


def _assumed(result: Calibration) -> tuple[float, float]:
    """GB/s and TFLOPS that placement assumes of a device that nobody has measured."""
    from gpurt.placement.devices import device_from_gpu

    device = device_from_gpu(result.device.model_copy(update={"speeds": None}), node="here")
    return device.memory_bandwidth / 1e9, device.compute_flops / 1e12


def _show(results: tuple[Calibration, ...]) -> None:
    from gpurt.printable import MAX_LINE

    lines: list[str] = []
    for result in results:
        speeds, (memory, flops) = result.speeds, _assumed(result)
        when = "not measured" if speeds is None else "measured now" if result.fresh else f"as of {speeds.measured_at}"
        simulated = " (simulated)" if result.device.simulated else ""
        lines.append(f"{result.device.device_id}  {printable(result.device.name)}{simulated}, {when}")
        if speeds is not None:
            lines += [
                _line("host to device", speeds.to_device_gbps, "GB/s"),
                _line("device to host", speeds.from_device_gbps, "GB/s"),
                _line("device memory", speeds.memory_gbps, "GB/s", memory),
                _line("arithmetic, fp32", speeds.fp32_tflops, "TFLOPS", flops),
                _line("matrix units, bf16", speeds.bf16_tflops, "TFLOPS"),
                _line("files in the page cache", speeds.load_gbps, "GB/s"),
            ]
            if speeds.load_together_gbps is not None:
                lines.append(_line("to all devices at once", speeds.load_together_gbps, "GB/s"))
        else:
            lines += [
                _line("device memory", None, "GB/s", memory),
                _line("arithmetic, fp32", None, "TFLOPS", flops),
            ]
        notes = (result.failure, *(() if speeds is None else speeds.notes))
        lines += [f"  {printable(note, MAX_LINE)}" for note in notes if note]
    sys.stdout.write("\n".join(lines) + "\n")


def _line(what: str, value: float | None, unit: str, assumed: float | None = None) -> str:
    told = "-" if value is None else f"{value:.4g} {unit}"
    line = f"  {what:<24}{told}"
    return line if assumed is None else f"{line:<42}(assumed: {assumed:.4g} {unit})"
