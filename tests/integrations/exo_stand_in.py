"""The few names of exo that the adapter imports, for machines without exo. ``test_exo.py`` runs against exo itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from types import ModuleType
from typing import Any, Self

import pytest
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class FrozenModel(BaseModel):
    """As strict as exo's records are: camel case outside, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="forbid", strict=True, frozen=True)


class Memory(FrozenModel):
    in_bytes: int = 0


class MemoryUsage(FrozenModel):
    ram_total: Memory
    ram_available: Memory
    swap_total: Memory
    swap_available: Memory

    @classmethod
    def from_bytes(cls, **sizes: int) -> Self:
        return cls(**{name: Memory(in_bytes=size) for name, size in sizes.items()})

    @classmethod
    def from_psutil(cls, *, override_memory: int | None) -> Self:
        """A host of 64 GiB, 50 of them free."""
        free = (50 << 30) if override_memory is None else override_memory
        return cls.from_bytes(ram_total=64 << 30, ram_available=free, swap_total=0, swap_available=0)


class Backend(StrEnum):
    MlxMetal = "MlxMetal"
    MlxCpu = "MlxCpu"
    MlxCuda = "MlxCuda"
    Vllm = "Vllm"


class NodeBackends(FrozenModel):
    backends: list[Backend]


_MODULES: dict[str, dict[str, Any]] = {
    "exo.utils.pydantic_ext": {"FrozenModel": FrozenModel, "TaggedModel": FrozenModel},
    "exo.shared.types.profiling": {"MemoryUsage": MemoryUsage},
    "exo.shared.types.backends": {"Backend": Backend},
    "exo.utils.info_gatherer.info_gatherer": {"NodeBackends": NodeBackends},
}


@pytest.fixture
def exo() -> Iterator[None]:
    """exo can be imported."""
    added: list[str] = []
    for path, names in _MODULES.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                sys.modules[name] = ModuleType(name)
                added.append(name)
        for name, value in names.items():
            setattr(sys.modules[path], name, value)
    yield
    for name in [*added, "gpurt.integrations.exo.records"]:
        sys.modules.pop(name, None)
