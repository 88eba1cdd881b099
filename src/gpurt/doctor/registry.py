"""Whether the registry file is well; nothing of its content but counts."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Any

from gpurt.errors import GPUError


def registry_health(path: Path | None) -> dict[str, Any]:
    """The state of the file; None is the usual one. Blocking; reads, never writes or puts aside."""
    from gpurt.discovery.registry import RegistryFile

    file = RegistryFile(path)
    health: dict[str, Any] = {"path": str(file.path), "exists": False}
    try:
        status = file.path.stat()
        health |= {
            "exists": True,
            "mode": f"{stat.S_IMODE(status.st_mode):04o}",
            "bytes": status.st_size,
            "age_s": round(max(0.0, time.time() - status.st_mtime), 1),
        }
        beside = sorted(entry.name for entry in file.path.parent.iterdir() if entry.name.startswith(file.path.name))
        health["beside"] = [name for name in beside if name != file.path.name]
        health["corrupt_copies"] = sum(".corrupt-" in name for name in beside)
    except FileNotFoundError:
        return health
    except OSError as exc:
        return health | {"error": str(exc)}
    try:
        document = file.load(put_aside=False)
    except GPUError as exc:
        return health | {"error": str(exc)}
    if document is None:
        return health | {"readable": False}
    return health | {
        "readable": True,
        "schema": document.schema_version,
        "epoch": document.epoch,
        "saved_at": document.saved_at,
        "counts": {
            "devices": len(document.devices),
            "reports": len(document.reports),
            "verified": len(document.verified),
            "remembered": {name: len(entries) for name, entries in document.remembered.items()},
            "attempts": {name: tried.failures for name, tried in document.attempts.items()},
            "tuning": len(document.tuning),
            "calibration": len(document.calibration),
            "links": len(document.topology),
        },
    }
