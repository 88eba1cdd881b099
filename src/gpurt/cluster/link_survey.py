"""A master has its nodes measure the ways between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from gpurt.cluster.bus import EventEngine
from gpurt.cluster.commands import LINKS_ANSWERS, MAX_PEERS, LinksAnswer, MeasureLinks, PeerAddress, send_command
from gpurt.cluster.errors import BusClosed, ClusterError
from gpurt.cluster.groups import together
from gpurt.cluster.link_measuring import PATIENCE_S
from gpurt.cluster.link_protocol import STEP_S, LinkBudget
from gpurt.cluster.peer_links import PeerLink
from gpurt.cluster.records import ClusterSnapshot

SOURCES: Final = 8
"""Nodes that measure at the same time; each measures one way at a time."""


@dataclass(frozen=True, slots=True)
class SurveyResult:
    """By (source, target)."""

    measured: dict[tuple[str, str], PeerLink] = field(default_factory=dict[tuple[str, str], PeerLink])
    failed: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])


async def request_links(
    engine: EventEngine, node: str, peers: Iterable[PeerAddress], *, term: int = 0, budget: LinkBudget | None = None
) -> LinksAnswer:
    """Have one node measure the ways to some others, one after the other; what it finds also comes as an event.

    Raises:
        NoAnswer: not there, or no reply in time. ClusterError: the node's own error.
    """
    budget = budget or LinkBudget()
    command = MeasureLinks(term=term, peers=tuple(peers), budget=budget)
    longest = len(command.peers) * (PATIENCE_S + budget.seconds + 4 * STEP_S)
    return LINKS_ANSWERS.parse(await send_command(engine, node, command, timeout=longest), node)


async def survey_links(
    engine: EventEngine,
    snapshot: ClusterSnapshot,
    pairs: Iterable[tuple[str, str]],
    *,
    term: int = 0,
    budget: LinkBudget | None = None,
    on_measured: Callable[[int, int], None] | None = None,
) -> SurveyResult:
    """Have the ways of ``pairs`` (source, target) measured, e.g. of ``pairs_to_measure``. One that fails does not keep
    the others from being measured.

    Args:
        snapshot: knows where nodes listen.
        on_measured: called with how many of the ways are done, measured or not, and how many there are.

    Raises:
        BusClosed: the engine is not started.
    """
    result = SurveyResult()
    peers: dict[str, list[PeerAddress]] = {}
    for source, target in pairs:
        record = snapshot.nodes.get(target)
        endpoint = None if record is None else record.links.endpoint
        if endpoint is None:
            result.failed[source, target] = f"node {target} is not there, or lets nobody measure"
        else:
            peers.setdefault(source, []).append(PeerAddress(node=target, endpoint=endpoint))
    total = len(result.failed) + sum(map(len, peers.values()))
    at_once = asyncio.Semaphore(SOURCES)

    async def measure(source: str, some: list[PeerAddress]) -> None:
        async with at_once:
            for start in range(0, len(some), MAX_PEERS):
                if on_measured is not None:
                    on_measured(len(result.measured) + len(result.failed), total)
                part = some[start : start + MAX_PEERS]
                try:
                    answer = await request_links(engine, source, part, term=term, budget=budget)
                except BusClosed:
                    raise
                except ClusterError as exc:
                    result.failed.update({(source, peer.node): exc.message for peer in part})
                else:
                    result.measured.update({(source, link.peer): link for link in answer.measured})
                    result.failed.update({(source, peer): why for peer, why in answer.failed.items()})

    await together(measure(source, some) for source, some in peers.items())
    return result
