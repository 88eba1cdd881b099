"""What to install for each backend, as whole commands. Imports nothing: drivers say it, and so does everybody who asks
why a backend is absent (:mod:`gpurt.remedies`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

INSTALL: Final[Mapping[str, str]] = {
    # Package names as on PyPI; the extras are those of pyproject.toml.
    "cpu": "pip install --force-reinstall numpy",
    "cuda": "pip install 'gpurt[cuda12]'  # cupy-cuda12x; with a driver for CUDA 13: 'gpurt[cuda13]'  # cupy-cuda13x",
    "rocm": "pip install 'gpurt[rocm]'  # cupy-rocm-7-0",
    "vulkan": "pip install 'gpurt[vulkan]'  # vulkan",
    "opencl": "pip install 'gpurt[opencl]'  # pyopencl",
    "metal": "pip install 'gpurt[metal]'  # mlx",
    "directml": "pip install 'gpurt[directml]'  # onnxruntime-directml",
    "tflite": "pip install 'gpurt[tflite]'  # ai-edge-litert",
}

DRIVER: Final[Mapping[str, Mapping[str, str]]] = {
    # By sys.platform.
    "cuda": {
        "linux": "install the NVIDIA driver (nvidia-smi must work); if it is installed: sudo modprobe nvidia",
        "win32": "install the NVIDIA driver from nvidia.com",
    },
    "rocm": {
        "linux": "load the amdgpu kernel driver (/dev/kfd must exist): sudo modprobe amdgpu; in a container --device "
        "/dev/kfd --device /dev/dri",
        "win32": "install AMD's driver with HIP support",
    },
    "vulkan": {
        "linux": "apt install mesa-vulkan-drivers  # AMD, Intel; of NVIDIA the vendor's driver",
        "win32": "install the GPU vendor's driver",
        "darwin": "brew install molten-vk",
    },
    "opencl": {
        # The loader finds drivers by the files in /etc/OpenCL/vendors, or in Windows' registry.
        "linux": "install the OpenCL driver (ICD) of the GPU's vendor, e.g. apt install intel-opencl-icd; NVIDIA's "
        "comes with its kernel driver; for the processor: apt install pocl-opencl-icd",
        "win32": "install the GPU vendor's graphics driver, which brings OpenCL",
        "darwin": "pip install 'pyopencl[pocl]', for the processor",
    },
}

_GROUPS: Final = "sudo usermod -aG render,video $USER and log in again; in a container"

PERMISSION: Final[Mapping[str, str]] = {
    "cuda": "give this user access to /dev/nvidia*; in a container start it with --gpus all",
    "rocm": f"{_GROUPS} --device /dev/kfd --device /dev/dri and --group-add with the group's number",
    "vulkan": f"{_GROUPS} --device /dev/dri",
    "opencl": f"{_GROUPS} --device /dev/dri",
}
