"""Hostile exceptions: whatever a library can raise, at every driver method, and whatever a callback can raise.

Each leaves as an error of :mod:`gpurt.errors` with the original in its chain of causes, or is reported as a background
error exactly once. Afterwards the backend works as before.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from gpurt.backend import GPUBackend
from gpurt.errors import BackendClosed, DeviceUnresponsive, GPUError
from gpurt.testing.kit.base import ConformanceBase, assert_nothing_live, filled, keeps_freed, shutdown_quietly
from gpurt.testing.kit.cancellation import result_ready
from gpurt.testing.kit.probe import DriverProbe
from gpurt.testing.loops import PATIENCE, until
from gpurt.types import Capabilities, MemoryHandle

if TYPE_CHECKING:
    from gpurt.runtime.backend import DriverBackend


class Panic(BaseException):
    """Raised by libraries in other languages: PyO3's ``PanicException`` is a ``BaseException``, too."""


class Unprintable(Exception):
    """An exception that has no text."""

    def __str__(self) -> str:
        raise ValueError("this exception cannot be printed")

    __repr__ = __str__


class Unpicklable(Exception):
    """An exception that holds something that cannot be copied to another process."""

    def __init__(self) -> None:
        super().__init__("a handle of the library", lambda: None)

    def __reduce__(self) -> Any:
        raise TypeError("this exception cannot be pickled")


EXCEPTIONS: Final[dict[str, Callable[[], BaseException]]] = {
    "panic": Panic,
    "unprintable": Unprintable,
    "unpicklable": Unpicklable,
    "keyboard_interrupt": KeyboardInterrupt,
    "system_exit": SystemExit,
    "generator_exit": GeneratorExit,
    "stop_iteration": StopIteration,
    "cancelled_error": asyncio.CancelledError,
    "memory_error": MemoryError,
}


def causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was caused by, down to the first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


async def raised(call: Awaitable[Any]) -> BaseException | None:
    """Whatever ``call`` raises, also what would end the event loop and the run of the tests with it."""
    try:
        await call
    except BaseException as exc:
        return exc
    return None


def assert_typed(error: BaseException, original: BaseException) -> None:
    """``error`` is one of ours, names its cause, and can be printed and sent to another process."""
    assert isinstance(error, GPUError), f"{type(original).__name__} left as {type(error).__name__}"
    assert any(each is original for each in causes(error)), f"{type(original).__name__} is not among the causes"
    assert str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


Scene = tuple["DriverBackend", MemoryHandle, MemoryHandle]
"""A backend and two allocations of 64 bytes on one device."""


@dataclass(frozen=True)
class Row:
    """A driver method and a public call that reaches it."""

    run: Callable[[Scene], Awaitable[Any]]
    available: Callable[[Capabilities], bool] = lambda _: True
    attempts: int = 1
    """How often the method is called before the failure is final."""


async def _load(scene: Scene) -> None:
    backend, handle, _ = scene
    await backend.load_file(__file__, handle, size_bytes=64)  # any file that is there: the call may never be resumed


async def _view(scene: Scene) -> None:
    (await scene[0].view(scene[1])).close()


async def _host_buffer(scene: Scene) -> None:
    await scene[0].trim(scene[1].device_id)  # a kept block would serve it
    (await scene[0].host_buffer(scene[1].device_id, 64)).close()


async def _allocate(scene: Scene) -> None:
    await scene[0].trim(scene[1].device_id)
    await scene[0].deallocate(await scene[0].allocate(scene[1].device_id, 1 << 16))


async def _free(scene: Scene) -> None:
    backend, handle, _ = scene
    await backend.deallocate(await backend.allocate(handle.device_id, 1 << 16))
    if keeps_freed(backend, handle.device_id):
        await backend.trim(handle.device_id)


async def _host_free(scene: Scene) -> None:
    await _host_buffer(scene)
    await scene[0].trim(scene[1].device_id)


