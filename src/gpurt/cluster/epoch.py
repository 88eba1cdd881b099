"""Where in a node's history an event stands: the run of the node's process, and the number within that run."""

from __future__ import annotations

import re
import secrets
import time
from functools import lru_cache
from typing import Final, NamedTuple, Self

from gpurt.cluster.errors import InvalidName

MAX_SEQ: Final = 2**64 - 1

_FORM: Final = re.compile(r"(0|[1-9][0-9]{0,18})-([0-9a-f]{32})")


class Epoch(NamedTuple):
    """One run of a node's publisher. Later runs compare greater.

    ``counter`` is kept in the node's registry and grows with every start; ``run`` tells apart two runs that have
    the same counter because the registry was lost or could not be written, and orders them by time.
    """

    counter: int
    run: str
    """32 hexadecimal digits: 48 bits of Unix time in ms, then random bits (the layout of a version 7 UUID)."""

    @classmethod
    def new(cls, counter: int) -> Self:
        millis = time.time_ns() // 1_000_000 & (1 << 48) - 1
        low = secrets.randbits(76)
        value = millis << 80 | 7 << 76 | low
        value = value & ~(3 << 62) | 2 << 62  # the variant bits of RFC 9562
        return cls(counter, f"{value:032x}")

    @staticmethod
    @lru_cache(maxsize=8192)  # every event of a run says it, several times over
    def parse(text: str) -> Epoch:
        """
        Raises:
            InvalidName: not the form that ``str(epoch)`` gives.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise InvalidName(f"epoch {text!r} is not of the form COUNTER-UUID")
        return Epoch(int(match[1]), match[2])

    def __str__(self) -> str:
        return f"{self.counter}-{self.run}"


class Position(NamedTuple):
    """``seq`` starts at 1 in each epoch and grows by 1 per event; 0 is the state before the first event."""

    epoch: Epoch
    seq: int
