"""A safetensors file from the page cache to a device, beside ``safetensors`` itself where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

from gpurt.benchmarks import targets
from gpurt.benchmarks.bench import Bench
from gpurt.benchmarks.clocks import PeakMemory, rates, seconds
from gpurt.benchmarks.files import TENSORS, checkpoint, written
from gpurt.benchmarks.measurement import Measurement, size_name
from gpurt.benchmarks.plan import GIB, MIB
from gpurt.benchmarks.raw import Way, opened
from gpurt.benchmarks.torch_raw import empty_cache, load_torch, torch_device
from gpurt.weights import load_safetensors


async def measure(bench: Bench) -> list[Measurement]:
    import numpy as np

    # The page cache, or a file system in memory, takes the file once, and the peer may hold it once more.
    nbytes = await bench.fitting(bench.plan.file_bytes, host=3, device=2)
    nbytes -= nbytes % TENSORS
    backend, raw = bench.backend, bench.raw(min(nbytes, GIB))

    async def load(path: Path) -> None:
        async with await load_safetensors(path, backend, bench.device_id):
            pass

    async with written("model.safetensors", checkpoint(nbytes), nbytes) as path, opened(raw) as threads:
        async with PeakMemory() as peak:
            await load(path)
        peer = await threads(_peer, bench, path)
        host = await threads(partial(np.ones, raw.nbytes, np.uint8))
        contenders = {
            "ours": partial(seconds, partial(load, path)),
            "ceiling": threads.timed(raw.fastest("to device", host.data, nbytes)),
        }
        if peer is not None:
            contenders["peer"] = threads.timed(peer.call)
        try:
            figures = await rates(nbytes, bench.plan.rounds, contenders)
        finally:
            await threads(empty_cache, backend.name)
    name = f"load_safetensors from the page cache, {size_name(nbytes)}"
    rows = [
        Measurement(
            "weights",
            name,
            "GB/s",
            figures["ours"],
            peer=figures.get("peer"),
            peer_name=peer.name if peer is not None else "",
            ceiling=figures["ceiling"],
            ceiling_name=raw.ceiling_name,
            **targets.weights(backend.name, nbytes),
        )
    ]
    if not bench.shares_host_memory:
        taken = Measurement(
            "weights",
            f"host memory that loading {size_name(nbytes)} takes",
            "MiB",
            peak.grown_bytes / MIB,
            **targets.weights_host_memory(backend.name),
        )
        rows.append(taken)
    return rows


def _peer(bench: Bench, path: Path) -> Way | None:
    """``safetensors`` with the same tensors on the same device, as far as it can."""
    if importlib.util.find_spec("safetensors") is None:
        return None
    if bench.backend.name == "cpu":
        load: Any = importlib.import_module("safetensors.numpy").load_file
        return Way("safetensors.numpy.load_file", partial(load, path))
    torch = load_torch(bench.backend.name)
    if torch is None:
        return None
    load = importlib.import_module("safetensors.torch").load_file
    device = torch_device(bench.backend.name, bench.device_id)

    def call() -> None:
        tensors = load(path, device=device)
        torch.cuda.synchronize(device)
        del tensors

    return Way("safetensors.torch.load_file", call)
