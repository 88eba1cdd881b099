"""Simulated devices that also compute: a launch lasts as long as the device's memory and arithmetic need for it.

Their kernels are in the language ``cost``: whatever the source says, a kernel takes two scalars, the bytes that it
reads (``numpy.uint64``) and the operations that it does (``numpy.float64``), and lasts as long as the longer of both::

    kernel = await backend.compile("modelled:0", "cost", "layer")
    await backend.launch(kernel, 1, 1, [weights, numpy.uint64(8 << 20), numpy.float64(16e6)])
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final

from gpurt.errors import CompileFailed
from gpurt.testing.profiles import Profile
from gpurt.testing.simulated import SimulatedDriver
from gpurt.types import Capabilities

LANGUAGE: Final = "cost"


class ModelledDriver(SimulatedDriver):
    """A simulated driver in real time, with launches. Options are those of :class:`SimulatedDriver`."""

    name: ClassVar[str] = "modelled"
    capabilities: Capabilities = SimulatedDriver.capabilities.model_copy(update={"kernels": frozenset({LANGUAGE})})

    def __init__(self, profiles: Iterable[Profile], **options: Any) -> None:
        super().__init__(profiles, realtime=True, **options)
        self._busy = threading.Lock()
        self._free_at: dict[int, float] = {}

    def compile(self, index: int, source: str, name: str) -> str:
        self._slot(index)
        if source != LANGUAGE:
            raise CompileFailed(f"modelled devices know costs alone: the source of {name} must be {LANGUAGE!r}", log="")
        return name

    def launch(
        self, index: int, kernel: str, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Any]
    ) -> None:
        profile = self._slot(index).profile
        nbytes, flops = (float(each) for each in args[-2:])
        memory = nbytes / (profile.memory_bandwidth_gbps * 1e9)
        compute = flops / (profile.fp16_tflops * 1e12)
        with self._busy:
            begins_at = max(self._clock(), self._free_at.get(index, float("-inf")))
            ends_at = self._free_at[index] = begins_at + profile.latency_s + max(memory, compute)
        self._wait(ends_at)