ROWS: Final[dict[str, Row]] = {
    "alloc": Row(_allocate, attempts=8),
    "free": Row(_free),
    "write": Row(lambda s: s[0].copy_to_device(b"x" * 64, s[1])),
    "read": Row(lambda s: s[0].copy_from_device(s[1])),
    "copy": Row(lambda s: s[0].copy_device_to_device(s[1], s[2], 64)),
    "sync": Row(lambda s: s[0].synchronize(s[1].device_id)),
    "telemetry": Row(lambda s: s[0].get_device_temperature(s[1].device_id)),
    "trim": Row(lambda s: s[0].trim(s[1].device_id)),
    "host_view": Row(_view, lambda c: c.host_visible),
    "pointer": Row(_view, lambda c: c.cuda_pointers and not c.host_visible),
    "load": Row(_load, lambda c: c.loads_files),
    "host_alloc": Row(_host_buffer, lambda c: c.pins_memory, attempts=3),
    "host_free": Row(_host_free, lambda c: c.pins_memory),
}
"""Calls whose caller waits. Opening and closing, attaching and detaching have tests of their own."""

CANCELLED: Final = ("write", "read", "copy", "sync", "telemetry", "alloc")
"""Methods whose failure is tried with a caller that has gone."""


async def round_trip(backend: GPUBackend, device_id: str) -> None:
    """The backend works."""
    async with filled(backend, device_id, b"afterwards") as handle:
        assert await backend.copy_from_device(handle) == b"afterwards"
        await backend.synchronize(device_id)


