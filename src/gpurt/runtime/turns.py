"""Shorter turns of the interpreter while a library is loaded beside an event loop.

Importing a vendor's library runs Python code for a third of a second on a lane. Each time the loop's thread wakes it
asks for the GIL and gets it at the end of the other thread's turn: 5 ms by default, so that every millisecond's timer
comes 5 ms late. A turn of half a millisecond costs the import a few per cent.
"""

from __future__ import annotations

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


@contextmanager
def short_turns() -> Generator[None]:
    """Within it, on any thread, the interpreter's switch interval is at most :data:`TURN_S` seconds.

    The interval is the whole process's. It is put back when the last who wanted it short has left, unless somebody
    else has set it meanwhile.
    """
    with _turns.lock:
        _turns.holders += 1
        if _turns.holders == 1:
            _turns.before = sys.getswitchinterval()
            if _turns.before > TURN_S:
                sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        with _turns.lock:
            _turns.holders -= 1
            # The interpreter keeps whole microseconds.
            if not _turns.holders and abs(sys.getswitchinterval() - TURN_S) < 1e-6:
                sys.setswitchinterval(_turns.before)
