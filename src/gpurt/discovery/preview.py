"""What can be told while the drivers are still being asked."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

from gpurt.discovery.merge import merge
from gpurt.discovery.result import DiscoveryResult, utc_now
from gpurt.types import GPUDevice

NOT_YET: Final = "not verified yet"

OnPreview = Callable[[DiscoveryResult], None]


class Previews:
    """Tells everybody who waits for one discovery what is known so far, each of them once."""

    def __init__(self) -> None:
        self._waiting: list[OnPreview] = []
        self._now: DiscoveryResult | None = None
        self._running = False

    @contextmanager
    def wanted(self, on_preview: OnPreview | None) -> Generator[None]:
        """Within it ``on_preview`` is called, at once where there is something to tell already."""
        if on_preview is None:
            yield
            return
        if self._now is not None:
            on_preview(self._now)
            yield
            return
        self._waiting.append(on_preview)
        try:
            yield
        finally:
            if on_preview in self._waiting:
                self._waiting.remove(on_preview)

    def begin(self, remembered: DiscoveryResult | None) -> None:
        """A discovery has begun of which nothing newer is known than ``remembered``, the registry's answer."""
        self._running = True
        if remembered is not None and remembered.devices:
            self._tell(remembered)

    def sighted(self, devices: Sequence[GPUDevice]) -> None:
        """Devices are seen that nobody has opened yet."""
        if not self._running or self._now is not None or not devices:
            return
        unopened = [device.model_copy(update={"state_reason": device.state_reason or NOT_YET}) for device in devices]
        self._tell(
            DiscoveryResult(
                backend_name=None,
                devices=merge([unopened], priority=()),
                reports=(),
                discovery_status="preview",
                timestamp=utc_now(),
            )
        )

    def end(self) -> None:
        """The drivers have answered."""
        self._running, self._now = False, None

    def _tell(self, result: DiscoveryResult) -> None:
        self._now = result
        waiting, self._waiting = self._waiting, []
        for on_preview in waiting:
            on_preview(result)
