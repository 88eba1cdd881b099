"""What is believed of devices beyond one look-up: Xids, failing telemetry and what an earlier process has seen.

The monitor has the memory; this lays its verdicts over what a look-up found, and keeps them in the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

from gpurt.health.evidence import SEVERITY, Evidence
from gpurt.health.monitor import HealthMonitor, Transition, Verdict
from gpurt.health.policy import HealthPolicy
from gpurt.types import DeviceState, GPUDevice

_ANSWERED: Final = frozenset({DeviceState.HEALTHY, DeviceState.DEGRADED})


class DeviceHealth:
    """
    Args:
        policy: what condemns a device; asked at the first use.
        clock: seconds, monotonic.
    """

    def __init__(self, policy: Callable[[], HealthPolicy], clock: Callable[[], float]) -> None:
        self._policy, self._clock = policy, clock
        self._monitor: HealthMonitor | None = None
        self._boot_id: str | None = None
        self._touched: set[str] = set()
        """Devices of which the file may say something else."""
        self.version = 0
        """Changes with everything that the file should know."""
        self._saved_version = 0
        self.is_watched: Callable[[str], bool] = _nobody
        """Whether the telemetry of a device (stable id) is followed, and tells: more than a look-up can."""

    def open(self) -> HealthMonitor:
        """The monitor, made at the first call.

        Raises:
            GPUError: an environment variable has a value that is not allowed.
        """
        if self._monitor is None:
            self._monitor = HealthMonitor(self._policy(), clock=self._clock)
        return self._monitor

    @property
    def monitor(self) -> HealthMonitor:
        """As :meth:`open`."""
        return self.open()

    def restore(self, document: Mapping[str, Any], boot_id: str | None) -> None:
        """Take over what the registry remembers; after a reboot that is nothing."""
        self._boot_id = boot_id
        self.monitor.restore(document, boot_id)

    def looked(self, devices: Iterable[GPUDevice], asked: Iterable[str]) -> None:
        """Devices answered the backends ``asked``: those that were bad may become better."""
        names = frozenset(asked)
        for device in devices:
            key = device.stable_id
            if self.is_watched(key) or device.state not in _ANSWERED or self.monitor.verdict(key).usable:
                continue
            if names.intersection(device.backends or (device.backend,)):
                self.changed(self.monitor.observe(key, Evidence()))

    def changed(self, transition: Transition | None) -> None:
        """A change of state that the monitor has told."""
        if transition is not None:
            self._touch(transition.key)

    def forget(self, keys: Iterable[str]) -> None:
        """Devices that an enumeration lacks: if they come back, somebody has reset or replaced them."""
        for key in keys:
            if not self.monitor.verdict(key).usable:
                self._touch(key)
            self.monitor.forget(key)

    def believed(self, devices: Iterable[GPUDevice], told: Iterable[GPUDevice] = ()) -> tuple[GPUDevice, ...]:
        """``devices`` as look-ups show them, with what is known to be worse.

        Args:
            told: what was said of them last: of two reasons for one state the one that was told already is kept, for
                a second reason is no change of state.
        """
        before = {device.stable_id: device for device in told}
        return tuple(
            _believed(device, self.monitor.verdict(device.stable_id), before.get(device.stable_id))
            for device in devices
        )

    # The file

    @property
    def unsaved(self) -> bool:
        return self.version != self._saved_version

    def saved(self, version: int) -> None:
        self._saved_version = version

    def document(self, stored: Mapping[str, Any], devices: Iterable[str] | None = None) -> dict[str, Any]:
        """What to keep: of devices that changed here our word, of others what is stored, if that is of this boot.

        Args:
            devices: stable ids to keep; None keeps all, for the file must not grow for ever.
        """
        ours = self.monitor.export(self._boot_id)
        same_boot = self._boot_id is None or stored.get("boot_id") in (None, self._boot_id)
        theirs = stored.get("devices") if same_boot else None
        entries = dict(cast("Mapping[str, Any]", theirs)) if isinstance(theirs, Mapping) else {}
        for key in self._touched:
            entries.pop(key, None)
        entries |= {key: entry for key, entry in ours["devices"].items() if key in self._touched}
        if devices is not None:
            known = frozenset(devices)
            entries = {key: entry for key, entry in entries.items() if key in known}
        return {"boot_id": self._boot_id, "devices": entries}

    def _touch(self, key: str) -> None:
        self._touched.add(key)
        self.version += 1


def _nobody(key: str) -> bool:
    return False


def _believed(device: GPUDevice, verdict: Verdict, told: GPUDevice | None) -> GPUDevice:
    if verdict.usable or device.state not in SEVERITY:
        return device
    own, other = SEVERITY.index(device.state), SEVERITY.index(verdict.state)
    if own > other or (own == other and not _was_told(verdict.reason, told)):
        return device.model_copy(update={"usable": False}) if device.usable else device
    return device.model_copy(update={"usable": False, "state": verdict.state, "state_reason": verdict.reason})


def _was_told(reason: str | None, told: GPUDevice | None) -> bool:
    return told is not None and _code(reason) == _code(told.state_reason)


def _code(reason: str | None) -> str:
    return (reason or "").partition(":")[0]
