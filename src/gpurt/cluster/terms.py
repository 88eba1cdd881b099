"""Which terms and plan numbers are believed, of those that nodes name. Pure.

Only masters make terms; a node repeats what it has heard of one. A node that lies could name the last number there is:
a master that went on from it would leave none for the masters after it, and every node that it speaks to would refuse
all others for ever. So what one node names alone counts only a bounded step beyond what another one names as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from gpurt.placement.version import PlanVersion

TERM_STEP: Final = 1 << 20
"""Terms by which one node may be ahead of all others and still be believed: a million elections that it alone has heard
of. With 2**63 terms, a liar would have to be believed 2**43 times before there were none left."""
NUMBER_STEP: Final = 1 << 32
"""The same of plans within a term."""


def believed(named: Iterable[int], step: int) -> int:
    """The highest number that counts: of at least two nodes, or within ``step`` of the second highest; 0 where there is
    none.

    Args:
        named: what each node names.
    """
    highest, second = 0, 0
    for number in named:
        if number > highest:
            highest, second = number, highest
        elif number > second:
            second = number
    return highest if highest - second <= step else second


def believed_version(versions: Iterable[PlanVersion], term: int) -> PlanVersion | None:
    """The latest of the versions of one instance that nodes name, each once; None: there is none that counts.

    Args:
        term: the latest that counts.
    """
    numbers: dict[int, list[int]] = {}
    for version in versions:
        if version.term <= term:
            numbers.setdefault(version.term, []).append(version.n)
    for latest in sorted(numbers, reverse=True):
        number = believed(numbers[latest], NUMBER_STEP)
        if number:
            return PlanVersion(term=latest, n=number)
    return None


def doubted(named: Mapping[str, int]) -> dict[str, int]:
    """Nodes whose term is not believed, with that term."""
    latest = believed(named.values(), TERM_STEP)
    return {node: term for node, term in named.items() if term > latest}
