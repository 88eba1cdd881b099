"""What the demo shows: a live table with progress bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from gpurt.cli.cluster_table import change_line, cluster_table
from gpurt.cli.worker_words import counted

if TYPE_CHECKING:
    from rich.console import Group
    from rich.progress import TaskID
    from rich.text import Text

    from gpurt.cli.demo import Summary
    from gpurt.cluster.changes import Change
    from gpurt.cluster.records import ClusterSnapshot

TABLE_FRAME_LINES: Final = 5
"""Title, heading and three rules."""
_COLOURS: Final = ("blue", "green", "yellow", "cyan", "magenta")


class Screen:
    """Plain lines on stdout."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        self._print(f"{time.monotonic() - self._began:6.2f} s  {text}")

    def change(self, change: Change, snapshot: ClusterSnapshot) -> None:
        if not change.minor:
            self.say(f"master: {change_line(change, snapshot)}")

    def progress(self, worker: str, done: int, total: int) -> None:
        """Pieces of the model that a worker has loaded."""

    def layers(self, owners: Sequence[str | None]) -> None:
        """Who holds each layer of the model; None: nobody."""
        self.say("layers  " + "".join("x" if owner is None else owner[-1] for owner in owners))

    def summary(self, summary: Summary) -> None:
        repair = summary.repair
        assert repair is not None, "a demo that has ended has repaired its plan"
        self._print(
            f"{counted(summary.devices, 'device')}; first event {summary.first_event_s:.2f} s after the workers' start"
        )
        self._print(
            f"{summary.held_bytes >> 20} MiB placed on {counted(summary.stages, 'device')}, committed, loaded and "
            f"checked in {summary.placed_s:.2f} s" + (" (simulated)" if summary.simulated else "")
        )
        self._print(
            f"kill -9: suspect after {summary.suspect_s * 1000:.0f} ms, lost after {summary.lost_s:.2f} s; "
            f"{repair.layers_moved} of {repair.plan.layer_count} layers moved, whole again {summary.whole_s:.2f} s "
            f"after the loss"
        )
        self._print(f"back and in sync {summary.resync_s:.2f} s after the restart")
        self._print(f"total {summary.total_s:.1f} s")

    def _print(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


class LiveScreen(Screen):
    """A table that changes in place, with what was said below it."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        from gpurt.cluster.records import ClusterSnapshot

        self._table = cluster_table(ClusterSnapshot(nodes={}), compact=True)
        self._lines: list[str] = []
        self._layers: Text | None = None
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("layers and ends")
        )
        self._tasks: dict[str, TaskID] = {}
        self._console = Console()
        self._live = Live(self._picture(), console=self._console, refresh_per_second=12)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._lines.append(f"{time.monotonic() - self._began:6.2f} s  {text}")
        self._live.update(self._picture())

    def change(self, change: Change, snapshot: ClusterSnapshot) -> None:
        self._table = cluster_table(snapshot, max_rows=self._console.height // 3, compact=True)
        if change.device is None and not change.minor:
            self.say(f"master: {change_line(change, snapshot)}")
        else:
            self._live.update(self._picture())

    def progress(self, worker: str, done: int, total: int) -> None:
        if worker not in self._tasks:
            self._tasks[worker] = self._bars.add_task(f"{worker} loads", total=total)
        self._bars.update(self._tasks[worker], completed=done, total=total)

    def layers(self, owners: Sequence[str | None]) -> None:
        from rich.text import Text

        self._layers = Text("layers ")
        for owner in owners:
            style = "red" if owner is None else _COLOURS[int(owner[-1]) % len(_COLOURS)]
            self._layers.append("x" if owner is None else owner[-1], style=f"{style} reverse")
        super().layers(owners)

    def _picture(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        # A picture that is too high loses its end, which is the news.
        shown = [] if self._layers is None else [self._layers]
        room = self._console.height - self._table.row_count - TABLE_FRAME_LINES - len(self._bars.tasks) - len(shown) - 1
        last = self._lines[-max(1, min(12, room)) :]
        lines = (Text(line, no_wrap=True, overflow="ellipsis") for line in last)
        return Group(self._table, self._bars, *shown, *lines)


def make_screen(*, live: bool) -> Screen:
    return LiveScreen() if live else Screen()
