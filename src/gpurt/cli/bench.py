"""``gpurt bench``: gpurt's own figures on this machine, each beside a peer and a ceiling of the same run."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable

from gpurt.benchmarks import TOPICS
from gpurt.cli.running import run_command
from gpurt.errors import GPUError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"what to measure, of: {' '.join(TOPICS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes: a minute, not many")
    parser.add_argument(
        "--device",
        metavar="ID",
        help="such as cuda:0, or vulkan for its first, software included (default: the best backend's first)",
    )
    parser.add_argument("--compare", metavar="FILE", help="an earlier run's --json output: show what has changed")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="the event loop to measure on")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit code 0, also when a target is missed or a figure got worse: a benchmark informs. 1 when a topic ended with
    an error; the others are still shown. 2 for a name, a device, a loop or a file that is not there."""
    from gpurt.benchmarks.comparison import compare, read_record
    from gpurt.benchmarks.report import show
    from gpurt.benchmarks.runner import measure

    names: list[str] = list(dict.fromkeys(args.names)) or list(TOPICS)
    unknown = [name for name in names if name not in TOPICS]
    if unknown:
        sys.stderr.write(f"gpurt bench: nothing named {', '.join(unknown)}; choose from: {' '.join(TOPICS)}\n")
        return 2
    path: str | None = args.compare
    old = None if path is None else read_record(path)
    on_topic: Callable[[str], None] = _announce if sys.stderr.isatty() else lambda _: None
    results = run_command(
        measure(names, quick=args.quick, device_id=args.device, on_topic=on_topic),
        loop_factory=_loop_factory(args.loop),
    )
    record = results.as_json() | {"loop": args.loop}
    comparison = None if path is None or old is None else compare(path, old, results, record)
    if args.json:
        if comparison is not None:
            record["comparison"] = comparison.as_json()
        sys.stdout.write(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        show(results, comparison)
    for name, error in results.failed.items():
        sys.stderr.write(f"gpurt bench: {name} failed: {' '.join(error.split())}\n")
    return 1 if results.failed else 0


def _announce(name: str) -> None:
    sys.stderr.write(f"measuring {name} …\n")


def _loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if name == "asyncio":
        return None
    try:
        import uvloop  # pyright: ignore[reportMissingImports]
    except ImportError as exc:
        raise GPUError("uvloop is not installed", hint="pip install uvloop") from exc
    return uvloop.new_event_loop  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
