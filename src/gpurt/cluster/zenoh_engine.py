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
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

from gpurt.cluster.bus import (
    MAX_COMMAND_BYTES,
    MAX_STATE_BYTES,
    CommandHandler,
    HubAway,
    HubBack,
    OnAsked,
    StateReply,
    TakeReadings,
    held_of,
)
from gpurt.cluster.connection import connection_log
from gpurt.cluster.envelope import MAX_EVENT_BYTES, check_size
from gpurt.cluster.errors import BusClosed, BusUnavailable, ClusterError, InvalidName, NoAnswer
from gpurt.cluster.keys import ANY, COMMAND, STATE, check_name, node_key, node_of
from gpurt.cluster.readings import MAX_READINGS_BYTES
from gpurt.cluster.security.door import LANES, Door, free_ports
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.handshake import GIVE_TLS, speaks_tls
from gpurt.cluster.security.loopback import check_protected, host_and_port
from gpurt.cluster.security.protection import Protection
from gpurt.cluster.zenoh_callbacks import END_TIMEOUT_S, SessionCallbacks
from gpurt.cluster.zenoh_commands import ZenohCommands
from gpurt.cluster.zenoh_hub import (
    MAX_ADMISSION_BYTES,
    Admission,
    admission_of,
    answer_at_door,
    door_key,
    watch_hub,
)
from gpurt.cluster.zenoh_node import ZenohNode
from gpurt.cluster.zenoh_query import ZenohQuery
from gpurt.cluster.zenoh_readings import ZenohReadings, put_readings
from gpurt.cluster.zenoh_settings import ZenohSettings, check_endpoint, load_zenoh, plain, session_config
from gpurt.cluster.zenoh_subscription import ZenohSubscription
from gpurt.errors import GPUError
from gpurt.printable import printable
from gpurt.runtime.lane import Lane, off_loop

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_TIMEOUT_S: Final = 5.0
ROSTER_S: Final = 1.0
"""Between two looks at whether a hub's roster has changed."""
PRESENT_FIRST_S: Final = 0.2
PRESENT_ATTEMPTS: Final = 6
"""For six seconds after a return of the hub, the pause doubling, it is asked who is there: less than
:data:`gpurt.cluster.view.HUB_GRACE_S`."""
REOPEN_ATTEMPTS: Final = 8
"""To listen where the hub listened a moment before; 25 s in all."""

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
        self._opened: _Opened | None = None
        self._lane: Lane | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Future[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._node: ZenohNode | None = None
        self._subscriptions: list[ZenohSubscription] = []
        self._readings: list[ZenohReadings] = []
        self._commands: ZenohCommands | None = None
        self.on_return: Callable[[], None] | None = None
        self.on_quiet: Callable[[], None] | None = None

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
            self._opened = opened[0]
            if self._protection is not None:
                self._protection.remind()
                if self.listen:
                    self._following = loop.create_task(self._follow_roster(), name="gpurt-roster")
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
        if self._following is not None:
            self._following.cancel()
            self._following = None
        opened, self._opened = self._opened, None
        assert opened is not None
        if self._commands is not None:
            self._commands.cancel()
        for subscription in self._subscriptions:
            subscription.close()
        closed = asyncio.wrap_future(
            lane.submit(_tear_down, opened, self._node, (*self._subscriptions, *self._readings))
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
        lanes = free_ports(LANES) if self.listen and self.endpoint.startswith("tls/") else []
        config = session_config(
            zenoh, self.endpoint, listen=self.listen, settings=self.settings, protection=protection, lanes=lanes
        )
        door = Door(*host_and_port(self.endpoint)) if lanes else None
        try:
            if door is not None:
                door.open(lanes)  # first: that the address is taken shows here
            session = zenoh.open(config)
        except (zenoh.ZError, OSError) as exc:
            if door is not None:
                door.close()
            if not self.listen:
                raise self._unreachable(plain(exc)) from exc
            raise BusUnavailable(
                f"cannot listen on {self.endpoint}: {plain(exc)}",
                hint="is another master running? choose another port",
            ) from exc
        made = _Opened(session, SessionCallbacks(zenoh), door)
        opened.append(made)
        self._watch(made)

    def _watch(self, opened: _Opened) -> None:
        zenoh, session, callbacks = self._zenoh, opened.session, opened.callbacks
        if self.listen:
            answer_at_door(session, callbacks, self._cluster, self._protection)
            if self._protection is not None:
                self._protection.watch(session, callbacks, zenoh.SampleKind.PUT)
            return
        trouble = None if self._protection is None else self._protection.trouble

        def in_use() -> bool:
            return self._opened is opened

        def tell(there: bool) -> None:
            for subscription in tuple(self._subscriptions):
                subscription.post(HubBack() if there else HubAway())
            if there:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the node has ended
                    self._the_loop().call_soon_threadsafe(self._returned)

        watch_hub(session, callbacks, self.endpoint, zenoh.SampleKind.PUT, in_use, trouble, tell)

    def _returned(self) -> None:
        if self._opened is not None:
            for subscription in tuple(self._subscriptions):
                self._ask_who_is_there(self._opened, subscription)
        if self.on_return is not None and self._opened is not None:
            self.on_return()

    def _ask_who_is_there(self, opened: _Opened, subscription: ZenohSubscription, attempt: int = 1) -> None:
        """Until somebody is: a connection that has just been opened may lead nowhere yet."""
        lane, loop = self._lane, self._the_loop()
        if lane is None or self._opened is not opened or subscription not in self._subscriptions:
            return

        def nobody() -> None:  # on a thread of zenoh
            if attempt < PRESENT_ATTEMPTS:
                pause = PRESENT_FIRST_S * 2 ** (attempt - 1)
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
                    loop.call_soon_threadsafe(
                        loop.call_later, pause, self._ask_who_is_there, opened, subscription, attempt + 1
                    )

        def ask() -> None:
            try:
                subscription.ask_who_is_there(opened.callbacks, opened.session, self._cluster, nobody)
            except self._zenoh.ZError as exc:
                _log.info("the hub could not be asked who is there, and is asked at its next return: %s", plain(exc))

        lane.submit(ask)

    async def admission(self, name: str, *, timeout: float = 2.0) -> Admission | None:
        """What the hub says of ``name`` and of itself; None: nothing, as a hub of an earlier version."""
        for ok, _ in await self._query(door_key(self._cluster, name), None, timeout, MAX_ADMISSION_BYTES):
            if ok:
                return admission_of(ok.payload.to_bytes())
        return None

    # The roster of a hub

    async def _follow_roster(self) -> None:
        """Take up what ``gpurt cluster enrol`` and ``revoke`` have changed. zenoh reads its access control only when a
        session is opened: with another roster the hub's own is opened anew, and its nodes connect again."""
        protection, lane = self._protection, self._lane
        assert protection is not None
        assert lane is not None
        while True:
            await asyncio.sleep(ROSTER_S)
            if await off_loop("roster", protection.roster_changed):
                await self._result(asyncio.wrap_future(lane.submit(self._open_again)))

    def _open_again(self) -> None:
        """On the lane, so that nothing else uses the session meanwhile."""
        zenoh, opened, protection = self._zenoh, self._opened, self._protection
        if opened is None or protection is None:
            return  # it is being closed
        try:
            values = protection.values(zenoh)
        except CredentialsRefused as exc:
            _log.warning("the hub goes on with the roster that it has: %s", exc)
            return
        parts: tuple[ZenohSubscription | ZenohReadings, ...] = (*self._subscriptions, *self._readings)
        subscriptions, node = tuple(self._subscriptions), self._node
        for subscription in subscriptions:
            subscription.post(HubAway())
        for part in parts:
            part.undeclare()
        if node is not None:
            node.undeclare()
        opened.session.close()
        opened.callbacks.wait()
        lanes = opened.door.ports if opened.door is not None else []
        opened.session, opened.callbacks = self._session_again(values, lanes), SessionCallbacks(zenoh)
        self._watch(opened)
        for subscription in subscriptions:
            subscription.declare(zenoh, opened.callbacks, opened.session, self._cluster)
            subscription.post(HubBack())
        for readings in tuple(self._readings):
            readings.declare(opened.callbacks, opened.session, self._cluster)
        if node is not None:
            node.move(opened.callbacks)
            node.declare(opened.session, self.settings)

    def _session_again(self, values: dict[str, Any], lanes: list[int]) -> Any:
        zenoh = self._zenoh
        config = session_config(
            zenoh, self.endpoint, listen=True, settings=self.settings, protection=values, lanes=lanes
        )
        for attempt in range(REOPEN_ATTEMPTS):
            try:
                return zenoh.open(config)
            except zenoh.ZError as exc:
                _log.warning("cannot listen on %s again: %s", self.endpoint, plain(exc))
                time.sleep(0.1 * 2**attempt)
        raise BusUnavailable(f"cannot listen on {self.endpoint} again", hint="start the hub again")

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

        def asked_quietly() -> None:
            if here() and self.on_quiet is not None:
                self.on_quiet()

        def asked_elsewhere(quiet: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the node has ended
                loop.call_soon_threadsafe(asked_quietly if quiet else asked)

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

    async def snapshot(self, node: str, *, timeout: float = 2.0, quiet: bool = False) -> tuple[StateReply, ...]:
        key = node_key(self._cluster, node, STATE)
        replies = await self._query(key, b"quiet" if quiet else None, timeout, MAX_STATE_BYTES)
        answers: list[StateReply] = []
        for ok, _ in replies:
            if ok:
                try:
                    held = None if ok.attachment is None else ok.attachment.to_bytes()[:32]
                    answers.append(StateReply(node_of(str(ok.key_expr)), ok.payload.to_bytes(), held_of(held)))
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
        if self._lane is None or self._opened is None:
            raise BusClosed("the bus is not started", hint="await engine.start()")
        return self._lane

    def _wrapper(self) -> SessionCallbacks:
        assert self._opened is not None
        return self._opened.callbacks

    @property
    def _session(self) -> Any:
        assert self._opened is not None
        return self._opened.session

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


@dataclass(slots=True)
class _Opened:
    """A session with what belongs to it."""

    session: Any
    callbacks: SessionCallbacks
    door: Door | None = None

    def close(self) -> bool:
        """Whether every callback has ended. The door last: it passes on what the session says at its end."""
        try:
            self.session.close()
        finally:
            if self.door is not None:
                self.door.close()
        return self.callbacks.wait()


def _close_sessions(sessions: list[_Opened]) -> None:
    for opened in sessions:
        opened.close()


def _tear_down(
    opened: _Opened,
    node: ZenohNode | None,
    subscriptions: tuple[ZenohSubscription | ZenohReadings, ...],
) -> None:
    try:
        if node is not None:
            node.undeclare()
        for subscription in subscriptions:
            subscription.undeclare()
    finally:
        if not opened.close():
            _log.warning("a callback of the zenoh session has not ended")
