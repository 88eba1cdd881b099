"""Which computer this is, as far as MLX cares: why it cannot use a GPU there, and what GPU it finds if it can."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.platforms import current_platform
from gpurt.sources import host
from gpurt.sources.apple import AppleGpu, AppleInventory, read_apple
from gpurt.sources.apple_query import Run, query_apple
from gpurt.sources.table import Absence, load_package
from gpurt.types import DeviceIdentity, DeviceKind, GPUDevice

BACKEND: Final = "metal"
DEVICE_ID: Final = f"{BACKEND}:0"
"""MLX knows one device of each kind."""

OLDEST_MACOS: Final = 14
"""What MLX's wheels for macOS are built for."""

_INSTALL: Final = "pip install 'gpurt[metal]'"

OLDEST_MLX: Final = "0.32"
"""The first with streams that outlive their thread; from 0.31.2 on every other one is bound to its."""


@dataclass(frozen=True, slots=True)
class Computer:
    """The system, and the Python that runs on it."""

    platform: str
    """As :func:`gpurt.platforms.current_platform` says."""
    machine: str
    """What the interpreter is built for: ``arm64``, ``x86_64``."""
    translated: bool = False
    """Rosetta translates this process: whatever ``machine`` says, the processor is Apple's."""
    os_version: str | None = None

    @classmethod
    def this(cls) -> Computer:
        return cls(
            current_platform(),
            platform.machine(),
            # An integer, of which the reader gives the bytes.
            host.darwin_sysctl("sysctl.proc_translated") == "\x01",
            host.darwin_sysctl("kern.osproductversion"),
        )


def check_computer(computer: Computer) -> None:
    """Asks nobody.

    Raises:
        BackendUnavailable: MLX has no GPU to offer on a computer like this.
    """
    if computer.platform != "darwin":
        text = f"Metal through MLX exists on macOS alone, not on {computer.platform}"
        raise _unavailable(text, ReasonCode.WRONG_PLATFORM)
    if computer.translated:
        raise _unavailable(
            f"this Python is built for {computer.machine} and runs under Rosetta; MLX exists for arm64 alone",
            ReasonCode.NO_LIBRARY,
            hint="make the environment with a Python for arm64 (`python3 -c 'import platform; print("
            f"platform.machine())'` must say arm64), then {_INSTALL}  # mlx",
        )
    if computer.machine != "arm64":
        raise _unavailable(
            f"MLX drives Apple's own GPUs alone, and this Mac's processor is {computer.machine}",
            ReasonCode.UNSUPPORTED_DEVICE,
            hint="use backend cpu: no software helps here",
        )
    major = re.match(r"\d+", computer.os_version or "")
    if major is not None and int(major[0]) < OLDEST_MACOS:
        raise _unavailable(
            f"MLX needs macOS {OLDEST_MACOS} or newer; this is macOS {computer.os_version}",
            ReasonCode.DRIVER_MISMATCH,
            hint=f"update macOS to {OLDEST_MACOS} or newer, then {_INSTALL}  # mlx",
        )


def load_mlx(computer: Computer) -> Any:
    """The module ``mlx.core``. Blocking, 30 ms.

    Raises:
        BackendUnavailable: it is not installed, does not load, or is too old.
    """
    package = "mlx[cpu]" if computer.platform == "linux" else "mlx"
    mx = load_package("mlx.core")
    if isinstance(mx, Absence):
        raise _unavailable(mx.message, mx.reason, install_hint=f"{_INSTALL}  # {package}")
    if not hasattr(mx, "new_thread_unsafe_stream"):
        text = f"MLX {mlx_version(mx)} is too old: gpurt needs {OLDEST_MLX} or newer"
        raise _unavailable(text, ReasonCode.NO_LIBRARY, install_hint=f"pip install --upgrade '{package}>={OLDEST_MLX}'")
    return mx


def mlx_version(mx: Any) -> str:
    return str(getattr(mx, "__version__", "of unknown version"))


