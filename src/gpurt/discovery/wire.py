"""What a probe says: JSON lines from the child to the parent, and the outcome that the parent makes of them.

Each line carries the token of its probe. Lines without it are noise (``.pth`` files and ``sitecustomize`` may print
on stdout before the probe takes it over) and are skipped; a line with the token that does not validate means that
the probe cannot be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gpurt.errors import ReasonCode

if TYPE_CHECKING:
    from gpurt.discovery.line import ProbeLine, Sighting
    from gpurt.types import GPUDevice

MAX_ANSWER_BYTES: Final = 4 << 20
"""1,000 devices of 4 KiB each: more than any host has. What is longer is not an answer."""

STDERR_TAIL_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something could not be used."""

    reason: ReasonCode
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """What came of one probe. Exactly one of ``verified``, ``unchanged`` and ``failure`` is set."""

    sighted: tuple[GPUDevice, ...] = ()
    """Shown by the system and its management libraries, whether the backend's own library can use them or not."""
    about: Mapping[str, Sighting] = field(default_factory=lambda: MappingProxyType({}))
    """By ``device_id`` of sighted devices: what visibility variables need to know."""
    sighting_failure: Failure | None = None
    note: str = ""
    """What people should know besides the sighted devices."""
    opened: tuple[GPUDevice, ...] = ()
    verified: tuple[GPUDevice, ...] | None = None
    unchanged: bool = False
    """The driver was not asked: ``signature`` is one of those that the probe was given."""
    failure: Failure | None = None
    elapsed_ms: float = 0.0
    signature: str | None = None
    """What the answer rests on; None: it must not be remembered."""


class Transcript:
    """Lines of one probe so far."""

    def __init__(self) -> None:
        self._sighted: tuple[GPUDevice, ...] = ()
        self._sighting_failure: Failure | None = None
        self._about: Mapping[str, Sighting] = MappingProxyType({})
        self._note = ""
        self._opened: tuple[GPUDevice, ...] = ()
        self._verified: tuple[GPUDevice, ...] | None = None
        self.unchanged = False
        """The probe ended without opening the driver."""
        self._signature: str | None = None
        self._failure: Failure | None = None
        self.doing = "starting"
        """What the probe was doing last."""

    @property
    def complete(self) -> bool:
        """The probe said everything it will say."""
        return self._verified is not None or self.unchanged or self._failure is not None

    @property
    def sighted(self) -> tuple[GPUDevice, ...]:
        """Devices that have been sighted so far."""
        return self._sighted

    def add(self, line: ProbeLine) -> None:
        failure = Failure(line.reason, line.message, line.hint) if line.reason is not None else None
        self._signature = line.signature or self._signature
        match line.stage:
            case "doing":
                self.doing = line.message
            case "sighted":
                self._sighted, self._sighting_failure, self._about = line.devices, failure, line.about
                self._note = line.message if failure is None else ""
            case "opened":
                self._opened = line.devices
            case "verified":
                self._verified = line.devices
            case "unchanged":
                self.unchanged = True
            case "failed":
                self.fail(failure or Failure(ReasonCode.ERROR, line.message, line.hint))

    def fail(self, failure: Failure) -> None:
        if not self.complete:
            self._failure = failure

    def outcome(self, elapsed_ms: float) -> ProbeOutcome:
        if not self.complete:
            raise ValueError("the probe has not ended")
        return ProbeOutcome(
            sighted=self._sighted,
            about=self._about,
            sighting_failure=self._sighting_failure,
            note=self._note,
            opened=self._opened,
            verified=self._verified,
            unchanged=self.unchanged,
            failure=self._failure,
            elapsed_ms=round(elapsed_ms, 1),
            signature=self._signature,
        )
