"""Files in the page cache, made for a measurement and gone after it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from gpurt.benchmarks.measurement import Skipped
from gpurt.benchmarks.plan import MIB

PIECE_BYTES: Final = 64 * MIB
"""What is written, or read by an ordinary loop, at a time."""

TENSORS: Final = 64


@asynccontextmanager
async def written(name: str, pieces: Iterable[bytes], nbytes: int) -> AsyncGenerator[Path]:
    """A new file of these pieces, ``nbytes`` in all, in the directory for temporary files.

    Raises:
        Skipped: it would take more than half of the disk space that is free there.
    """
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="gpurt-bench-"))
    try:
        free = (await asyncio.to_thread(shutil.disk_usage, directory)).free
        if nbytes > free // 2:
            raise Skipped(f"needs {nbytes:,} bytes; half of what {directory.parent} has free is {free // 2:,}")
        path = directory / name
        for piece in pieces:
            await asyncio.to_thread(_append, path, piece)
        yield path
    finally:
        await asyncio.to_thread(shutil.rmtree, directory)


def noise(nbytes: int) -> Iterable[bytes]:
    """Pieces that no file system or link can compress away within its window."""
    block = os.urandom(min(nbytes, PIECE_BYTES))
    for start in range(0, nbytes, len(block)):
        yield block[: min(len(block), nbytes - start)]


def checkpoint(nbytes: int) -> Iterable[bytes]:
    """A safetensors file of ``TENSORS`` equal tensors of bytes, ``nbytes`` in all."""
    each = nbytes // TENSORS
    header = {
        f"layers.{number}.weight": {
            "dtype": "U8",
            "shape": [each],
            "data_offsets": [number * each, (number + 1) * each],
        }
        for number in range(TENSORS)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    yield from noise(each * TENSORS)


def _append(path: Path, piece: bytes) -> None:
    with path.open("ab") as file:
        file.write(piece)
