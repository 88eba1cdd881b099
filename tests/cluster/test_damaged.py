"""Bytes that are lost or change places within a connection: it is made again, and all is whole within 5 s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gpurt.cluster.bus import EventEngine
from gpurt.cluster.endpoints import engine_at
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.publisher import NodePublisher
from gpurt.testing.judged_view import JudgedView, digest
from tests.cluster.nats_server import shared_nats_server
from tests.cluster.support import E1, HOST_A, device, free_port, result, until
from tests.stories.chaos_proxy import ChaosProxy

WHOLE_S = 5.0


@asynccontextmanager
async def through(proxied: str, cluster: str) -> AsyncIterator[tuple[EventEngine, EventEngine, ChaosProxy]]:
    """A hub (or a server), an engine that watches, and one behind the proxy."""
    port = int(shared_nats_server().endpoint.rpartition(":")[2]) if proxied == "nats://" else free_port()
    watching = engine_at(f"{proxied}127.0.0.1:{port}", cluster=cluster, listen=True)
    await watching.start()
    proxy = await ChaosProxy(port, cluster).open()
    node = engine_at(f"{proxied}127.0.0.1:{proxy.port}", cluster=cluster)
    await node.start()
    try:
        yield watching, node, proxy
    finally:
        proxy.heal()
        await node.close()
        await watching.close()
        await proxy.close()


async def damage(proxied: str, fault: str, to: str, times: int) -> None:
    cluster = f"damaged-{fault}-{to}-{times}"
    async with through(proxied, cluster) as (watching, node, proxy):
        view = JudgedView()
        observing = asyncio.create_task(ClusterObserver(watching, view).run())
        publisher = NodePublisher(node, "n1", host=HOST_A, epoch=E1)
        await publisher.start(result(device(memory_available=0)))
        await until(lambda: view.snapshot().nodes.get("n1"))
        for number in range(1, times + 1):
            proxy.set(fault, to=to)
            try:
                for step in range(8):  # something has to pass to be damaged
                    changed = result(device(memory_available=100 * number + step))
                    async with asyncio.timeout(WHOLE_S + 5):
                        await publisher.publish_snapshot(changed)
                    await watching.snapshot("n1", timeout=0.05)
            finally:
                proxy.heal()
            begin = time.monotonic()

            def whole() -> bool:
                record = view.snapshot().nodes["n1"]
                same = digest(record.gpu_devices) == digest(publisher.devices.values())
                return record.state == "healthy" and same

            while not await watching.snapshot("n1", timeout=0.1):  # the other direction
                assert time.monotonic() - begin < 3 * WHOLE_S
            await until(whole, f"the view after {fault} {number}", timeout=3 * WHOLE_S)
            assert time.monotonic() - begin < WHOLE_S
        assert not view.faults
        observing.cancel()
        await asyncio.gather(observing, return_exceptions=True)


@pytest.mark.wide
@pytest.mark.parametrize("proxied", ["tcp/", "nats://"])
async def test_a_view_is_whole_after_lost_bytes(proxied: str) -> None:
    pytest.importorskip("zenoh" if proxied == "tcp/" else "nats")
    await damage(proxied, "drop", "node", 1)


@pytest.mark.wide
@pytest.mark.parametrize("proxied", ["tcp/", "nats://"])
@pytest.mark.parametrize("fault", ["drop", "reorder"])
@pytest.mark.parametrize("to", ["hub", "node", "both"])
async def test_a_view_is_whole_after_damage_again_and_again(to: str, fault: str, proxied: str) -> None:
    pytest.importorskip("zenoh" if proxied == "tcp/" else "nats")
    await damage(proxied, fault, to, 6)
