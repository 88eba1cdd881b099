"""Why it is time to look again."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    KERNEL = "kernel"
    """The kernel told of a GPU, of its driver's module, or that a GPU had to be reset."""
    NODES = "nodes"
    """Device nodes appeared or went."""
    DRIVER = "driver"
    """Another version of a kernel driver is loaded, or one was loaded or unloaded."""
    RESUMED = "resumed"
    """The machine slept: drivers start anew, and what was true of devices before need not be now."""
