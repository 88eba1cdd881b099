"""Long passes over many objects on a lane, without standing in an event loop's way."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, TypeVar

from gpurt.runtime.turns import short_turns

T = TypeVar("T")

SLICE: Final = 1000
"""Objects that are dealt with at a time where the loop or the GIL is held: well under 1 ms."""
MANY: Final = 5000
"""Objects that a full collection takes about 1 ms for."""
_FROZEN_AT_START: Final = 1000
"""Python 3.12 starts with 375 frozen objects of its own, other versions with none; a host that freezes what it has
loaded freezes many thousands."""


class _Pause:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.resume = False


_pause = _Pause()


def _after_fork() -> None:
    """In the child: whoever paused the collector does not exist there, and would never resume it."""
    global _pause
    before, _pause = _pause, _Pause()
    if before.holders and before.resume:
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def quiet(objects: int) -> Generator[None]:
    """While about so many objects are made, the interpreter takes short turns and its cyclic garbage collector pauses,
    on every thread; nothing of the kind for less than :data:`MANY`. Not for what waits for a file.

    100,000 tensors are some 300,000 objects, none of them garbage, and each full collection among them is one call
    that keeps the GIL for 0.1 s. Several happen while the objects are made. Both settings are the whole process's and
    are put back when the last holder has left. Garbage without cycles, which is nearly all, is freed as ever.
    """
    if objects < MANY:
        yield
        return
    with short_turns():
        pause = _pause
        with pause.lock:
            pause.holders += 1
            if pause.holders == 1:
                pause.resume = gc.isenabled()
                gc.disable()
        try:
            yield
        finally:
            with pause.lock:
                pause.holders -= 1
                if not pause.holders and pause.resume:
                    _settle()
                    gc.enable()


def _settle() -> None:
    """Count what was made as old, or the next collection of the young, which comes at once, would visit all of it.

    Freezing and unfreezing moves lists and visits nothing. What the host froze itself stays frozen: then it is done
    without.
    """
    if gc.get_freeze_count() < _FROZEN_AT_START:
        gc.freeze()
        gc.unfreeze()


def drop(items: list[Any] | dict[Any, Any]) -> None:
    """Empty it slice by slice: to free 100,000 objects is one call otherwise."""
    if isinstance(items, dict):
        while items:
            items.popitem()
    while items:
        del items[-SLICE:]


def slices(items: Iterable[T]) -> Iterator[list[T]]:
    """``items``, :data:`SLICE` at a time. A set or a dictionary that is made of 500,000 at once is one call of 30 ms;
    of slices it is many."""
    rest = iter(items)
    while part := list(islice(rest, SLICE)):
        yield part
