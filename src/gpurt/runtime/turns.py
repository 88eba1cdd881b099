"""Shorter turns of the interpreter while a library is loaded beside an event loop.

Importing a vendor's library runs Python code for a third of a second on a lane. Each time the loop's thread wakes it
asks for the GIL and gets it at the end of the other thread's turn: 5 ms by default, so that every millisecond's timer
comes 5 ms late. A turn of half a millisecond costs the import a few per cent.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

TURN_S: Final = 0.0005


class _Turns:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.before = 0.0


_turns = _Turns()


def _after_fork() -> None:
    """In the child: whoever wanted short turns does not exist there, and would never put the interval back."""
    global _turns
    before, _turns = _turns, _Turns()
    _put_back(before)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def short_turns() -> Generator[None]:
    """Within it, on any thread, the interpreter's switch interval is at most :data:`TURN_S` seconds.

    The interval is the whole process's. It is put back when the last who wanted it short has left, unless somebody
    else has set it meanwhile.
    """
    turns = _turns
    with turns.lock:
        turns.holders += 1
        if turns.holders == 1:
            turns.before = sys.getswitchinterval()
            if turns.before > TURN_S:
                sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        with turns.lock:
            turns.holders -= 1
            if not turns.holders:
                _put_back(turns)


def _put_back(turns: _Turns) -> None:
    # The interpreter keeps whole microseconds.
    if turns.before and abs(sys.getswitchinterval() - TURN_S) < 1e-6:
        sys.setswitchinterval(turns.before)
