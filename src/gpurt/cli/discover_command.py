"""``python -m gpurt.discover`` and ``gpurt discover``: which accelerators are here, and why one is missing.

Exit code: 0 with a usable accelerator, 1 with the CPU only, 2 for an error or when nothing is usable; with ``--doctor``
and ``--record`` 0 when the file or directory is written; 1 for a recording that has no answer of some drivers: nothing
failed, and nothing is known to be usable. 143 after SIGTERM, 129 after SIGHUP; ``--watch`` ends with 0 after Ctrl-C,
everything else with 130. With ``--json`` stdout has one JSON document and nothing else (with ``--watch`` one a line,
whenever something has changed).
"""

from __future__ import annotations

import argparse
import errno
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpurt.cli.discover_checks import (
    check_registry,
    check_variables_beside_a_recording,
    warn_of_unknown_choice,
    warn_of_unknown_variables,
)
from gpurt.cli.logs import log_to_stderr
from gpurt.cli.running import run_command
from gpurt.cli.signals import give_up_stdout, interrupted_by_signals
from gpurt.errors import GPUError
from gpurt.printable import MAX_LINE, printable, quoted

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
    if args.explain and args.watch is not None and not args.json and sys.stdout.isatty():
        raise GPUError("a live table has no room for --explain", hint="leave out --watch, or add --json")
    warn_of_unknown_variables()
    if args.fixture is not None:
        return _replay(args)
    warn_of_unknown_choice()
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
    parser = argparse.ArgumentParser(
        prog="python -m gpurt.discover", description="Which accelerators are here, and why one is missing."
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    log_to_stderr(logging.WARNING)
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  (closed by whoever started us)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for the process's life)
    ended_by: list[int] = []
    try:
        with interrupted_by_signals(ended_by):
            code = run(args, early)
        sys.stdout.flush()
    except GPUError as exc:
        sys.stderr.write(f"{parser.prog}: {_one_line(exc)}\n")
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 128 + (ended_by[0] if ended_by else signal.SIGINT)
    except BrokenPipeError:
        # Who reads our output has seen enough.
        give_up_stdout()
        return 128 + ended_by[0] if ended_by else 141
    except OSError as exc:
        give_up_stdout()
        if ended_by and exc.errno == errno.EIO:  # the terminal that has hung up takes no farewell
            return 128 + ended_by[0]
        sys.stderr.write(f"{parser.prog}: {_one_line(exc)}\n")
        return EXIT_ERROR
    # A watch takes an interruption for its ordinary end; a signal is none.
    return 128 + ended_by[0] if ended_by else code


def _one_line(exc: Exception) -> str:
    return printable(" ".join(str(exc).split()), MAX_LINE)


def _service(args: argparse.Namespace, prober: Prober | None = None) -> GPUDiscoveryService:
    from gpurt.discovery.service import GPUDiscoveryService
    from gpurt.plugins import known_names
    from gpurt.settings import canonical_name

    backends: list[str] | None = None
    if args.backend is not None:
        known = known_names()
        for name in args.backend:
            if canonical_name(name) not in known:
                raise GPUError(f"there is no backend named {quoted(name)}", hint=f"choose one of {', '.join(known)}")
        backends = args.backend
    if args.registry is not None:
        check_registry(args.registry)
    return GPUDiscoveryService(
        registry_path=args.registry,
        backends=backends,
        probe_timeout=args.timeout,
        interval=args.watch or 10.0,
        prober=prober,
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
        names = printable(", ".join(device.name for device in preview.devices))
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
                console.print(printable(describe(event), MAX_LINE), soft_wrap=True)


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
        sys.stdout.write(f"{printable(str(path), MAX_LINE)} is written. Names, serial numbers and UUIDs are {names}.\n")
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
    place = printable(str(done.directory), MAX_LINE)
    sys.stdout.write(f"Recorded in {place}: {done.files} files, and the answers of the libraries.\n")
    for name, why in done.left_out.items():
        sys.stdout.write(f"  not copied: {printable(name)}: {why}\n")
    sys.stdout.write(f"Look at it anywhere: python -m gpurt.discover --fixture {place}\n")
    return EXIT_ACCELERATOR


def _replay(args: argparse.Namespace) -> int:
    from gpurt.recording.replay import Recording

    for option in ("verify", "registry", "timeout"):
        if getattr(args, option):
            raise GPUError(f"--fixture opens no driver and no registry: --{option} means nothing", hint="leave it out")
    check_variables_beside_a_recording()
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
