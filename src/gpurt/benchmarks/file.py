"""A file from the page cache to a device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gpurt.benchmarks.bench import Bench
from gpurt.benchmarks.clocks import rates, seconds
from gpurt.benchmarks.files import PIECE_BYTES, noise, written
from gpurt.benchmarks.measurement import Measurement, size_name
from gpurt.benchmarks.plan import GIB
from gpurt.benchmarks.raw import Raw, opened


async def measure(bench: Bench) -> list[Measurement]:
    import numpy as np

    # The page cache, or a file system in memory, takes the file once.
    nbytes = await bench.fitting(bench.plan.file_bytes, host=2, device=1)
    backend, raw = bench.backend, bench.raw(min(nbytes, GIB))
    async with (
        written("file", noise(nbytes), nbytes) as path,
        opened(raw) as threads,
        backend.allocation(bench.device_id, nbytes) as handle,
    ):
        host = await threads(partial(np.ones, raw.nbytes, np.uint8))
        figures = await rates(
            nbytes,
            bench.plan.rounds,
            {
                "ours": partial(seconds, partial(backend.load_file, path, handle)),
                "peer": threads.timed(partial(_ordinary, raw, path, host.data[:PIECE_BYTES])),
                "ceiling": threads.timed(raw.fastest("to device", host.data, nbytes)),
            },
        )
    return [
        Measurement(
            "file",
            f"load_file from the page cache, {size_name(nbytes)}",
            "GB/s",
            figures["ours"],
            peer=figures["peer"],
            peer_name=f"readinto, {raw.copy_name}",
            ceiling=figures["ceiling"],
            ceiling_name=raw.ceiling_name,
        )
    ]


def _ordinary(raw: Raw, path: Path, host: memoryview) -> None:
    """One buffer, filled from the file and copied, again and again."""
    write = raw.writer(host)
    with path.open("rb", buffering=0) as file:
        while file.readinto(host):
            write()
