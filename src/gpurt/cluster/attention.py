"""Attention: whether anybody hears this node, as far as the node itself can know.

A connection shows nothing: a hub lets in who has a certificate, and lets nothing through of a name that is not on its
roster. But who watches a cluster asks each node for its state when it sees it, and then once a minute; to notice that
costs nobody a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NoReturn

FIRST_S: Final = 10.0
"""Without a question for so long after joining, nobody hears the node: a master asks within a second."""
SILENT_S: Final = 150.0
"""The same later on: more than two of the regular checks of a master
(:data:`gpurt.cluster.observer.RESYNC_INTERVAL_S`)."""


class Attention:
    """Of one node. Another process that wants its name asks, too, and is taken for somebody who watches."""

    def __init__(self) -> None:
        self.first_s, self.silent_s = FIRST_S, SILENT_S
        self._question = asyncio.Event()

    def asked(self) -> None:
        """Somebody has asked for the node's state."""
        self._question.set()

    async def follow(self, say: Callable[[bool, float], None]) -> NoReturn:
        """Until cancelled: ``say(heard, seconds)`` at the first question or without one for ``first_s``, and at every
        change from then on. ``seconds`` is how long there has been no question."""
        heard: bool | None = None
        patience = self.first_s
        while True:
            try:
                async with asyncio.timeout(None if heard is False else patience):
                    await self._question.wait()
            except TimeoutError:
                heard = False
                say(False, patience)
                continue
            self._question.clear()
            if heard is not True:
                heard, patience = True, self.silent_s
                say(True, 0.0)
