"""Explanations as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from gpurt.doctor.explanation import Explanation

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
            yield Text(f"  {_printable(each.text)}")
            if each.todo:
                yield Text(f"      to do: {_printable(each.todo)}")


def _printable(text: str) -> str:
    """What drivers say of themselves, without what would move a terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)
