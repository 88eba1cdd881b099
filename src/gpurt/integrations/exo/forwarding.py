"""Senders for exo's ``InfoGatherer``: each runs until cancelled, and sends only when there is something to say.

A sender is anything with ``async send(item)``; exo's are unbounded, so nothing here counts on being slowed down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib import import_module
from typing import Any, Final, Protocol, TypeVar

from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import GPUError
from gpurt.integrations.exo.engines import backends
from gpurt.integrations.exo.figures import DeviceFigures, changed
from gpurt.integrations.exo.memory import placement_memory
from gpurt.integrations.exo.states import device_states
from gpurt.runtime.lane import off_loop
from gpurt.types import GPUDevice

MEMORY_KEEP_ALIVE_S: Final = 10.0
"""exo's master forgets a node that was silent for 30 s, and counts these messages: three of them fit in."""
RETRY_S: Final = 30.0

Item = TypeVar("Item", contravariant=True)

_log = logging.getLogger("gpurt.integrations.exo")


class Sender(Protocol[Item]):
    """exo's ``Sender``, or any other."""

    async def send(self, item: Item, /) -> None: ...


async def forward_memory(
    sender: Sender[Any],
    *,
    override_bytes: int | None = None,
    service: GPUDiscoveryService | None = None,
    keep_alive: float = MEMORY_KEEP_ALIVE_S,
) -> None:
    """The small step: send exo's ``MemoryUsage`` with what the node's accelerator has in place of the host's memory.

    Sends when the devices change and every ``keep_alive`` seconds. Needs no change of exo's messages, so nodes with and
    without it can be mixed. Cancel it to end it; it returns within 100 ms.

    Args:
        override_bytes: available memory as the user says (exo's ``OVERRIDE_MEMORY_MB``): it is believed.
    """
    usage = import_module("exo.shared.types.profiling").MemoryUsage
    async with aclosing(_states(service, keep_alive)) as states:
        async for devices in states:
            memory = await off_loop("exo-memory", lambda: usage.from_psutil(override_memory=override_bytes))
            if override_bytes is None:
                memory = placement_memory(memory, map(DeviceFigures.of, devices))
            await sender.send(memory)


async def forward_devices(
    sender: Sender[Any], *, service: GPUDiscoveryService | None = None, keep_alive: float | None = None
) -> None:
    """The full step: send ``NodeDevices`` with every device of the node, whenever one of them changes.

    Args:
        keep_alive: seconds after which the same is sent again; None: never, exo's events are kept and replayed.
    """
    from gpurt.integrations.exo.records import NodeDevice, NodeDevices

    told: list[DeviceFigures] | None = None
    async with aclosing(_states(service, keep_alive)) as states:
        async for devices in states:
            now = [DeviceFigures.of(device) for device in devices]
            if keep_alive is not None or changed(now, told):
                await sender.send(NodeDevices(devices=[NodeDevice.of(each) for each in now]))
                told = now


async def forward_backends(sender: Sender[Any], *, service: GPUDiscoveryService | None = None) -> None:
    """Send exo's ``NodeBackends`` once they are known, and again whenever they change.

    Until then a node has none, and nothing is placed on it: a driver that hangs makes it a node without that driver
    after its deadline, and a driver that comes later is seen.
    """
    kind = import_module("exo.utils.info_gatherer.info_gatherer").NodeBackends
    names = import_module("exo.shared.types.backends").Backend
    told: set[str] | None = None
    async with aclosing(_states(service, None)) as states:
        async for devices in states:
            now = backends(devices)
            if now != told:
                await sender.send(kind(backends=[names(name) for name in sorted(now)]))
                told = now


async def _states(
    service: GPUDiscoveryService | None, keep_alive: float | None
) -> AsyncGenerator[tuple[GPUDevice, ...], None]:
    """:func:`device_states`, begun anew after an error: a variable that is wrong must not end exo's worker."""
    while True:
        try:
            async with aclosing(device_states(service, keep_alive=keep_alive)) as states:
                async for devices in states:
                    yield devices
                return
        except GPUError as error:
            _log.error("the devices of this node are unknown, next attempt in %g s: %s", RETRY_S, error)
        await asyncio.sleep(RETRY_S)
