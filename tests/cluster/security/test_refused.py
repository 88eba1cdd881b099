"""What a hub, a node and a master refuse, on real links: each is said in a log, and nothing of it is applied."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpurt.cluster.board import ReadingsBoard
from gpurt.cluster.bus import MAX_STATE_BYTES, NodeUp
from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.commands import request_rediscovery
from gpurt.cluster.envelope import MAX_EVENT_BYTES
from gpurt.cluster.errors import BusUnavailable, ClusterError, NoAnswer
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.readings import MAX_READINGS_BYTES
from gpurt.cluster.records import NodeState
from gpurt.cluster.security.authority import Role
from gpurt.cluster.security.enrolment import enrol, init_cluster
from gpurt.cluster.security.errors import CredentialsRefused
from gpurt.cluster.security.identity import load_identity
from gpurt.cluster.security.tls import tls_values
from gpurt.cluster.state import encode_snapshot
from gpurt.cluster.view import MasterView
from gpurt.cluster.zenoh_engine import ZenohEngine
from gpurt.cluster.zenoh_hub import Admission
from gpurt.cluster.zenoh_settings import ZenohSettings, load_zenoh, session_config
from gpurt.discovery.result import DiscoveryResult
from tests.cluster.security.conftest import Attack, Made
from tests.cluster.support import E1, E2, HOST_A, device, event_bytes, result, snapshot, until

TREE = "gpurt/v1/test"


@asynccontextmanager
async def watched(hub: ZenohEngine) -> AsyncIterator[tuple[MasterView, ClusterObserver]]:
    """A master at the hub."""
    view = MasterView()
    observer = ClusterObserver(hub, view)
    ready = asyncio.Event()
    task = asyncio.create_task(observer.run(ready.set))
    await ready.wait()
    try:
        yield view, observer
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def send(session: Any, key: str, payload: bytes) -> None:
    """Puts without leave to drop it where a queue is full: what is not seen must have been refused."""
    session.put(key, payload, congestion_control=load_zenoh().CongestionControl.BLOCK)


async def start(engine: ZenohEngine) -> None:
    """One that is not refused would be tried for ever."""
    async with asyncio.timeout(10):
        await engine.start()


@asynccontextmanager
async def joined(made: Made, name: str = "w1", epoch: object = E2) -> AsyncIterator[ZenohEngine]:
    engine = made.engine(made.node(name))
    await start(engine)
    try:
        await engine.join(name, encode_snapshot(snapshot(device(), node=name, epoch=epoch)))  # type: ignore[arg-type]
        yield engine
    finally:
        await engine.close()


# Who gets in


async def test_everybody_with_a_certificate_of_the_cluster(
    made: Made, hub: ZenohEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with watched(hub) as (view, _), joined(made) as node:
        await until(lambda: view.node("w1") and view.node("w1").state is NodeState.HEALTHY)  # type: ignore[union-attr]
        await node.set_state(encode_snapshot(snapshot(device(), node="w1", epoch=E2, seq=1)))
        await node.publish(event_bytes(1, node="w1", epoch=E2))
        await until(lambda: view.node("w1").seq == 1)  # type: ignore[union-attr]
        master = made.engine(made.node("m1"))
        await master.start()
        assert [reply.node for reply in await master.snapshot("*")] == ["w1"]
        await master.close()
    assert "node w1 is connected from tls/127.0.0.1" in caplog.text
    assert "master m1 is connected from" in caplog.text


async def test_what_another_authority_has_issued_is_refused(
    made: Made, hub: ZenohEngine, attack: Attack, tmp_path: Path
) -> None:
    await asyncio.to_thread(init_cluster, tmp_path / "other", cluster="test", hosts=["127.0.0.1"])
    stranger = await asyncio.to_thread(enrol, tmp_path / "other", "w1")
    engine = made.engine(stranger)
    with pytest.raises(CredentialsRefused, match=r"is there, but its certificate is refused: .*issuer certificate"):
        await start(engine)
    # One who believes the hub all the same.
    shutil.copy(made.folder / "ca.pem", stranger / "ca.pem")
    with pytest.raises(CredentialsRefused, match="was not issued by the authority"):
        await start(engine)
    with pytest.raises(load_zenoh().ZError):
        await asyncio.to_thread(attack, stranger)


async def test_without_a_certificate_or_with_an_old_one_or_the_hubs(
    made: Made, hub: ZenohEngine, attack: Attack, tmp_path: Path
) -> None:
    zenoh = load_zenoh()
    tls = "transport__link__tls"
    old = await asyncio.to_thread(made.changed, tmp_path / "old", "w1", begin=timedelta(days=-3), days=2)
    bare = {f"{tls}__enable_mtls": False, f"{tls}__connect_certificate": None, f"{tls}__connect_private_key": None}
    plain = {"connect__endpoints": [made.endpoint.replace("tls/", "tcp/")]}
    for folder, settings in ((made.node("w1"), bare), (old, {}), (made.hub, {}), (made.node("w1"), plain)):
        with pytest.raises(zenoh.ZError):
            await asyncio.to_thread(attack, folder, **settings)
    assert hub._session.info.links() == []  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(CredentialsRefused, match="has expired"):
        await start(made.engine(old))


async def test_a_node_cannot_play_the_hub_and_a_hub_has_its_own_names_only(made: Made, tmp_path: Path) -> None:
    # A node's certificate in a hub's folder, as a thief would build it; the check of roles is passed by.
    zenoh = load_zenoh()
    values = tls_values(await asyncio.to_thread(load_identity, made.hub), listen=True)
    for name in ("certificate", "private_key"):
        file = "cert.pem" if name == "certificate" else "key.pem"
        values[f"transport/link/tls/listen_{name}"] = str(made.node("w2") / file)
    config = session_config(zenoh, made.endpoint, listen=True, settings=ZenohSettings(), protection=values)
    thief = await asyncio.to_thread(zenoh.open, config)
    try:
        with pytest.raises(CredentialsRefused, match="its certificate is refused: unsuitable certificate purpose"):
            await start(made.engine(made.node("w1")))
    finally:
        await asyncio.to_thread(thief.close)
    hub = made.engine(made.hub, listen=True)
    await hub.start()
    try:
        named = ZenohEngine(
            cluster="test", endpoint=made.endpoint.replace("127.0.0.1", "localhost"), tls=made.node("w1")
        )
        with pytest.raises(CredentialsRefused, match="not valid for 'localhost'"):
            await start(named)
    finally:
        await hub.close()


async def test_what_is_no_matter_of_certificates_is_waited_for(made: Made) -> None:
    engine = made.engine(made.node("w1"))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0.8)
    assert not starting.done()
    hub = made.engine(made.hub, listen=True)
    await hub.start()
    try:
        async with asyncio.timeout(10):
            await starting
    finally:
        await engine.close()
        await hub.close()


async def test_an_address_in_use_is_no_matter_of_certificates(made: Made, hub: ZenohEngine) -> None:
    with pytest.raises(BusUnavailable, match="cannot listen on"):
        await start(made.engine(made.hub, listen=True))


async def test_a_name_of_ones_own(made: Made, hub: ZenohEngine) -> None:
    other = ZenohEngine(cluster="elsewhere", endpoint=made.endpoint, tls=made.node("w1"))
    with pytest.raises(CredentialsRefused, match="is of cluster 'test', not of 'elsewhere'"):
        await start(other)
    for name in ("w1", "m1"):
        engine = made.engine(made.node(name))
        await start(engine)
        with pytest.raises(CredentialsRefused, match=rf"'{name}', not of node 'w2'"):
            await engine.join("w2", encode_snapshot(snapshot(node="w2")))
        await engine.close()
    assert await hub.snapshot("*") == ()


@pytest.mark.wide
async def test_who_is_not_on_the_roster_is_told_by_the_hub_and_not_heard(
    made: Made, hub: ZenohEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """And is heard as soon as the roster has it, without a new start of the hub, which loses nobody meanwhile."""
    roster = made.hub / "roster.json"
    before = roster.read_bytes()
    await asyncio.to_thread(enrol, made.folder, "w3")
    after = roster.read_bytes()
    roster.write_bytes(before)
    async with watched(hub) as (view, _), joined(made, "w1"), joined(made, "w3") as refused:
        await until(lambda: "'w3' has a certificate of this cluster, but is not on the roster" in caplog.text)
        await until(lambda: view.node("w1"))
        assert view.node("w3") is None
        assert await refused.admission("w3") == Admission("test", listed=False)
        assert await refused.admission("w1") == Admission("test", listed=True)
        changes = view.changes()
        roster.write_bytes(after)
        await until(lambda: view.node("w3"), "the node, which has connected again by itself")
        await until(lambda: view.snapshot().nodes["w1"].state == "healthy")
        assert await refused.admission("w3") == Admission("test", listed=True)
        changes.close()
        assert not {change.kind async for change in changes} & {ChangeKind.NODE_SUSPECT, ChangeKind.NODE_LOST}
        roster.write_bytes(before)
        await until(lambda: view.snapshot().nodes["w3"].state == "lost", "w3, which was revoked", timeout=20)
        assert view.snapshot().nodes["w1"].state == "healthy"


# What they may say


async def test_under_another_nodes_key_nobody_says_anything(made: Made, hub: ZenohEngine, attack: Attack) -> None:
    async with watched(hub) as (view, observer), joined(made, "w2") as other:
        await until(lambda: view.node("w2"))
        # w1's certificate is good; the names under which it speaks and listens are not its own.
        session = await asyncio.to_thread(attack, made.node("w1"))
        seen: list[str] = []
        everything = hub._session.declare_subscriber(  # pyright: ignore[reportPrivateUsage]
            "**", lambda sample: seen.append(str(sample.key_expr))
        )

        def lie(query: object) -> None:
            with query:  # type: ignore[attr-defined]
                query.reply(f"{TREE}/node/w2/state", encode_snapshot(snapshot(node="w2", epoch=E1)))  # type: ignore[attr-defined]

        heard: list[str] = []
        there: list[str] = []
        held = [
            session.declare_queryable(f"{TREE}/node/w2/state", lie),
            session.declare_queryable(f"{TREE}/node/*/state", lie),
            session.liveliness().declare_token(f"{TREE}/node/w2/leaving"),
            session.liveliness().declare_token(f"{TREE}/node/w9/live"),
            session.declare_subscriber(f"{TREE}/node/w2/**", lambda sample: heard.append(str(sample.key_expr))),
            session.declare_subscriber("**", lambda sample: heard.append(str(sample.key_expr))),
            session.liveliness().declare_subscriber(
                f"{TREE}/node/*/*", lambda sample: there.append(str(sample.key_expr)), history=True
            ),
        ]
        forged = event_bytes(1, node="w2", epoch=E2, kind="gpurt.node.leaving.v1")
        for key in ("node/w2/ev", "node/w2/telemetry", "node/w9/ev", "master/9/live", "placement/p", "nonsense"):
            send(session, f"{TREE}/{key}", forged)
        send(session, "gpurt/v1/elsewhere/node/w1/ev", forged)
        session.delete(f"{TREE}/node/w2/ev")
        replies = list(session.get(f"{TREE}/node/w2/cmd", payload=b'{"command":"rediscover"}', timeout=0.3))
        assert [reply for reply in replies if reply.ok] == []
        # In order behind all that: its own key, but the envelope says another.
        send(session, f"{TREE}/node/w1/ev", forged)
        await until(lambda: observer.rejected["malformed"] == 1)
        await until(lambda: heard)
        heard.clear()  # its own lies, which never left its process
        await other.set_state(encode_snapshot(snapshot(device(), node="w2", epoch=E2, seq=1)))
        await other.publish(event_bytes(1, node="w2", epoch=E2))
        await other.publish_telemetry(b"{}")
        await until(lambda: f"{TREE}/node/w2/telemetry" in seen)
        await until(lambda: view.node("w2").seq == 1)  # type: ignore[union-attr]
        assert sorted(seen) == [f"{TREE}/node/{key}" for key in ("w1/ev", "w2/ev", "w2/telemetry")]
        assert [reply.node for reply in await hub.snapshot("*")] == ["w2"]
        assert heard == []
        assert f"{TREE}/node/w9/live" in there  # its own lie
        assert f"{TREE}/node/w2/live" not in there
        picture = view.snapshot()
        assert {name: record.state for name, record in picture.nodes.items()} == {"w2": NodeState.HEALTHY}
        assert picture.conflicts == ()
        assert observer.counters("w2").applied == 1
        tokens = hub._session.liveliness().get(f"{TREE}/node/*/*")  # pyright: ignore[reportPrivateUsage]
        assert [str(reply.ok.key_expr) for reply in tokens] == [f"{TREE}/node/w2/live"]
        for each in (everything, *held):
            each.undeclare()


async def test_an_observer_reads_and_gives_no_commands(made: Made, hub: ZenohEngine) -> None:
    commands: list[bytes] = []

    async def obey(payload: bytes) -> bytes:
        commands.append(payload)
        return b"done"

    node = made.engine(made.node("w1"))
    reader, master = made.engine(made.node("o1")), made.engine(made.node("m1"))
    await asyncio.gather(node.start(), reader.start(), master.start())
    view = MasterView()
    watching = asyncio.create_task(ClusterObserver(reader, view).run())
    try:
        await node.join("w1", encode_snapshot(snapshot(device(), node="w1")), obey)
        await until(lambda: view.node("w1") and view.node("w1").state is NodeState.HEALTHY)  # type: ignore[union-attr]
        with pytest.raises(NoAnswer):
            await reader.command("w1", b"{}", timeout=0.3)
        assert commands == []
        assert await master.command("w1", b"{}", timeout=5) == b"done"
        assert await hub.command("w1", b"{}", timeout=5) == b"done"
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await asyncio.gather(node.close(), reader.close(), master.close())


# What is looked at by who receives it


async def test_what_is_too_large_is_not_even_put_together(
    made: Made, hub: ZenohEngine, attack: Attack, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(hub) as (view, observer), ReadingsBoard(hub) as board, joined(made):
        await until(lambda: view.node("w1"))
        before = view.node("w1")
        session = await asyncio.to_thread(attack, made.node("w1"))
        send(session, f"{TREE}/node/w1/ev", bytes(MAX_EVENT_BYTES + 1))
        send(session, f"{TREE}/node/w1/telemetry", bytes(MAX_READINGS_BYTES + 1))
        await until(lambda: observer.rejected["oversized"] == 1)
        await until(lambda: f"readings of node w1 of {MAX_READINGS_BYTES + 1} bytes" in caplog.text)
        assert f"event of node w1 of {MAX_EVENT_BYTES + 1} bytes" in caplog.text
        # Past what the largest state may have, zenoh gives up on a message: no memory is taken for it here.
        send(session, f"{TREE}/node/w1/ev", bytes(MAX_STATE_BYTES + (1 << 20)))
        send(session, f"{TREE}/node/w1/ev", b"{}")
        await until(lambda: observer.rejected["malformed"] == 1)
        assert observer.rejected["oversized"] == 1

        def answer(query: object) -> None:
            with query:  # type: ignore[attr-defined]
                query.reply(f"{TREE}/node/w1/state", bytes(MAX_STATE_BYTES + 1))  # type: ignore[attr-defined]

        other = session.declare_queryable(f"{TREE}/node/w1/state", answer)
        told = f"ignored: an answer of {MAX_STATE_BYTES + 1} bytes"
        async with asyncio.timeout(10):
            while told not in caplog.text:  # as soon as the hub has heard that there is a second one to ask
                replies = await hub.snapshot("w1")
                assert [len(reply.payload) for reply in replies] == [
                    len(encode_snapshot(snapshot(device(), node="w1", epoch=E2)))
                ]
        other.undeclare()
        assert view.node("w1") == before
        assert board.readings("w1") == {}


async def test_a_repeated_epoch_is_refused(
    made: Made, hub: ZenohEngine, attack: Attack, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(hub) as (view, observer), joined(made, epoch=E2) as node:
        await until(lambda: view.node("w1") and view.node("w1").state is NodeState.HEALTHY)  # type: ignore[union-attr]
        await node.set_state(encode_snapshot(snapshot(device(), node="w1", epoch=E2, seq=1)))
        await node.publish(event_bytes(1, node="w1", epoch=E2))
        await until(lambda: view.node("w1").seq == 1)  # type: ignore[union-attr]
        before = view.node("w1")
        session = await asyncio.to_thread(attack, made.node("w1"))
        # The goodbye of an earlier run, and of this run what was told already: both were true once.
        for epoch in (E1, E2):
            send(session, f"{TREE}/node/w1/ev", event_bytes(1, node="w1", epoch=epoch, kind="gpurt.node.leaving.v1"))
        counters = observer.counters("w1")
        await until(lambda: (counters.stale, counters.duplicates) == (1, 1))
        assert f"event w1:{E1}:1, which is of an earlier run of the node" in caplog.text
        await until(lambda: counters.snapshots >= 2, "the node's word on it")
        assert view.node("w1") == before


async def test_a_stale_term_is_refused(made: Made, hub: ZenohEngine, caplog: pytest.LogCaptureFixture) -> None:
    looked: list[int] = []

    async def look() -> DiscoveryResult:
        looked.append(len(looked))
        return result(device())

    engine = made.engine(made.node("w1"))
    await start(engine)
    try:
        publisher = NodePublisher(engine, "w1", host=HOST_A, epoch=E2, rediscover=look)
        seen = await hub.subscribe()
        await publisher.start(result(device()))
        assert await anext(seen) == NodeUp("w1")  # what it answers is known to the hub by then
        assert (await request_rediscovery(hub, "w1", term=5, timeout=5))["devices"] == 1
        before = publisher.position
        with pytest.raises(ClusterError, match="command of term 4 refused: a master of term 5 has spoken"):
            await request_rediscovery(hub, "w1", term=4, timeout=5)
        assert "a command failed" in caplog.text
        assert "command of term 4 refused" in caplog.text
        assert looked == [0]
        assert publisher.position == before
    finally:
        await engine.close()


# Time


async def test_a_certificate_that_ends_ends_the_connection_and_the_next_one_brings_it_back(
    made: Made, hub: ZenohEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(enrol, made.folder, "w1", renew=True, days=2.5 / 86_400)
    async with watched(hub) as (view, _), joined(made):
        assert "ends at" in caplog.text  # said when it is near
        await until(lambda: view.node("w1"))
        await until(lambda: view.node("w1").state is not NodeState.HEALTHY, "the end")  # type: ignore[union-attr]
        await until(lambda: "went away" in caplog.text)
        assert "cert.pem has expired" in caplog.text
        await asyncio.to_thread(enrol, made.folder, "w1")
        await until(lambda: view.node("w1").state is NodeState.HEALTHY, "the return")  # type: ignore[union-attr]


async def test_renewal_is_asked_for_every_day_until_the_end(
    made: Made, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpurt.cluster.security.protection.REMIND_S", 0.05)
    await asyncio.to_thread(enrol, made.folder, "hub", role=Role.HUB, renew=True, days=60 / 86_400)
    engine = made.engine(made.hub, listen=True)
    await start(engine)
    asked = "renew it with gpurt cluster enrol hub --role hub, and start the hub again"
    await until(lambda: caplog.text.count(asked) >= 3)
    await engine.close()
    said = caplog.text.count(asked)
    await asyncio.sleep(0.15)
    assert caplog.text.count(asked) == said
