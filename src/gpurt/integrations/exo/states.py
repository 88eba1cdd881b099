"""The devices of this node, told whenever they change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.integrations.exo.sharing import shared
from gpurt.types import GPUDevice

TOGETHER_S: Final = 0.05
"""What happens within so many seconds is told at once: eight cards of one host are lost together."""


async def device_states(
    service: GPUDiscoveryService | None = None, *, keep_alive: float | None = None
) -> AsyncGenerator[tuple[GPUDevice, ...], None]:
    """All devices of this node, first when they have been looked up, then whenever something has changed.

    Changes of free memory below 64 MiB and 1 % are none, and larger ones are told every ten seconds at most; a device
    that is lost, added or no longer well at once. Ends when the service is shut down. When cancelled it returns at
    once and leaves nothing running but the end of its service.

    Args:
        service: the caller's, which stays open; None: one for the whole process, shut down after its last user.
        keep_alive: seconds after which the same is told again.

    Raises:
        GPUError: an environment variable has a value that is not allowed. BackendClosed: the service was shut down
            during the first look-up.
    """
    found = await shared.acquire() if service is None else service
    try:
        # What the registry remembers is fit for showing, not for placing on: the first word is of a look-up.
        await found.discover_all_devices(refresh=False, patient=True)
        subscription = found.subscribe()
        devices: dict[str, GPUDevice] = {}
        while True:
            wait = keep_alive
            try:
                while True:
                    async with asyncio.timeout(wait):
                        _fold(devices, await anext(subscription))
                    wait = TOGETHER_S
            except TimeoutError:
                pass
            except StopAsyncIteration:
                return
            yield tuple(devices.values())
    finally:
        if service is None:
            shared.release(found)


def _fold(devices: dict[str, GPUDevice], event: DeviceEvent) -> None:
    """``devices`` after ``event``."""
    if event.snapshot is not None:
        devices.clear()
        devices.update((device.stable_id, device) for device in event.snapshot.devices)
    elif event.device is None:
        return
    elif event.type is EventType.REMOVED:
        devices.pop(event.device.stable_id, None)
    else:
        devices[event.device.stable_id] = event.device