class HostileTests(ConformanceBase):
    @asynccontextmanager
    async def watched(
        self, backend: GPUBackend, shell: DriverBackend, **options: Any
    ) -> AsyncGenerator[tuple[DriverBackend, list[BaseException]], None]:
        """The same driver under another backend, and what is reported in the background."""
        from gpurt import DriverBackend

        await backend.shutdown()
        reported: list[BaseException] = []
        watched = DriverBackend(shell.driver, on_background_error=reported.append, **options)
        await watched.initialize()
        try:
            yield watched, reported
        finally:
            await shutdown_quietly(watched)

    @pytest.mark.parametrize("method", list(ROWS))
    async def test_hostile_exception_is_typed_and_passes(
        self,
        backend: GPUBackend,
        shell: DriverBackend,
        capabilities: Capabilities,
        device_id: str,
        hold: DriverProbe,
        method: str,
    ) -> None:
        row = ROWS[method]
        if not row.available(capabilities):
            pytest.skip(f"this library has no {method}")
        async with self.watched(backend, shell) as (watched, reported):
            scene = (watched, await watched.allocate(device_id, 64), await watched.allocate(device_id, 64))
            for make in EXCEPTIONS.values():
                await row.run(scene)
                originals = [make() for _ in range(row.attempts)]
                hold.fail(method, *originals)
                async with asyncio.timeout(PATIENCE):
                    error = await raised(row.run(scene))
                if error is None and method == "host_free":  # nobody in particular waits for it
                    error = reported.pop()
                    assert any(each in originals for each in causes(error))
                else:
                    assert error is not None
                    found = [each for each in causes(error) if each in originals]
                    assert_typed(error, (found or originals)[0])
                    del found
                hold.forgive()
                del error
                await round_trip(watched, device_id)
            for handle in scene[1:]:
                await watched.deallocate(handle)
            await assert_nothing_live(watched, hold)
            assert reported == []

    async def test_hostile_attach_fails_one_call(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        for make in EXCEPTIONS.values():
            async with self.watched(backend, shell) as (watched, reported):
                original = make()
                hold.fail("attach", original)
                error = await raised(watched.allocate(device_id, 64))
                assert error is not None
                assert_typed(error, original)
                await round_trip(watched, device_id)
                await assert_nothing_live(watched, hold)
                assert reported == []

    async def test_hostile_open_is_typed_and_may_be_tried_again(
        self, backend: GPUBackend, device_id: str, hold: DriverProbe
    ) -> None:
        await backend.shutdown()
        for make in EXCEPTIONS.values():
            original = make()
            hold.fail("open", original)
            async with asyncio.timeout(PATIENCE):
                error = await raised(backend.initialize())
            assert error is not None
            assert_typed(error, original)
            await backend.initialize()
            await round_trip(backend, device_id)
            await backend.shutdown()

    @pytest.mark.parametrize("method", ["close", "detach"])
    async def test_hostile_end_is_reported_once_and_final(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe, method: str
    ) -> None:
        for make in EXCEPTIONS.values():
            original = make()
            async with self.watched(backend, shell) as (watched, reported):
                await round_trip(watched, device_id)
                closed = hold.counts["close"]
                hold.fail(method, original)
                async with asyncio.timeout(PATIENCE):
                    await watched.shutdown()
                assert hold.counts["close"] == closed + 1
                assert sum(original in causes(each) for each in reported) == 1
                with pytest.raises(BackendClosed):
                    await watched.synchronize(device_id)
                await watched.initialize()
                await round_trip(watched, device_id)

    @pytest.mark.parametrize("method", CANCELLED)
    async def test_failure_without_a_caller_is_reported_once(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe, method: str
    ) -> None:
        """The caller was cancelled while the call was in the driver, or when its failure was there already."""
        async with self.watched(backend, shell) as (watched, reported):
            scene = (watched, await watched.allocate(device_id, 64), await watched.allocate(device_id, 64))
            for make in EXCEPTIONS.values():
                for moment in ("in_driver", "result_ready"):
                    originals = [make() for _ in range(ROWS[method].attempts)]
                    hold.fail(method, *originals)
                    gate = hold.hold(method)
                    call: asyncio.Task[Any] = asyncio.ensure_future(ROWS[method].run(scene))
                    await gate.entered()
                    if moment == "in_driver":
                        call.cancel()
                        await asyncio.wait({call})
                        gate.release()
                    else:
                        await result_ready(gate)
                        call.cancel()
                        await asyncio.wait({call})
                    assert call.cancelled()
                    await until(lambda: bool(reported), f"the failure of {method} was reported")
                    hold.forgive()
                    await round_trip(watched, device_id)
                    assert len(reported) == 1
                    assert any(each in originals for each in causes(reported.pop()))
            for handle in scene[1:]:
                await watched.deallocate(handle)
            await assert_nothing_live(watched, hold)

    async def test_hostile_undo_leaves_the_lane_alive(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        """The memory of a cancelled allocation is given back on its lane, whatever that raises."""
        async with self.watched(backend, shell, pool_bytes=0, hang_after=PATIENCE) as (watched, reported):
            for make in EXCEPTIONS.values():
                gate, original = hold.hold("alloc"), make()
                hold.fail("free", original)
                call = asyncio.create_task(watched.allocate(device_id, 64))
                await gate.entered()
                call.cancel()
                await asyncio.wait({call})
                gate.release()
                await until(lambda: bool(reported), "the failure of the undo was reported")
                assert original in causes(reported.pop())
                async with asyncio.timeout(PATIENCE / 2):
                    await round_trip(watched, device_id)
                assert reported == []
            assert watched.ledger.usage(device_id).reserved_bytes == 0

    @pytest.mark.parametrize("name", list(EXCEPTIONS))
    async def test_hostile_report_leaves_the_lane_alive(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe, name: str
    ) -> None:
        """``on_background_error`` raises, on a lane and on the event loop."""
        from gpurt import DriverBackend

        await backend.shutdown()
        reported: list[BaseException] = []

        def report(exc: BaseException) -> None:
            reported.append(exc)
            raise EXCEPTIONS[name]()

        watched = DriverBackend(shell.driver, on_background_error=report, hang_after=PATIENCE)
        async with watched:
            handle = await watched.allocate(device_id, 64)
            gate, original = hold.hold("write"), OSError("after its caller had gone")
            hold.fail("write", original)
            call = asyncio.create_task(watched.copy_to_device(bytes(64), handle))
            await gate.entered()
            call.cancel()
            await asyncio.wait({call})
            gate.release()
            await until(lambda: bool(reported), "the failure was reported")
            async with asyncio.timeout(PATIENCE / 2):
                await watched.copy_to_device(bytes(64), handle)
                await round_trip(watched, device_id)
            assert [list(causes(each))[-1] for each in reported] == [original]
            await watched.deallocate(handle)

    async def test_hostile_state_listener_stops_nothing(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        async with self.watched(backend, shell, hang_after=0.2) as (watched, reported):
            heard: list[str] = []
            raised: list[BaseException] = []

            def hostile(device: Any) -> None:
                raised.append([Panic, Unprintable, GeneratorExit, asyncio.CancelledError][len(raised) % 4]())
                raise raised[-1]

            watched.state_listeners.append(hostile)
            watched.state_listeners.append(lambda device: heard.append(device.state.value))
            for _ in range(2):
                gate = hold.hold("sync")
                with pytest.raises(DeviceUnresponsive):
                    await watched.synchronize(device_id)
                gate.release()
                await until(lambda: watched.devices[0].state == "healthy", "the device came back")
                await until(lambda: len(heard) % 2 == 0, "everybody was told that it came back")
                await round_trip(watched, device_id)
            assert heard == ["unresponsive", "healthy"] * 2
            for each in raised:
                assert sum(each in causes(error) for error in reported) == 1
