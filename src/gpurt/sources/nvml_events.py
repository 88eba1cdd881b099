"""Xid errors as the NVIDIA driver reports them: what went wrong on which GPU, at the moment it does.

Not every driver gives events (WSL and vGPU guests do not): :func:`open_xid_events` then says so, and polling is left.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Self

from gpurt.errors import Unsupported
from gpurt.identity import normalize_pci_address
from gpurt.runtime.lane import Lane
from gpurt.sources.nvml import NvmlSession, open_session
from gpurt.sources.nvml_fields import FieldReader, error_code

_log = logging.getLogger("gpurt.sources.nvml")

_XID: Final = 0x08  # nvmlEventTypeXidCriticalError
_TIMEOUT: Final = 10  # nvmlReturn_t
_WHOLE: Final = 2**32 - 1  # instance ids of an event that concerns the whole GPU
_SLICE_MS: Final = 100
"""How long one wait inside NVML lasts, and so how long its thread outlives the reader."""


@dataclass(frozen=True, slots=True)
class XidEvent:
    """One Xid. ``pci_address`` is None when the driver does not say which GPU: it may be any of them."""

    xid: int
    pci_address: str | None
    partition: str | None = None
    """MIG ``gi/ci`` when it concerns that partition alone."""


class XidEvents:
    """An async iterator of Xids. Get one from :func:`open_xid_events`; one task at a time may iterate.

    A cancelled wait returns at once, and the event that it would have got is the next one's.
    """

    def __init__(self, lane: Lane, listener: _Listener) -> None:
        self._lane, self._listener = lane, listener
        self._waiting: asyncio.Future[XidEvent | None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> XidEvent:
        """The next Xid, whenever it comes.

        Raises:
            OSError: the driver ended the stream of events, as when it is unloaded or its device nodes are revoked.
        """
        if self._waiting is None:
            self._waiting = asyncio.wrap_future(self._lane.submit(self._listener.wait))
        # Not awaited directly: a cancelled wait would swallow the event that ends it.
        done, _ = await asyncio.wait({self._waiting})
        self._waiting = None
        event = done.pop().result()
        if event is None:
            raise StopAsyncIteration
        return event


@asynccontextmanager
async def open_xid_events(pci_addresses: Iterable[str]) -> AsyncGenerator[XidEvents]:
    """Listen to the GPUs at these addresses::

        async with open_xid_events(addresses) as events:
            async for event in events: ...

    Leaving does not wait for the driver.

    Raises:
        BackendUnavailable: NVML cannot be used. Unsupported: none of the GPUs gives events.
    """
    lane, listener = Lane("gpurt:nvml:events"), _Listener()
    try:
        await asyncio.wrap_future(lane.submit(listener.open, tuple(pci_addresses)))
        yield XidEvents(lane, listener)
    finally:
        listener.closing.set()
        # After whatever the lane is in: also after an opening that was cancelled half-way.
        lane.submit(listener.close)
        lane.stop()


class _Listener:
    """The blocking side; every method runs on the lane."""

    def __init__(self) -> None:
        self.closing = threading.Event()
        self._session: NvmlSession | None = None
        self._nvml: Any = None
        self._events: Any = None

    def open(self, addresses: tuple[str, ...]) -> None:
        self._session = open_session()
        self._nvml = import_module("pynvml")  # initialised by the session
        fields = FieldReader(self._nvml)
        self._events = fields.read("events", "nvmlEventSetCreate")
        if self._events is None or not any([self._register(address) for address in addresses]):
            raise Unsupported("no GPU here gives events", backend="nvml", operation="nvmlDeviceRegisterEvents")

    def _register(self, address: str) -> bool:
        fields = FieldReader(self._nvml)  # a lost GPU must not keep the others from being listened to
        normal = normalize_pci_address(address) or address
        handle = fields.read("handle", "nvmlDeviceGetHandleByPciBusId", normal.encode())
        if handle is None:
            return False
        supported = fields.number("types", 0, 2**64 - 1, "nvmlDeviceGetSupportedEventTypes", handle)
        if not (supported or 0) & _XID:
            return False
        fields.read("registered", "nvmlDeviceRegisterEvents", handle, _XID, self._events)
        return "registered" not in fields.unavailable

    def wait(self) -> XidEvent | None:
        """The next Xid, or None once the reader is closing."""
        while not self.closing.is_set():
            try:
                data = self._nvml.nvmlEventSetWait_v2(self._events, _SLICE_MS)
            except Exception as exc:
                if error_code(exc) == _TIMEOUT:
                    continue
                raise OSError(f"the NVIDIA driver gives no more events: {exc}") from exc
            if data.eventType == _XID:
                return self._event(data)
        return None

    def _event(self, data: Any) -> XidEvent:
        # A GPU that has just fallen off the bus may not tell its own address any more.
        pci = FieldReader(self._nvml).read("pci_address", "nvmlDeviceGetPciInfo", data.device) if data.device else None
        whole = _WHOLE in (data.gpuInstanceId, data.computeInstanceId)
        return XidEvent(
            xid=int(data.eventData),
            pci_address=normalize_pci_address(getattr(pci, "busId", None)),
            partition=None if whole else f"{data.gpuInstanceId}/{data.computeInstanceId}",
        )

    def close(self) -> None:
        if self._events is not None:
            try:
                self._nvml.nvmlEventSetFree(self._events)
            except Exception as exc:  # closing must not fail, and nothing depends on it
                _log.warning("nvmlEventSetFree failed: %s", exc)
        if self._session is not None:
            self._session.close()
