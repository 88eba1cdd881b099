"""How long a backend may take, from how long it took before. Pure.

One deadline for all would be too short for the host whose driver needs 12 s to answer, and too long for a driver that
hangs. The last report is in the registry, so what was learnt survives a restart.
"""

from __future__ import annotations

from typing import Final

from gpurt.errors import ReasonCode
from gpurt.types import BackendReport

USUAL_S: Final = 10.0
FIRST_S: Final = 30.0
"""For a backend that this registry has never seen: a first import of a large library from a cold disk is slow."""
LONGEST_S: Final = 60.0
HEADROOM: Final = 3.0
"""Times the time of the last answer: a host under load is slower by less than that."""


def deadline_for(report: BackendReport | None) -> float:
    """Seconds for the next probe.

    A probe that was late gets twice the time at the next attempt, up to a minute: it may only have been slow, and
    attempts become rarer as they fail.
    """
    if report is None:
        return FIRST_S
    took = report.elapsed_ms / 1000
    factor = 2.0 if report.reason is ReasonCode.TIMEOUT else HEADROOM
    return min(max(factor * took, USUAL_S), LONGEST_S)
