"""A node says that it has joined when somebody hears it, and what may be wrong when nobody does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gpurt.cluster import attention
from gpurt.cluster.attention import Attention
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.master import MasterConfig, run_master
from gpurt.cluster.observer import RESYNC_INTERVAL_S
from gpurt.cluster.view import MasterView
from gpurt.cluster.worker import WorkerConfig, run_worker


@asynccontextmanager
async def running(work: Any) -> AsyncGenerator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def mastered(bus: InProcessBus) -> AsyncGenerator[None]:
    ready = asyncio.Event()
    config = MasterConfig("test")
    async with running(run_master(config, MasterView(), on_ready=lambda _: ready.set(), engine=InProcessEngine(bus))):
        await ready.wait()
        yield


async def test_each_change_is_told_once_and_questions_are_no_change() -> None:
    node, told = Attention(), asyncio.Queue[tuple[bool, float]]()
    node.first_s, node.silent_s = 3600.0, 3600.0
    node.asked()
    async with running(node.follow(lambda *said: told.put_nowait(said))):
        assert await told.get() == (True, 0.0), "also of a question before anybody followed"
        for _ in range(3):
            node.asked()
            await asyncio.sleep(0)
        assert told.empty()


async def test_without_a_question_nobody_hears_until_one_comes() -> None:
    node, told = Attention(), asyncio.Queue[tuple[bool, float]]()
    node.first_s, node.silent_s = 0.01, 0.02
    async with running(node.follow(lambda *said: told.put_nowait(said))):
        assert await told.get() == (False, 0.01)
        node.asked()
        assert await told.get() == (True, 0.0)
        assert await told.get() == (False, 0.02), "later ones may take longer"
        node.asked()
        assert await told.get() == (True, 0.0)


def test_a_master_asks_more_often_than_a_node_is_patient() -> None:
    assert attention.SILENT_S > 2 * 1.1 * RESYNC_INTERVAL_S


async def test_a_worker_is_heard_once_a_master_runs_and_says_so_when_none_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "FIRST_S", 0.01)
    bus, heard = InProcessBus("test"), asyncio.Queue[bool]()
    config = WorkerConfig("w1", "test", registry_path=tmp_path / "r.json", simulate="h100", telemetry_s=None)
    with caplog.at_level(logging.WARNING, "gpurt.cluster.worker"):
        async with running(run_worker(config, on_heard=heard.put_nowait, engine=InProcessEngine(bus))):
            assert not await heard.get()
            (record,) = caplog.records
            assert "no master has heard node w1 at tcp/127.0.0.1:7447 for 0 s" in record.getMessage()
            assert "no master of cluster test runs" in record.getMessage()
            assert "roster" not in record.getMessage(), "which is of certificates"
            async with mastered(bus):
                assert await heard.get()
            assert len(caplog.records) == 1
