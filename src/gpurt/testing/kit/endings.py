"""Endings: a backend is closed, or its event loop ends, at every stage of every call, and is opened again.

A library is never opened before its last ``close`` has returned, nothing of an opening is live when it is closed, and
what ends late is undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from gpurt.backend import GPUBackend
from gpurt.errors import BackendClosed, BackendUnavailable, GPUError, HandleInUse, OutOfRange, ReasonCode
from gpurt.testing.kit.base import ConformanceBase, assert_nothing_live, shutdown_quietly
from gpurt.testing.kit.cancellation import result_ready
from gpurt.testing.kit.hostile import ROWS, round_trip
from gpurt.testing.kit.kernels import BLOCK, operands, scalars
from gpurt.testing.kit.probe import DriverProbe
from gpurt.testing.loops import PATIENCE, loop_factories, turns, until
from gpurt.types import Capabilities, Kernel, MemoryHandle

if TYPE_CHECKING:
    from gpurt.runtime.backend import DriverBackend

HANG_AFTER: Final = 0.2
"""Seconds for which ``initialize`` waits for an opening that has not ended."""

STAGES: Final = ("queued", "in_driver", "result_ready")


@dataclass
class Scene:
    """A backend and two allocations of 64 bytes on one device."""

    backend: DriverBackend
    handle: MemoryHandle
    other: MemoryHandle


Run = Callable[[Scene], Awaitable[Any]]

CALLS: Final[dict[str, tuple[Run, Callable[[Capabilities], bool]]]] = {
    "alloc": (lambda s: s.backend.allocate(s.handle.device_id, 1 << 16), lambda _: True),
    "free": (lambda s: s.backend.deallocate(s.other), lambda c: c.pool_bytes == 0),
    **{
        method: (lambda s, method=method: ROWS[method].run((s.backend, s.handle, s.other)), ROWS[method].available)
        for method in ("write", "read", "copy", "sync", "telemetry", "trim", "host_view", "load", "host_alloc")
    },
}
"""Driver method to a call that is inside it when an opening ends, and where there is such a method."""

calls = pytest.mark.parametrize("method", list(CALLS))


@contextlib.contextmanager
def quietly() -> Generator[None]:
    """Without ``ResourceWarning``: these tests leave things behind on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def assert_alternate(hold: DriverProbe) -> None:
    """Between two openings the library was closed, and each was over before the next began."""
    steps = [(method, side) for method, side in hold.log if method in ("open", "close")]
    # The probe was made after the first opening.
    cycle = [("close", "enter"), ("close", "exit"), ("open", "enter"), ("open", "exit")]
    assert steps == [cycle[position % 4] for position in range(len(steps))], steps


