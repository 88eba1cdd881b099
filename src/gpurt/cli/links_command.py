"""``gpurt links``: the ways between the nodes of a cluster, as they were measured; ``--measure`` has it done first."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpurt.cli import observing, protected
from gpurt.cli.progress import Report, progress
from gpurt.cli.running import run_command
from gpurt.errors import GPUError
from gpurt.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

    from gpurt.cluster.bus import EventEngine
    from gpurt.cluster.link_survey import SurveyResult
    from gpurt.cluster.master import Master, MasterConfig
    from gpurt.cluster.peer_links import PeerLink
    from gpurt.cluster.records import ClusterSnapshot
    from gpurt.cluster.view import MasterView

MATRIX: Final = 8
"""Nodes that a matrix has room for; the ways between more are lines."""
SETTLE_S: Final = 3.0
"""For the nodes that answer to be in the view."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpurt.cli.worker import byte_count, seconds
    from gpurt.cluster.link_protocol import LinkBudget

    budget = LinkBudget()
    parser.add_argument("--cluster", help="name of the cluster (default: default, or the certificate's)")
    observing.add_arguments(parser)
    parser.add_argument(
        "--measure",
        action="store_true",
        help="first have the nodes measure, every way between few of them, of many a sample; as a master alone may",
    )
    parser.add_argument(
        "--nodes", metavar="NAME,…", type=lambda text: text.split(","), help="every way between these nodes only"
    )
    parser.add_argument(
        "--bytes",
        metavar="BYTES",
        type=byte_count,
        default=budget.bytes,
        help="sent over each way at most (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=seconds,
        default=budget.seconds,
        help="of sending over each way at most (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    measure = (args.bytes, args.seconds) if args.measure else None
    if measure:
        observing.check_may_command(protected.identity_of(args), "have nodes measure")
    config = observing.observer_config(args, args.cluster)
    if measure:
        with progress(f"gpurt links: every way is measured for {args.seconds:g} s at most") as tell:
            seen = run_command(look(config, measure=measure, nodes=args.nodes, tell=tell))
    else:
        seen = run_command(look(config, nodes=args.nodes))
    sys.stdout.write(json.dumps(seen.document(), allow_nan=False) + "\n" if args.json else seen.text())
    return 1 if seen.failed else 0


@dataclass(frozen=True, slots=True)
class Seen:
    """The ways between some nodes, by (source, peer)."""

    nodes: list[str]
    links: dict[tuple[str, str], PeerLink]
    failed: dict[tuple[str, str], str]
    """Of this run: why a way was not measured."""

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        links = [{"source": a, **link.model_dump(mode="json")} for (a, _), link in sorted(self.links.items())]
        failed = [{"source": a, "peer": b, "message": why} for (a, b), why in sorted(self.failed.items())]
        return {"nodes": self.nodes, "links": links, "failed": failed}

    def text(self) -> str:
        """A matrix, or a line for each way where there are too many nodes for one."""
        if not self.links and len(self.nodes) < 2:
            there = f"{self.nodes[0]} is alone" if self.nodes else "there is none"
            said = f"a way is between two nodes, and {there} (gpurt worker --node NAME starts another)\n"
        elif not self.links and self.failed:
            said = ""  # asked to measure again, somebody would only read the same
        elif not self.links:
            said = "no way between nodes was measured yet: gpurt links --measure has it done\n"
        elif len(self.nodes) <= MATRIX:
            from rich.console import Console

            console = Console()
            with console.capture() as drawn:
                console.print(self._matrix())
            said = drawn.get()
        else:
            said = "".join(f"{a} -> {b}: {_figures(link)}\n" for (a, b), link in sorted(self.links.items()))
        failed = (f"{a} -> {b}: not measured: {printable(why)}\n" for (a, b), why in sorted(self.failed.items()))
        return said + "".join(failed)

    def _matrix(self) -> Table:
        from rich.table import Table

        table = Table(title="round trip, and bandwidth to")
        for heading in ("from", *self.nodes):
            table.add_column(heading)
        for source in self.nodes:
            cells = ("" if peer == source else _cell(self.links.get((source, peer))) for peer in self.nodes)
            table.add_row(source, *cells)
        return table


async def look(
    config: MasterConfig,
    *,
    measure: tuple[int, float] | None = None,
    nodes: list[str] | None = None,
    engine: EventEngine | None = None,
    tell: Report | None = None,
) -> Seen:
    """
    Args:
        measure: bytes and seconds for each way; None: nothing is measured.
        nodes: the ways between these only.
        engine: in place of one at ``config.endpoint``.
        tell: called with how many ways are measured.

    Raises:
        BusUnavailable: no hub there. GPUError: the budget is over the limits, or there is no such node.
    """
    from gpurt.cluster.view import MasterView

    view = MasterView()
    async with observing.observing(config, view, command="gpurt links", engine=engine) as master:
        await _settled(master, view)
        names = _chosen(view.snapshot(), nodes)
        outcome = None if measure is None else await _measured(master, view.snapshot(), names, nodes, measure, tell)
        links = {
            (name, link.peer): link
            for name in names
            for link in view.snapshot().nodes[name].links.measured
            if link.peer in names
        }
    if outcome is None:
        return Seen(names, links, {})
    # Their events may still be on the way.
    return Seen(names, links | outcome.measured, outcome.failed)


async def _settled(master: Master, view: MasterView) -> None:
    """Until every node that answers is in the view, but not for ever."""
    there = {answer.node for answer in await master.engine.snapshot("*")}
    changes = view.changes()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while there - view.snapshot().nodes.keys():
                await anext(changes)
    changes.close()


def _chosen(snapshot: ClusterSnapshot, nodes: list[str] | None) -> list[str]:
    if nodes is None:
        return sorted(snapshot.nodes)
    for name in nodes:
        if name not in snapshot.nodes:
            raise GPUError(f"there is no node {name!r}; there are: {', '.join(sorted(snapshot.nodes)) or 'none'}")
    return sorted(set(nodes))


async def _measured(
    master: Master,
    snapshot: ClusterSnapshot,
    names: list[str],
    nodes: list[str] | None,
    measure: tuple[int, float],
    tell: Report | None,
) -> SurveyResult:
    from pydantic import ValidationError

    from gpurt.cluster.link_protocol import LinkBudget
    from gpurt.cluster.link_survey import survey_links
    from gpurt.cluster.message_limits import summary
    from gpurt.cluster.topology import pairs_to_measure

    try:
        budget = LinkBudget(bytes=measure[0], seconds=measure[1])
    except ValidationError as exc:
        raise GPUError(f"no such measurement: {summary(exc)}") from exc
    if nodes is None:
        pairs: Iterable[tuple[str, str]] = pairs_to_measure(snapshot)
    else:
        pairs = [(a, b) for a in names for b in names if a != b]
    # Whoever asks for this knows the cluster as it is now, so this is no command of a master that was replaced.
    return await survey_links(
        master.engine,
        snapshot,
        pairs,
        term=snapshot.term,
        budget=budget,
        on_measured=None if tell is None else lambda done, total: tell("ways measured", done, total),
    )


def _figures(link: PeerLink) -> str:
    return f"{link.round_trip_s * 1e3:.3g} ms, {link.bandwidth / 1e6:,.1f} MB/s"


def _cell(link: PeerLink | None) -> str:
    return "?" if link is None else _figures(link).replace(", ", "\n", 1)
