"""A node's events on their way into the stream: in order, sent again until the server has acknowledged them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, cast
from uuid import uuid4

from gpurt.cluster.errors import MalformedEvent
from gpurt.cluster.message_limits import strict_json
from gpurt.cluster.nats_settings import NatsSettings, header, load_nats
from gpurt.printable import printable

PAUSE_S: Final = 0.1
"""After an answer that was no acknowledgement: a server that has just started does not know its streams yet."""

_log = logging.getLogger("gpurt.cluster.nats")


@dataclass(slots=True, eq=False)
class _Event:
    number: int
    subject: str
    payload: bytes
    kept: asyncio.Future[None]
    """Done when the server has the event; or when there is no server, and it is kept here."""
    acknowledged: bool = False

    def let_go(self) -> None:
        if not self.kept.done():
            self.kept.set_result(None)


class NatsOutbox:
    """
    The server drops what it has already, by a number that goes with each event. So that none overtakes another, only
    one is on its way until the first acknowledgement of a connection or after a refusal; then ``in_flight`` are.

    Args:
        stream: the only one that may take the events.
    """

    def __init__(self, stream: str, settings: NatsSettings) -> None:
        self._stream, self._settings = stream, settings
        self._id = uuid4().hex
        self._count = 0
        self._sent = deque[_Event]()
        self._waiting = deque[_Event]()
        self._by_number: dict[int, _Event] = {}
        self._bytes = 0
        self._window = 1
        self._refused = False
        self._news = asyncio.Event()
        self._progress = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None
        self.dropped = 0
        """Events that no server has got, because there was none for too long."""

    async def put(self, subject: str, payload: bytes) -> None:
        """Submitted at once; returns when the server has it, or when it is kept because there is none."""
        self._count += 1
        event = _Event(self._count, subject, payload, asyncio.get_running_loop().create_future())
        self._waiting.append(event)
        self._by_number[event.number] = event
        self._bytes += len(payload)
        if self._sending is None:
            self._keep()
        self._news.set()
        await asyncio.shield(event.kept)

    async def flush(self) -> None:
        """Wait until nothing is left, or there is no server."""
        while self._sending is not None and self._by_number:
            self._progress.clear()
            await self._progress.wait()

    async def connected(self, client: Any) -> None:
        """Send what is there, and from now on what comes, over ``client``."""
        inbox = client.new_inbox()
        await client.subscribe(f"{inbox}.*", cb=self._answered)
        self._refused = False
        self._again()
        self._sending = asyncio.create_task(self._send(client, inbox), name="gpurt-nats-outbox")

    def disconnected(self) -> None:
        """Keep what is there for the next connection; nobody waits for that."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        self._progress.set()
        self._again()
        self._keep()

    def _keep(self) -> None:
        lost = 0
        while len(self._waiting) > self._settings.backlog_events or self._bytes > self._settings.backlog_bytes:
            self._done(self._waiting.popleft())
            lost += 1
        if lost and not self.dropped:
            _log.warning("no NATS server for too long: the oldest events are dropped, receivers will ask for the state")
        self.dropped += lost
        for event in self._waiting:
            event.let_go()

    def _done(self, event: _Event) -> None:
        del self._by_number[event.number]
        self._bytes -= len(event.payload)
        self._progress.set()
        event.let_go()

    def _again(self) -> None:
        """What is not acknowledged, from the beginning and one by one."""
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self._window = 1
        self._news.set()

    async def _send(self, client: Any, inbox: str) -> None:
        nats = load_nats()
        try:
            while True:
                if self._refused:
                    self._refused = False
                    await asyncio.sleep(PAUSE_S)
                elif self._waiting and len(self._sent) < self._window:
                    await self._send_one(client, inbox, self._waiting.popleft())
                else:
                    await self._wait()
        except (OSError, nats.errors.Error) as exc:
            _log.debug("events wait for the next connection: %r", exc)  # whoever watches the connection tells of it

    async def _send_one(self, client: Any, inbox: str, event: _Event) -> None:
        if event.acknowledged:  # late, when it was to be sent again
            self._done(event)
            return
        self._sent.append(event)
        headers = {"Nats-Msg-Id": f"{self._id}-{event.number}", "Nats-Expected-Stream": self._stream}
        await client.publish(event.subject, event.payload, reply=f"{inbox}.{event.number}", headers=headers)

    async def _wait(self) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(self._settings.answer_timeout_s if self._sent else None):
                await self._news.wait()
        except TimeoutError:
            _log.warning("the NATS server does not acknowledge %d events, which are sent again", len(self._sent))
            self._again()

    async def _answered(self, message: Any) -> None:
        event = self._by_number.get(int(message.subject.rpartition(".")[2]))
        if event is None:
            return
        self._news.set()
        trouble = _trouble(message)
        if trouble is None:
            event.acknowledged = True
            event.let_go()
            self._window = self._settings.in_flight
            while self._sent and self._sent[0].acknowledged:
                self._done(self._sent.popleft())
        elif not self._refused and not event.acknowledged:
            _log.warning("the NATS server did not take an event, which is sent again: %s", trouble)
            self._refused = True
            self._again()


def _trouble(message: Any) -> str | None:
    """What an answer says, when it is no acknowledgement."""
    if header(message, "Status"):
        return "no stream takes it"
    try:
        answer = strict_json(message.data, "answer of the server")
    except MalformedEvent:
        return "an answer that is no JSON"
    if not isinstance(answer, dict):
        return "an answer that is none of a stream"
    error: object = cast("dict[str, Any]", answer).get("error")
    if isinstance(error, dict):
        error = cast("dict[str, Any]", error).get("description", cast("object", error))
    return None if error is None else printable(str(error), 1000)
