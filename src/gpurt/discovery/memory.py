"""What a service remembers: in the registry file, and of it in this process. Survives restarts where it can."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gpurt.discovery.assemble import CONCLUSIVE, BackendAnswer
from gpurt.discovery.backoff import Backoff
from gpurt.discovery.health import DeviceHealth
from gpurt.discovery.registry import Attempts, RegistryDocument, RegistryFile, RegistryTooNew
from gpurt.discovery.remembered import MAX_ANSWERS, Remembered
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.verify import verification_key
from gpurt.errors import ReasonCode, UntrustedFile
from gpurt.health.policy import HealthPolicy
from gpurt.registry.records import CalibrationRecord, Link, between
from gpurt.runtime.lane import off_loop
from gpurt.sources.host_identity import boot_id
from gpurt.types import GPUDevice

_HARMFUL: Final = frozenset({ReasonCode.TIMEOUT, ReasonCode.CRASHED})

_log = logging.getLogger("gpurt.discovery")


class DiscoveryMemory:
    """The registry's answer, passed verifications and back-off times.

    Args:
        file: the registry file.
        given: devices of the backend that the service was given, or None for a service of this host. Of a given
            backend only what it still has is remembered; what is simulated has a place of its own in the file.
        clock: seconds, monotonic.
        health: what is believed of devices, of which a part is kept in the file; None judges by the default policy.
        root: where ``/proc`` is found.
    """

    def __init__(
        self,
        file: RegistryFile,
        clock: Callable[[], float] = time.monotonic,
        *,
        health: DeviceHealth | None = None,
        root: Path = Path("/"),
        given: Callable[[], Sequence[GPUDevice]] | None = None,
    ) -> None:
        self.file = file
        self.health = health or DeviceHealth(HealthPolicy, clock)
        self._root = root
        self._given = given
        self.backoff = Backoff(clock)
        self.verified: set[str] = set()
        self.answers: dict[str, BackendAnswer] = {}
        """The last answer of each backend, of this process or an earlier one."""
        self.remembered: DiscoveryResult | None = None
        """The registry's answer, marked stale."""
        self.recovered_from: str | None = None
        """Why there is no answer although there was a file."""
        self.known: dict[str, tuple[Remembered, ...]] = {}
        """Verified answers of each backend that hold while their signature does, the newest first."""
        self._links: tuple[Link, ...] = ()
        self._calibrations: tuple[CalibrationRecord, ...] = ()
        self._fresh: dict[str, Remembered] = {}
        self._forgotten: set[str] = set()
        """Backends whose answers, and answers that, the file does not know to be gone, or there, yet."""
        self._clock = clock
        self._age_at_load = 0.0
        self._loaded_at: float | None = None
        self._warned = False

    async def load(self) -> None:
        """Read the registry; does nothing when that has been done.

        Raises:
            GPUError: an environment variable about health has a value that is not allowed.
        """
        if self._loaded_at is not None:
            return
        self.health.open()  # first: what it raises must not leave half of this done
        document, boot = await off_loop("registry", lambda: (self.file.load(), boot_id(self._root)))
        if self._loaded_at is not None:  # somebody else has done it meanwhile
            return
        self._loaded_at = self._clock()
        if document is None:
            self.health.restore({}, boot)
            if self.file.quarantined is not None:
                self.recovered_from = f"recovered: the registry was corrupt, see {self.file.quarantined}"
            return
        self._took_measurements(document)
        document = self._of_given(document, self._given()) if self._given else _of_host(document)
        self.health.restore(document.health, boot)
        if not document.discovered:
            return
        self._age_at_load = _age(document.timestamp)
        self.verified = set(document.verified)
        self.known = dict(document.remembered)
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
            topology=between(self._links, {device.stable_id for device in document.devices}),
            registry=str(self.file.path),
            persisted=True,
        )

    def _of_given(self, document: RegistryDocument, given: Sequence[GPUDevice]) -> RegistryDocument:
        """What the file knows of a given backend's devices, if anything."""
        section = document.simulated if any(device.simulated for device in given) else document
        ids = {device.stable_id for device in given}
        devices = tuple(device for device in section.devices if device.stable_id in ids) if section else ()
        if section is None or not devices:
            return RegistryDocument()
        names = {name for device in given for name in (device.backend, *device.backends)}
        reports = tuple(report for report in section.reports if report.name in names)
        backend_name = next((device.backend for device in devices if device.usable), None)
        return RegistryDocument(
            timestamp=section.timestamp,
            backend_name=backend_name,
            devices=devices,
            reports=reports,
            health=section.health,
        )

    def stale(self) -> DiscoveryResult | None:
        """The registry's answer with its present age."""
        if self.remembered is None or self._loaded_at is None:
            return None
        age = self._age_at_load + self._clock() - self._loaded_at
        return self.remembered.model_copy(update={"age_s": max(age, 0.0)})

    def topology(self, devices: Iterable[GPUDevice]) -> tuple[Link, ...]:
        """What was measured between these devices, as the file said when it was last read or written here."""
        return between(self._links, {device.stable_id for device in devices})

    def with_speeds(self, devices: Iterable[GPUDevice]) -> tuple[GPUDevice, ...]:
        """The devices with what was measured of each by its present backend and driver, as the file said when it was
        last read or written here."""
        latest = {record.key: record for record in reversed(self._calibrations)}

        def measured(device: GPUDevice) -> GPUDevice:
            record = latest.get((device.stable_id, device.backend))
            if record is None or not record.holds_for(device):
                return device
            return device.model_copy(update={"speeds": record.speeds})

        return tuple(map(measured, devices))

    async def read_measurements(self) -> None:
        """Read anew what others have measured: links and speeds."""
        try:
            document = await off_loop("registry", lambda: self.file.load(put_aside=False))
        except UntrustedFile as exc:  # it was replaced since this service has begun
            _log.warning("%s", exc)
            return
        if document is not None:
            self._took_measurements(document)

    def _took_measurements(self, document: RegistryDocument) -> None:
        parts = [document, document.simulated] if document.simulated else [document]
        self._links = tuple(link for part in parts for link in part.topology)
        self._calibrations = tuple(record for part in parts for record in part.calibration)

    def learn(self, answers: Mapping[str, BackendAnswer], marks: Mapping[str, str] = MappingProxyType({})) -> None:
        """Take in what was just asked: answers, back-off, verifications. ``marks``: what is installed for each."""
        for name, answer in answers.items():
            self.answers[name] = answer
            if answer.report.status == "ok":
                self.backoff.succeeded(name)
            else:
                self.backoff.failed(name, marks.get(name))
            self._keep(name, answer)
            for device in answer.devices:
                key = verification_key(device)
                if key is None:
                    continue
                if device.usable and not (device.state_reason or "").startswith("not verified"):
                    self.verified.add(key)
                else:
                    self.verified.discard(key)

    def _keep(self, name: str, answer: BackendAnswer) -> None:
        if answer.remember is not None:
            self._fresh[name] = answer.remember
            self.known[name] = _with(answer.remember, self.known.get(name, ()))
        elif not answer.unchanged and answer.report.reason not in CONCLUSIVE:
            # Something was wrong: the next probe must look for itself. What a variable hides is wrong nowhere else.
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._fresh.pop(name, None)
        if self.known.pop(name, ()):
            self._forgotten.add(name)

    @property
    def unsaved(self) -> bool:
        """The file has answers that no longer hold, or lacks one that does."""
        return bool(self._forgotten or self._fresh or self.health.unsaved)

    async def doubt(self, names: Iterable[str]) -> None:
        """Forget what was verified of these backends, also in the file: a check that is killed has not passed."""
        backends = tuple(names)
        before = len(self.verified)
        self.verified = {key for key in self.verified if not _is_of(key, backends)}
        for name in backends:
            self._forget(name)
        if not self._forgotten and len(self.verified) == before:
            return

        def change(old: RegistryDocument | None) -> RegistryDocument:
            document = old or RegistryDocument()
            verified = tuple(key for key in document.verified if not _is_of(key, backends))
            return document.model_copy(update={"verified": verified, "remembered": self._merged(document)})

        await self._update(change)

    async def store(self, result: DiscoveryResult) -> bool:
        """Write ``result`` and what was learnt; False where that is not possible. Says why once.

        A given backend without devices leaves the file as it is.
        """
        if self._given is not None and not result.devices:
            return False
        simulated = self._given is not None and any(device.simulated for device in result.devices)
        names = {report.name for report in result.reports}
        verified, attempts, version = set(self.verified), self.backoff.dump(), self.health.version

        def change(whole: RegistryDocument | None) -> RegistryDocument:
            old = whole.simulated if whole and simulated else whole
            # Backends that were not asked this time keep what is written about them.
            found = tuple(device for device in result.devices if simulated or not device.simulated)
            new_ids = {device.stable_id for device in found}
            others = [
                device
                for device in (old.devices if old else ())
                if not names.intersection(device.backends or (device.backend,)) and device.stable_id not in new_ids
            ]
            devices = (*found, *others)
            stored: Mapping[str, Attempts] = old.attempts if old else {}
            kept = {name: tried for name, tried in stored.items() if name not in names}
            new = RegistryDocument(
                timestamp=result.timestamp,
                backend_name=old.backend_name if old and others and old.backend_name else result.backend_name,
                discovery_status=result.discovery_status,
                devices=devices,
                reports=(*result.reports, *(r for r in (old.reports if old else ()) if r.name not in names)),
                verified=_of_devices({*verified, *(old.verified if old and others else ())}, devices),
                remembered=self._merged(old),
                attempts=kept | attempts,
                tuning=old.tuning if old else (),
                calibration=old.calibration if old else (),
                topology=old.topology if old else (),
                health=self.health.document(old.health if old else {}, (device.stable_id for device in devices)),
            )
            if simulated:
                return (whole or RegistryDocument()).model_copy(update={"simulated": new})
            return new.model_copy(update={"simulated": whole.simulated if whole else None})

        stored = await self._update(change)
        if stored:
            self.health.saved(version)
        return stored

    async def save_health(self) -> None:
        """Write what is believed of devices, if the file does not know it yet."""
        if not self.health.unsaved:
            return
        simulated = self._given is not None and any(device.simulated for device in self._given())
        version = self.health.version

        def change(whole: RegistryDocument | None) -> RegistryDocument:
            whole = whole or RegistryDocument()
            part = (whole.simulated or RegistryDocument()) if simulated else whole
            part = part.model_copy(update={"health": self.health.document(part.health)})
            return whole.model_copy(update={"simulated": part}) if simulated else part

        if await self._update(change):
            self.health.saved(version)

    async def _update(self, change: Callable[[RegistryDocument | None], RegistryDocument]) -> bool:
        fresh, forgotten = dict(self._fresh), set(self._forgotten)
        try:
            written = await off_loop("registry", lambda: self.file.update(change))
        except (OSError, RegistryTooNew, ValueError) as exc:  # ValueError: what JSON cannot say, of another's entry
            if not self._warned:
                self._warned = True
                _log.warning("the registry %s is not saved: %s", self.file.path, exc)
            return False
        self._took_measurements(written)
        self._forgotten -= forgotten
        self._fresh = {name: answer for name, answer in self._fresh.items() if fresh.get(name) is not answer}
        return True

    def _merged(self, old: RegistryDocument | None) -> dict[str, tuple[Remembered, ...]]:
        """Remembered answers: those of the file, which other processes may have written, and what changed here."""
        stored: Mapping[str, tuple[Remembered, ...]] = old.remembered if old else {}
        merged = {name: kept for name, kept in stored.items() if name not in self._forgotten}
        for name, answer in self._fresh.items():
            merged[name] = _with(answer, merged.get(name, ()))
        return merged


def _of_host(document: RegistryDocument) -> RegistryDocument:
    """Without simulated devices, which a plug-in or an earlier version may have left there."""
    devices = tuple(device for device in document.devices if not device.simulated)
    return document if len(devices) == len(document.devices) else document.model_copy(update={"devices": devices})


def _with(answer: Remembered, others: Iterable[Remembered]) -> tuple[Remembered, ...]:
    return (answer, *(each for each in others if each.signature != answer.signature))[:MAX_ANSWERS]


def _is_of(key: str, backends: Iterable[str]) -> bool:
    """Whether a verification key names a device of one of these backends."""
    return any(f" {backend}/" in key for backend in backends)


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
