"""Terms follow masters: no single node, whatever it names, makes others go on from there, and an operator has a way
back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.cli.drain import drain
from gpurt.cli.reset_term import reset
from gpurt.cluster.assignment import Refusal
from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.commands import Step, request_drain, reset_term, send_assignment
from gpurt.cluster.committer import latest_version
from gpurt.cluster.errors import ClusterError, StaleTerm
from gpurt.cluster.fence import Fence
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.master import MasterConfig
from gpurt.cluster.message_limits import Refusals
from gpurt.cluster.promises import PromiseFile
from gpurt.cluster.shards import NodePlacement, ShardReport, ShardState
from gpurt.cluster.state import encode_snapshot, parse_snapshot
from gpurt.cluster.terms import NUMBER_STEP, TERM_STEP, believed
from gpurt.cluster.view import MasterView
from gpurt.errors import GPUError
from gpurt.placement import PlanVersion
from gpurt.placement.version import MAX_NUMBER
from tests.cluster.support import device, snapshot, until
from tests.cluster.test_assignments import Cluster, cluster, part, v  # noqa: F401

numbers = st.one_of(st.integers(0, 10), st.integers(0, MAX_NUMBER), st.just(MAX_NUMBER))
honest = st.integers(1, 1000)
CONFIG = MasterConfig("test", listen=False)


@given(st.lists(honest, min_size=1, max_size=8), numbers)
def test_one_liar_moves_what_counts_by_a_bounded_step_at_most(named: list[int], lie: int) -> None:
    alone, together = believed(named, TERM_STEP), believed([*named, lie], TERM_STEP)
    assert alone == max(named), "of honest nodes, the latest counts also where one alone has heard of it"
    assert alone <= together <= alone + TERM_STEP
    if lie > alone + TERM_STEP:
        assert together == alone, "what is far beyond changes nothing at all"


@given(numbers)
def test_where_there_is_nobody_else_a_number_far_off_does_not_count(named: int) -> None:
    assert believed([named], TERM_STEP) == (named if named <= TERM_STEP else 0)
    assert believed([], TERM_STEP) == 0


def view_of(**nodes: tuple[int, int | None]) -> MasterView:
    """Nodes by name, each with its term and the number of the plan that it follows, in that term."""
    view = MasterView()
    for name, (term, number) in nodes.items():
        shards = []
        if number is not None:
            version = PlanVersion(term=term, n=number)
            shards = [ShardReport(instance="llama", model="llama", version=version, state=ShardState.LOADED)]
        view.node_up(name)
        view.apply_snapshot(snapshot(device(), node=name, placement=NodePlacement(term=term, shards=tuple(shards))))
    return view


@pytest.mark.parametrize("lie", [MAX_NUMBER, MAX_NUMBER - 1, 2**62, 2**40])
@pytest.mark.parametrize("first", [False, True])
def test_a_master_goes_on_as_if_the_liar_were_not_there(lie: int, first: bool) -> None:
    liar, good = {"evil": (lie, 5)}, {"good": (3, 7), "other": (3, None)}
    seen = view_of(**(liar | good if first else good | liar)).snapshot()
    assert seen.term == 3
    assert seen.doubted_terms == {"evil": lie}
    version = latest_version(seen, "llama")
    assert version == v(7, term=3)
    assert version.next(term=seen.term) == v(8, term=3)


@pytest.mark.parametrize("number", [MAX_NUMBER, MAX_NUMBER - 1, NUMBER_STEP * 2])
def test_a_number_of_a_plan_that_one_node_names_is_no_end_of_numbers(number: int) -> None:
    assert latest_version(view_of(good=(3, 7), evil=(3, number)).snapshot(), "llama") == v(7, term=3)
    assert latest_version(view_of(good=(3, None), evil=(3, number)).snapshot(), "llama") is None


@pytest.mark.parametrize("term", [MAX_NUMBER + 1, 10**30, -1, 1.5, "3", None])
def test_what_is_no_term_is_refused_by_field_and_node(term: Any) -> None:
    document = snapshot(device(), node="evil").document()
    document["placement"]["term"] = term
    refusals = Refusals()
    known = parse_snapshot(document, node="evil", refusals=refusals)
    if term == "3":
        assert known.placement.term == 3
    else:
        assert known.placement.term == 0, "it names none"
        assert refusals.of("evil") == {"placement.term": 1}


async def test_a_term_that_does_not_count_is_said_once() -> None:
    view = view_of(good=(3, None), other=(3, None))
    changes = view.changes()
    for seq in (1, 2):
        view.node_up("evil")
        placement = NodePlacement(term=MAX_NUMBER)
        view.apply_snapshot(snapshot(device(), node="evil", seq=seq, placement=placement))
    changes.close()
    said = [each async for each in changes if each.kind is ChangeKind.TERM_DOUBTED]
    assert [each.node for each in said] == ["evil"]
    assert f"term {MAX_NUMBER}, far beyond 3" in (said[0].message or "")
    assert "gpurt cluster reset-term evil --term 3" in (said[0].message or "")


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff",
        b"",
        b"[]",
        b"null",
        b'{"term":' + b"9" * 400 + b"}",
        b"[" * 50_000,
        b'{"term":1e400}',
        b'{"term":-1}',
        b'{"refused":"no","term":' + b"9" * 30 + b"}",
        b'{"refused":"no","term":%d}' % MAX_NUMBER,
        b'{"draining":true,"term":0,"unkept":"\\u001b[31mboom"}',
    ],
    ids=range(11),
)
async def test_drain_ends_in_words_whatever_a_node_answers(answer: bytes) -> None:
    bus = InProcessBus("test")
    evil = InProcessEngine(bus)
    await evil.start()

    async def answers(payload: bytes) -> bytes:
        return answer

    await evil.join("evil", encode_snapshot(snapshot(device(), node="evil")), answers)
    for command in (drain, reset):
        try:
            if command is drain:
                said = await drain(CONFIG, "evil", engine=InProcessEngine(bus))
            else:
                said = str(await reset(CONFIG, ["evil"], 0, engine=InProcessEngine(bus)))
        except GPUError as exc:
            said = str(exc)
        assert "evil" in said
        assert "\x1b" not in said
    await evil.close()


@pytest.mark.parametrize("term", [10**30, MAX_NUMBER, "x"])
async def test_drain_ends_in_words_whatever_a_node_says_of_itself(term: Any) -> None:
    bus = InProcessBus("test")
    evil = InProcessEngine(bus)
    await evil.start()
    document = snapshot(device(), node="evil").document()
    document["placement"]["term"] = term

    async def answers(payload: bytes) -> bytes:
        return b'{"draining":true,"term":0}'

    await evil.join("evil", json.dumps(document).encode(), answers)
    assert "evil is draining" in await drain(CONFIG, "evil", engine=InProcessEngine(bus))
    await evil.close()


async def test_an_operator_sets_back_what_a_wrong_master_has_named(cluster: Cluster) -> None:  # noqa: F811
    one = await cluster.node("n1")
    assert (await cluster.committer.commit(plan_of("n1"), v(4, term=3))).committed
    await cluster.loaded("n1", v(4, term=3))
    wrong = part(v(1, term=MAX_NUMBER))
    assert (await send_assignment(cluster.engine, "n1", wrong, Step.OFFER)).accepted
    refused = await send_assignment(cluster.engine, "n1", part(v(5, term=3), end=3), Step.OFFER)
    assert refused.reason is Refusal.STALE_TERM
    with pytest.raises(StaleTerm):
        await request_drain(cluster.engine, "n1", term=3)
    answer = await reset_term(cluster.engine, "n1", 3)
    assert (answer.before, answer.term, answer.unkept) == (MAX_NUMBER, 3, None)
    await until(lambda: cluster.view.snapshot().nodes["n1"].placement.term == 3, "the term")
    assert one.publisher.fence.promised("llama") is not None, "what was promised of the right term holds"
    stale = await send_assignment(cluster.engine, "n1", part(v(4, term=3), end=3), Step.OFFER)
    assert stale.reason is Refusal.STALE_VERSION
    assert (await cluster.committer.commit(plan_of("n1"), v(5, term=3))).committed
    await cluster.loaded("n1", v(5, term=3))
    # And it is kept.
    await one.stop()
    again = await cluster.node("n1")
    assert again.publisher.fence.term == 3
    assert (await reset_term(cluster.engine, "n1", 9)).term == 3, "only masters raise a term"
    with pytest.raises(ClusterError, match="command"):
        await cluster.engine.command("n1", b'{"command":"reset_term","term":%d}' % (MAX_NUMBER + 1))


def plan_of(*nodes: str) -> Any:
    from tests.cluster.plans import plan

    return plan(*((f"{node}/GPU-{node}-0", 4 * i, 4 * i + 4) for i, node in enumerate(nodes)))


async def test_the_command_sets_every_node_back_and_says_which_did_not(tmp_path: Path) -> None:
    from tests.cluster.conftest import InProcess
    from tests.cluster.test_assignments import Node

    bus = InProcess(False)
    nodes = [Node(name, await bus.node(), tmp_path / f"{name}.json", 1) for name in ("n1", "n2")]
    for node in nodes:
        await node.start()
        await node.publisher.fence.admit(MAX_NUMBER if node.name == "n1" else 2)
    done, failed = await reset(CONFIG, [], 2, engine=InProcessEngine(bus.bus))
    assert done == [
        f"n1 follows masters from term 2 on; it had heard of {MAX_NUMBER}",
        "n2 has heard of no later term than 2",
    ]
    assert failed == []
    done, failed = await reset(CONFIG, ["n3", "n1"], 1, engine=InProcessEngine(bus.bus), timeout_s=0.1)
    assert [line.partition(" ")[0] for line in done] == ["n1"]
    assert [line.partition(":")[0] for line in failed] == ["n3"]
    for node in nodes:
        await node.assignments.aclose()
    await bus.aclose()
    with pytest.raises(GPUError, match="no node"):
        await reset(CONFIG, [], 2, engine=InProcessEngine(InProcessBus("test")))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.booleans()), max_size=12), st.integers(0, 4))
def test_a_fence_keeps_the_latest_and_after_a_reset_nothing_later(said: list[tuple[int, int, bool]], back: int) -> None:
    async def follow() -> None:
        fence = Fence()
        latest = 0
        for term, n, activated in said:
            try:
                await fence.admit(term)
                await fence.promise("a", v(n, term=term), f"{term}.{n}", activated=activated)
            except StaleTerm:
                assert term < latest
            latest = max(latest, term)
            assert fence.term == latest
        before = fence.promised("a")
        if before is not None and before.activated is not None:
            followed = [v(n, term=term) for i, (term, n, on) in enumerate(said) if on and _admitted(said, i)]
            assert before.activated.version == max(followed)
        await fence.reset(back)
        assert fence.term == min(latest, back)
        after = fence.promised("a")
        if after is not None:
            assert after.offered.version.term <= back
            assert after.activated is None or after.activated.version.term <= back
        if before is not None and before.offered.version.term <= back:
            assert after == before

    asyncio.run(follow())


def _admitted(said: list[tuple[int, int, bool]], index: int) -> bool:
    return said[index][0] >= max((term for term, _, _ in said[:index]), default=0)


def test_a_promise_file_with_the_last_term_there_is_can_be_set_back(tmp_path: Path) -> None:
    async def follow() -> None:
        file = PromiseFile(tmp_path / "registry.json", "test", "n1")
        fence = Fence(file)
        await fence.admit(MAX_NUMBER)
        again = Fence(PromiseFile(tmp_path / "registry.json", "test", "n1"))
        await again.load()
        assert again.term == MAX_NUMBER
        assert await again.reset(2)
        assert not await again.reset(2)
        last = Fence(PromiseFile(tmp_path / "registry.json", "test", "n1"))
        await last.load()
        assert last.term == 2

    asyncio.run(follow())
