"""The first stage of a cuda probe: what NVML shows, and what the probe's answer rests on. Opens no CUDA."""

from __future__ import annotations

import os

from gpurt.discovery.line import ProbeLine
from gpurt.discovery.sightings import sighted_devices
from gpurt.discovery.signature import cuda_signature
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.sources.nvml import open_session


def sight_nvidia() -> ProbeLine:
    """Every NVIDIA device of the machine, also those that CUDA cannot use or may not show."""
    try:
        session = open_session()
        try:
            version = session.driver_version
            records = session.devices()
        finally:
            session.close()
        devices = tuple(seen for record in records for seen in sighted_devices(record, version))
    except BackendUnavailable as exc:
        return ProbeLine(stage="sighted", reason=exc.reason, message=exc.message, hint=exc.hint)
    except Exception as exc:
        return ProbeLine(stage="sighted", reason=ReasonCode.ERROR, message=f"{type(exc).__name__}: {exc}")
    if not devices:
        return ProbeLine(stage="sighted", reason=ReasonCode.NO_DEVICE, message="the NVIDIA driver shows no device")
    return ProbeLine(stage="sighted", devices=devices, signature=cuda_signature(records, version, os.environ))
