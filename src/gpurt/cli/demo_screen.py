"""What the demo shows: a live table with progress bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from gpurt.cli.cluster_table import change_line, cluster_table
from gpurt.cli.worker import counted

if TYPE_CHECKING:
    from rich.console import Group
    from rich.progress import TaskID

    from gpurt.cli.demo import Summary
    from gpurt.cluster.changes import Change
    from gpurt.cluster.records import ClusterSnapshot

TABLE_FRAME_LINES: Final = 5
"""Title, heading and three rules."""


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
        self.say(f"master: {change_line(change, snapshot)}")

    def progress(self, worker: str, done: int, total: int) -> None:
        """Bytes checked so far, both directions together."""
        quarter = total // 4
        if done % quarter == 0:
            self.say(f"{worker}: {100 * done // total} % of the device check")

    def summary(self, summary: Summary) -> None:
        for worker, check in summary.checks.items():
            simulated = " (simulated)" if check["simulated"] else ""
            # Fresh host memory is filled at the rate of page faults; a device's own memory knows none.
            first_touch = " (first touch)" if check["host_memory"] else ""
            self._print(
                f"{worker}: {check['nbytes'] >> 20} MiB to {check['device_id']} and back, SHA-256 equal: "
                f"{check['to_device_gbps']:.2f} GB/s there{first_touch}, "
                f"{check['from_device_gbps']:.2f} GB/s back{simulated}"
            )
        self._print(
            f"{counted(summary.devices, 'device')}; first event {summary.first_event_s:.2f} s after the workers' start"
        )
        self._print(
            f"kill -9: suspect after {summary.suspect_s * 1000:.0f} ms, lost after {summary.lost_s:.2f} s; "
            f"back and in sync {summary.resync_s:.2f} s after the restart"
        )
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
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        from gpurt.cluster.records import ClusterSnapshot

        self._table = cluster_table(ClusterSnapshot(nodes={}), compact=True)
        self._lines: list[str] = []
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
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
        if change.device is None:
            self.say(f"master: {change_line(change, snapshot)}")
        else:
            self._live.update(self._picture())

    def progress(self, worker: str, done: int, total: int) -> None:
        if worker not in self._tasks:
            self._tasks[worker] = self._bars.add_task(f"{worker} there and back", total=total)
        self._bars.update(self._tasks[worker], completed=done)

    def _picture(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        # A picture that is too high loses its end, which is the news.
        room = self._console.height - self._table.row_count - TABLE_FRAME_LINES - len(self._bars.tasks) - 1
        last = self._lines[-max(1, min(12, room)) :]
        return Group(self._table, self._bars, *(Text(line, no_wrap=True, overflow="ellipsis") for line in last))


def make_screen(*, live: bool) -> Screen:
    return LiveScreen() if live else Screen()
