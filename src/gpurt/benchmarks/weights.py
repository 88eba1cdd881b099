"""Weights from a page-cached file to a device, beside ``safetensors`` where it is installed.

``python -m gpurt.benchmarks.weights [BYTES] [DIRECTORY]`` prints one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

TENSORS = 64


def write_checkpoint(path: Path, nbytes: int) -> None:
    """A safetensors file of ``TENSORS`` equal U8 tensors with random contents."""
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
    block = os.urandom(min(each, 16 << 20))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(TENSORS):
            for start in range(0, each, len(block)):
                file.write(block[: min(len(block), each - start)])


async def measure(nbytes: int, directory: Path) -> dict[str, Any]:
    """Seconds and GB/s of gpurt and of safetensors for one file, both from the page cache, best of three each."""
    from gpurt.factory import create_backend
    from gpurt.weights import load_safetensors

    path = directory / "model.safetensors"
    await asyncio.to_thread(write_checkpoint, path, nbytes)
    size = path.stat().st_size
    result: dict[str, Any] = {"bytes": size}
    async with await create_backend() as backend:
        device = backend.devices[0]
        process = psutil.Process()
        seconds: list[float] = []
        grown = 0
        for _ in range(3):
            before = process.memory_info().rss
            began = time.perf_counter()
            async with await load_safetensors(path, backend, device.device_id):
                seconds.append(time.perf_counter() - began)
                grown = max(grown, process.memory_info().rss - before)
        result |= {"device": device.name, "gpurt_s": min(seconds), "gpurt_gbps": size / min(seconds) / 1e9}
        result["rss_growth_mib"] = grown >> 20
    if device.backend == "cuda":
        result |= await asyncio.to_thread(_peer, path, size)
        result["of_peer"] = result["safetensors_s"] / result["gpurt_s"] if "safetensors_s" in result else None
    return result


def _peer(path: Path, size: int) -> dict[str, Any]:
    try:
        import safetensors.torch as peer  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as exc:
        return {"peer": f"not installed: {exc.name}"}
    load: Any = peer.load_file  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    synchronize: Any = torch.cuda.synchronize  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    seconds: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        tensors = load(path, device="cuda:0")
        synchronize()
        seconds.append(time.perf_counter() - began)
        del tensors
    return {"safetensors_s": min(seconds), "safetensors_gbps": size / min(seconds) / 1e9}


def main() -> int:
    nbytes = int(sys.argv[1]) if len(sys.argv) > 1 else 256 << 20
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as directory:
        sys.stdout.write(json.dumps(asyncio.run(measure(nbytes, Path(directory)))) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
