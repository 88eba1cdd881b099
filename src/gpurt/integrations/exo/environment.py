"""The environment of a runner that is to see exactly some of its node's devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from gpurt.discovery.registry import RegistryFile
from gpurt.errors import DeviceNotFound
from gpurt.types import GPUDevice
from gpurt.visibility import env_for as full_environment


def env_for(
    device_ids: Sequence[str],
    devices: Iterable[GPUDevice] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    registry_path: str | os.PathLike[str] | None = None,
) -> dict[str, str]:
    """The visibility variables (``CUDA_VISIBLE_DEVICES``, ``ROCR_VISIBLE_DEVICES``, …) to set before a library loads.

    ::

        os.environ.update(env_for(shard.devices))     # first thing in a runner, before MLX is imported

    Args:
        device_ids: today's names or stable ids, in the order in which the runner is to count them.
        devices: all devices of the machine; None: those of the registry, which the node's discovery keeps. That reads
            a file: for a runner, not for an event loop.
        environ: what is changed; None: this process's own.

    Raises:
        DeviceNotFound: a device is not there or hidden, or nothing was ever discovered here.
        ValueError, TypeError, Unsupported: as :func:`gpurt.visibility.env_for`.
    """
    environ = os.environ if environ is None else environ
    if devices is None:
        registry = RegistryFile(registry_path)
        document = registry.load(put_aside=False)
        if document is None:
            raise DeviceNotFound(
                f"the registry {registry.path} knows no devices",
                device_id=device_ids[0] if device_ids else None,
                operation="env_for",
                hint="run a discovery on this machine first, or give devices=",
            )
        devices = document.devices
    after = full_environment(device_ids, devices, environ)
    return {name: value for name, value in after.items() if environ.get(name) != value}
