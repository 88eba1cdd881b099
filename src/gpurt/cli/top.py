"""``gpurt top``: the nodes and devices of a cluster and what they measure, until Ctrl-C.

It watches through the hub and takes no part: no node sees it, and it asks for nothing that a master does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import sys
import time
from collections import deque
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final

from gpurt.cli import observing
from gpurt.cli.running import run_command
from gpurt.cluster.connection import CONNECTION_LOG

if TYPE_CHECKING:
    from rich.console import Console, Group

    from gpurt.cli.top_overview import Overview
    from gpurt.cluster.bus import EventEngine
    from gpurt.cluster.master import Master, MasterConfig

READINGS_S: Final = 3.0
"""How long the first picture waits for readings: a node repeats them at once for who has come, unless they are lost."""
SETTLE_S: Final = 0.05
NOTICES: Final = 2
"""Lines on the bus below the picture."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpurt.cli.worker import seconds

    parser.add_argument("--cluster", help="name of the cluster (default: default, or the certificate's)")
    observing.add_arguments(parser)
    parser.add_argument("--once", action="store_true", help="one picture, with all nodes and devices, and the end")
    parser.add_argument(
        "--json", action="store_true", help="every picture as one JSON line on stdout; with --once a single one"
    )
    parser.add_argument(
        "--interval", metavar="S", type=seconds, default=1.0, help="seconds between pictures (default: %(default)s)"
    )
    parser.add_argument(
        "--wait",
        metavar="S",
        type=seconds,
        default=READINGS_S,
        help="how long a first picture that is not drawn again waits for readings (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    config = observing.observer_config(args, args.cluster)
    watch = Watch(config, interval_s=args.interval, wait_s=args.wait)
    # To be ended is the only end that watching has.
    with contextlib.suppress(KeyboardInterrupt):
        if args.once:
            run_command(watch.once(as_json=args.json))
        elif args.json:
            run_command(watch.documents())
        elif sys.stdout.isatty():
            from rich.console import Console

            run_command(watch.live(Console()))
        else:
            run_command(watch.changes())
    return 0


class Watch:
    """One run of the command. Each method but the constructor is a way to show the cluster.

    Args:
        engine: in place of a zenoh session with ``config.endpoint``.
        connect_s: see :data:`gpurt.cli.observing.CONNECT_S`.

    Raises (every method):
        BusUnavailable: no hub there, or no zenoh here.
    """

    def __init__(
        self,
        config: MasterConfig,
        *,
        interval_s: float = 1.0,
        wait_s: float = READINGS_S,
        connect_s: float = observing.CONNECT_S,
        engine: EventEngine | None = None,
    ) -> None:
        from gpurt.cluster.view import MasterView

        self._config, self._engine = config, engine
        self._interval_s, self._wait_s, self._connect_s = interval_s, wait_s, connect_s
        self._view = MasterView()
        self._notices: deque[tuple[float, str]] = deque(maxlen=NOTICES)

    async def once(self, *, as_json: bool = False) -> None:
        """Print one picture, once every node that is there has told its devices and, within ``wait_s``, readings."""
        from gpurt.cli.top_picture import lines

        with _Heard(self._notices):  # of a hub that is not there, the error says more
            async with self._connected() as master:
                await self._settled(master)
                seen = self._overview(master)
        if as_json:
            self._write_document(seen)
        else:
            for line in lines(seen):
                _write(line)

    async def documents(self) -> None:
        """A JSON line for every interval, until cancelled."""
        async with self._connected() as master:
            await self._settled(master)
            while True:
                self._write_document(self._overview(master))
                await asyncio.sleep(self._interval_s)

    async def changes(self) -> None:
        """Everything as lines, then a line for each change, until cancelled."""
        from gpurt.cli.cluster_table import change_line
        from gpurt.cli.top_picture import lines

        async with self._connected() as master:
            await self._settled(master)
            changes = self._view.changes()
            for line in lines(self._overview(master)):
                _write(line)
            async for change in changes:
                if not change.minor:
                    _write(change_line(change, self._view.snapshot()))

    async def live(self, console: Console) -> None:
        """A picture that changes in place, until cancelled; the last one stays."""
        from rich.live import Live

        with _Heard(self._notices):
            async with self._connected() as master:
                # A screen of its own: a picture in the scroll-back is torn apart when the terminal becomes narrower.
                live = Live(console=console, auto_refresh=False, screen=True, transient=True)
                try:
                    with live:
                        while True:
                            live.update(self._picture(master, console), refresh=True)
                            await asyncio.sleep(self._interval_s)
                finally:
                    console.print(self._picture(master, console))

    # Inside

    def _connected(self) -> AbstractAsyncContextManager[Master]:
        return observing.observing(
            self._config, self._view, command="gpurt top", connect_s=self._connect_s, engine=self._engine
        )

    async def _settled(self, master: Master) -> None:
        """Until every node that answers is in the view, with readings of its devices, but not for ever."""
        answers = await master.engine.snapshot("*")
        there = {answer.node for answer in answers}
        deadline = time.monotonic() + self._wait_s
        while time.monotonic() < deadline and not all(self._told(master, name) for name in there):  # noqa: ASYNC110
            await asyncio.sleep(SETTLE_S)

    def _told(self, master: Master, name: str) -> bool:
        node = self._view.node(name)
        return node is not None and node.state != "suspect" and node.devices.keys() <= master.readings(name).keys()

    def _overview(self, master: Master) -> Overview:
        from gpurt.cli.top_overview import overview

        return overview(self._view.snapshot(), master.readings, self._view.clock(), self._view.refusals.of)

    def _picture(self, master: Master, console: Console) -> Group:
        from gpurt.cli.top_picture import picture

        now, size = time.monotonic(), console.size
        title = f"cluster {self._config.cluster} at {self._config.endpoint}"
        notices = [f"{now - at:.0f} s ago: {text}" for at, text in self._notices]
        return picture(self._overview(master), title, notices, width=size.width, height=size.height)

    def _write_document(self, seen: Overview) -> None:
        head = {"cluster": self._config.cluster, "endpoint": self._config.endpoint, "time": time.time()}
        _write(json.dumps(head | seen.document(), allow_nan=False))


class _Heard(logging.Handler):
    """Within ``with``: what the cluster layer warns of, and what happens to the connection, goes into a list, and not
    onto the picture."""

    def __init__(self, notices: deque[tuple[float, str]]) -> None:
        super().__init__()
        self.addFilter(lambda record: record.levelno >= logging.WARNING or record.name == CONNECTION_LOG)
        self._notices = notices
        self._logger = logging.getLogger("gpurt.cluster")
        self._propagated = self._logger.propagate

    def emit(self, record: logging.LogRecord) -> None:
        self._notices.append((time.monotonic(), record.getMessage()))

    def __enter__(self) -> None:
        self._logger.addHandler(self)
        self._logger.propagate = False

    def __exit__(self, *_: Any) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
