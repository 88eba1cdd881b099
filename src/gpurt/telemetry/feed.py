"""Changes on their way to one reader, never more than one per device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from gpurt.telemetry.changes import TelemetryChange


class ChangeFeed:
    """An async iterator of changes, one task at a time. Ends with ``close``, after what is waiting.

    A reader that is slower than its devices gets the changes of one device as one, with the newest sample and all the
    aspects that changed meanwhile: it never falls behind by more than one change a device.
    """

    def __init__(self, on_close: Callable[[ChangeFeed], None]) -> None:
        self._waiting: dict[str, TelemetryChange] = {}
        self._wake = asyncio.Event()
        self._closed = False
        self._on_close = on_close

    def put(self, change: TelemetryChange) -> None:
        before = self._waiting.get(change.device_id)
        if before is not None:
            aspects = before.aspects | change.aspects
            change = TelemetryChange(change.device_id, aspects, change.sample, before.previous)
        self._waiting[change.device_id] = change
        self._wake.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TelemetryChange:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._waiting.pop(next(iter(self._waiting)))

    def close(self) -> None:
        """Take no more changes. Idempotent."""
        if not self._closed:
            self._closed = True
            self._wake.set()
            self._on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
