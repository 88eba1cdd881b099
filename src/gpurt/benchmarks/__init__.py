"""Measuring gpurt on this machine, one module a topic: the library side of ``gpurt bench``.

A topic of the host has ``async def measure(*, quick: bool) -> list[Measurement]``, a topic of a device
``async def measure(bench: Bench) -> list[Measurement]``; both may raise ``Skipped``. Nothing here is a test: figures
depend on the machine, so each comes with a peer and a ceiling of the same run.
"""

from __future__ import annotations

from typing import Final

HOST_TOPICS: Final = {
    "import": "gpurt.benchmarks.import_cost",
    "discovery": "gpurt.benchmarks.discovery",
}
DEVICE_TOPICS: Final = {
    "start": "gpurt.benchmarks.start",
    "calls": "gpurt.benchmarks.calls",
    "allocation": "gpurt.benchmarks.allocation",
    "wire": "gpurt.benchmarks.wire",
    "copies": "gpurt.benchmarks.copies",
    "loop": "gpurt.benchmarks.loop_gap",
    "latency": "gpurt.benchmarks.latency",
    "file": "gpurt.benchmarks.file",
    "weights": "gpurt.benchmarks.weights",
}
TOPICS: Final = HOST_TOPICS | DEVICE_TOPICS
"""Topic names, in the order in which they run."""
