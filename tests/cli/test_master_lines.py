"""What ``gpurt master`` prints: for people what is new, for programs every change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import pytest

from gpurt.cli.master import _lines  # pyright: ignore[reportPrivateUsage]
from gpurt.cluster.view import MasterView
from tests.cluster.support import device, snapshot, until


@asynccontextmanager
async def printing(view: MasterView, *, as_json: bool = False) -> AsyncGenerator[None]:
    task = asyncio.create_task(_lines(view, as_json=as_json))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def printed(capsys: pytest.CaptureFixture[str], last: str) -> list[str]:
    said = ""

    def there() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return last in said

    await until(there, last)
    return said.splitlines()


def ordinary_start(view: MasterView) -> None:
    """A node is looked through, its free memory moves, it is drained."""
    view.node_up("n1")
    for fields, free in (
        ({"gpu_discovery_timestamp": "1", "discovery_status": "complete"}, 70),
        ({"gpu_discovery_timestamp": "2", "discovery_status": "complete"}, 69),
        ({"gpu_discovery_timestamp": "2", "discovery_status": "complete", "draining": True}, 69),
    ):
        card = device(memory_available=free << 30)
        view.apply_snapshot(snapshot(card, **fields), sole=True)  # type: ignore[arg-type]


async def test_people_are_told_what_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    view = MasterView()
    async with printing(view):
        ordinary_start(view)
        assert await printed(capsys, "draining") == [
            "node joined n1 1 device, discovery complete",
            "device added n1 cuda:0 H100",
            "node updated n1 draining: it takes no new placements",
        ]


async def test_programs_are_told_everything(capsys: pytest.CaptureFixture[str]) -> None:
    view = MasterView()
    async with printing(view, as_json=True):
        ordinary_start(view)
        lines = [json.loads(line) for line in await printed(capsys, "draining:")]
    kinds = ["node_joined", "device_added", "node_updated", "device_updated", "node_updated"]
    assert [line["change"] for line in lines] == kinds
    assert lines[-1]["draining"] is lines[-1]["summary"]["draining"] is True
    assert lines[1]["available"] is False, "as it is now: the node is draining"
