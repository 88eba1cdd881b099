"""A node over one kind of backend, with stand-ins for the libraries of GPUs. Says READY; then each line on standard
input is bytes in base64, which it brings to its first device and back."""

from __future__ import annotations

import asyncio
import base64
import os
import sys

import pytest

from gpurt.backend import GPUBackend
from gpurt.backends.cpu_backend import CPUBackend
from gpurt.backends.cuda_backend import CUDADriver
from gpurt.backends.rocm_backend import ROCmDriver
from gpurt.cluster.endpoints import engine_at
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.publisher import NodePublisher
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.runtime.backend import DriverBackend
from tests.cluster.fault_programs import lines, say
from tests.cluster.support import HOST_A
from tests.support import cupy_backends

CPU_BYTES = 512 << 20


def backend_of(kind: str) -> GPUBackend:
    # The cards of the stand-ins are smaller than what is left alone on a real one.
    os.environ["GPURT_MEMORY_RESERVE"] = "0"
    environ = dict(os.environ)
    if kind == "cuda":
        cupy_backends.stand_in_cuda(pytest.MonkeyPatch())
        return DriverBackend(CUDADriver(environ=environ), pool_bytes=0)
    if kind == "rocm":
        cupy_backends.stand_in_hip(pytest.MonkeyPatch())
        return DriverBackend(ROCmDriver(environ=environ, root=cupy_backends.hip_root()), pool_bytes=0)
    return CPUBackend(memory_limit=CPU_BYTES)


async def through(backend: GPUBackend, data: bytes) -> bytes:
    """``data`` as it comes back from the first device."""
    device_id = (await backend.list_devices())[0].device_id
    handle = await backend.allocate(device_id, size_bytes=2 * len(data))
    try:
        await backend.copy_to_device(data, handle, offset_bytes=len(data))
        return bytes(await backend.copy_from_device(handle, offset_bytes=len(data), size_bytes=len(data)))
    finally:
        await backend.deallocate(handle)


async def main(endpoint: str, kind: str) -> None:
    backend = backend_of(kind)
    await backend.initialize()
    engine = engine_at(endpoint, cluster="test")
    await engine.start()
    host = HOST_A.model_copy(update={"hostname": kind, "fingerprint": f"{kind:0>16}"})
    publisher = NodePublisher(engine, kind, host=host, epoch=Epoch.new(1))
    async with GPUDiscoveryService(backend) as discovery:
        await publisher.start(await discovery.discover_all_devices())
        say("READY")
        async for line in lines():
            say(base64.b64encode(await through(backend, base64.b64decode(line))).decode())
        await publisher.leave()
    await engine.close()
    await backend.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
