"""One connection to a NATS server after another: what makes them, and what notices their end.

The library's own reconnection is not used: it keeps certificates of the past, and gives up for good on some of the
errors that a server ends a connection with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from gpurt.cluster.connection import connection_log
from gpurt.cluster.envelope import MAX_EVENT_BYTES
from gpurt.cluster.errors import BusClosed, BusUnavailable
from gpurt.cluster.nats_settings import SCHEME, NatsSettings, load_nats
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.handshake import GIVE_TLS, speaks_tls
from gpurt.cluster.security.protection import Protection
from gpurt.runtime.lane import off_loop

T = TypeVar("T")

CLOSE_S: Final = 1.0
"""A server that does not take our last bytes gets no more time than this."""
PENDING_BYTES: Final = 8 << 20
"""Of a connection, before a sender waits."""
HEADROOM_BYTES: Final = 4 << 10
"""Of a message: for its headers."""

_log = logging.getLogger("gpurt.cluster.nats")


async def in_task(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` so that a cancellation gets through at once: the library swallows some of them."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        raise


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Go on without what takes longer, or fails because the connection does."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
        task.add_done_callback(_report)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        _log.info("the end of a node could not be told: %r", exc)


class NatsLink:
    """
    Args:
        on_up: awaited for each new connection; an error ends it.
        on_down: called when it has ended.
    """

    def __init__(
        self,
        endpoint: str,
        settings: NatsSettings,
        protection: Protection | None,
        on_up: Callable[[Any], Awaitable[None]],
        on_down: Callable[[], None],
    ) -> None:
        self._endpoint, self._settings, self._protection = endpoint, settings, protection
        self._on_up, self._on_down = on_up, on_down
        self._running: asyncio.Task[None] | None = None
        self._told = False
        self._why = ""

    async def open(self) -> None:
        """Connect, however long it takes; then stay connected until ``close``.

        Raises:
            BusUnavailable, CredentialsRefused: it will never be possible. BusClosed: closed meanwhile.
        """
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(first), name="gpurt-nats")
        try:
            await asyncio.wait({first, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                raise BusClosed("the bus was closed while it was being started")
            first.result()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait({running}, timeout=2 * CLOSE_S)

    async def _run(self, first: asyncio.Future[None]) -> None:
        nats: Any = None
        pause = self._settings.retry_first_s
        while True:
            client, begun = None, False
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            try:
                nats = nats or await off_loop("nats-import", load_nats)
                client = nats.aio.client.Client()
                await self._connect(nats, client, ended)
                begun = True
                await self._while_up(ended, client)
                if self._told:
                    connection_log.info("connected to the NATS server at %s", self._endpoint)
                self._told, self._why, pause = False, "", self._settings.retry_first_s
                if not first.done():
                    first.set_result(None)
                await ended
                self._say("went away; waiting until it is back", self._why)
            except (BusUnavailable, CredentialsRefused) as exc:
                if not first.done():
                    first.set_exception(exc)
                    return
                self._say("cannot be used now", str(exc))
            except _temporary(nats) as exc:
                self._say("cannot be used yet", self._why or plain(exc))
            finally:
                if begun:
                    self._on_down()
                if client is not None:
                    await _close(client)
            self._why = ""
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._settings.retry_longest_s)

    async def _while_up(self, ended: asyncio.Future[None], client: Any) -> None:
        """``on_up``, given up when the connection ends: whatever it has asked it would wait for until its deadlines."""
        beginning = asyncio.ensure_future(self._on_up(client))
        try:
            await asyncio.wait({beginning, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not beginning.done():
                raise ConnectionResetError("the connection was closed")
            beginning.result()
        finally:
            beginning.cancel()
            await asyncio.wait({beginning})

    async def _connect(self, nats: Any, client: Any, ended: asyncio.Future[None]) -> None:
        settings, options = self._settings, dict[str, Any]()
        if self._protection is not None:
            # From the files as they are now. TLS from the first byte: a server that only offers it could be somebody
            # in between who does not.
            options["tls"] = await off_loop("nats-tls", self._protection.client_context)
            options["tls_handshake_first"] = True
            options["inbox_prefix"] = f"_INBOX_{self._protection.name}"

        async def on_error(exc: Exception) -> None:
            self._why = plain(exc)
            if not client.is_connected:
                if self._protection is None and not self._told and await off_loop("nats-tls", self._wants_tls):
                    self._why = f"it wants certificates: {GIVE_TLS}"
                if not isinstance(exc, ssl.SSLError):  # which ends the attempts, and is told then
                    self._say("is not there yet; waiting for it", self._why, logging.INFO)
            elif not isinstance(exc, OSError | nats.errors.StaleConnectionError):  # the end, which is told below
                _log.warning("the NATS server at %s: %s", self._endpoint, self._why)

        async def on_closed() -> None:
            if not ended.done():
                ended.set_result(None)

        try:
            await client.connect(
                servers=[self._endpoint],
                name="gpurt",
                allow_reconnect=False,
                max_reconnect_attempts=-1,
                reconnect_time_wait=settings.retry_longest_s / 4,
                connect_timeout=settings.connect_timeout_s,
                ping_interval=settings.lease_s / 4,
                max_outstanding_pings=2,
                pending_size=PENDING_BYTES,
                flusher_queue_size=0,
                error_cb=on_error,
                closed_cb=on_closed,
                **options,
            )
        except ssl.SSLError as exc:
            if self._protection is None:
                raise CredentialsRefused(
                    f"the NATS server at {self._endpoint} wants certificates", hint=GIVE_TLS
                ) from exc
            raise _refused(self._endpoint, exc) from exc
        except nats.errors.Error as exc:
            if "authorization" in str(exc).lower():
                raise CredentialsRefused(
                    f"the NATS server at {self._endpoint} lets nobody in without credentials"
                ) from exc
            raise
        if client.max_payload < MAX_EVENT_BYTES + HEADROOM_BYTES:
            raise BusUnavailable(
                f"the NATS server at {self._endpoint} takes messages of {client.max_payload} bytes only",
                hint=f"set its max_payload to {1 << 20} (its default) or more",
            )

    def _wants_tls(self) -> bool:
        """From the first byte: such a server ends a plain connection without a word."""
        return bool(speaks_tls(f"tcp/{self._endpoint.removeprefix(SCHEME)}"))

    def _say(self, what: str, why: str, level: int = logging.WARNING) -> None:
        """Once for each time without a server."""
        if not self._told:
            log = connection_log if level == logging.INFO else _log
            log.log(level, "the NATS server at %s %s (%s)", self._endpoint, what, why or "connection closed")
            self._told = True


async def _close(client: Any) -> None:
    closing = asyncio.ensure_future(client.close())
    try:
        await asyncio.wait({closing}, timeout=CLOSE_S)
    finally:
        closing.cancel()
        # A socket whose other side does not read would wait for ever to send what is left.
        with contextlib.suppress(AttributeError):
            client._transport._io_writer.transport.abort()


def _temporary(nats: Any) -> tuple[type[BaseException], ...]:
    """What may be otherwise the next time."""
    return (OSError,) if nats is None else (OSError, nats.errors.Error)


def plain(exc: BaseException) -> str:
    return str(exc).removeprefix("nats: ") or type(exc).__name__


def _refused(endpoint: str, exc: ssl.SSLError) -> CredentialsRefused:
    if isinstance(exc, ssl.SSLCertVerificationError):
        return CredentialsRefused(
            f"the certificate of the NATS server at {endpoint} is refused: {exc.verify_message}",
            hint="it needs the folder hub of the same gpurt cluster init, with this host among its names",
        )
    reason = (exc.reason or str(exc)).lower().replace("_", " ")
    if "alert" in reason:
        return CredentialsRefused(f"the NATS server at {endpoint} refuses our certificate: {reason}")
    return CredentialsRefused(
        f"the NATS server at {endpoint} does not speak TLS from the first byte ({reason})",
        hint="set handshake_first: true in the tls part of its configuration",
    )
