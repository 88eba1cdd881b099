"""Other names and numbers in place of those that must not be told: never the same for two."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from itertools import chain
from typing import Final

_TRIES: Final = 1 << 16


class Pseudonyms:
    """Gives out pseudonyms, each once."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def word(self, kind: str) -> str:
        """``user-1``."""
        return f"{kind}-{self._next(kind)}"

    def digits(self, count: int) -> str:
        """``count`` hexadecimal digits in place of an identifier. Any two differ in their first eight digits already,
        and the first 254 in their first two: variables may name a device by a prefix."""
        return self._digits()[:count]

    def start(self, count: int, taken: Iterable[str]) -> str:
        """``count`` digits that none of ``taken`` begins with, in place of the beginning of an unknown identifier."""
        others = list(taken)
        first = self.digits(count)
        # A few digits are not enough for many.
        following = (f"{number:0{count}x}" for number in range(min(16**count, _TRIES)))
        return next(
            (d for d in chain((first,), following) if not any(o.startswith(d) or d.startswith(o) for o in others)),
            first,
        )

    def mac(self) -> str:
        """Twelve digits of a hardware address that is administered locally."""
        return f"02{self._next('mac'):010x}"

    def address(self, version: int) -> str:
        """Of the ranges for documentation; where those of IPv4 are used up, of the one that is reserved."""
        if version == 6:
            return f"2001:db8::{self._next('address6'):x}"
        number = self._next("address4")
        if number < 256:
            return f"192.0.2.{number}"
        return str(ipaddress.IPv4Address((240 << 24) + number))

    def _digits(self) -> str:
        number = self._next("id")
        return (f"{number:02x}" if number < 255 else f"ff{number:06x}") * 32

    def _next(self, kind: str) -> int:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return self._counts[kind]
