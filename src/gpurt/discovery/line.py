"""One line of a probe's answer.

Apart from :mod:`gpurt.discovery.wire`, because this is what loads pydantic: a parent starts its probes before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gpurt.errors import ReasonCode
from gpurt.types import GPUDevice

_LONGEST_TEXT: Final = 10_000


class Sighting(BaseModel):
    """What visibility variables need to know of a sighted device, beside its record."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    numbered: bool = False
    """Its source shows all devices of its vendor in the vendor's own order, so that numbers in variables are theirs."""
    parent_uuid: str | None = None
    """``GPU-…`` of the physical device of a partition."""
    tiles: int = 1
    """Of an Intel GPU; Level Zero counts them."""
    ordinals: Mapping[str, int] = Field(default_factory=dict)
    """Numbers without any mask, by interface: :class:`gpurt.visibility.candidates.Candidate`."""


class ProbeLine(BaseModel):
    """One step of a probe, sent as soon as it is known, so that a later crash does not lose it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    stage: Literal["doing", "sighted", "opened", "verified", "unchanged", "failed"]
    """``doing``: ``message`` says what comes next, for the report if that crashes or hangs. ``sighted``: devices
    that the system and its management libraries show, or why they show none; a later line replaces an earlier one.
    ``opened``: devices of the driver, not verified yet. ``verified``, ``unchanged`` and ``failed`` end the answer;
    ``unchanged``: the driver was not asked, because the signature is one that the parent has an answer for."""
    devices: tuple[GPUDevice, ...] = ()
    about: Mapping[str, Sighting] = Field(default_factory=dict)
    """By ``device_id`` of sighted devices."""
    reason: ReasonCode | None = None
    message: str = ""
    """With ``sighted`` and no reason: what people should know besides the devices."""
    hint: str | None = None

    @field_validator("message", "hint", mode="before")
    @classmethod
    def _sent(cls, text: object) -> object:
        """Libraries say what they like; a line has to be written, and to be short enough to be read."""
        return text if not isinstance(text, str) else text[:_LONGEST_TEXT].encode("utf-8", "replace").decode()

    signature: str | None = None
    """What the answer rests on (:mod:`gpurt.discovery.signature`), with any line; None: not to be remembered."""
