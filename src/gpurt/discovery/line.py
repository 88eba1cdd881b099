"""One line of a probe's answer.

Apart from :mod:`gpurt.discovery.wire`, because this is what loads pydantic: a parent starts its probes before that.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from gpurt.errors import ReasonCode
from gpurt.types import GPUDevice


class ProbeLine(BaseModel):
    """One step of a probe, sent as soon as it is known, so that a later crash does not lose it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    stage: Literal["doing", "sighted", "opened", "verified", "unchanged", "failed"]
    """``doing``: ``message`` says what comes next, for the report if that crashes or hangs. ``sighted``: devices
    that the management library shows, or why it shows none. ``opened``: devices of the driver, not verified yet.
    ``verified``, ``unchanged`` and ``failed`` end the answer; ``unchanged``: the driver was not asked, because the
    signature is one that the parent has an answer for."""
    devices: tuple[GPUDevice, ...] = ()
    reason: ReasonCode | None = None
    message: str = ""
    hint: str | None = None
    signature: str | None = None
    """What the answer rests on (:mod:`gpurt.discovery.signature`), with any line; None: not to be remembered."""
