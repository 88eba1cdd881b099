"""A backend over a checking driver whose calls can be held and made to fail."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gpurt import DriverBackend
from gpurt.testing import CheckingDriver, Fault, FaultyDriver
from gpurt.testing.loops import PATIENCE


class Rig:
    """Options are those of ``CheckingDriver``, but for two of the backend's."""

    def __init__(self, *, hang_after: float = PATIENCE, pool_bytes: int | None = None, **options: Any) -> None:
        self._before = set(threading.enumerate())
        self.checking = CheckingDriver(**options)
        self.driver = FaultyDriver(self.checking)
        self.driver.inline_copy_bytes = self.checking.inline_copy_bytes
        self.reported: list[BaseException] = []
        self.backend = DriverBackend(
            self.driver, hang_after=hang_after, pool_bytes=pool_bytes, on_background_error=self.reported.append
        )

    def hold(self, method: Any, **when: Any) -> threading.Event:
        gate = threading.Event()
        self.driver.inject(Fault(method, gate=gate, **({"first": 1} | when)))
        return gate

    def fail(self, method: Any, exc: BaseException, **when: Any) -> None:
        self.driver.inject(Fault(method, raises=lambda: exc, **({"first": 1} | when)))

    async def called(self, method: Any, n: int = 1, **where: Any) -> None:
        await asyncio.to_thread(self.driver.wait_until_called, method, n, PATIENCE, **where)

    def count(self, method: str) -> int:
        return sum(call.method == method for call in self.driver.calls)

    def lanes(self) -> list[str]:
        """Names of gpurt's threads that have begun since this was made."""
        return [each.name for each in set(threading.enumerate()) - self._before if each.name.startswith("gpurt")]

    def assert_clean(self) -> None:
        checking = self.checking
        assert checking.violations == [], checking.violations
        left = {"device": checking.live, "page-locked": checking.host_live}
        assert not any(left.values()), f"blocks of memory that are live: {left}"
        assert checking.opens == checking.closes, f"{checking.opens} opens, {checking.closes} closes"


@asynccontextmanager
async def rig(**options: Any) -> AsyncIterator[Rig]:
    """An open one, which is clean at its end."""
    made = Rig(**options)
    await made.backend.initialize()
    try:
        yield made
    finally:
        made.driver.clear()
        await made.backend.shutdown()
    made.assert_clean()


def stand_still() -> None:
    """Keep the event loop while a lane ends its call: nobody can see the result yet."""
    time.sleep(0.02)
