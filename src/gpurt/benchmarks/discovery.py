"""How long discovery takes, and what it does to the event loop meanwhile."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from gpurt.benchmarks.clocks import LoopGap, medians, seconds
from gpurt.benchmarks.measurement import Measurement

TARGET_S = 1.0
GAP_TARGET_MS = 50.0
REMEMBERED_TARGET_MS = 50.0


async def measure(*, quick: bool) -> list[Measurement]:
    from gpurt.discovery.service import GPUDiscoveryService

    rounds = 1 if quick else 5
    gaps: list[float] = []
    loop = asyncio.get_running_loop()

    async def discover() -> None:
        directory = await loop.run_in_executor(None, tempfile.mkdtemp)
        # A registry of its own: the figure is that of a first start, with nothing remembered.
        service = GPUDiscoveryService(Path(directory) / "registry.json")
        try:
            async with LoopGap() as gap:
                await service.discover_all_devices()
            gaps.append(gap.longest_ms)
        finally:
            await service.shutdown()
            await loop.run_in_executor(None, shutil.rmtree, directory)

    async def child(*command: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        await process.wait()

    contenders = {
        "ours": partial(seconds, discover),
        "child": partial(seconds, lambda: child(sys.executable, "-c", "")),
    }
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is not None:
        contenders["nvidia-smi"] = partial(seconds, partial(child, nvidia_smi, "-L"))
    figures = await medians(rounds, contenders)
    remembered, read = await _remembered(rounds=5 * rounds)
    return [
        Measurement(
            "discovery",
            "first discovery, every backend",
            "s",
            figures["ours"],
            peer=figures.get("nvidia-smi"),
            peer_name="nvidia-smi -L" if nvidia_smi else "",
            ceiling=figures["child"],
            ceiling_name="start of one child python",
            target=TARGET_S,
        ),
        Measurement("discovery", "longest gap of the loop meanwhile", "ms", max(gaps), target=GAP_TARGET_MS),
        Measurement(
            "discovery",
            "answer from the registry",
            "ms",
            remembered,
            ceiling=read,
            ceiling_name="read and parse of the file",
            target=REMEMBERED_TARGET_MS,
        ),
    ]


async def _remembered(*, rounds: int) -> tuple[float, float]:
    """Milliseconds of a new service until it has what the registry remembers of this host, and of the file alone."""
    from gpurt.discovery.service import GPUDiscoveryService

    loop = asyncio.get_running_loop()
    directory = await loop.run_in_executor(None, tempfile.mkdtemp)
    path = Path(directory) / "registry.json"
    try:
        async with GPUDiscoveryService(path) as service:
            await service.discover_all_devices()

        async def ours() -> None:
            if await GPUDiscoveryService(path).cached() is None:
                raise RuntimeError("the registry remembers nothing of the look-up before")

        async def file() -> None:
            await loop.run_in_executor(None, lambda: json.loads(path.read_bytes()))

        figures = await medians(rounds, {"ours": partial(seconds, ours), "file": partial(seconds, file)})
    finally:
        await loop.run_in_executor(None, shutil.rmtree, directory)
    return figures["ours"] * 1e3, figures["file"] * 1e3
