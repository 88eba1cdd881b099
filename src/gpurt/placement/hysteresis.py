"""Whether a plan that nobody is forced to take is taken now, later or not at all. State without a clock of its own."""

from __future__ import annotations

from collections import deque
from typing import Final

from pydantic import Field

from gpurt.placement.record import PlacementRecord

_MEMORY_SECONDS: Final = 3600.0
"""How long a move is remembered: each one within it doubles the time until the next."""


class RepairPolicy(PlacementRecord):
    """What movement is worth, and how long a gain has to last."""

    tolerance: float = Field(default=0.04, ge=0)
    """Of plans whose objective is at most this share above the best one known, the one that moves least is taken. With
    what the former plan may be away from the best, it stays below 6 %, the most that a repair should cost against the
    best full plan."""
    horizon_tokens: float = Field(default=20_000, gt=0)
    """Tokens (pipeline steps) over which a plan that nobody is forced to take has to win back its loading: some minutes
    of decoding at 20 to 60 ms each."""
    minimum_gain: float = Field(default=0.05, ge=0, lt=1)
    """Share of the objective that such a plan has to win: about what noise in measured speeds and links makes."""
    load_bandwidth: float = Field(default=1e9, gt=0)
    """Bytes/s at which weights arrive on a device that does not say: 10 Gb/s Ethernet, or a slow NVMe disk."""
    settle_seconds: float = Field(default=10.0, ge=0)
    """How long a gain must have been there without a break: five times the 2 s after which a silent node counts as
    lost, so that a device that comes and goes, or throttles in bursts, moves nothing."""
    quiet_seconds: float = Field(default=60.0, ge=0)
    """Least time between two such plans; doubled by each one within the last hour, so that a slow to and fro ends, too.
    """

    @property
    def seconds_per_byte(self) -> float:
        """Price of movement in the objective: time to load a byte over the tokens that win it back."""
        return 1 / (self.load_bandwidth * self.horizon_tokens)

    def pays(self, before: float, after: float, load_seconds: float) -> bool:
        """Whether going from a plan to another is worth its loading. Objectives in seconds."""
        gain = before - after
        return gain > 0 and gain >= self.minimum_gain * before and gain * self.horizon_tokens >= load_seconds


class Hysteresis:
    """Lets through a gain that lasts, and fewer and fewer of them when they keep coming.

    Times are seconds of any clock that does not go back; the caller gives them.
    """

    def __init__(self, policy: RepairPolicy) -> None:
        self.policy = policy
        self._since: float | None = None
        self._moves: deque[float] = deque()

    def wait(self, pays: bool, now: float) -> float | None:
        """Seconds until the gain may be taken, 0 for at once; None where there is no gain, which breaks its run."""
        if not pays:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        ready = self._since + self.policy.settle_seconds
        while self._moves and self._moves[0] <= now - _MEMORY_SECONDS:
            self._moves.popleft()
        if self._moves:
            ready = max(ready, self._moves[-1] + self.policy.quiet_seconds * 2 ** (len(self._moves) - 1))
        return max(0.0, ready - now)

    def moved(self, now: float) -> None:
        """A gain was taken."""
        self._since = None
        self._moves.append(now)

    def forced(self) -> None:
        """A loss changed the plan: what was gained against the former one says nothing of this one."""
        self._since = None
