"""A registry whose disk does not answer costs what is remembered, never the devices."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest

from gpurt.discovery.pace import Care, Pace
from gpurt.discovery.patience import Patience
from gpurt.discovery.registry import RegistryFile
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.health.monitor import HealthMonitor
from tests.discovery.records import device
from tests.discovery.test_service import Host


async def test_what_does_not_answer_is_given_up_and_not_asked_again() -> None:
    asked: list[asyncio.Event] = []

    async def never() -> str:
        asked.append(asyncio.Event())
        await asked[-1].wait()
        return "late"

    patience = Patience("the disk", seconds=0.01)
    assert await patience.wait(never) is None
    assert await patience.wait(never) is None
    assert len(asked) == 1
    asked[0].set()
    await asyncio.sleep(0.01)

    async def quick() -> str:
        return "answer"

    assert await patience.wait(quick) == "answer"


async def test_an_error_is_the_callers() -> None:
    async def fail() -> None:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        await Patience("the disk").wait(fail)


@pytest.mark.parametrize("call", ["load", "update"])
async def test_devices_are_found_although_the_disk_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    dead = threading.Event()
    monkeypatch.setattr(RegistryFile, call, lambda self, *args: dead.wait(20) and None)
    try:
        host = Host(device(0))
        service = GPUDiscoveryService(tmp_path / "r.json", backends=["cuda", "cpu"], prober=host)
        service._reading._seconds = service._writing._seconds = 0.05
        async with service, asyncio.timeout(5):
            result = await service.discover_all_devices()
            assert [found.device_id for found in result.devices][:1] == ["cuda:0"]
            assert not result.persisted or call == "load"
    finally:
        dead.set()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
@pytest.mark.parametrize("name", ["r.json", "r.json.bak"])
async def test_a_pipe_is_no_registry(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    if name.endswith(".bak"):
        (tmp_path / "r.json").write_text("{")
    service = GPUDiscoveryService(tmp_path / "r.json", backends=["cpu"])
    async with service, asyncio.timeout(10):
        assert (await service.discover_all_devices()).devices


async def test_another_backends_entry_that_json_cannot_say_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    async with GPUDiscoveryService(path, backends=["cpu"]) as service:
        await service.discover_all_devices()
    document = json.loads(path.read_text())
    document["reports"].append(document["reports"][0] | {"name": "zzz", "elapsed_ms": float("nan")})
    path.write_text(json.dumps(document))
    async with GPUDiscoveryService(path, backends=["cpu"]) as service:
        assert (await service.discover_all_devices()).devices


def test_remembered_health_without_sense_costs_its_entry() -> None:
    monitor = HealthMonitor()
    bad = {"state": "lost", "reason": "x", "xids": [float("inf")]}
    monitor.restore({"devices": {"a": bad, "b": {"state": "lost", "reason": "y", "xids": [79]}}})
    assert monitor.verdict("a").usable
    assert not monitor.verdict("b").usable


def test_what_a_look_up_that_was_given_up_was_wanted_for_is_wanted_still() -> None:
    pace = Pace(lambda: 0.0)
    pace.begin(Care.ASK)
    pace.ended(complete=True)
    pace.want(Care.VERIFY)
    pace.begin(Care.VERIFY)
    assert pace.care is Care.POLL
    pace.ended(complete=False)
    assert pace.care is Care.VERIFY
    assert pace.seconds_left(100.0) == 0.0
    pace.begin(Care.VERIFY)
    pace.want(Care.ASK)
    pace.ended(complete=True)
    assert pace.care is Care.ASK


async def test_a_reader_with_a_short_timeout_sees_the_end_of_a_long_look_up(tmp_path: Path) -> None:
    host = Host(device(0))
    async with GPUDiscoveryService(tmp_path / "r.json", backends=["cuda"], prober=host) as service:
        subscription = service.subscribe()
        assert (await anext(subscription)).type == "snapshot"
        host.shows["cuda"] = (device(0), device(1))
        host.gate = asyncio.Event()
        service.look_soon()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await anext(subscription)
        assert host.probes.count("cuda") == 2  # one look-up, not one for each reader that left
        host.gate.set()
        async with asyncio.timeout(5):
            event = await anext(subscription)
        assert (event.type, event.device.device_id if event.device else None) == ("added", "cuda:1")
