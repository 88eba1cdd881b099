"""The bus between processes and machines, over zenoh.

zenoh-python has no asyncio interface, and ``put`` may block for seconds while a link is congested. Everything we
ask of it therefore runs on one lane, in order; everything it tells us comes on its own threads, into bounded
inboxes. Lost events are repeated by the publisher's cache (advanced publisher and subscriber), which also survives
the death of the hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, ParamSpec, TypeVar

from gpurt.cluster.bus import MAX_COMMAND_BYTES, MAX_STATE_BYTES, CommandHandler, OnAsked, StateReply, TakeReadings
from gpurt.cluster.connection import connection_log
from gpurt.cluster.envelope import MAX_EVENT_BYTES, check_size
from gpurt.cluster.errors import BusClosed, BusUnavailable, ClusterError, InvalidName, NoAnswer
from gpurt.cluster.keys import ANY, COMMAND, STATE, check_name, node_key, node_of
from gpurt.cluster.readings import MAX_READINGS_BYTES
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.handshake import GIVE_TLS, speaks_tls
from gpurt.cluster.security.loopback import check_protected
from gpurt.cluster.security.protection import Protection
from gpurt.cluster.zenoh_callbacks import END_TIMEOUT_S, SessionCallbacks
from gpurt.cluster.zenoh_commands import ZenohCommands
from gpurt.cluster.zenoh_hub import watch_hub
from gpurt.cluster.zenoh_node import ZenohNode
from gpurt.cluster.zenoh_query import ZenohQuery
from gpurt.cluster.zenoh_readings import ZenohReadings, put_readings
from gpurt.cluster.zenoh_settings import ZenohSettings, check_endpoint, load_zenoh, plain, session_config
from gpurt.cluster.zenoh_subscription import ZenohSubscription
from gpurt.errors import GPUError
from gpurt.printable import printable
from gpurt.runtime.lane import Lane

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_TIMEOUT_S: Final = 5.0

_log = logging.getLogger("gpurt.cluster.zenoh")


class ZenohEngine:
    """One zenoh session.

    Args:
        endpoint: ``tcp/HOST:PORT`` of the hub.
        listen: be the hub. Its end does not end the others: they connect again when there is one again.
        tls: folder with the certificate to show (:mod:`gpurt.cluster.security.enrolment`); read at each start.
        insecure: without one, let other machines in all the same.

    Raises:
        InvalidName: cluster or endpoint malformed. InsecureEndpoint: other machines could reach the endpoint
            unprotected, or ``tls`` would not be used with it.
    """

    def __init__(
        self,
        *,
        cluster: str = "default",
        endpoint: str,
        listen: bool = False,
        settings: ZenohSettings | None = None,
        tls: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        self._cluster = check_name(cluster, "cluster")
        self.endpoint = check_endpoint(endpoint)
        check_protected(self.endpoint, tls=tls is not None, insecure=insecure)
        self.listen = listen
        self.settings = settings or ZenohSettings()
        self._protection = None if tls is None else Protection(tls, cluster, self.endpoint, listen=listen)
        self._zenoh: Any = None
        self._session: Any = None
        self._callbacks: SessionCallbacks | None = None
        self._lane: Lane | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Future[None] | None = None
        self._node: ZenohNode | None = None
        self._subscriptions: list[ZenohSubscription] = []
        self._readings: list[ZenohReadings] = []
        self._commands: ZenohCommands | None = None

    @property
    def cluster(self) -> str:
        return self._cluster

    # Lifecycle

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._opening is not None and self._opening.get_loop() is loop:
            await asyncio.wait({self._opening})
        if self._lane is not None:
            return
        self._loop = loop
        opening = self._opening = loop.create_future()
        lane = self._lane = Lane(f"gpurt:zenoh:{self._cluster}")
        opened: list[_Opened] = []
        try:
            await self._open(lane, opened)
            self._session, self._callbacks = opened[0]
            if self._protection is not None:
                self._protection.remind()
        except BaseException:
            # An open that is under way ends within its own timeout; the lane then closes what it gave. That may be
            # after the next start, so it is not this object's session.
            if self._lane is lane:
                self._lane = None
            closing = asyncio.wrap_future(lane.submit(_close_sessions, opened))
            lane.stop()
            # Not for its result: a process that ends while its thread is inside zenoh is aborted.
            await asyncio.wait({closing}, timeout=self.settings.connect_timeout_s + END_TIMEOUT_S)
            raise
        finally:
            self._opening = None
            opening.set_result(None)

    async def close(self) -> None:
        lane, self._lane = self._lane, None
        if lane is None:
            return
        if self._opening is not None and self._opening.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({self._opening})  # start() sees that it is closed, and undoes itself
            return
        if self._protection is not None:
            self._protection.forget()
        session, self._session = self._session, None
        callbacks, self._callbacks = self._callbacks, None
        if self._commands is not None:
            self._commands.cancel()
        for subscription in self._subscriptions:
            subscription.close()
        closed = asyncio.wrap_future(
            lane.submit(_tear_down, session, callbacks, self._node, (*self._subscriptions, *self._readings))
        )
        lane.stop()
        self._node = None
        self._subscriptions.clear()
        for readings in self._readings:
            readings.closed = True
        self._readings.clear()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.shield(closed)
        except TimeoutError:
            _log.warning("the zenoh session did not close within %g s and is left behind", CLOSE_TIMEOUT_S)

    async def _open(self, lane: Lane, opened: list[_Opened]) -> None:
        pause = self.settings.retry_first_s
        told = False
        while True:
            try:
                await self._result(asyncio.wrap_future(lane.submit(self._open_session, opened)))
            except BusUnavailable as exc:
                if self.listen or self._zenoh is None:
                    raise
                if not told:
                    connection_log.info("waiting for a master at %s (%s)", self.endpoint, exc.message)
                    told = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, self.settings.retry_longest_s)
            if self._lane is not lane:
                raise BusClosed("the bus was closed while it was being started")
            if opened:
                if told:
                    connection_log.info("connected to the hub at %s", self.endpoint)
                return

    def _open_session(self, opened: list[_Opened]) -> None:
        self._zenoh = zenoh = load_zenoh()
        protection = None if self._protection is None else self._protection.values(zenoh)
        config = session_config(zenoh, self.endpoint, listen=self.listen, settings=self.settings, protection=protection)
        try:
            session = zenoh.open(config)
        except zenoh.ZError as exc:
            if not self.listen:
                raise self._unreachable(plain(exc)) from exc
            raise BusUnavailable(
                f"cannot listen on {self.endpoint}: {plain(exc)}",
                hint="is another master running? choose another port",
            ) from exc
        callbacks = SessionCallbacks(zenoh)
        opened.append((session, callbacks))
        if self.listen and self._protection is not None:
            self._protection.watch(session, callbacks, zenoh.SampleKind.PUT)
        if not self.listen:
            trouble = None if self._protection is None else self._protection.trouble
            watch_hub(
                session, callbacks, self.endpoint, zenoh.SampleKind.PUT, lambda: self._session is session, trouble
            )

    def _unreachable(self, why: str) -> GPUError:
        """What is said of a hub to which no session could be opened."""
        if self._protection is not None:
            self._protection.check_refusal()
            if speaks_tls(self.endpoint) is False:
                why += "; somebody listens there who does not speak TLS: a hub without certificates?"
        elif speaks_tls(self.endpoint):
            return CredentialsRefused(f"the hub at {self.endpoint} wants certificates", hint=GIVE_TLS)
        return BusUnavailable(why)

    # A node

    async def join(
        self, node: str, state: bytes, on_command: CommandHandler | None = None, on_asked: OnAsked | None = None
    ) -> None:
        lane = self._running()
        check_name(node, "node")
        check_size(state, f"state of node {node}", MAX_STATE_BYTES)
        if self._node is not None:
            raise ClusterError(f"already joined as node {self._node.node}")
        if self._protection is not None:
            self._protection.check_node(node)

        async def reply(query: Any, payload: bytes, error: bool) -> None:
            if self._lane is not None:
                await self._call(joined.reply, query, payload, error=error)

        def here() -> bool:
            return self._node is joined and self._lane is not None

        if self._commands is not None:
            self._commands.cancel()  # of a run before
        commands = None if on_command is None else ZenohCommands(self._the_loop(), on_command, reply, here)
        take = None if commands is None else commands.take
        loop = self._the_loop()

        marking: Future[None] | None = None

        def asked() -> None:
            nonlocal marking
            if not here():
                return
            if marking is None or marking.done():  # one that waits is for all who have asked by then
                marking = lane.submit(joined.mark)
            if on_asked is not None:
                on_asked()

        def asked_elsewhere() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the node has ended
                loop.call_soon_threadsafe(asked)

        self._node = joined = ZenohNode(self._zenoh, self._wrapper(), self._cluster, node, state, take, asked_elsewhere)
        self._commands = commands
        try:
            await self._call(joined.declare, self._session, self.settings)
        except BaseException:
            self._node = None
            with contextlib.suppress(GPUError):  # the lane is stopped: close() has undeclared it
                lane.submit(joined.undeclare)
            raise

    async def leave(self) -> None:
        node, self._node = self._node, None
        if node is not None and self._lane is not None:
            await self._call(node.leave, self._session)

    async def set_state(self, state: bytes) -> None:
        node = self._joined()
        check_size(state, f"state of node {node.node}", MAX_STATE_BYTES)
        node.state = state

    async def publish(self, payload: bytes) -> None:
        node = self._joined()
        check_size(payload, f"event of node {node.node}", MAX_EVENT_BYTES)
        # Shielded: a number that has been given to an event must go out, or every receiver sees a hole.
        await asyncio.shield(asyncio.ensure_future(self._call(node.put, payload)))

    async def publish_telemetry(self, payload: bytes) -> None:
        node = self._joined()
        check_size(payload, f"readings of node {node.node}", MAX_READINGS_BYTES)
        await self._call(put_readings, self._zenoh, self._session, self._cluster, node.node, payload)

    # An observer

    async def follow_telemetry(self, take: TakeReadings) -> Callable[[], Awaitable[None]]:
        self._running()
        readings = ZenohReadings(self._the_loop(), take)
        self._readings.append(readings)

        async def stop() -> None:
            readings.closed = True
            if readings in self._readings:
                self._readings.remove(readings)
                await self._call(readings.undeclare)

        try:
            await self._call(readings.declare, self._wrapper(), self._session, self._cluster)
        except BaseException:
            await stop()
            raise
        return stop

    async def subscribe(self) -> ZenohSubscription:
        self._running()
        subscription = ZenohSubscription(self._the_loop(), self.settings.inbox_events, self._unsubscribe)
        self._subscriptions.append(subscription)
        try:
            await self._call(subscription.declare, self._zenoh, self._wrapper(), self._session, self._cluster)
        except BaseException:
            await self._unsubscribe(subscription)
            raise
        return subscription

    async def snapshot(self, node: str, *, timeout: float = 2.0) -> tuple[StateReply, ...]:
        replies = await self._query(node_key(self._cluster, node, STATE), None, timeout, MAX_STATE_BYTES)
        answers: list[StateReply] = []
        for ok, _ in replies:
            if ok:
                try:
                    answers.append(StateReply(node_of(str(ok.key_expr)), ok.payload.to_bytes()))
                except InvalidName as exc:  # a stranger's: it must not hide what the nodes answered
                    _log.warning("ignored: an answer to a question for the state of %s: %s", node, exc)
        return tuple(answers)

    async def command(self, node: str, payload: bytes, *, timeout: float = 10.0) -> bytes:
        check_size(payload, f"command for node {node}", MAX_COMMAND_BYTES)
        key = node_key(self._cluster, check_name(node, "node"), COMMAND)
        for ok, error in await self._query(key, payload, timeout, MAX_EVENT_BYTES):
            if ok:
                return ok.payload.to_bytes()
            if error is not None:
                text = printable(error.payload.to_bytes()[:1024].decode(errors="replace"), 1024)
                if text != "Timeout":  # zenoh's own word for a query that ran out of time
                    raise ClusterError(f"node {node} answered: {text}")
        raise NoAnswer(f"node {node} did not answer within {timeout:g} s")

    async def _query(self, key: str, payload: bytes | None, timeout: float, limit: int) -> list[tuple[Any, Any]]:
        """Every reply, as (sample, None) or (None, error)."""
        self._running()
        query = ZenohQuery(asyncio.get_running_loop(), limit, one=ANY not in key)
        wrapper = self._wrapper()
        await self._call(query.ask, self._zenoh, wrapper, self._session, key, payload=payload, timeout=timeout)
        return await query.replies(timeout + 1.0)

    # Inside

    async def _unsubscribe(self, subscription: ZenohSubscription) -> None:
        subscription.close()
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            if self._lane is not None:
                await self._call(subscription.undeclare)

    def _running(self) -> Lane:
        if self._lane is None or self._session is None:
            raise BusClosed("the bus is not started", hint="await engine.start()")
        return self._lane

    def _wrapper(self) -> SessionCallbacks:
        assert self._callbacks is not None
        return self._callbacks

    def _the_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    def _joined(self) -> ZenohNode:
        self._running()
        if self._node is None:
            raise ClusterError("this engine has not joined as a node", hint="await engine.join(node, state)")
        return self._node

    def _call(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        """Submits at the call, not at the await."""
        lane = self._lane
        if lane is None:
            raise BusClosed("the bus is closed")
        return self._result(asyncio.wrap_future(lane.submit(fn, *args, **kwargs)))

    async def _result(self, future: asyncio.Future[T]) -> T:
        try:
            return await future
        except GPUError:
            raise
        except Exception as exc:
            raise BusUnavailable(f"zenoh refused: {exc}") from exc


_Opened = tuple[Any, SessionCallbacks]
"""A session and its callbacks."""


def _close_sessions(sessions: list[_Opened]) -> None:
    for session, callbacks in sessions:
        session.close()
        callbacks.wait()


def _tear_down(
    session: Any,
    callbacks: SessionCallbacks | None,
    node: ZenohNode | None,
    subscriptions: tuple[ZenohSubscription | ZenohReadings, ...],
) -> None:
    try:
        if node is not None:
            node.undeclare()
        for subscription in subscriptions:
            subscription.undeclare()
    finally:
        session.close()
        if callbacks is not None and not callbacks.wait():
            _log.warning("a callback of the zenoh session has not ended")
