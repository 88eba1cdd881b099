"""The environment variables that may be written down. Everything else stays on its machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpurt.visibility.variables import VARIABLES

ALLOWED: Final = frozenset(
    {
        *VARIABLES,
        # Read by container runtimes, before this process was there.
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
        # Our own. Named one by one: a plug-in may have a secret under our prefix.
        "GPURT_BACKEND",
        "GPURT_FALLBACK",
        "GPURT_PLUGINS",
        "GPURT_MEMORY_LIMIT",
        "GPURT_MEMORY_RESERVE",
        "GPURT_HEALTH_XIDS",
        "GPURT_THERMAL_LIMIT",
        "AITBC_GPU_BACKEND",
        "AITBC_GPU_FALLBACK",
        # Which library is found, and how it behaves.
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_MODULE_LOADING",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_LAUNCH_BLOCKING",
        "CUPY_ACCELERATORS",
        "ROCM_HOME",
        "ROCM_PATH",
        "HSA_OVERRIDE_GFX_VERSION",
        "HSA_ENABLE_SDMA",
        "VK_DRIVER_FILES",
        "VK_ICD_FILENAMES",
        "VK_LOADER_DRIVERS_SELECT",
        "OCL_ICD_VENDORS",
        "ZE_ENABLE_ALT_DRIVERS",
        # What decides which platform this is, and where libraries put their files.
        "ANDROID_ROOT",
        "ANDROID_DATA",
        "WSL_DISTRO_NAME",
        "XDG_STATE_HOME",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "PYTHONPATH",
        "container",
        "KUBERNETES_SERVICE_PORT",
        "SLURM_JOB_GPUS",
    }
)
"""Names, never patterns: what a pattern lets through nobody has looked at."""


def allowed(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of ``environ`` that may be written down, in order of name."""
    return {name: environ[name] for name in sorted(environ) if name in ALLOWED}
