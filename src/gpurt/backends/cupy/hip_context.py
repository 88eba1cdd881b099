"""HIP initialised without holding the GIL."""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any, Final

log = logging.getLogger("gpurt.rocm")

_LIBRARIES: Final = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")


class HipContexts:
    """Initialises HIP, which finds and sets up every device, through a call that releases the GIL; CuPy's first one,
    ``getDeviceCount``, holds it. Errors are left for CuPy to meet and to report.

    There is nothing else to make ahead: HIP has no contexts to retain, its primary contexts are deprecated names.
    """

    def prepare(self) -> None:
        # Only what CuPy has loaded by now: another version beside it would be a second runtime. Windows has no such
        # mode, and there CuPy's own call does it.
        mode = getattr(os, "RTLD_NOLOAD", None)
        if mode is None:
            return
        for name in _LIBRARIES:
            try:
                status = ctypes.CDLL(name, mode).hipInit(0)
            except (OSError, AttributeError) as exc:
                log.debug("no warm-up through %s: %s", name, exc)
                continue
            if status:
                log.debug("hipInit answered %d", status)
            return

    def properties(self, index: int) -> dict[str, Any] | None:
        """None: CuPy is asked."""
        return None

    def retain(self, index: int) -> None: ...

    def release(self) -> None: ...
