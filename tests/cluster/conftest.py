"""The buses that the conformance suite runs over."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from gpurt.cluster.bus import EventEngine, EventReceived, EventRefused
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.keys import EVENTS, node_key
from gpurt.cluster.nats_engine import NatsEngine
from gpurt.cluster.nats_settings import NatsSettings, subject
from gpurt.cluster.zenoh_engine import ZenohEngine
from gpurt.cluster.zenoh_settings import ZenohSettings, load_zenoh
from tests.cluster.nats_server import shared_nats_server
from tests.cluster.support import free_port

SMALL = 64
"""Items that a subscriber of the small bus may be behind."""


class Bus(Protocol):
    """One bus, and as many participants as a test wants."""

    async def node(self) -> EventEngine: ...
    async def observer(self) -> EventEngine: ...
    async def inject(self, node: str, payload: bytes) -> None:
        """Put bytes on the bus that no engine would send."""

    def dropped(self) -> int: ...
    async def aclose(self) -> None: ...


class InProcess:
    def __init__(self, small: bool) -> None:
        self.bus = InProcessBus("test", buffer_items=SMALL if small else 1024)
        self.engines: list[InProcessEngine] = []

    async def node(self) -> EventEngine:
        engine = InProcessEngine(self.bus)
        await engine.start()
        self.engines.append(engine)
        return engine

    observer = node

    async def inject(self, node: str, payload: bytes) -> None:
        too_large = len(payload) > 256 << 10
        self.bus.deliver(EventRefused(node, len(payload)) if too_large else EventReceived(node, payload))

    def dropped(self) -> int:
        return sum(subscription.dropped for subscription in self.bus.subscriptions)

    async def aclose(self) -> None:
        for engine in self.engines:
            await engine.close()


class Zenoh:
    """The hub is the observer, as in a master."""

    def __init__(self, small: bool) -> None:
        settings = ZenohSettings(inbox_events=SMALL) if small else ZenohSettings()
        self.endpoint = f"tcp/127.0.0.1:{free_port()}"
        self.hub = ZenohEngine(cluster="test", endpoint=self.endpoint, listen=True, settings=settings)
        self.engines = [self.hub]

    async def node(self) -> EventEngine:
        await self.hub.start()
        engine = ZenohEngine(cluster="test", endpoint=self.endpoint)
        await engine.start()
        self.engines.append(engine)
        return engine

    async def observer(self) -> EventEngine:
        await self.hub.start()
        return self.hub

    async def inject(self, node: str, payload: bytes) -> None:
        session: Any = self.engines[-1]._session  # pyright: ignore[reportPrivateUsage]
        # Not to be dropped for want of room in a queue, which is zenoh's default.
        session.put(node_key("test", node, EVENTS), payload, congestion_control=load_zenoh().CongestionControl.BLOCK)

    def dropped(self) -> int:
        return sum(s.dropped for s in self.hub._subscriptions)  # pyright: ignore[reportPrivateUsage]

    async def aclose(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))


class Nats:
    """One server for all tests, and a cluster of its own for each."""

    clusters = itertools.count()

    def __init__(self, small: bool) -> None:
        self.endpoint = shared_nats_server().endpoint
        self.cluster = f"test{next(self.clusters)}"
        self.settings = NatsSettings(inbox_events=SMALL) if small else NatsSettings()
        self.engines: list[NatsEngine] = []

    async def node(self) -> EventEngine:
        engine = NatsEngine(cluster=self.cluster, endpoint=self.endpoint, settings=self.settings)
        await engine.start()
        self.engines.append(engine)
        return engine

    observer = node

    async def inject(self, node: str, payload: bytes) -> None:
        client: Any = self.engines[-1]._client  # pyright: ignore[reportPrivateUsage]
        await client.publish(subject(self.cluster, node, EVENTS), payload)

    def dropped(self) -> int:
        return sum(s.dropped for e in self.engines for s in e._subscriptions)  # pyright: ignore[reportPrivateUsage]

    async def aclose(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))


BUSES = {"inprocess": InProcess, "zenoh": Zenoh, "nats": Nats}


@pytest.fixture(params=BUSES)
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    made = BUSES[request.param](False)
    yield made
    await made.aclose()


@pytest.fixture(params=BUSES)
async def small_bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    made = BUSES[request.param](True)
    yield made
    await made.aclose()