class EndingTests(ConformanceBase):
    @asynccontextmanager
    async def impatient_scene(self, backend: GPUBackend, shell: DriverBackend) -> AsyncGenerator[Scene, None]:
        """The same driver, without a pool, under a backend that waits for its end shortly."""
        from gpurt import DriverBackend

        await backend.shutdown()
        impatient = DriverBackend(shell.driver, pool_bytes=0, hang_after=HANG_AFTER, on_background_error=_ignore)
        await impatient.initialize()
        device_id = impatient.devices[0].device_id
        yield Scene(impatient, await impatient.allocate(device_id, 64), await impatient.allocate(device_id, 64))

    async def refused(self, backend: DriverBackend, hold: DriverProbe, method: str) -> None:
        """``initialize`` opens nothing beside what hangs, and says what that is."""
        opened = hold.counts["open"]
        started = time.monotonic()
        with pytest.raises(BackendUnavailable) as caught:
            async with asyncio.timeout(PATIENCE):
                await backend.initialize()
        assert time.monotonic() - started >= HANG_AFTER / 2, "it did not wait for the call that hangs"
        assert caught.value.reason == ReasonCode.TIMEOUT
        assert method in str(caught.value)
        assert hold.counts["open"] == opened

    async def opens_again(self, backend: DriverBackend, hold: DriverProbe) -> None:
        async with asyncio.timeout(PATIENCE):
            while not backend.devices:
                # What was held goes on now, and a compiler or a busy machine may take longer than the clock of hangs.
                with contextlib.suppress(BackendUnavailable):
                    await backend.initialize()
        await round_trip(backend, backend.devices[0].device_id)
        await assert_nothing_live(backend)
        await backend.shutdown()
        assert_alternate(hold)
        assert hold.live == 0, f"{hold.live} allocations of ended openings were never freed"

    @calls
    async def test_initialize_waits_for_a_call_of_the_last_opening(
        self, backend: GPUBackend, shell: DriverBackend, capabilities: Capabilities, hold: DriverProbe, method: str
    ) -> None:
        run, available = CALLS[method]
        if not available(capabilities):
            pytest.skip(f"this library has no {method}")
        async with self.impatient_scene(backend, shell) as scene:
            gate = hold.hold(method)
            call = asyncio.ensure_future(run(scene))
            await gate.entered()
            with quietly():
                await scene.backend.shutdown(timeout=0.001)
            await asyncio.wait({call}, timeout=PATIENCE)
            assert call.done()
            if not call.cancelled() and (error := call.exception()) is not None:
                assert isinstance(error, GPUError)
            await self.refused(scene.backend, hold, method)
            assert scene.handle.device_id in await self._refusal(scene.backend)
            again = asyncio.create_task(scene.backend.initialize())
            await turns(5)
            gate.release()
            await asyncio.wait({again}, timeout=PATIENCE)
            assert again.exception() is None
            await self.opens_again(scene.backend, hold)

    async def _refusal(self, backend: DriverBackend) -> str:
        with pytest.raises(BackendUnavailable) as caught:
            await backend.initialize()
        return str(caught.value)

    @pytest.mark.parametrize("method", ["compile", "launch"])
    async def test_initialize_waits_for_a_kernel_of_the_last_opening(
        self, backend: GPUBackend, shell: DriverBackend, source: str, kernel: Kernel, hold: DriverProbe, method: str
    ) -> None:
        async with self.impatient_scene(backend, shell) as scene:
            device_id, arrays = scene.handle.device_id, operands(BLOCK)
            handles = [await scene.backend.allocate(device_id, each.nbytes) for each in arrays]
            known = await scene.backend.compile(device_id, source, "field_add")
            gate = hold.hold(method)
            call: asyncio.Future[Any] = asyncio.ensure_future(
                scene.backend.compile(device_id, source + "\n", "field_add")
                if method == "compile"
                else scene.backend.launch(known, 1, BLOCK, [*handles, *scalars(BLOCK)])
            )
            await gate.entered()
            with quietly():
                await scene.backend.shutdown(timeout=0.001)
            await asyncio.wait({call}, timeout=PATIENCE)
            assert isinstance(call.exception(), GPUError)
            await self.refused(scene.backend, hold, method)
            gate.release()
            await self.opens_again(scene.backend, hold)
            with pytest.raises(GPUError):
                await scene.backend.launch(known, 1, BLOCK, [])

    async def test_initialize_waits_for_the_last_close(
        self, backend: GPUBackend, shell: DriverBackend, hold: DriverProbe
    ) -> None:
        async with self.impatient_scene(backend, shell) as scene:
            gate = hold.hold("close")
            with quietly():
                await scene.backend.shutdown(timeout=0.05)
            await gate.entered()
            await self.refused(scene.backend, hold, "close")
            await self.refused(scene.backend, hold, "close")
            gate.release()
            await self.opens_again(scene.backend, hold)

    async def test_initialize_waits_for_the_last_open(
        self, backend: GPUBackend, shell: DriverBackend, hold: DriverProbe
    ) -> None:
        """An opening that hangs is not tried a second time beside itself."""
        async with self.impatient_scene(backend, shell) as scene:
            with quietly():
                await scene.backend.shutdown()
            gate, opened = hold.hold("open"), hold.counts["open"]
            for _ in range(2):
                with pytest.raises(BackendUnavailable) as caught:
                    await scene.backend.initialize()
                assert caught.value.reason == ReasonCode.TIMEOUT
            assert hold.counts["open"] == opened + 1
            gate.release()
            await self.opens_again(scene.backend, hold)

    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("end", ["close", "cancel_all", "shutdown"])
    @calls
    async def test_loop_ends_in_the_middle(
        self,
        backend: GPUBackend,
        shell: DriverBackend,
        capabilities: Capabilities,
        hold: DriverProbe,
        method: str,
        end: str,
        stage: str,
    ) -> None:
        """A loop is closed with a call pending, after all of its tasks were cancelled, or while the backend is shut
        down; another loop uses the backend next."""
        if not CALLS[method][1](capabilities):
            pytest.skip(f"this library has no {method}")
        await backend.shutdown()
        running = "uvloop" if "uvloop" in type(asyncio.get_running_loop()).__module__ else "asyncio"
        await asyncio.to_thread(self._two_loops, loop_factories()[running], shell, hold, method, end, stage)
        assert_alternate(hold)
        assert hold.live == 0, f"{hold.live} allocations of the loop that ended were never freed"

    def _two_loops(
        self,
        new_loop: Callable[[], asyncio.AbstractEventLoop],
        shell: DriverBackend,
        hold: DriverProbe,
        method: str,
        end: str,
        stage: str,
    ) -> None:
        from gpurt import DriverBackend

        backend = DriverBackend(shell.driver, pool_bytes=0, on_background_error=_ignore)
        loop = new_loop()
        with quietly():
            tasks = loop.run_until_complete(self._first(backend, hold, method, end, stage))
            if end != "close":
                left = asyncio.all_tasks(loop)
                for task in left:
                    task.cancel()
                if left:
                    loop.run_until_complete(asyncio.wait(left, timeout=PATIENCE))
                assert all(task.done() for task in left)
            loop.close()
            hold.release()
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(self._second(backend))
        for task in tasks:
            task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]

    async def _first(
        self, backend: DriverBackend, hold: DriverProbe, method: str, end: str, stage: str
    ) -> list[asyncio.Task[Any]]:
        await backend.initialize()
        device_id = backend.devices[0].device_id
        scene = Scene(backend, await backend.allocate(device_id, 64), await backend.allocate(device_id, 64))
        gate = hold.hold("write" if stage == "queued" else method)
        tasks: list[asyncio.Task[Any]] = []
        if stage == "queued":
            tasks.append(asyncio.create_task(backend.copy_to_device(bytes(64), scene.handle)))
            await gate.entered()
        tasks.append(asyncio.ensure_future(CALLS[method][0](scene)))
        if stage == "queued":
            await turns(2)
        else:
            await gate.entered()
        if end == "shutdown":
            tasks.append(asyncio.create_task(backend.shutdown()))
            await asyncio.sleep(0)
        if stage == "result_ready":
            await result_ready(gate)
        return tasks

    async def _second(self, backend: DriverBackend) -> None:
        started = time.process_time()
        async with asyncio.timeout(PATIENCE):
            await backend.initialize()
        assert time.process_time() - started < PATIENCE / 10, "initialize was busy while it waited"
        device_id = backend.devices[0].device_id
        await round_trip(backend, device_id)
        await assert_nothing_live(backend)
        await backend.shutdown()

    @pytest.mark.parametrize("stage", ["draining", "freeing", "closing"])
    async def test_every_task_is_cancelled_during_shutdown(
        self, backend: GPUBackend, shell: DriverBackend, hold: DriverProbe, stage: str
    ) -> None:
        """As at the end of ``asyncio.run`` and of servers: closing belongs to no caller's task and is done once."""
        await backend.shutdown()
        method = {"draining": "write", "freeing": "free", "closing": "close"}[stage]

        def two_runs() -> None:
            from gpurt import DriverBackend

            backend = DriverBackend(shell.driver, pool_bytes=0)

            async def first() -> None:
                await backend.initialize()
                device_id = backend.devices[0].device_id
                handles = [await backend.allocate(device_id, 64) for _ in range(5)]
                gate = hold.hold(method)
                tasks = [asyncio.create_task(backend.copy_to_device(bytes(64), handles[0]))]
                if stage == "draining":
                    await gate.entered()
                tasks.append(asyncio.create_task(backend.shutdown()))
                await (asyncio.sleep(0) if stage == "draining" else gate.entered())
                asyncio.get_running_loop().call_later(0.02, gate.release)

            async def second() -> None:
                await backend.shutdown()
                await backend.initialize()
                await backend.shutdown()

            with quietly():
                asyncio.run(first())
                hold.release()
                asyncio.run(second())

        await asyncio.to_thread(two_runs)
        assert_alternate(hold)
        assert hold.live == 0

    @pytest.mark.parametrize("value", ["10", b"1", [1], object(), float("nan"), -1, -0.5, True, 1 + 0j])
    async def test_a_timeout_that_is_no_time(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe, value: Any
    ) -> None:
        handle = await backend.allocate(device_id, 64)
        with pytest.raises(OutOfRange) as caught:
            await backend.shutdown(timeout=value)
        assert isinstance(caught.value, ValueError)
        assert hold.counts["close"] == 0
        await backend.copy_to_device(bytes(64), handle)  # nothing has happened
        await backend.deallocate(handle)

    async def test_failed_results_at_a_timed_out_shutdown_are_typed(
        self, backend: GPUBackend, shell: DriverBackend, hold: DriverProbe
    ) -> None:
        """Results that are there, and whose callers have not seen them, when a shutdown gives up on the next call."""
        for _ in range(5):
            async with self.impatient_scene(backend, shell) as scene:
                hold.fail("write", OSError("link down"))
                first, second = hold.hold("write"), hold.hold("write")
                copies = [
                    asyncio.create_task(scene.backend.copy_to_device(b"x", each))
                    for each in (scene.handle, scene.other)
                ]
                await first.entered()
                first.release()
                await second.entered()
                with quietly():
                    await scene.backend.shutdown(timeout=0.001)
                results = await asyncio.gather(*copies, return_exceptions=True)
                assert all(isinstance(result, GPUError) for result in results), results
                second.release()
                await self.opens_again(scene.backend, hold)
            await backend.initialize()

    async def test_a_cancelled_allocation_at_shutdown_is_freed_before_the_close(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        """Also where freed memory is pooled, and whenever in the shutdown its caller is cancelled."""
        from gpurt import DriverBackend

        await backend.shutdown()
        pooled = DriverBackend(shell.driver, pool_bytes=1 << 20)
        for steps in range(8):
            await pooled.initialize()
            gate = hold.hold("alloc")
            call = asyncio.create_task(pooled.allocate(device_id, 4096))
            await gate.entered()
            closing = asyncio.create_task(pooled.shutdown())
            await turns(4)
            await result_ready(gate)
            await turns(steps)
            call.cancel()
            with quietly():
                await asyncio.wait({call, closing}, timeout=PATIENCE)
            assert closing.done()
            assert hold.live == 0, f"cancelled {steps} turns after its result was there"

    async def test_host_buffers_end_before_the_close(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, capabilities: Capabilities, hold: DriverProbe
    ) -> None:
        if not capabilities.pins_memory:
            pytest.skip("this library pins no memory")
        for moment in ("open", "cancelled"):
            gate = hold.hold("host_alloc")
            call = asyncio.create_task(backend.host_buffer(device_id, 5000))
            await gate.entered()
            if moment == "cancelled":
                closing = asyncio.create_task(shutdown_quietly(backend))
                await turns(3)
                await result_ready(gate)
                call.cancel()
                await asyncio.wait({call, closing}, timeout=PATIENCE)
            else:
                gate.release()
                buffer = await call
                with quietly():
                    await backend.shutdown(timeout=0.05)
                buffer.close()
            await backend.initialize()
            await round_trip(backend, device_id)
            await backend.shutdown()
            assert hold.counts["host_alloc"] == hold.counts["host_free"]
            await backend.initialize()

    async def test_shutdown_keeps_memory_that_somebody_looks_into(
        self, backend: GPUBackend, shell: DriverBackend, capabilities: Capabilities, hold: DriverProbe
    ) -> None:
        """Until the last array over it is gone: then the driver is closed, and not before."""
        if not capabilities.host_visible:
            pytest.skip("the host cannot address this memory")
        async with self.impatient_scene(backend, shell) as scene:
            closed = hold.counts["close"]
            view = await scene.backend.view(scene.handle)
            array = view.numpy()
            view.close()
            del view
            array[:] = 7
            with pytest.warns(ResourceWarning, match="view"):
                await scene.backend.shutdown(timeout=0.02)
            assert hold.counts["close"] == closed
            array[:] = 8
            with pytest.raises(BackendClosed):
                await scene.backend.synchronize(scene.handle.device_id)
            await self.refused(scene.backend, hold, "view")
            assert bytes(array) == b"\x08" * 64
            del array
            await until(lambda: hold.counts["close"] > closed, "the driver was closed once its memory was free")
            assert hold.live == 0
            await self.opens_again(scene.backend, hold)

    async def test_the_driver_is_closed_when_the_last_array_goes(
        self, backend: GPUBackend, shell: DriverBackend, capabilities: Capabilities, hold: DriverProbe
    ) -> None:
        """Also by itself: nobody need ask again. Whatever else there was is given back without waiting for it."""
        if not capabilities.host_visible:
            pytest.skip("the host cannot address this memory")
        async with self.impatient_scene(backend, shell) as scene:
            closed = hold.counts["close"]
            with await scene.backend.view(scene.handle) as view:
                array = view.numpy()
            with quietly():
                closing = asyncio.create_task(scene.backend.shutdown(timeout=None))
                await until(lambda: hold.counts["free"] >= 1, "the other allocation was freed")
                await turns(5)
                array[:] = 9
                assert hold.counts["close"] == closed
                del array
                await asyncio.wait({closing}, timeout=PATIENCE)
            assert closing.done()
            await until(lambda: hold.counts["close"] == closed + 1, "the driver was closed")
            await self.opens_again(scene.backend, hold)

    @pytest.mark.parametrize("kind", [None, ZeroDivisionError, asyncio.CancelledError, TimeoutError, KeyboardInterrupt])
    async def test_allocation_with_an_open_view(
        self,
        backend: GPUBackend,
        shell: DriverBackend,
        device_id: str,
        capabilities: Capabilities,
        hold: DriverProbe,
        kind: type[BaseException] | None,
    ) -> None:
        """The body's exception wins, with a note about the view; the memory is freed when that is gone."""
        if not capabilities.host_visible:
            pytest.skip("the host cannot address this memory")
        views: list[Any] = []
        original = None if kind is None else kind("the body's")

        async def body() -> None:
            async with backend.allocation(device_id, 64) as handle:
                views.append(await backend.view(handle))
                if original is not None:
                    raise original

        with pytest.raises(HandleInUse if kind is None else kind) as caught:
            await body()
        if original is not None:
            assert caught.value is original
            assert any("view" in note for note in getattr(original, "__notes__", []))
        assert shell.live_handles == 1
        views.pop().close()
        await until(lambda: shell.live_handles == 0, "the memory was freed")
        await assert_nothing_live(backend, hold)

    @pytest.mark.parametrize("how", ["cancel", "timeout"])
    async def test_allocation_with_an_open_view_is_cancelled(
        self, backend: GPUBackend, device_id: str, capabilities: Capabilities, hold: DriverProbe, how: str
    ) -> None:
        if not capabilities.host_visible:
            pytest.skip("the host cannot address this memory")
        views: list[Any] = []
        viewed = asyncio.Event()

        async def body() -> None:
            async with asyncio.timeout(0.02 if how == "timeout" else None), backend.allocation(device_id, 64) as handle:
                views.append(await backend.view(handle))
                viewed.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(body())
        await viewed.wait()
        if how == "cancel":
            task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE)
        if how == "cancel":
            assert task.cancelled()
        else:
            assert isinstance(task.exception(), TimeoutError)
        views.pop().close()
        await assert_nothing_live(backend, hold)


def _ignore(_: BaseException) -> None: ...
