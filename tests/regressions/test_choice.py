"""Faults of backend selection."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest

from gpurt import factory, plugins
from gpurt.backends.cpu_backend import CPUBackend


class Leaver(CPUBackend):
    async def initialize(self) -> None:
        sys.exit("no licence")


@pytest.fixture
def leaver() -> Iterator[str]:
    plugins.register("leaver", Leaver)
    yield "leaver"
    plugins.unregister("leaver")


def test_a_backend_that_tries_to_end_the_process_is_refused(leaver: str) -> None:
    async def choose() -> str:
        async with await factory.create_backend(candidates=[leaver, "cpu"]) as backend:
            return backend.name

    assert asyncio.run(choose()) == "cpu"
    assert "no licence" in factory.last_reports()[0].message
