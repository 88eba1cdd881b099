"""Log lines about what others do, as many as somebody reads: nobody's garbage fills a disk."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

BURST: Final = 5
"""Lines of one key that are written at once."""
EVERY_S: Final = 10.0
"""One more after so many seconds."""
TOGETHER: Final = 50
"""Lines of all keys that are written at once; one more after a fifth of a second."""
TOGETHER_S: Final = 0.2
KEYS: Final = 4096


class LimitedLog:
    """Writes warnings by key (a node), and says with the next one how many were left out. Safe from any thread, as far
    as that a line may be counted once too little.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._keys: OrderedDict[str, list[float]] = OrderedDict()
        """Tokens, the time of the last line that was wanted, and lines left out since one was written."""
        self._all = [float(TOGETHER), clock(), 0.0]

    def warning(self, key: str, message: str, *args: object) -> None:
        now = self._clock()
        mine = self._keys.get(key)
        if mine is None:
            mine = self._keys[key] = [float(BURST), now, 0.0]
            if len(self._keys) > KEYS:
                self._keys.popitem(last=False)
        allowed = _token(mine, now, BURST, EVERY_S) and _token(self._all, now, TOGETHER, TOGETHER_S)
        if not allowed:
            mine[2] += 1
            return
        left_out, mine[2] = int(mine[2]), 0.0
        more = f" (and {left_out:,} more lines about {key} since the last one)" if left_out else ""
        self._log.warning(message + "%s", *args, more)


def _token(bucket: list[float], now: float, most: int, every_s: float) -> bool:
    bucket[0] = min(float(most), bucket[0] + max(0.0, now - bucket[1]) / every_s)
    bucket[1] = now
    if bucket[0] < 1:
        return False
    bucket[0] -= 1
    return True
