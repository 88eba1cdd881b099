"""What can be told while some drivers are still being asked.

A look-up may take as long as its slowest backend: seconds on the first discovery of a host with many GPUs, up to the
deadline where a driver hangs. Nobody has to wait for that to learn the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

from gpurt.discovery.assemble import BackendAnswer
from gpurt.discovery.merge import merge
from gpurt.discovery.result import DiscoveryResult
from gpurt.registry.records import utc_now
from gpurt.types import GPUDevice

NOT_YET: Final = "not verified yet"
LATEST_S: Final = 0.8
"""After the start of a look-up that is still going on: within the second in which discovery promises an answer, and as
late as that allows, because NVML's answer is one of a new process. On a host with two H100 half a second was too early
for it."""
NEIGHBOURS_S: Final = 0.05
"""From the first devices seen to the preview, for those of other backends that are about to be."""

_log = logging.getLogger("gpurt.discovery")

OnPreview = Callable[[DiscoveryResult], None]


class Previews:
    """Tells everybody who waits for one look-up what is known so far, each of them once. On one event loop."""

    def __init__(self) -> None:
        self._waiting: list[OnPreview] = []
        self._now: DiscoveryResult | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._names: tuple[str, ...] = ()
        self._sighted: dict[str, Sequence[GPUDevice]] = {}
        self._answers: dict[str, BackendAnswer] = {}

    @contextmanager
    def wanted(self, on_preview: OnPreview | None) -> Generator[None]:
        """Within it ``on_preview`` is called, at once where there is something to tell already."""
        if on_preview is None:
            yield
            return
        if self._now is not None:
            _call(on_preview, self._now)
            yield
            return
        self._waiting.append(on_preview)
        try:
            yield
        finally:
            if on_preview in self._waiting:
                self._waiting.remove(on_preview)

    def begin(self, names: Sequence[str], remembered: DiscoveryResult | None) -> None:
        """Backends ``names``, the preferred one first, are being asked; ``remembered`` is the registry's answer."""
        self.end()
        self._names = tuple(names)
        if remembered is not None and remembered.devices:
            self._tell(remembered)
        else:
            self._timer = asyncio.get_running_loop().call_later(LATEST_S, self._summarize)

    def sighted(self, name: str, devices: Sequence[GPUDevice]) -> None:
        """A management library shows devices of backend ``name`` that nobody has opened yet."""
        if self._timer is not None and devices:
            self._sighted[name] = devices
            loop = asyncio.get_running_loop()
            if self._timer.when() > loop.time() + NEIGHBOURS_S:
                self._timer.cancel()
                self._timer = loop.call_later(NEIGHBOURS_S, self._summarize)

    def answered(self, name: str, answer: BackendAnswer) -> None:
        """Backend ``name`` has answered."""
        if self._timer is not None:
            self._answers[name] = answer

    def end(self) -> None:
        """Every backend has answered, or the look-up was given up."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._now = None
        self._sighted.clear()
        self._answers.clear()

    def _summarize(self) -> None:
        records: list[Sequence[GPUDevice]] = []
        for name in self._names:
            answer = self._answers.get(name)
            records.append(answer.devices if answer else [_unopened(each) for each in self._sighted.get(name, ())])
        hidden = frozenset[str]().union(*(answer.hidden for answer in self._answers.values()))
        devices = merge(records, priority=self._names, hidden=hidden)
        usable = [each for each in devices if each.usable]
        self._tell(
            DiscoveryResult(
                backend_name=usable[0].backend if usable else None,
                devices=devices,
                reports=tuple(self._answers[name].report for name in self._names if name in self._answers),
                pending=tuple(name for name in self._names if name not in self._answers),
                discovery_status="preview",
                timestamp=utc_now(),
            )
        )

    def _tell(self, result: DiscoveryResult) -> None:
        self._now = result
        waiting, self._waiting = self._waiting, []
        for on_preview in waiting:
            _call(on_preview, result)


def _call(on_preview: OnPreview, result: DiscoveryResult) -> None:
    try:
        on_preview(result)
    except Exception:  # one caller's fault must not cost the others their devices
        _log.exception("a callback for a preview of discovery failed")


def _unopened(device: GPUDevice) -> GPUDevice:
    return device.model_copy(update={"usable": False, "state_reason": device.state_reason or NOT_YET})
