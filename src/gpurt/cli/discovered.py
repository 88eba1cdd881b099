"""What ``discover`` prints: one JSON document, or tables and sentences."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpurt.printable import MAX_LINE, printable

if TYPE_CHECKING:
    from rich.console import Console

    from gpurt.discovery.result import DiscoveryResult
    from gpurt.doctor.explanation import Explanation
    from gpurt.recording.place import Place
    from gpurt.recording.replay import Recording


class Output:
    """stdout of one run of the command.

    Reads a few small files when it is made with ``explain``, so make it where no event loop runs.

    Args:
        as_json: one JSON document for each result.
        explain: with a sentence for everything.
        recording: where results come from, if not from this machine.
    """

    def __init__(self, *, as_json: bool, explain: bool, recording: Recording | None = None) -> None:
        self.as_json = as_json
        self._explain = explain
        self._recording = recording
        self._place = _place(recording) if explain else None

    def tell(self, result: DiscoveryResult) -> None:
        """One result, as JSON or for people."""
        if self.as_json:
            self.write(self._document(result))
        else:
            self.show(result)

    def show(self, result: DiscoveryResult) -> Console:
        """One result for people."""
        from rich.text import Text

        from gpurt.discovery.report import render

        console = make_console()
        recorded = self._recording is not None
        if self._recording is not None:
            told = printable(f"recorded: {self._recording.label}; nothing here is of this machine", MAX_LINE)
            console.print(Text(told), soft_wrap=True)
        for part in render(result, reasons=not self._explain, recorded=recorded):
            # Sentences are left to the terminal to wrap, so that a command can be copied in one piece.
            console.print(part, soft_wrap=isinstance(part, Text))
        if self._explain:
            from gpurt.doctor.render import render_explanations

            for line in render_explanations(self._explanations(result)):
                console.print(line, soft_wrap=True)
        sys.stdout.flush()
        return console

    def write(self, document: dict[str, Any]) -> None:
        """One JSON document on one line."""
        sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
        sys.stdout.flush()

    def _document(self, result: DiscoveryResult) -> dict[str, Any]:
        document = result.document()
        if self._recording is not None:
            document |= {
                "devices": [{**device, "recorded": True} for device in document["devices"]],
                "recorded": {"directory": str(self._recording.directory), "at": self._recording.meta.recorded_at},
            }
        if self._explain:
            document["explanations"] = [each.record() for each in self._explanations(result)]
        return document

    def _explanations(self, result: DiscoveryResult) -> Sequence[Explanation]:
        from gpurt.doctor.explain import explain
        from gpurt.platforms import current_platform
        from gpurt.recording.place import Place

        place = self._place or Place()
        recording = self._recording
        if recording is None:
            return explain(result, os.environ, current_platform(), place=place)
        return explain(result, recording.environ, recording.meta.platform, place=place, recorded=recording.label)


def make_console() -> Console:
    """rich on stdout, which prints what it is given and nothing of its own."""
    from rich.console import Console

    from gpurt.discovery.report import WIDTH_WITHOUT_TERMINAL

    # With None, rich asks COLUMNS and then the terminal.
    told = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    width = None if told else WIDTH_WITHOUT_TERMINAL
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)


def _place(recording: Recording | None) -> Place:
    from gpurt.recording.place import place_of

    return place_of() if recording is None else recording.place
