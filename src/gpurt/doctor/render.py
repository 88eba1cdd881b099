"""Explanations as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from gpurt.doctor.explanation import Explanation
from gpurt.printable import MAX_LINE, printable

if TYPE_CHECKING:
    from rich.text import Text

_HEADINGS: Final = {
    "backend": "Backends:",
    "device": "Devices:",
    "memory": "Memory:",
    "visibility": "What hides or orders devices:",
    "host": "How this was found out:",
}


def render_explanations(explanations: Sequence[Explanation]) -> Iterator[Text]:
    """One line for each sentence, below the heading of its topic, and one for what to do."""
    from rich.text import Text

    for topic, group in groupby(explanations, key=lambda each: each.topic):
        yield Text(_HEADINGS[topic], style="bold")
        for each in group:
            yield Text(f"  {printable(each.text, MAX_LINE)}")
            if each.todo:
                yield Text(f"      to do: {printable(each.todo, MAX_LINE)}")
