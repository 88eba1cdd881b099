"""Questions to the processes of one node: its state, a command."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from typing import Any, Final

from gpurt.cluster.bus import MAX_STATE_BYTES, held_of
from gpurt.cluster.envelope import MAX_EVENT_BYTES
from gpurt.cluster.errors import ClusterError, NoAnswer
from gpurt.cluster.log_limit import LimitedLog
from gpurt.cluster.nats_node import ERROR, HELD, PART, PART_BYTES
from gpurt.cluster.nats_settings import header, load_nats
from gpurt.cluster.reply_budget import SENDER_LARGEST, SENDER_REPLIES
from gpurt.printable import printable

OTHERS_S: Final = 0.1
"""How long a second process of the same name may take longer than the first, where nobody has told of one."""
MAX_PARTS: Final = -(-MAX_STATE_BYTES // PART_BYTES)

_PART = re.compile(r"([0-9a-f]{32}) ([0-9]{1,2}) ([0-9]{1,2})")
_warnings: Final = LimitedLog(logging.getLogger("gpurt.cluster.nats"))


class StateQuery:
    """Everybody's answer to one question.

    Args:
        expected: how many processes there are, as far as is known; 0: not known.
    """

    def __init__(self, node: str, expected: Callable[[], int]) -> None:
        self._node, self._expected = node, expected
        self._parts: dict[str, dict[int, bytes]] = {}
        self._whole: dict[str, tuple[bytes, float]] = {}
        self._bytes = 0
        self._nobody = False
        self._news = asyncio.Event()

    async def ask(self, client: Any, subject: str, timeout: float, *, quiet: bool = False) -> list[tuple[bytes, float]]:
        """Those that are there within ``timeout`` seconds, and for how long each has held its name."""
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox, cb=self._take)
        try:
            await client.publish(subject, b"quiet" if quiet else b"", reply=inbox)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._wait(client)
        finally:
            if not client.is_closed:
                await subscription.unsubscribe()
        return list(self._whole.values())

    async def _wait(self, client: Any) -> None:
        while not self._nobody and not client.is_closed:
            expected = self._expected()
            if expected and len(self._whole) >= expected:
                return
            patience = OTHERS_S if self._whole and not expected else None
            self._news.clear()
            try:
                async with asyncio.timeout(patience):
                    await self._news.wait()
            except TimeoutError:
                return

    async def _take(self, message: Any) -> None:
        self._news.set()
        if header(message, "Status") == "503":
            self._nobody = True
            return
        part = _PART.fullmatch(header(message, PART))
        if part is None or not int(part[2]) < int(part[3]) <= MAX_PARTS or len(message.data) > PART_BYTES:
            _warnings.warning(
                self._node, "ignored: an answer to a question for the state of %s that is none", self._node
            )
            return
        token, number, count = part[1], int(part[2]), int(part[3])
        many = token not in self._parts and len(self._parts) >= SENDER_REPLIES
        if many or self._bytes + len(message.data) > SENDER_LARGEST * MAX_STATE_BYTES:
            _warnings.warning(
                self._node,
                "ignored: an answer of node %s, which has answered %d times with %d bytes",
                *(self._node, len(self._parts), self._bytes),
            )
            return
        self._bytes += len(message.data)
        parts = self._parts.setdefault(token, {})
        parts[number] = message.data
        if all(each in parts for each in range(count)):
            held = held_of(header(message, HELD).encode())
            self._whole[token] = b"".join(parts[each] for each in range(count)), held


async def ask_command(client: Any, node: str, subject: str, payload: bytes, timeout: float) -> bytes:
    """
    Raises:
        NoAnswer: not there, or no reply within ``timeout`` seconds. ClusterError: the node's own error.
    """
    nats = load_nats()
    try:
        message = await client.request(subject, payload, timeout=timeout)
    except nats.errors.NoRespondersError as exc:
        raise NoAnswer(f"node {node} takes no commands here") from exc
    except TimeoutError as exc:
        raise NoAnswer(f"node {node} did not answer within {timeout:g} s") from exc
    if len(message.data) > MAX_EVENT_BYTES:
        raise ClusterError(f"node {node} answered with {len(message.data)} bytes, over the limit of {MAX_EVENT_BYTES}")
    if header(message, ERROR):
        raise ClusterError(f"node {node} answered: {printable(message.data[:1024].decode(errors='replace'), 1024)}")
    return bytes(message.data)
