"""``gpurt drain``: take a node out of new placements, or let it take part again.

Exit codes beyond those of every command: 1 when the node refuses; 2 also when there is no such node, or no answer.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from gpurt.cli import observing, protected
from gpurt.cli.running import run_command
from gpurt.errors import GPUError
from gpurt.printable import printable

if TYPE_CHECKING:
    from gpurt.cluster.bus import EventEngine
    from gpurt.cluster.master import MasterConfig
    from gpurt.cluster.state import NodeSnapshot

ANSWER_S: Final = 10.0
LISTED: Final = 16
"""Nodes that are named where there is no such node: of a thousand nobody reads all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpurt.cli.worker import seconds

    parser.add_argument("node", metavar="NODE")
    parser.add_argument("--undo", action="store_true", help="let it take part in placements again")
    parser.add_argument("--cluster", help="name of the cluster (default: default, or the certificate's)")
    observing.add_arguments(parser, role="a master")
    parser.add_argument(
        "--term",
        metavar="N",
        type=term,
        help="speak for the master of this term (default: the latest that the node has heard of); from then on the "
        "node refuses masters of earlier ones",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=seconds,
        default=ANSWER_S,
        help="how long the node may take to answer (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    from gpurt.cluster.errors import StaleTerm

    # First: who may not even watch is not to be sent for an observer's certificate, which may not do this either.
    observing.check_may_command(protected.identity_of(args), "tell a node to drain")
    config = observing.observer_config(args, args.cluster)
    work = drain(config, args.node, draining=not args.undo, term=args.term, timeout_s=args.timeout)
    try:
        said = run_command(work)
    except StaleTerm as exc:
        sys.stderr.write(
            f"gpurt drain: node {args.node} refuses: it has heard of term {exc.latest}, and this was said for term "
            f"{args.term}; leave out --term, or give a later one\n"
        )
        return 1
    sys.stdout.write(said + "\n")
    return 0


async def drain(
    config: MasterConfig,
    node: str,
    *,
    draining: bool = True,
    term: int | None = None,
    timeout_s: float = ANSWER_S,
    engine: EventEngine | None = None,
) -> str:
    """What the node does now, in words.

    Args:
        term: None is the latest that the node has heard of: a person speaks for whichever master there is.
        engine: in place of one at ``config.endpoint``.

    Raises:
        BusUnavailable: no hub there. StaleTerm: the node has heard of a later term. NoAnswer: it is there and has not
            answered in time. GPUError: there is no such node, or its own error. InvalidName: ``node`` is none.
    """
    from gpurt.cluster.commands import request_drain
    from gpurt.cluster.errors import StaleTerm
    from gpurt.cluster.keys import check_name
    from gpurt.cluster.view import MasterView

    check_name(node, "node")
    async with observing.observing(config, MasterView(), command="gpurt drain", engine=engine) as master:
        before = await _state(master.engine, node, config.cluster)
        chosen = before.placement.term if term is None else term
        try:
            answer = await request_drain(master.engine, node, term=chosen, draining=draining, timeout=timeout_s)
        except StaleTerm as exc:
            if term is not None:
                raise
            # A later master has spoken to it since it was asked.
            answer = await request_drain(master.engine, node, term=exc.latest, draining=draining, timeout=timeout_s)
    already = " already" if before.draining is draining else ""
    forgets = f"; when it is started again it forgets that: {printable(answer.unkept)}" if answer.unkept else ""
    if not draining:
        return f"{node} takes new placements{already or ' again'}{forgets}"
    return (
        f"{node} is draining{already}: nothing new is placed on it, and what lies there stays until a plan moves it; "
        f"gpurt drain {node} --undo ends that{forgets}"
    )


async def _state(engine: EventEngine, node: str, cluster: str) -> NodeSnapshot:
    """What it says of itself.

    Raises:
        GPUError: it is not there.
    """
    from gpurt.cluster.state import decode_snapshot

    replies = await engine.snapshot(node)
    if replies:
        return decode_snapshot(replies[0].payload, node=node)
    there = sorted({reply.node for reply in await engine.snapshot("*")})
    raise GPUError(
        f"there is no node {node!r} in cluster {cluster} now; there {_are(there)}",
        hint="a node that is away cannot be told: drain it when it is back",
    )


def _are(names: list[str]) -> str:
    if not names:
        return "is none at all"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{'is' if len(names) == 1 else 'are'} {', '.join(names[:LISTED])}{more}"


def term(text: str) -> int:
    from gpurt.placement.version import MAX_NUMBER

    # Python refuses to read a number of thousands of digits.
    if not text.isdecimal() or len(text) > len(str(MAX_NUMBER)) or int(text) > MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {MAX_NUMBER}")
    return int(text)
