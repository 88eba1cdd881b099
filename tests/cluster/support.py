"""Helpers of the cluster tests."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpurt.cluster.envelope import encode, make_event
from gpurt.cluster.epoch import Epoch, Position
from gpurt.cluster.state import HostInfo, NodeSnapshot
from gpurt.discovery.result import DiscoveryResult, summarize
from gpurt.types import BackendReport, DeviceIdentity, GPUDevice

HOST_A = HostInfo(hostname="alpha", fingerprint="a" * 16, boot_id="boot-a", pid=1)
HOST_B = HostInfo(hostname="beta", fingerprint="b" * 16, boot_id="boot-b", pid=2)
E1 = Epoch(1, "0" * 32)
E2 = Epoch(2, "0" * 32)


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def device(uuid: str = "GPU-a", index: int = 0, **fields: Any) -> GPUDevice:
    values: dict[str, Any] = {
        "device_id": f"cuda:{index}",
        "name": "H100",
        "vendor": "nvidia",
        "backend": "cuda",
        "compute_capability": "9.0",
        "memory_bytes": 80 << 30,
        "memory_available": 79 << 30,
        "compute_units": 132,
        "tensor_core_count": 528,
        "max_threads_per_block": 1024,
        "clock_rate_mhz": 1980,
        "bandwidth_gbps": 3350.0,
        "support_level": "full",
        "driver_version": "590.48",
        "backend_name": "cupy",
        "identity": DeviceIdentity(key=uuid, uuid=uuid),
    }
    return GPUDevice(**{**values, **fields})


def result(*devices: GPUDevice) -> DiscoveryResult:
    return summarize(devices, [BackendReport(name="cuda", status="ok", device_ids=("cuda:0",))])


def snapshot(
    *devices: GPUDevice, node: str = "n1", epoch: Epoch = E1, seq: int = 0, host: HostInfo = HOST_A, **fields: Any
) -> NodeSnapshot:
    return NodeSnapshot(node=node, epoch=str(epoch), seq=seq, host=host, gpu_devices=devices, **fields)


def event_bytes(
    seq: int, *, node: str = "n1", epoch: Epoch = E1, kind: str = "com.example.tick", **fields: Any
) -> bytes:
    return encode(make_event(kind, cluster="test", node=node, position=Position(epoch, seq), **fields))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def until(condition: Callable[[], Any], what: str = "the condition", timeout: float = 10.0) -> float:
    """Seconds until ``condition`` was true."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout, f"{what} did not come true within {timeout:g} s"
        await asyncio.sleep(0.002)
    return time.monotonic() - start


class Child:
    """A child process of one of the programs of a module, which says READY when it is."""

    def __init__(self, program: str, *args: object, module: str = "tests.cluster.programs") -> None:
        command = [sys.executable, "-m", module, program, *map(str, args)]
        self.process = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    async def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def ready(self) -> Child:
        assert await self.line() == "READY"
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def end(self, timeout: float = 10.0) -> int:
        """Close its standard input, on which it ends by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            return self.process.wait(timeout)
        finally:
            self.kill()
