"""What a worker says whose connection is open, and whom nobody hears: its name is not on the roster."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

import pytest

from gpurt.cluster import attention
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.security.enrolment import enrol, revoke
from gpurt.cluster.view import MasterView
from gpurt.cluster.worker import WorkerConfig, run_worker
from tests.cluster.security.conftest import Made
from tests.cluster.support import until

pytestmark = pytest.mark.wide


class Heard:
    """A worker, and whether it is heard, as it is told."""

    def __init__(self, made: Made, name: str, registry: Path) -> None:
        self.told = asyncio.Queue[bool]()
        config = WorkerConfig(
            *(name, "test", made.endpoint),
            tls=made.node(name),
            registry_path=registry / f"{name}.json",
            simulate="h100",
            telemetry_s=None,
            links=False,
        )
        self.task = asyncio.create_task(run_worker(config, on_heard=self.told.put_nowait))

    async def end(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


async def test_who_is_not_on_the_roster_has_not_joined(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(revoke, made.folder, "w2")
    hub = made.engine(made.hub, listen=True)
    await hub.start()
    await asyncio.to_thread(enrol, made.folder, "w3")
    ready, view = asyncio.Event(), MasterView()
    observer = asyncio.create_task(ClusterObserver(hub, view).run(ready.set))
    await ready.wait()
    workers: list[Heard] = []
    try:
        one = Heard(made, "w1", tmp_path)
        workers.append(one)
        async with asyncio.timeout(20):
            assert await one.told.get(), "on the roster, and there is a master"
        monkeypatch.setattr(attention, "FIRST_S", 0.5)
        with caplog.at_level(logging.WARNING, "gpurt.cluster.worker"):
            workers.append(Heard(made, "w2", tmp_path))
            async with asyncio.timeout(20):
                assert not await workers[-1].told.get(), "connected, and nothing more"
        assert "no master has heard node w2" in caplog.text
        assert "not on the hub's roster" in caplog.text
        assert "it was revoked" in caplog.text
        assert set(view.snapshot().nodes) == {"w1"}
        three = Heard(made, "w3", tmp_path)
        workers.append(three)
        async with asyncio.timeout(30):
            while not await three.told.get():
                pass  # until the hub has seen that it is on the roster
        await until(lambda: set(view.snapshot().nodes) == {"w1", "w3"}, "it in the view")
    finally:
        for each in workers:
            await each.end()
        observer.cancel()
        with suppress(asyncio.CancelledError):
            await observer
        await hub.close()
