"""MetricsServer: metrics for whoever scrapes them over HTTP, in the OpenMetrics or the older Prometheus format.

``prometheus_client`` (extra ``api``) chooses the format and writes it, on threads of the server's own. What is told is
taken on the event loop, where it lives, in small steps; a loop that is busy makes a scrape fail, and nothing wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from http.server import HTTPServer
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Self

from gpurt.errors import GPUError
from gpurt.runtime.lane import off_loop
from gpurt.telemetry.metrics import Family

LOOPBACK: Final = "127.0.0.1"
SCRAPES: Final = 16
"""Connections that are served at once; more are closed. A scraper uses one."""
CONNECTION_S: Final = 10.0
"""The longest wait for a client that sends or takes nothing: a scraper's own usual patience."""
TAKE_S: Final = 5.0
"""The longest wait for the event loop."""

Families = Callable[[], Iterable[Family]]
Take = Callable[[], Awaitable[Families]]
"""Awaited on the event loop; must not keep it for long. What it returns is called once on another thread, and must look
at nothing that still changes. Families without samples are there too: a scraper may ask for some by name."""

_log = logging.getLogger("gpurt.telemetry.exporter")


class MetricsUnavailable(GPUError):
    """Metrics cannot be served: the library is missing, or the address cannot be had."""


class MetricsServer:
    """Serves within ``async with``, to everybody who can reach the address: there are no secrets in metrics, and no
    passwords before them. Each server has a registry of its own.

    Args:
        take: see :data:`Take`.
        address: numeric, of this machine; ``localhost`` is 127.0.0.1.
        port: 0 for any that is free; ``port`` then tells which.
        take_s: see :data:`TAKE_S`.

    Raises:
        ValueError: no address, or no port.
    """

    def __init__(self, take: Take, address: str = LOOPBACK, port: int = 0, *, take_s: float = TAKE_S) -> None:
        self._take = take
        self.address, self.port = _numeric(address), _port(port)
        self._take_s = take_s
        self._server: _Server | None = None
        self._waiting: set[Future[Families]] = set()

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"

    async def __aenter__(self) -> Self:
        """
        Raises:
            MetricsUnavailable.
        """
        exposition, registry = await off_loop("metrics", _library)
        self._loop = asyncio.get_running_loop()
        # Of a first look the registry learns the names.
        named = [_metric(family) for family in (await self._take())()]
        registry.register(_Collector(self._collect, named))
        try:
            self._server = _Server((self.address, self.port), _handler(exposition, registry))
        except OSError as exc:
            hint = "choose another port, or 0 for any that is free; is a worker or a master running here already?"
            where = f"{self.address} port {self.port}"
            raise MetricsUnavailable(f"metrics cannot be served at {where}: {exc.strerror}", hint=hint) from exc
        self.port = self._server.server_address[1]
        if not ipaddress.ip_address(self.address).is_loopback:
            _log.warning("metrics at %s can be read by everybody who reaches this machine", self.url)
        self._server.begin()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        server, self._server = self._server, None
        if server is not None:
            for future in tuple(self._waiting):
                future.cancel()
            # Shielded: a port that is not given back stays taken for as long as the process lives.
            await asyncio.shield(asyncio.ensure_future(off_loop("metrics", server.end)))

    def _collect(self) -> Iterator[Any]:
        """On a thread of the server."""
        taking = self._take_now()
        try:
            future = asyncio.run_coroutine_threadsafe(taking, self._loop)
        except RuntimeError:  # the loop is closed
            taking.close()
            raise _Busy from None
        self._waiting.add(future)
        try:
            families = future.result(self._take_s)
        except (TimeoutError, CancelledError):
            future.cancel()
            raise _Busy from None
        finally:
            self._waiting.discard(future)
        return iter([_metric(family) for family in families() if family.samples])

    async def _take_now(self) -> Families:
        return await self._take()


class _Busy(Exception):
    """The event loop did not answer in time."""


class _Collector:
    """What a registry of prometheus_client asks."""

    def __init__(self, collect: Callable[[], Iterator[Any]], named: list[Any]) -> None:
        self.collect = collect
        self._named = named

    def describe(self) -> list[Any]:
        return self._named


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True
    # On Windows it would let a second server take the port of the first.
    allow_reuse_address = sys.platform != "win32"
    request_queue_size = SCRAPES

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._room = threading.BoundedSemaphore(SCRAPES)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service, for a name that nobody needs.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients that go away in the middle, mostly.
        _log.debug("a scrape failed", exc_info=True)

    def begin(self) -> None:
        # A daemon: a process that ends in a hurry does not wait for scrapers.
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.05,), name="gpurt:metrics:server", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Blocks, for 0.05 s at most."""
        self.shutdown()
        self.server_close()
        self._thread.join()


def _handler(exposition: Any, registry: Any) -> Any:
    """The library's handler, with an end to every wait and an answer to a busy loop."""

    class Handler(exposition.MetricsHandler):
        timeout = CONNECTION_S
        server_version, sys_version = "gpurt", ""

        def do_GET(self) -> None:
            try:
                super().do_GET()  # pyright: ignore[reportUnknownMemberType]  (of a library without stubs here)
            except _Busy:
                self.send_error(503, "the event loop is busy")
            except OSError:
                raise
            except Exception:
                # The library writes nothing before it has it all, so an answer is still possible.
                _log.exception("metrics could not be told")
                with contextlib.suppress(OSError):
                    self.send_error(500, "metrics could not be told; the log says why")

    return Handler.factory(registry)


def _library() -> tuple[Any, Any]:
    """prometheus_client's exposition and a new registry. Imports: not for the event loop."""
    try:
        exposition, registry = (
            import_module("prometheus_client.exposition"),
            import_module("prometheus_client.registry"),
        )
    except ImportError as exc:
        raise MetricsUnavailable(
            f"metrics cannot be served: {exc}", hint="pip install 'gpurt[api]', or leave --metrics away"
        ) from exc
    return exposition, registry.CollectorRegistry()


def _metric(family: Family) -> Any:
    """As prometheus_client has it."""
    metric = import_module("prometheus_client.metrics_core").Metric(family.name, family.help, family.kind, family.unit)
    suffix = "_total" if family.kind == "counter" else ""
    for labels, value in family.samples:
        # Lone surrogates, as in file names of other encodings, cannot be sent as UTF-8.
        told = {name: text.encode("utf-8", "replace").decode() for name, text in labels.items()}
        metric.add_sample(family.name + suffix, told, value)
    return metric


def parse_metrics_address(text: str) -> tuple[str, int]:
    """``ADDRESS:PORT``, ``[ADDRESS]:PORT`` for IPv6, or ``PORT`` alone, which is on the loopback.

    Raises:
        ValueError: none of them.
    """
    address, colon, port = text.strip().rpartition(":")
    if colon and address.startswith("[") and address.endswith("]"):
        address = address[1:-1]
    elif ":" in address:
        raise ValueError(f"{text!r} is no address and port; an IPv6 address is written as [::1]:9464")
    if (colon and not address) or not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise ValueError(f"{text!r} is no address and port, such as 127.0.0.1:9464")
    return (_numeric(address) if address else LOOPBACK), _port(int(port))


def _numeric(address: str) -> str:
    if address == "localhost":
        return LOOPBACK
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        # A name may stand for several addresses, and asking takes time.
        raise ValueError(f"{address!r} is no numeric address, such as 127.0.0.1 or ::1") from None


def _port(port: int) -> int:
    if not 0 <= port <= 65535:
        raise ValueError(f"{port} is no port")
    return port
