"""``python -m gpurt.discover`` and ``gpurt discover``: which accelerators are here, and why one is missing.

Exit code: 0 with a usable accelerator, 1 with the CPU only, 2 for an error or when nothing is usable; with ``--doctor``
and ``--record`` 0 when the file or directory is written. With ``--json`` stdout has one JSON document and nothing else
(with ``--watch`` one a line, whenever something has changed).
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpurt.cli.running import run_command
from gpurt.errors import GPUError

if TYPE_CHECKING:
    from gpurt.cli.discovered import Output
    from gpurt.discovery.probe import ChildProber
    from gpurt.discovery.probe_process import EarlyProbe
    from gpurt.discovery.result import DiscoveryResult
    from gpurt.discovery.service import GPUDiscoveryService
    from gpurt.discovery.survey import Prober
    from gpurt.recording.replay import Recording

EXIT_ACCELERATOR, EXIT_NO_ACCELERATOR, EXIT_ERROR = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument(
        "--explain", action="store_true", help="a sentence for each backend, device, variable: why, and what to do"
    )
    parser.add_argument(
        "--mask", action="store_true", help="with --doctor, --record: pseudonyms for UUIDs, names, paths"
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--watch", type=_seconds, metavar="N", help="look again every N seconds: a live table, or changes as lines"
    )
    modes.add_argument(
        "--doctor", nargs="?", const="", metavar="FILE", help="write everything for a bug report into one JSON file"
    )
    modes.add_argument("--record", metavar="DIR", help="write what discovery reads here into a new directory")
    modes.add_argument("--fixture", metavar="DIR", help="discover the devices of a recorded machine, not of this one")
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


def run(args: argparse.Namespace, early: EarlyProbe | None = None) -> int:
    """Run the command; returns the exit code.

    Raises:
        GPUError: the options, the environment or a recording are wrong.
        OSError: what was to be written could not be.
    """
    if args.mask and args.doctor is None and args.record is None:
        raise GPUError("--mask is for --doctor and --record", hint="add one of them")
    if args.fixture is not None:
        return _replay(args)
    _warn_of_unknown_choice()
    if args.record is not None:
        return _record(args)
    if args.doctor is not None:
        return _doctor(args)
    if args.watch is None:
        result = run_command(_once(args, early))
        _output(args).tell(result)
        return _exit_code(result)
    try:
        run_command(_watch(_service(args), args, _output(args)))
    except KeyboardInterrupt:
        return 0
    return 0


def main(argv: Sequence[str] | None = None, *, early: EarlyProbe | None = None) -> int:
    """``python -m gpurt.discover``. ``argv`` without the program's name; None is ``sys.argv[1:]``.

    ``early`` is a probe that was started already.
    """
    parser = argparse.ArgumentParser(prog="python -m gpurt.discover", description=(__doc__ or "").split("\n\n")[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  (closed by whoever started us)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for the process's life)
    try:
        code = run(args, early)
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


async def _once(args: argparse.Namespace, early: EarlyProbe | None) -> DiscoveryResult:
    from gpurt.discovery.probe import ChildProber

    prober = ChildProber()
    try:
        # Half of the time of a quick answer is imports, in the child and here: let both go on at once.
        if early is None:
            await _prepare(prober, args.backend)
        else:
            await prober.adopt(early)
        async with _service(args, prober) as service:
            patience = None if args.json or not sys.stderr.isatty() else _say_what_is_seen
            return await service.discover_all_devices(verify=args.verify, on_preview=patience)
    finally:
        await prober.discard()


def _output(args: argparse.Namespace, recording: Recording | None = None) -> Output:
    from gpurt.cli.discovered import Output  # half of a quick answer is imports: not before the probes are started

    return Output(as_json=args.json, explain=args.explain, recording=recording)


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
    from gpurt.sources.nvidia_traces import has_nvidia_traces

    platform = current_platform()
    wanted = backends is None or "cuda" in map(canonical_name, backends)
    if not wanted or not has_child_processes(platform) or gate("cuda", platform=platform):
        return
    if platform == "linux" and not has_nvidia_traces(Path("/"), os.environ):
        return
    try:
        await prober.prepare("cuda", os.environ)
    except (OSError, NotImplementedError) as exc:
        logging.getLogger("gpurt.discovery").info("the probe is not started early: %s", exc)


async def _watch(service: GPUDiscoveryService, args: argparse.Namespace, out: Output) -> None:
    if not args.json and sys.stdout.isatty():
        from gpurt.cli.discovered import make_console

        console = make_console()
        if not console.is_dumb_terminal:
            from gpurt.watch.live import LiveWatch

            await LiveWatch(service, console, interval_s=args.watch).run(verify=args.verify)
            return
    async with service:
        if args.json:
            if args.verify:
                await service.discover_all_devices(verify=True)
            async for result in service.watch():
                out.tell(result)
            return
        from gpurt.discovery.events import EventType
        from gpurt.discovery.report import describe

        console = out.show(await service.discover_all_devices(verify=args.verify))
        async for event in service.subscribe():
            if event.type is not EventType.SNAPSHOT:
                console.print(describe(event), soft_wrap=True)


def _doctor(args: argparse.Namespace) -> int:
    from gpurt.doctor.document import check_new, default_name, examine_host, masked, write_new

    path = Path(args.doctor or default_name())
    check_new(path)  # before a minute of probes, not after it
    service = _service(args)

    async def discover() -> DiscoveryResult:
        async with service:
            return await service.discover_all_devices(verify=args.verify)

    registry = None if args.registry is None else Path(args.registry)
    document = run_command(examine_host(discover, environ=os.environ, registry=registry))
    write_new(path, masked(document) if args.mask else document)
    if args.json:
        _output(args).write({"doctor": str(path), "masked": args.mask})
    else:
        names = "replaced by pseudonyms" if args.mask else "in it as they are; --mask replaces them"
        sys.stdout.write(f"{path} is written. Names, serial numbers and UUIDs are {names}.\n")
    return EXIT_ACCELERATOR


def _record(args: argparse.Namespace) -> int:
    from gpurt.recording.record import record

    _service(args)  # names of backends are checked before anything is written
    done = run_command(
        record(Path(args.record), environ=os.environ, backends=args.backend, probe_timeout=args.timeout, mask=args.mask)
    )
    out = _output(args)
    if args.json:
        out.write({"record": str(done.directory), "files": done.files, "left_out": dict(done.left_out)})
        return EXIT_ACCELERATOR
    out.show(done.result)
    sys.stdout.write(f"Recorded in {done.directory}: {done.files} files, and the answers of the libraries.\n")
    for name, why in done.left_out.items():
        sys.stdout.write(f"  not copied: {name}: {why}\n")
    sys.stdout.write(f"Look at it anywhere: python -m gpurt.discover --fixture {done.directory}\n")
    return EXIT_ACCELERATOR


def _replay(args: argparse.Namespace) -> int:
    from gpurt.recording.replay import Recording

    for option in ("verify", "registry", "timeout"):
        if getattr(args, option):
            raise GPUError(f"--fixture opens no driver and no registry: --{option} means nothing", hint="leave it out")
    recording = Recording(Path(args.fixture))
    result = run_command(recording.discover(args.backend))
    _output(args, recording).tell(result)
    return _exit_code(result)


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
