"""How much a benchmark does: sizes, turns and durations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

SMALL_BYTES: Final = 4 * KIB
"""What a call carries where the call is what is measured."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes are bytes. What does not fit into half of the free memory is made smaller, or left out."""

    sizes: tuple[int, ...]
    """Of host copies."""
    bulk_bytes: int
    """Of one bulk copy, beside which something else is measured."""
    file_bytes: int
    rounds: int
    """Turns of each contender; short copies get more, see :meth:`turns`."""
    most_turns: int
    calls: int
    """Calls in a round where single calls are measured."""
    seconds: float
    """How long the loop is watched beside each kind of work."""

    def turns(self, nbytes: int) -> int:
        """So many rounds that copies of this size come to 64 MiB, if that is more."""
        return max(self.rounds, min(self.most_turns, 64 * MIB // nbytes))


FULL: Final = Plan(
    sizes=(4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB, 4 * GIB),
    bulk_bytes=GIB,
    file_bytes=4 * GIB,
    rounds=7,
    most_turns=200,
    calls=3200,
    seconds=4.0,
)
QUICK: Final = Plan(
    sizes=(4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB),
    bulk_bytes=64 * MIB,
    file_bytes=64 * MIB,
    rounds=3,
    most_turns=40,
    calls=640,
    seconds=0.5,
)
