"""What is said first: whether the registry has it, and when a preview comes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from tests.discovery.records import device
from tests.discovery.test_service import Host, take


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


async def test_the_first_snapshot_knows_that_the_registry_has_it(path: Path) -> None:
    async with Host(device(0)).service(path, interval=3600) as service:
        subscription = service.subscribe()
        (event,) = await take(subscription, 1)
        assert event.snapshot is not None
        assert (event.snapshot.persisted, event.snapshot.registry) == (True, str(path))
        assert path.exists()
        # Whoever comes later begins with the same.
        (event,) = await take(service.subscribe(), 1)
        assert event.snapshot is not None
        assert event.snapshot.persisted


async def test_a_snapshot_that_is_read_before_the_disk_is_done_does_not_claim_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, store = asyncio.Event(), None

    async def slow(result: DiscoveryResult) -> bool:
        await written.wait()
        return await store(result)  # type: ignore[misc]

    async with Host(device(0)).service(path, interval=3600) as service:
        store = service._memory.store
        monkeypatch.setattr(service._memory, "store", slow)
        early, late = service.subscribe(), service.subscribe()
        looking = asyncio.create_task(service.discover_all_devices())
        async with asyncio.timeout(5):
            while not early._events:
                await asyncio.sleep(0)
        (event,) = await take(early, 1)
        assert event.snapshot is not None
        assert not event.snapshot.persisted
        written.set()
        assert (await looking).persisted
        (event,) = await take(late, 1)
        assert event.snapshot is not None
        assert event.snapshot.persisted


async def test_a_registry_that_cannot_be_written_is_not_claimed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with Host(device(0)).service(tmp_path / "file" / "registry.json", interval=3600) as service:
        (event,) = await take(service.subscribe(), 1)
        assert event.snapshot is not None
        assert not event.snapshot.persisted


async def test_no_preview_where_everybody_answers_in_time(path: Path) -> None:
    """The docstring says when: on a machine without a GPU the result itself is there at once."""
    previews: list[Any] = []
    async with GPUDiscoveryService(path, backends=["cpu"]) as service:
        await service.discover_all_devices(on_preview=previews.append)
    assert previews == []
    # With an answer in the registry it is told at once, as what it is.
    async with GPUDiscoveryService(path, backends=["cpu"]) as service:
        await service.discover_all_devices(on_preview=previews.append)
        assert [each.discovery_status for each in previews] == ["stale"]
        await service.discover_all_devices(on_preview=previews.append)
    assert len(previews) == 1
