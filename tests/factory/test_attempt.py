"""Deadlines, cancellation, and that nothing which was opened stays open (C14, C28)."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest

from gpurt import attempt, factory
from gpurt.errors import BackendUnavailable, ReasonCode
from tests.factory.toy import Shelf, ToyBackend, device


async def eventually(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


class Hanging:
    """An ``initialize`` that never ends; ``stubborn`` ones do not end on cancellation either, until released."""

    def __init__(self, *, stubborn: bool = False) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = False
        self._stubborn = stubborn

    async def __call__(self) -> None:
        self.entered.set()
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled = True
                if not self._stubborn:
                    raise


@pytest.mark.parametrize("stubborn", [False, True])
async def test_hanging_backend_times_out_and_the_next_is_tried(shelf: Shelf, stubborn: bool) -> None:
    hang = Hanging(stubborn=stubborn)
    shelf.put("cuda", lambda: ToyBackend(on_initialize=hang))
    started = time.monotonic()
    assert await factory.create_backend(deadline=0.05) is shelf["cpu"]
    assert time.monotonic() - started < 1.5
    report = factory.last_reports()[0]
    assert (report.name, report.reason) == ("cuda", ReasonCode.TIMEOUT)
    assert report.elapsed_ms >= 50
    assert "0.05 s" in report.message
    hang.release.set()
    await eventually(lambda: hang.cancelled and shelf["cuda"].shutdowns == 1)


async def test_hanging_shutdown_does_not_block(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "SHUTDOWN_TIMEOUT_S", 0.05)
    never = asyncio.Event()

    async def fail() -> None:
        raise RuntimeError("broken")

    shelf.put("cuda", lambda: ToyBackend(on_initialize=fail, on_shutdown=lambda: never.wait()))
    started = time.monotonic()
    assert await factory.create_backend() is shelf["cpu"]
    assert time.monotonic() - started < 1
    never.set()


async def test_failing_shutdown_is_logged(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("cannot close either")

    shelf.put("cuda", lambda: ToyBackend((), on_shutdown=fail))
    assert await factory.create_backend() is shelf["cpu"]
    assert "cannot close either" in caplog.text


@pytest.mark.parametrize("way", ["native", "timeout", "task_group", "anyio"])
async def test_cancelling_closes_what_was_opened(shelf: Shelf, way: str) -> None:
    hang = Hanging()
    shelf.put("rocm", lambda: ToyBackend(on_initialize=hang))
    call = factory.create_backend()
    match way:
        case "native":
            task = asyncio.ensure_future(call)
            await hang.entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        case "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await call
        case "task_group":

            async def sibling() -> None:
                await hang.entered.wait()
                raise ZeroDivisionError

            async def both() -> None:
                async with asyncio.TaskGroup() as group:
                    group.create_task(call)
                    group.create_task(sibling())

            with pytest.raises(ExceptionGroup):
                await both()
        case _:
            with anyio.move_on_after(0.1) as scope:
                await call
            assert scope.cancelled_caught
    assert hang.cancelled
    assert shelf["rocm"].shutdowns == 1
    assert [report.name for report in factory.last_reports()] == ["cuda"]


async def test_cancelling_a_stubborn_backend_is_prompt(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "CANCEL_WAIT_S", 0.05)
    hang = Hanging(stubborn=True)
    shelf.put("cuda", lambda: ToyBackend(on_initialize=hang))
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await factory.create_backend()
    assert time.monotonic() - started < 1
    hang.release.set()
    await eventually(lambda: shelf["cuda"].shutdowns == 1)


async def test_cancelled_when_the_answer_is_there_already(shelf: Shelf) -> None:
    """asyncio drops a result that is set before a cancelled task resumes: the backend would stay open for ever."""
    task: asyncio.Task

    async def cancel_caller() -> None:
        # Runs in the attempt's own task: by the time the caller resumes, that task is done.
        asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(task.cancel))

    shelf.put("cuda", lambda: ToyBackend((device("cuda:0"),), on_initialize=cancel_caller))
    task = asyncio.ensure_future(factory.create_backend())
    try:
        backend = await task
    except asyncio.CancelledError:
        await eventually(lambda: shelf["cuda"].shutdowns == 1)
    else:
        assert backend is shelf["cuda"]
        assert shelf["cuda"].shutdowns == 0


async def test_every_moment_of_cancellation_leaves_nothing_open(shelf: Shelf) -> None:
    """Cancel after n turns of the loop, for every n until the call gets through."""

    async def slow() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    for turns in range(400):
        shelf.made.clear()
        shelf.put("cuda", lambda: ToyBackend((device("cuda:0"),), on_initialize=slow))
        task = asyncio.ensure_future(factory.create_backend("cuda"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            break
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            await eventually(lambda: all(b.shutdowns >= bool(b.initializations) for _, b in shelf.made))
        else:
            break
    else:
        pytest.fail("create_backend never got through")


async def test_cancelled_from_inside_is_a_failure_not_a_cancellation(shelf: Shelf) -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    shelf.put("cuda", lambda: ToyBackend(on_initialize=give_up))
    assert await factory.create_backend() is shelf["cpu"]
    assert "cancelled from inside" in factory.last_reports()[0].message


@pytest.mark.parametrize("deadline", [0, -1])
async def test_deadline_is_checked(deadline: float) -> None:
    with pytest.raises(ValueError, match="deadline"):
        await factory.create_backend(deadline=deadline)


async def test_hanging_import_costs_only_its_deadline(shelf: Shelf) -> None:
    import threading

    gate = threading.Event()
    shelf.put("cuda", lambda: gate.wait() and ToyBackend())
    try:
        ticks = 0
        pending = asyncio.ensure_future(factory.create_backend(deadline=0.1))
        while not pending.done():
            ticks += 1
            await asyncio.sleep(0.01)
        assert await pending is shelf["cpu"]
        assert ticks >= 5  # the loop went on
        assert factory.last_reports()[0].reason is ReasonCode.TIMEOUT
    finally:
        gate.set()


async def test_concurrent_calls_each_get_their_own(shelf: Shelf) -> None:
    shelf.put("cuda")
    backends = await asyncio.gather(*(factory.create_backend() for _ in range(8)))
    assert len(set(map(id, backends))) == 8


def test_two_loops_in_a_row(shelf: Shelf) -> None:
    async def once() -> None:
        backend = await factory.create_backend()
        await backend.shutdown()

    asyncio.run(once())
    asyncio.run(once())
    assert shelf.names.count("cpu") == 2


class TestDetection:
    async def test_available_backends_end_with_cpu_and_are_closed(self, shelf: Shelf) -> None:
        shelf.put("rocm")
        assert await factory.detect_available_backends() == ["rocm", "cpu"]
        assert shelf.names == ["cuda", "rocm", "vulkan", "cpu"]
        assert [backend.shutdowns for _, backend in shelf.made] == [1, 1, 1, 1]
        assert [report.status for report in factory.last_reports()] == ["unavailable", "ok", "unavailable", "ok"]

    async def test_info_has_the_devices(self, shelf: Shelf) -> None:
        info = await factory.get_gpu_backend_info()
        assert list(info) == ["cpu"]
        assert [d.device_id for d in info["cpu"]] == ["cpu:0"]

    async def test_forced_choice_does_not_narrow(self, shelf: Shelf) -> None:
        shelf.put("rocm")
        factory.set_backend_override("cpu")
        assert await factory.detect_available_backends(environ={"GPURT_FALLBACK": "0"}) == ["rocm", "cpu"]

    async def test_cancelled_detection_closes(self, shelf: Shelf) -> None:
        hang = Hanging()
        shelf.put("cuda")
        shelf.put("rocm", lambda: ToyBackend(on_initialize=hang))
        task = asyncio.ensure_future(factory.detect_available_backends())
        await hang.entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [(name, backend.shutdowns) for name, backend in shelf.made] == [("cuda", 1), ("rocm", 1)]

    async def test_broken_cpu_is_an_error_not_a_lie(self, shelf: Shelf) -> None:
        shelf.put("cpu", lambda: ToyBackend(()))
        with pytest.raises(BackendUnavailable, match="installation is broken"):
            await factory.detect_available_backends()
