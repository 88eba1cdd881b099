"""``gpurt drain``: a node is told, says what it does, and everybody who looks can see it."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurt.cli import protected
from gpurt.cli.drain import drain
from gpurt.cli.main import main
from gpurt.cli.place_inputs import live_inventory
from gpurt.cli.top import Watch
from gpurt.cli.worker import _Session  # pyright: ignore[reportPrivateUsage]
from gpurt.cluster import request_drain
from gpurt.cluster.errors import InvalidName, NoAnswer, StaleTerm
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.master import MasterConfig
from gpurt.cluster.state import encode_snapshot
from gpurt.cluster.worker import Worker, WorkerConfig, run_worker
from gpurt.errors import GPUError
from tests.cluster.support import device, snapshot, until

CONFIG = MasterConfig("test", listen=False)


@asynccontextmanager
async def worker(bus: InProcessBus, name: str, folder: Path) -> AsyncGenerator[Worker]:
    joined: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()

    async def ready(made: Worker) -> None:
        joined.set_result(made)

    config = WorkerConfig(name, "test", registry_path=folder / f"{name}.json", simulate="h100", telemetry_s=None)
    task = asyncio.create_task(run_worker(config, on_ready=ready, engine=InProcessEngine(bus)))
    try:
        yield await joined
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[InProcessBus]:
    """With the workers w1 and w2."""
    made = InProcessBus("test")
    async with worker(made, "w1", tmp_path), worker(made, "w2", tmp_path):
        yield made


async def told(bus: InProcessBus, *arguments: Any, **options: Any) -> str:
    return await drain(CONFIG, *arguments, engine=InProcessEngine(bus), **options)


async def test_a_node_is_drained_and_takes_part_again(bus: InProcessBus) -> None:
    assert (await told(bus, "w1")).startswith("w1 is draining: nothing new is placed on it")
    assert "w1 is draining already" in await told(bus, "w1")
    inventory = await live_inventory(CONFIG, engine=InProcessEngine(bus))
    assert [each.node for each in inventory.devices] == ["w2"]
    assert await told(bus, "w1", draining=False) == "w1 takes new placements again"
    assert await told(bus, "w1", draining=False) == "w1 takes new placements already"
    inventory = await live_inventory(CONFIG, engine=InProcessEngine(bus))
    assert [each.node for each in inventory.devices] == ["w1", "w2"]


async def test_it_speaks_for_the_master_that_the_node_has_heard(bus: InProcessBus) -> None:
    engine = InProcessEngine(bus)
    await engine.start()
    await request_drain(engine, "w1", term=7, draining=False)
    assert "w1 is draining" in await told(bus, "w1"), "without knowing about terms"
    with pytest.raises(StaleTerm, match="master of term 7 has spoken") as stale:
        await told(bus, "w1", draining=False, term=6)
    assert stale.value.latest == 7
    assert "again" in await told(bus, "w1", draining=False, term=8)
    with pytest.raises(StaleTerm):
        await request_drain(engine, "w1", term=7)
    await engine.close()


async def test_who_is_not_there_or_does_not_answer(bus: InProcessBus) -> None:
    with pytest.raises(GPUError, match=r"no node 'w9' in cluster test now; there are w1, w2"):
        await told(bus, "w9")
    with pytest.raises(GPUError, match=r"there is none at all"):
        await told(InProcessBus("test"), "w1")
    with pytest.raises(InvalidName):
        await told(bus, "*")
    dumb, hang = InProcessEngine(bus), asyncio.Event()

    async def never(payload: bytes) -> bytes:
        await hang.wait()
        return b""

    await dumb.start()
    await dumb.join("w3", encode_snapshot(snapshot(device(), node="w3")), never)
    with pytest.raises(NoAnswer, match="w3"):
        await told(bus, "w3", timeout_s=0.05)
    await dumb.close()


async def test_of_a_thousand_nodes_a_few_are_named() -> None:
    bus = InProcessBus("test")
    engines = [InProcessEngine(bus) for _ in range(18)]
    for number, engine in enumerate(engines):
        await engine.start()
        await engine.join(f"n{number:02}", encode_snapshot(snapshot(device(), node=f"n{number:02}")), _nothing)
    with pytest.raises(GPUError, match=r"there are n00, .*, n15 and 2 more \("):
        await told(bus, "w1")
    for engine in engines:
        await engine.close()


async def test_a_master_that_speaks_meanwhile_does_not_matter_without_a_term() -> None:
    bus, terms = InProcessBus("test"), list[int]()
    busy = InProcessEngine(bus)

    async def overtaken(payload: bytes) -> bytes:
        terms.append(term := json.loads(payload)["term"])
        refused = None if term == 9 else "a master of term 9 has spoken"
        return json.dumps({"term": 9, "refused": refused}).encode()

    await busy.start()
    await busy.join("w3", encode_snapshot(snapshot(device(), node="w3")), overtaken)
    assert (await told(bus, "w3")).startswith("w3 is draining")
    assert terms == [0, 9]
    with pytest.raises(StaleTerm):
        await told(bus, "w3", term=8)
    assert terms == [0, 9, 8], "that term, or none"
    await busy.close()


async def test_a_node_that_cannot_keep_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bus, file = InProcessBus("test"), tmp_path / "w1.promises.json"
    await asyncio.to_thread(file.mkdir)
    monkeypatch.setattr("gpurt.cluster.worker.engine_at", lambda *_, **__: InProcessEngine(bus))
    config = WorkerConfig("w1", "test", registry_path=tmp_path / "w1.json", simulate="h100", telemetry_s=None)
    options: dict[str, Any] = {"check_bytes": None, "calibrate": False, "weights": None, "verify": False}
    session = asyncio.create_task(_Session(config, as_json=False, **options).run(exit_with_stdin=False))
    said = ""

    def has(text: str) -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return text in said

    monkeypatch.setattr("gpurt.cli.worker.HEARD_S", 0.01)
    await until(lambda: has("opened backend"), "the worker")
    assert f"; when it is started again it forgets that: {file} cannot be written: " in await told(bus, "w1")
    await until(lambda: has("takes no new placements, until it is started again"), "the word")
    session.cancel()
    with suppress(asyncio.CancelledError):
        await session


async def test_everybody_sees_it(bus: InProcessBus, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("w1", "w2"):
        await told(bus, name)
    watch = Watch(CONFIG, wait_s=0.01, engine=InProcessEngine(bus))
    await watch.once()
    shown = capsys.readouterr().out
    assert "2 nodes (2 healthy), 2 draining, 2 devices, 0 available" in shown
    assert "w1 (draining)" in shown
    assert "not usable" not in shown, "the devices are well"
    await Watch(CONFIG, wait_s=0.01, engine=InProcessEngine(bus)).once(as_json=True)
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert [each["draining"] for each in nodes] == [True, True]
    with pytest.raises(GPUError, match=r"no device takes a new placement now: its node is draining \(2\)") as none:
        await live_inventory(CONFIG, engine=InProcessEngine(bus))
    assert "gpurt drain NODE --undo" in str(none.value)


async def test_the_worker_says_what_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bus = InProcessBus("test")
    monkeypatch.setattr("gpurt.cluster.worker.engine_at", lambda *_, **__: InProcessEngine(bus))
    monkeypatch.setattr("gpurt.cli.worker.HEARD_S", 0.01)
    monkeypatch.setattr("gpurt.cluster.attention.FIRST_S", 0.01)
    config = WorkerConfig("w1", "test", registry_path=tmp_path / "w1.json", simulate="h100", telemetry_s=None)
    said = ""

    def has(text: str) -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return text in said

    async def session(as_json: bool = False) -> asyncio.Task[None]:
        options: dict[str, Any] = {"check_bytes": None, "calibrate": False, "weights": None, "verify": False}
        return asyncio.create_task(_Session(config, as_json=as_json, **options).run(exit_with_stdin=False))

    async def end(task: asyncio.Task[None]) -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    first = await session()
    await until(lambda: has("opened backend"), "the worker")
    assert "joined" not in said, "nobody has heard it"
    await told(bus, "w1")
    await until(lambda: has("w1 is draining and takes no new placements"), "the word")
    assert "w1 joined test" in said
    await end(first)
    said = ""
    again = await session(as_json=True)
    await until(lambda: has('{"event": "draining", "node": "w1"}'), "what it was told before")
    unheard = '{"event": "unheard", "node": "w1", "message": "no master of cluster test runs"}'
    await until(lambda: has(unheard), "that nobody has asked")
    await told(bus, "w1", draining=False)
    await until(lambda: has('{"event": "undrained", "node": "w1"}'), "the end of it")
    await end(again)


async def _nothing(payload: bytes) -> bytes:
    return b""


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    outcome: list[Any] = ["w1 is draining", StaleTerm("", latest=9), GPUError("there is no node 'w1'")]
    asked: list[tuple[Any, ...]] = []

    async def done(config: Any, node: str, **options: Any) -> str:
        asked.append((node, options["draining"], options["term"]))
        if isinstance(result := outcome.pop(0), Exception):
            raise result
        return result

    monkeypatch.setattr("gpurt.cli.drain.drain", done)
    assert main(["drain", "w1"]) == 0
    assert capsys.readouterr().out == "w1 is draining\n"
    assert main(["drain", "w1", "--undo", "--term", "3"]) == 1
    assert "it has heard of term 9, and this was said for term 3" in capsys.readouterr().err
    assert main(["drain", "w1"]) == 2
    assert asked == [("w1", True, None), ("w1", False, 3), ("w1", True, None)]
    for wrong in ("-1", "x", str(1 << 70)):
        with pytest.raises(SystemExit):
            main(["drain", "w1", "--term", wrong])


@pytest.mark.parametrize(("role", "words"), [("observer", "that of an observer"), ("node", "that of a node")])
def test_who_may_not(
    role: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def identity(args: argparse.Namespace) -> SimpleNamespace:
        return SimpleNamespace(name="o1", role=role, cluster="test", endpoint="tls/h:7447")

    monkeypatch.setattr(protected, "identity_of", identity)
    assert main(["drain", "w1", "--tls", "o1"]) == 2
    assert words in (said := capsys.readouterr().err)
    assert "which may not tell a node to drain" in said
    assert "--role master" in said, "of an observer's certificate one would hear the same again"
