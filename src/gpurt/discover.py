"""``python -m gpurt.discover`` and ``gpurt discover``: which accelerators are here, and why one is missing.

Exit code: 0 with a usable accelerator, 1 with the CPU only, 2 for an error or when nothing is usable. With ``--json``
stdout has one JSON document and nothing else (with ``--watch`` one a line, whenever something has changed).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpurt.errors import GPUError

if TYPE_CHECKING:
    from rich.console import Console

    from gpurt.discovery.probe import ChildProber
    from gpurt.discovery.result import DiscoveryResult
    from gpurt.discovery.service import GPUDiscoveryService
    from gpurt.discovery.survey import Prober

EXIT_ACCELERATOR, EXIT_NO_ACCELERATOR, EXIT_ERROR = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--explain", action="store_true", help="say how the answer came about")
    parser.add_argument("--watch", type=_seconds, metavar="N", help="look again every N seconds, print changes")
    parser.add_argument(
        "--backend", action="append", metavar="NAME", help="ask this backend only; repeat it for more, best first"
    )
    parser.add_argument(
        "--verify", action="store_true", help="open every driver and check every device again, whatever is remembered"
    )
    parser.add_argument("--registry", metavar="PATH", help="registry file (default: in the user's state directory)")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="S", help="seconds for each backend (default: 10; 30 the first time)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        GPUError: the options or the environment are wrong.
    """
    _warn_of_unknown_choice()
    if args.watch is None:
        return asyncio.run(_once(args))
    try:
        asyncio.run(_watch(_service(args), args))
    except KeyboardInterrupt:
        return 0
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m gpurt.discover``. ``argv`` without the program's name; None is ``sys.argv[1:]``."""
    parser = argparse.ArgumentParser(prog="python -m gpurt.discover", description=(__doc__ or "").split("\n\n")[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  (closed by whoever started us)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for the process's life)
    try:
        code = run(args)
        sys.stdout.flush()
    except GPUError as exc:
        sys.stderr.write(f"{parser.prog}: {exc}\n")
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who reads our output has seen enough.
        _give_up_stdout()
        return 141
    except OSError as exc:
        _give_up_stdout()
        sys.stderr.write(f"{parser.prog}: {exc}\n")
        return EXIT_ERROR
    return code


def _give_up_stdout() -> None:
    """Without this the interpreter would flush once more at exit, and fail with a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _warn_of_unknown_choice() -> None:
    """Discovery asks every backend whatever GPURT_BACKEND says; what comes after it would fail."""
    from gpurt.settings import SelectionSettings

    settings = SelectionSettings.from_environ(os.environ)
    if settings.backend is None:
        return
    from gpurt.plugins import known_names  # half of a quick answer is imports: only where it is needed

    known = known_names()
    if settings.backend not in known:
        logging.getLogger("gpurt.discovery").warning(
            "%s names no backend, so create_backend() will fail; choose one of %s",
            settings.backend_source,
            ", ".join(known),
        )


def _service(args: argparse.Namespace, prober: Prober | None = None) -> GPUDiscoveryService:
    from gpurt.discovery.service import GPUDiscoveryService
    from gpurt.plugins import known_names
    from gpurt.settings import canonical_name

    backends: list[str] | None = None
    if args.backend is not None:
        known = known_names()
        for name in args.backend:
            if canonical_name(name) not in known:
                raise GPUError(f"there is no backend named {name!r}", hint=f"choose one of {', '.join(known)}")
        backends = args.backend
    if args.registry is not None:
        _check_registry(args.registry)
    return GPUDiscoveryService(
        registry_path=args.registry,
        backends=backends,
        probe_timeout=args.timeout,
        interval=args.watch or 10.0,
        prober=prober,
    )


def _check_registry(text: str) -> None:
    """Refuse what can never be a file. A directory that does not exist yet is made, but none above it."""
    if not text.strip() or "\0" in text:
        raise GPUError(f"--registry {text!r} is not a path", hint="name a file")
    path = Path(text)
    if path.is_dir():
        raise GPUError(f"--registry {text} is a directory", hint=f"name a file, e.g. {path / 'registry.json'}")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir():
        raise GPUError(f"--registry {text}: {existing} is not a directory", hint="name a file in a directory")
    directory = path.absolute().parent
    if not directory.parent.is_dir():
        raise GPUError(
            f"--registry {text}: the directory {directory.parent} does not exist", hint=f"mkdir -p {directory}"
        )


async def _once(args: argparse.Namespace) -> int:
    from gpurt.discovery.probe import ChildProber

    prober = ChildProber()
    try:
        # Half of the time of a quick answer is imports, in the child and here: let both go on at once.
        await _prepare(prober, args.backend)
        async with _service(args, prober) as service:
            patience = None if args.json or not sys.stderr.isatty() else _say_what_is_seen
            result = await service.discover_all_devices(verify=args.verify, on_preview=patience)
    finally:
        await prober.discard()
    if args.json:
        _write(result.document())
    else:
        _show(result, args)
    return _exit_code(result)


def _say_what_is_seen(preview: DiscoveryResult) -> None:
    """To somebody who waits while drivers are opened for the first time."""
    if preview.discovery_status == "preview":
        names = ", ".join(device.name for device in preview.devices)
        sys.stderr.write(f"seen: {names}; asking the drivers …\n")


async def _prepare(prober: ChildProber, backends: Sequence[str] | None) -> None:
    from gpurt.discovery.gate import gate
    from gpurt.discovery.probe import has_child_processes
    from gpurt.platforms import current_platform
    from gpurt.settings import canonical_name

    platform = current_platform()
    wanted = backends is None or "cuda" in map(canonical_name, backends)
    if not wanted or not has_child_processes(platform) or gate("cuda", platform=platform):
        return
    try:
        await prober.prepare("cuda", os.environ)
    except (OSError, NotImplementedError) as exc:
        logging.getLogger("gpurt.discovery").info("the probe is not started early: %s", exc)


async def _watch(service: GPUDiscoveryService, args: argparse.Namespace) -> None:
    async with service:
        if args.json:
            if args.verify:
                await service.discover_all_devices(verify=True)
            async for result in service.watch():
                _write(result.document())
            return
        from gpurt.discovery.events import EventType
        from gpurt.discovery.report import describe

        console = _show(await service.discover_all_devices(verify=args.verify), args)
        async for event in service.subscribe():
            if event.type is not EventType.SNAPSHOT:
                console.print(describe(event), soft_wrap=True)


def _show(result: DiscoveryResult, args: argparse.Namespace) -> Console:
    from rich.console import Console
    from rich.text import Text

    from gpurt.discovery.report import WIDTH_WITHOUT_TERMINAL, render

    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    console = Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)
    for part in render(result, explain=args.explain, environ=os.environ):
        # Sentences are left to the terminal to wrap, so that a command can be copied in one piece.
        console.print(part, soft_wrap=isinstance(part, Text))
    sys.stdout.flush()
    return console


def _write(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
    sys.stdout.flush()


def _exit_code(result: DiscoveryResult) -> int:
    from gpurt.types import DeviceKind

    if result.discovery_status == "failed":
        return EXIT_ERROR
    passive = (DeviceKind.CPU, DeviceKind.SOFTWARE)
    usable = any(device.usable and device.kind not in passive for device in result.devices)
    return EXIT_ACCELERATOR if usable else EXIT_NO_ACCELERATOR


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


if __name__ == "__main__":
    # pydantic would read the metadata of every installed package to look for plug-ins of its own: time, for nothing.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    sys.exit(main())
