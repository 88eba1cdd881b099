"""exo: what its nodes and its master need of gpurt. Documented in ``docs/exo.md``, with the patches for exo.

::

    from gpurt.integrations.exo import forward_memory            # memory of accelerators, no change of exo's messages
    from gpurt.integrations.exo import NodeDevices, forward_devices, placement_memory   # every device
    from gpurt.integrations.exo.placement import place           # the solver for exo's question

exo's types are imported on first use of a name that rests on them (``NodeDevice``, ``NodeDevices``, and the functions
when they are called): importing this package needs no exo.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpurt.integrations.exo.engines import backends
    from gpurt.integrations.exo.environment import env_for
    from gpurt.integrations.exo.forwarding import forward_backends, forward_devices, forward_memory
    from gpurt.integrations.exo.memory import placement_memory
    from gpurt.integrations.exo.records import NodeDevice, NodeDevices
    from gpurt.integrations.exo.states import device_states

__all__ = [
    "NodeDevice",
    "NodeDevices",
    "backends",
    "device_states",
    "env_for",
    "forward_backends",
    "forward_devices",
    "forward_memory",
    "placement_memory",
]

_HOMES = {
    "NodeDevice": "records",
    "NodeDevices": "records",
    "backends": "engines",
    "device_states": "states",
    "env_for": "environment",
    "forward_backends": "forwarding",
    "forward_devices": "forwarding",
    "forward_memory": "forwarding",
    "placement_memory": "memory",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
