"""The TFLite backends that the conformance kit runs over here, and stand-ins for what no machine here has."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpurt.backend import GPUBackend
from gpurt.backends.tflite.model import ROW_BYTES
from gpurt.backends.tflite_gpu_backend import TFLiteGPUDriver
from gpurt.runtime.backend import DriverBackend

HOST_MEMORY = 1
"""Of ``supported_types``."""


def litert_cpu_driver() -> TFLiteGPUDriver:
    """The real LiteRT on its CPU accelerator."""
    return TFLiteGPUDriver(accelerator="cpu")


def interpreter_cpu_driver() -> TFLiteGPUDriver:
    """The real interpreter of TFLite, which LiteRT's package still brings, in place of tflite_runtime's."""
    modules: dict[str, Any] = {}
    with contextlib.suppress(ModuleNotFoundError):  # the driver says so when it opens
        modules["tflite_runtime.interpreter"] = importlib.import_module("ai_edge_litert.interpreter")
        modules["tflite_runtime"] = SimpleNamespace(__version__="of LiteRT")
    return TFLiteGPUDriver(accelerator="cpu", import_module=importer(modules))


def fake_gpu_driver() -> TFLiteGPUDriver:
    """A phone's GPU by :class:`FakeLiteRT`: memory that is not the host's."""
    return TFLiteGPUDriver(platform="android", import_module=importer(FakeLiteRT().modules))


class _InSmallPieces(TFLiteGPUDriver):
    """Whose copies are cut often enough for what the kit tests between two pieces."""

    capabilities = TFLiteGPUDriver.capabilities.model_copy(update={"chunk_bytes": 1 << 20})


def there(driver: TFLiteGPUDriver) -> TFLiteGPUDriver:
    """``driver``, closed. Raises ``BackendUnavailable`` where its library is not installed."""
    driver.open()
    driver.close()
    return driver


def litert_cpu() -> GPUBackend:
    return DriverBackend(_InSmallPieces(accelerator="cpu"))


def interpreter_cpu() -> GPUBackend:
    return DriverBackend(interpreter_cpu_driver())


def fake_gpu() -> GPUBackend:
    return DriverBackend(fake_gpu_driver())


def importer(modules: Mapping[str, Any]) -> Callable[[str], Any]:
    """Imports from ``modules`` and nowhere else, as :func:`importlib.import_module` does; raises what is an error."""

    def import_module(name: str) -> Any:
        found = modules.get(name)
        if isinstance(found, Exception):
            raise found
        if found is not None:
            return found
        package = name.partition(".")[0]
        missing = name if package in modules else package
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    return import_module


def rows_of(model: bytes) -> int:
    """The number of rows that a model of ours is made for."""
    return int.from_bytes(model[328:332], "little", signed=True)


class FakeLiteRT:
    """A GPU as LiteRT shows one: a lock for writing fetches nothing, and what is unlocked goes to the GPU whole.

    Args:
        fully: what ``is_fully_accelerated`` says. works: whether the GPU computes what it should.
        refusal: what compiling raises. kinds: ``supported_types`` of its tensors; 1 is host memory.
    """

    def __init__(
        self,
        *,
        fully: bool = True,
        works: bool = True,
        refusal: Exception | None = None,
        kinds: tuple[int, ...] = (20,),
    ) -> None:
        self.fully, self.works, self.refusal, self.kinds = fully, works, refusal, kinds
        self.live = 0
        self.compiled: list[int] = []
        self.room = 1 << 62
        module = SimpleNamespace(
            HardwareAccelerator=SimpleNamespace(CPU=1, GPU=2, NPU=4),
            EnvironmentOptions=dict,
            Environment=SimpleNamespace(create=FakeEnvironment),
            CompiledModel=SimpleNamespace(from_buffer=self._compile),
        )
        self.modules: dict[str, Any] = {"ai_edge_litert": SimpleNamespace(), "ai_edge_litert.compiled_model": module}

    def _compile(self, model: bytes, hardware_accel: int, environment: FakeEnvironment) -> FakeModel:
        if self.refusal is not None:
            raise self.refusal
        nbytes = rows_of(model) * ROW_BYTES
        self.compiled.append(nbytes)
        return FakeModel(self, nbytes)


class FakeEnvironment:
    def __init__(self, options: Mapping[str, str]) -> None: ...

    def close(self) -> None: ...


class FakeModel:
    def __init__(self, owner: FakeLiteRT, nbytes: int) -> None:
        self.owner, self.nbytes = owner, nbytes

    def is_fully_accelerated(self) -> bool:
        return self.owner.fully

    def get_input_buffer_requirements(self, index: int) -> dict[str, Any]:
        return {"buffer_size": self.nbytes, "supported_types": list(self.owner.kinds)}

    def create_input_buffers(self, index: int) -> list[FakeTensorBuffer]:
        return [FakeTensorBuffer(self.owner, self.nbytes)]

    create_output_buffers = create_input_buffers

    def run_by_index(self, index: int, sources: list[FakeTensorBuffer], targets: list[FakeTensorBuffer]) -> None:
        x = sources[0].memory.view(np.float32)
        targets[0].memory[:] = (np.maximum(x, 0) if self.owner.works else x).view(np.uint8)

    def close(self) -> None: ...


class FakeTensorBuffer:
    def __init__(self, owner: FakeLiteRT, nbytes: int) -> None:
        if nbytes > owner.room:
            raise RuntimeError("CompiledModel error: code=3\n└ Failed to allocate aligned memory")
        owner.room -= nbytes
        owner.live += 1
        self.owner = owner
        self.memory = np.full(nbytes, 0xEE, np.uint8)
        self.gone = False

    def write(self, data: Any) -> None:
        self._check(data.nbytes)
        if self.owner.kinds[0] != HOST_MEMORY:
            self.memory[:] = 0xDD  # what the copy on the host happens to hold
        self.memory[: data.nbytes] = data

    def read(self, count: int, dtype: Any) -> Any:
        self._check(count)
        return self.memory[:count].copy()

    def destroy(self) -> None:
        if not self.gone:
            self.owner.live -= 1
            self.owner.room += self.memory.nbytes
            self.gone = True

    def _check(self, count: int) -> None:
        if self.gone:
            raise RuntimeError("invalid capsule")
        if count > self.memory.nbytes:
            raise RuntimeError("larger than the tensor buffer")
