"""What a service remembers: in the registry file, and of it in this process. Survives restarts where it can."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

from gpurt.discovery.assemble import BackendAnswer
from gpurt.discovery.backoff import Backoff
from gpurt.discovery.offload import off_loop
from gpurt.discovery.registry import RegistryDocument, RegistryFile, RegistryTooNew
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.verify import verification_key
from gpurt.errors import ReasonCode
from gpurt.types import GPUDevice

_HARMFUL: Final = frozenset({ReasonCode.TIMEOUT, ReasonCode.CRASHED})

_log = logging.getLogger("gpurt.discovery")


class DiscoveryMemory:
    """The registry's answer, passed verifications and back-off times.

    Args:
        file: the registry file.
        clock: seconds, monotonic.
    """

    def __init__(self, file: RegistryFile, clock: Callable[[], float] = time.monotonic) -> None:
        self.file = file
        self.backoff = Backoff(clock)
        self.verified: set[str] = set()
        self.answers: dict[str, BackendAnswer] = {}
        """The last answer of each backend, of this process or an earlier one."""
        self.remembered: DiscoveryResult | None = None
        """The registry's answer, marked stale."""
        self.recovered_from: str | None = None
        """Why there is no answer although there was a file."""
        self._clock = clock
        self._age_at_load = 0.0
        self._loaded_at: float | None = None
        self._warned = False

    async def load(self) -> None:
        """Read the registry; does nothing when that has been done."""
        if self._loaded_at is not None:
            return
        document = await off_loop("registry", self.file.load)
        self._loaded_at = self._clock()
        if document is None:
            if self.file.quarantined is not None:
                self.recovered_from = f"recovered: the registry was corrupt, see {self.file.quarantined}"
            return
        self._age_at_load = _age(document.timestamp)
        self.verified = set(document.verified)
        for report in document.reports:
            shown = tuple(device for device in document.devices if device.backend == report.name)
            self.answers[report.name] = BackendAnswer(report, shown)
        # A restart is a reason to look again (somebody may just have installed the driver), but not to hang or crash
        # in a loop.
        harmful = {report.name for report in document.reports if report.reason in _HARMFUL}
        self.backoff.restore({name: tried for name, tried in document.attempts.items() if name in harmful})
        self.remembered = DiscoveryResult(
            backend_name=document.backend_name,
            devices=document.devices,
            reports=document.reports,
            discovery_status="stale",
            timestamp=document.timestamp,
            registry=str(self.file.path),
            persisted=True,
        )

    def stale(self) -> DiscoveryResult | None:
        """The registry's answer with its present age."""
        if self.remembered is None or self._loaded_at is None:
            return None
        age = self._age_at_load + self._clock() - self._loaded_at
        return self.remembered.model_copy(update={"age_s": max(age, 0.0)})

    def learn(self, answers: Mapping[str, BackendAnswer]) -> None:
        """Take in what was just asked: answers, back-off, verifications."""
        for name, answer in answers.items():
            self.answers[name] = answer
            if answer.report.status == "ok":
                self.backoff.succeeded(name)
            else:
                self.backoff.failed(name)
            for device in answer.devices:
                key = verification_key(device)
                if key is None:
                    continue
                if device.usable and not (device.state_reason or "").startswith("not verified"):
                    self.verified.add(key)
                else:
                    self.verified.discard(key)

    async def store(self, result: DiscoveryResult) -> bool:
        """Write ``result`` and what was learnt; False where that is not possible. Says why once."""
        names = {report.name for report in result.reports}
        verified, attempts = set(self.verified), self.backoff.dump()

        def change(old: RegistryDocument | None) -> RegistryDocument:
            # Backends that were not asked this time keep what is written about them.
            new_ids = {device.stable_id for device in result.devices}
            others = [
                device
                for device in (old.devices if old else ())
                if not names.intersection(device.backends or (device.backend,)) and device.stable_id not in new_ids
            ]
            devices = (*result.devices, *others)
            return RegistryDocument(
                timestamp=result.timestamp,
                backend_name=old.backend_name if old and others and old.backend_name else result.backend_name,
                discovery_status=result.discovery_status,
                devices=devices,
                reports=(*result.reports, *(r for r in (old.reports if old else ()) if r.name not in names)),
                verified=_of_devices({*verified, *(old.verified if old and others else ())}, devices),
                attempts=attempts,
            )

        try:
            await off_loop("registry", lambda: self.file.update(change))
        except (OSError, RegistryTooNew) as exc:
            if not self._warned:
                self._warned = True
                _log.warning("the registry %s is not saved: %s", self.file.path, exc)
            return False
        return True


def _of_devices(keys: Iterable[str], devices: Iterable[GPUDevice]) -> tuple[str, ...]:
    """Without the keys of devices that are gone: the file must not grow for ever."""
    ids = {device.stable_id for device in devices}
    return tuple(sorted(key for key in keys if key.split(" ", 1)[0] in ids))


def _age(timestamp: str) -> float:
    try:
        return max((datetime.now(UTC) - datetime.fromisoformat(timestamp)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        # Written by hand or by another tool, without a time zone: the age is not known, so say the least.
        return 0.0
