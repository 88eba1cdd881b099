"""How much may come in answer to one question."""

from __future__ import annotations

from typing import Final

SENDER_REPLIES: Final = 8
"""Of one sender: a process each. Two processes under one name are a conflict, more are none that anybody can settle."""
SENDER_LARGEST: Final = 2
"""Of one sender together, in largest replies."""
ALL_BYTES: Final = 256 << 20
"""Of all senders: a thousand nodes of two hundred devices."""


class ReplyBudget:
    """Of one question. Safe from any thread, as far as that two replies that come at once may both still be taken.

    Args:
        limit: bytes of one reply.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._senders: dict[str, tuple[int, int]] = {}
        """Replies and bytes."""
        self._bytes = 0
        self.spent = False
        """A sender has said all that it may."""

    def refuses(self, sender: str, size: int) -> str | None:
        """Why a reply is not taken; None: it is, and counted."""
        if size > self._limit:
            return f"over the limit of {self._limit} bytes"
        replies, so_far = self._senders.get(sender, (0, 0))
        if replies >= SENDER_REPLIES:
            self.spent = True
            return f"its sender has answered {replies} times already"
        if so_far + size > SENDER_LARGEST * self._limit:
            self.spent = True
            return f"its sender has answered with {so_far} bytes already"
        if self._bytes + size > ALL_BYTES:
            return f"there are {self._bytes} bytes of answers already"
        self._senders[sender] = replies + 1, so_far + size
        self._bytes += size
        return None
