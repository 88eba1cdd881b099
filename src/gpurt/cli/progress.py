"""How far a long command is: a bar on a terminal, one line elsewhere, always on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

Report = Callable[[str, float, float], None]
"""Called with what is being done, how much of it is done, and how much there is to do."""


@contextmanager
def progress(line: str) -> Generator[Report]:
    """
    Args:
        line: printed where stderr is no terminal, so that a log says what is being waited for.
    """
    if not sys.stderr.isatty():
        waiting = [line]

        def say(what: str, done: float, total: float) -> None:
            if waiting:  # not before it has begun: what is refused at once is one line, too
                sys.stderr.write(waiting.pop() + "\n")
                sys.stderr.flush()

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(line, total=None)

        def report(what: str, done: float, total: float) -> None:
            bars.update(task, description=what, completed=done, total=total)

        yield report