def inspect_gpu(mx: Any, run: Run) -> tuple[AppleInventory, AppleGpu]:
    """What macOS and MLX say of the one GPU. Blocking, up to a second.

    Raises:
        BackendUnavailable: there is none that MLX can use.
    """
    inventory = read_apple(query_apple(run, mx))
    if inventory.metal is not None:
        if inventory.metal.reason is ReasonCode.NO_DEVICE and not _has_metal_kernels():
            raise _unavailable(
                f"MLX {mlx_version(mx)} is installed without its Metal part (the package mlx-metal)",
                ReasonCode.NO_LIBRARY,
                install_hint="pip install --force-reinstall mlx mlx-metal",
            )
        raise _unavailable(inventory.metal.message, inventory.metal.reason)
    own = [gpu for gpu in inventory.gpus if gpu.vendor == "apple"]
    if len(own) != 1:
        text = f"MLX knows one GPU, and this computer shows {len(own)} of Apple's"
        raise _unavailable(text, ReasonCode.NO_DEVICE if not own else ReasonCode.UNSUPPORTED_DEVICE)
    return inventory, own[0]


def gpu_record(mx: Any, inventory: AppleInventory, gpu: AppleGpu, root: Path, free_bytes: int) -> GPUDevice:
    """``free_bytes``: what could be allocated at this moment."""
    pool = f"host:{host.host_fingerprint(root)}"
    system = "macOS" if inventory.os_version is None else f"macOS {inventory.os_version}"
    return GPUDevice(
        device_id=DEVICE_ID,
        name=gpu.name or "Apple GPU",
        vendor="apple",
        backend=BACKEND,
        compute_capability=gpu.architecture,
        memory_bytes=gpu.memory_total_bytes,
        memory_available=free_bytes,
        compute_units=gpu.cores,
        tensor_core_count=None,
        max_threads_per_block=None,
        clock_rate_mhz=None,
        bandwidth_gbps=None,
        support_level="experimental",  # not yet run on a Mac
        driver_version=f"MLX {mlx_version(mx)}, {system}",
        backend_name="mlx",
        # Part of the processor: the computer's name is its own.
        identity=DeviceIdentity(key=f"{pool}/gpu"),
        kind=gpu.kind,
        memory_usable_bytes=gpu.working_set_bytes,
        memory_usable_source=gpu.working_set_source,
        memory_pool_id=pool,
        unified_memory=True,
        backends=(BACKEND,),
    )


def cpu_record(mx: Any, root: Path) -> GPUDevice:
    """MLX on the host's processor, which stands in for a GPU."""
    memory, cpu = host.memory_budget(root), host.cpu_info(root)
    pool = f"host:{host.host_fingerprint(root)}"
    return GPUDevice(
        device_id=DEVICE_ID,
        name=f"{cpu.name} (MLX without a GPU)",
        vendor=cpu.vendor,
        backend=BACKEND,
        compute_capability=cpu.instruction_set,
        memory_bytes=memory.total_bytes,
        memory_available=memory.usable_bytes,
        compute_units=host.cpu_count(root),
        tensor_core_count=0,
        max_threads_per_block=None,
        clock_rate_mhz=None,
        bandwidth_gbps=None,
        support_level="experimental",
        driver_version=f"MLX {mlx_version(mx)}",
        backend_name="mlx",
        identity=DeviceIdentity(key=f"{pool}/mlx-cpu"),
        kind=DeviceKind.SOFTWARE,
        memory_usable_bytes=memory.usable_bytes,
        memory_usable_source=memory.source,
        memory_pool_id=pool,
        unified_memory=True,
        backends=(BACKEND,),
    )


def _has_metal_kernels() -> bool:
    try:
        importlib.metadata.version("mlx-metal")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _unavailable(
    text: str, reason: ReasonCode, *, install_hint: str | None = None, hint: str | None = None
) -> BackendUnavailable:
    return BackendUnavailable(text, reason=reason, backend=BACKEND, install_hint=install_hint, hint=hint)
