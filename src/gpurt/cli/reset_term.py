"""``gpurt cluster reset-term``: the way back where nodes have heard of a term that no master should have named.

Exit code 1: a node has not done it; 2: no hub, or no such node.
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
    from collections.abc import Sequence

    from gpurt.cluster.bus import EventEngine
    from gpurt.cluster.master import MasterConfig

ANSWER_S: Final = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpurt.cli.drain import term
    from gpurt.cli.worker import seconds

    parser.add_argument("nodes", metavar="NODE", nargs="*", help="default: every node that is there")
    parser.add_argument(
        "--term",
        metavar="N",
        type=term,
        required=True,
        help="the latest term that the nodes shall have heard of: that of the master that is to be followed, or 0",
    )
    parser.add_argument("--cluster", help="name of the cluster (default: default, or the certificate's)")
    observing.add_arguments(parser, role="a master")
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=seconds,
        default=ANSWER_S,
        help="how long each node may take to answer (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    observing.check_may_command(protected.identity_of(args), "set nodes' term back")
    config = observing.observer_config(args, args.cluster)
    lines, failed = run_command(reset(config, args.nodes, args.term, timeout_s=args.timeout))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if failed:
        sys.stderr.write("".join(f"gpurt cluster reset-term: {printable(line)}\n" for line in failed))
        return 1
    return 0


async def reset(
    config: MasterConfig,
    nodes: Sequence[str],
    term: int,
    *,
    timeout_s: float = ANSWER_S,
    engine: EventEngine | None = None,
) -> tuple[list[str], list[str]]:
    """What each node has done, and what went wrong at others, in words.

    Args:
        nodes: none is every node that is there.
        engine: in place of one at ``config.endpoint``.

    Raises:
        BusUnavailable: no hub there. GPUError: no node is there. InvalidName: one of ``nodes`` is none.
    """
    from gpurt.cluster.commands import reset_term
    from gpurt.cluster.errors import ClusterError
    from gpurt.cluster.keys import check_name
    from gpurt.cluster.view import MasterView

    for node in nodes:
        check_name(node, "node")
    done: list[str] = []
    failed: list[str] = []
    async with observing.observing(config, MasterView(), command="gpurt cluster reset-term", engine=engine) as master:
        # Of those that are there: also of one whose state nobody takes, which is where this is needed.
        named = nodes or sorted({reply.node for reply in await master.engine.snapshot("*")})
        if not named:
            raise GPUError(f"there is no node in cluster {config.cluster} now", hint="start one, or name it")
        for node in named:
            try:
                answer = await reset_term(master.engine, node, term, timeout=timeout_s)
            except ClusterError as exc:
                failed.append(f"{node}: {exc.message}")
                continue
            forgets = f"; when it is started again it forgets that: {printable(answer.unkept)}" if answer.unkept else ""
            if answer.term == answer.before:
                done.append(f"{node} has heard of no later term than {answer.term}{forgets}")
            else:
                done.append(
                    f"{node} follows masters from term {answer.term} on; it had heard of {answer.before}{forgets}"
                )
    return done, failed
