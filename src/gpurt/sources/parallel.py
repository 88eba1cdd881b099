"""The same blocking question to several devices at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

MOST: Final = 16
"""Threads at a time."""


def ask_each(ask: Callable[[T], R], subjects: Sequence[T]) -> list[R]:
    """``[ask(each) for each in subjects]``, on threads of their own where there are several.

    A driver takes 20 to 40 ms for what is to be known of one GPU, without the GIL. The threads are daemons: one that
    hangs holds up the answer, but not the end of the process. What the first of them raises is raised.
    """
    if len(subjects) < 2:
        return [ask(each) for each in subjects]
    answers: dict[int, R] = {}
    failures: dict[int, BaseException] = {}
    rest = iter(range(len(subjects)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                place = next(rest, None)
            if place is None:
                return
            try:
                answers[place] = ask(subjects[place])
            except BaseException as exc:
                failures[place] = exc

    threads = [
        threading.Thread(target=work, name=f"gpurt:ask:{number}", daemon=True)
        for number in range(min(MOST, len(subjects)) - 1)
    ]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return [answers[place] for place in range(len(subjects))]
