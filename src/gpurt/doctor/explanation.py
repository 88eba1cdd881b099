"""One plain sentence about a discovery, and what can be done about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Topic = Literal["backend", "device", "memory", "visibility", "host"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """``text`` says what is so and why; ``todo`` what to do, a command where there is one; None: nothing is wrong."""

    topic: Topic
    subject: str
    """The backend, the device's id, or the variable that it is about."""
    status: str
    """``usable absent hidden inaccessible failing limited …``: the sentence in one word."""
    text: str
    todo: str | None = None

    def record(self) -> dict[str, Any]:
        """As in the JSON document."""
        return {
            "topic": self.topic,
            "subject": self.subject,
            "status": self.status,
            "text": self.text,
            "todo": self.todo,
        }
