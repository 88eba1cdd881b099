"""Files to load, right and wrong, and what they hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpurt.backend import GPUBackend
from gpurt.weights import DTYPES, LoadedWeights

Content = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""Name → dtype, shape, bytes."""


def tensor(dtype: str, *shape: int, seed: int = 0) -> tuple[str, tuple[int, ...], bytes]:
    size = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].bits // 8
    return dtype, shape, np.random.default_rng(seed).bytes(size)


def document(content: Content, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The header of ``content`` in its own order, as JSON data."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape, data) in content.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    return entries


def raw_file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write(path: Path, content: Content) -> Path:
    path.write_bytes(raw_file(document(content), b"".join(data for _, _, data in content.values())))
    return path


def write_sharded(folder: Path, shards: Mapping[str, Content]) -> Path:
    for name, content in shards.items():
        write(folder / name, content)
    return write_index(folder, {name: shard for shard, content in shards.items() for name in content})


def write_index(folder: Path, weight_map: Mapping[str, Any]) -> Path:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


async def check(backend: GPUBackend, weights: LoadedWeights, content: Content) -> None:
    """Every tensor of ``content`` is on its device, byte by byte."""
    assert set(weights) == set(content)
    for name, (dtype, shape, data) in content.items():
        got = weights[name]
        assert (got.name, got.dtype, got.shape, got.size_bytes) == (name, dtype, shape, len(data))
        assert got.offset_bytes % 256 == 0
        assert await backend.copy_from_device(got.handle, got.offset_bytes, got.size_bytes) == data, name


async def eventually(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.002)
