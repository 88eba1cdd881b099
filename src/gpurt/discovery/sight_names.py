"""Names of the sources that show devices which nobody has opened: ``backend_name`` of their records."""

from __future__ import annotations

from typing import Final

NVML: Final = "nvml"
AMDGPU: Final = "amdgpu"
DRM: Final = "drm"
MACOS: Final = "macos"
DXGI: Final = "dxgi"

MANAGEMENT: Final = frozenset({NVML, AMDGPU, DRM, MACOS, DXGI})
"""Systems and management libraries. They know of all devices and how they are; nothing can be run through them."""
