"""Measuring gpurt on this machine, one module a topic: the library side of ``gpurt bench``.

A topic module has ``async def measure(*, quick: bool) -> list[Measurement]``, and may raise ``Skipped``. Nothing
here is a test: figures depend on the machine, so each comes with a peer and a ceiling of the same run.
"""

from __future__ import annotations

from typing import Final

TOPICS: Final = {
    "import": "gpurt.benchmarks.import_cost",
    "calls": "gpurt.benchmarks.calls",
    "copies": "gpurt.benchmarks.copies",
    "loop": "gpurt.benchmarks.loop_gap",
    "discovery": "gpurt.benchmarks.discovery",
    "cuda": "gpurt.benchmarks.cuda",
}
"""Topic names, in the order in which they run."""
