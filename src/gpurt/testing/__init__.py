"""Tools for testing gpurt and code built on it: simulated devices, injected faults, the conformance kit.

Names are resolved on first use: importing this package loads none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpurt.testing.checking import CheckedDeviceLoss, CheckingDriver
    from gpurt.testing.conformance import BackendConformance
    from gpurt.testing.driver_conformance import DriverConformance
    from gpurt.testing.faults import Fault, FaultyDriver, InjectedDeviceLoss
    from gpurt.testing.profiles import PROFILES, Profile, parse_simulation
    from gpurt.testing.simulated import SimulatedBackend, SimulatedDriver, create_simulated

_MODULES = {
    "BackendConformance": "conformance",
    "CheckedDeviceLoss": "checking",
    "CheckingDriver": "checking",
    "DriverConformance": "driver_conformance",
    "Fault": "faults",
    "FaultyDriver": "faults",
    "InjectedDeviceLoss": "faults",
    "PROFILES": "profiles",
    "Profile": "profiles",
    "SimulatedBackend": "simulated",
    "SimulatedDriver": "simulated",
    "create_simulated": "simulated",
    "parse_simulation": "profiles",
}

__all__ = [
    "PROFILES",
    "BackendConformance",
    "CheckedDeviceLoss",
    "CheckingDriver",
    "DriverConformance",
    "Fault",
    "FaultyDriver",
    "InjectedDeviceLoss",
    "Profile",
    "SimulatedBackend",
    "SimulatedDriver",
    "create_simulated",
    "parse_simulation",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
