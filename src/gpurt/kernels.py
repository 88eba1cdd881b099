"""The kernels of a driver backend: compiled once, launched in the order of the memory that they touch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpurt.errors import CompileFailed, GPUError
from gpurt.job import Job
from gpurt.kernel_source import parameters
from gpurt.kernel_table import arguments, check_shape, check_source, extent, listed
from gpurt.lifecycle import DriverLifecycle
from gpurt.types import Kernel, MemoryHandle

if TYPE_CHECKING:
    import numpy as np


class DriverKernels(DriverLifecycle):
    """Adds ``compile``, ``launch`` and ``execute_kernel``."""

    async def compile(self, device_id: str, source: str, name: str) -> Kernel:
        dispatch, index = self._enter_device(device_id)
        try:
            check_source(source, name)
        except GPUError as exc:
            self._tell(exc, index, "compile")
            raise
        driver, kernels = self.driver, self._kernels

        def build(_: Job) -> Kernel:
            # On the lane, so that of two calls for the same text the second one finds what the first has made.
            return kernels.find(device_id, source, name) or kernels.add(
                device_id,
                index,
                source,
                name,
                driver.compile(index, source, name),
                # The range of the index space comes first in C, from the driver.
                parameters(source, name, 2 if "c" in driver.capabilities.kernels else 0),
            )

        kernel = kernels.find(device_id, source, name)
        if kernel is None:
            # A compiler may take longer than a call of a driver should, and the device is free meanwhile.
            job = dispatch.submit(index, "compile", build, occupies=False)
            kernel = await self._outcome(job, index, f"compile({name})", failure=CompileFailed)
        kernels.remember(kernel)
        return kernel

    async def launch(
        self,
        kernel: Kernel,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[MemoryHandle | np.generic] = (),
    ) -> None:
        dispatch = self._enter()
        try:
            compiled = self._kernels.get(kernel)
        except GPUError as exc:
            self._tell(exc, None, "launch")
            raise
        index, operation = compiled.index, f"launch({kernel.name})"
        dispatch.check(index, kernel.device_id)
        try:
            blocks, threads = extent(grid, "grid"), extent(block, "block")
            check_shape(blocks, threads, self._devices[index].max_threads_per_block)
            passed, allocations = arguments(args, self._handles, compiled)
        except GPUError as exc:
            self._tell(exc, index, operation)
            raise

        def run(_: Job) -> None:
            self.driver.launch(index, compiled.token, blocks, threads, passed)

        job = dispatch.submit(index, "compute", run, chains={allocation.chain for allocation in allocations})
        await self._outcome(job, index, operation, failure=GPUError)

    async def execute_kernel(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[MemoryHandle | np.generic],
    ) -> bool:
        self._enter()
        try:
            device_id = next((each.device_id for each in listed(args) if isinstance(each, MemoryHandle)), "")
            kernel = self._kernels.named(device_id, name)
        except GPUError as exc:
            self._tell(exc, None, "execute_kernel")
            raise
        if kernel is None:
            return False
        await self.launch(kernel, grid, block, args)
        return True
