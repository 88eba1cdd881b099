"""What an observer may believe of a node, whatever the order in which the node's words reach it.

:class:`World` is an independent statement of it: several runs of one node, one after the other, say things; tokens come
in their own order, events in any, twice or never, and answers as late as a bus may bring them. The true observer takes
them in. At every moment it may believe only what was true of some run once, and never go back to an earlier run; in the
end, once all that the newest run has said is there, it believes that run.

:class:`Doubled` states the other case: two processes that live at the same time and use one name. There it is not the
newer run that is believed, but the process that has held the name for longest, for as long as both answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpurt.cluster.bus import BusItem, EventReceived, NodeDown, NodeUp, StateReply
from gpurt.cluster.envelope import EventKind, encode, make_event
from gpurt.cluster.epoch import Epoch, Position
from gpurt.cluster.observer import HELD_EQUAL_S, ClusterObserver
from gpurt.cluster.records import NodeState
from gpurt.cluster.state import NodeSnapshot, encode_snapshot
from gpurt.cluster.view import MasterView
from tests.cluster.support import HOST_A
from tests.cluster.virtual_time import VirtualLoop

NODE = "n1"
SETTLED_S = 5.0
"""Within this time an observer that has got every message believes the truth: long before its next regular check."""
CHECKED_S = 75.0
"""Where events were lost for good, the next regular check repairs it."""


@dataclass
class Run:
    """One run of the node's process: what it says of itself, by the number of its last event."""

    number: int
    epoch: Epoch
    since: float
    """When it has joined."""
    seq: int = 0
    up: bool = True
    said_goodbye: bool = False

    def fields(self, seq: int) -> dict[str, Any]:
        return {"gpu_discovery_timestamp": f"run {self.number}, event {seq}"}

    def state(self) -> bytes:
        position = {"epoch": str(self.epoch), "seq": self.seq}
        return encode_snapshot(NodeSnapshot(node=NODE, host=HOST_A, **position, **self.fields(self.seq)))

    def event(self, kind: str) -> bytes:
        """The next one."""
        self.seq += 1
        position, data = Position(self.epoch, self.seq), {"node": self.fields(self.seq)}
        leaving = kind == EventKind.NODE_LEAVING
        return encode(make_event(kind, cluster="c", node=NODE, position=position, data=None if leaving else data))


class Items:
    """What reaches the observer, when the test lets it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[BusItem] = asyncio.Queue()

    def __aiter__(self) -> Items:
        return self

    async def __anext__(self) -> BusItem:
        return await self.queue.get()

    async def aclose(self) -> None: ...


@dataclass
class Question:
    answer: asyncio.Future[None]
    tokens: int = 0
    """Tokens that had come when it was put."""
    replies: list[StateReply] = field(default_factory=list[StateReply])


class World:
    """The node's runs, what is on its way, and the observer."""

    cluster = "c"

    def __init__(self, loop: VirtualLoop, *, forgetful: bool = False) -> None:
        self.loop, self.forgetful = loop, forgetful
        self.runs: list[Run] = []
        self.events: list[tuple[Run, bytes]] = []
        self.tokens: list[tuple[Run, BusItem]] = []
        self.questions: list[Question] = []
        self.items = Items()
        self.lost = False
        self.token_up = False
        """What the last token that was delivered said."""
        self.tokens_come = 0
        self.newest_token = -1
        """Of which run a token was delivered last."""
        self.first_believed: int | None = None
        """The run that was believed first, where it had ended by then."""
        self.newest_believed = -1
        self.seen_off: set[int] = set()
        """Runs whose goodbye the observer has believed."""
        self.prompt = False
        """The node answers at once."""
        self.view = MasterView(clock=loop.time)
        self.observer = ClusterObserver(self, self.view)  # type: ignore[arg-type]
        self.observer._jitter = random.Random(0)  # pyright: ignore[reportPrivateUsage]
        self.task = loop.create_task(self.observer.run())
        loop.settle()

    # The bus

    async def subscribe(self) -> Items:
        return self.items

    async def snapshot(self, node: str, *, timeout: float) -> tuple[StateReply, ...]:
        question = Question(asyncio.get_running_loop().create_future(), self.tokens_come)
        self.questions.append(question)
        if self.prompt:
            self.reach(question)
            self.questions.remove(question)
            return tuple(question.replies)
        try:
            async with asyncio.timeout(timeout):
                await question.answer
        except TimeoutError:
            pass
        if question in self.questions:
            self.questions.remove(question)
        return tuple(question.replies)

    # What happens

    @property
    def alive(self) -> Run | None:
        return self.runs[-1] if self.runs and self.runs[-1].up else None

    def start(self) -> None:
        number = len(self.runs)
        # One that has lost its registry counts from 1 again.
        counter = 1 if self.forgetful and number % 2 else number + 10
        run = Run(number, Epoch(counter, f"{number:032x}"), self.loop.time())
        self.runs.append(run)
        self.tokens.append((run, NodeUp(NODE)))
        # As a publisher does when it has joined.
        self.say(run)

    def say(self, run: Run) -> None:
        self.events.append((run, run.event(EventKind.BACKEND_SELECTED)))

    def say_goodbye(self, run: Run) -> None:
        """It still answers until it is gone."""
        self.events.append((run, run.event(EventKind.NODE_LEAVING)))
        run.said_goodbye = True

    def gone(self, run: Run) -> None:
        """It has ended: after its goodbye, or without."""
        run.up = False
        self.tokens.append((run, NodeDown(NODE, run.said_goodbye)))

    # What reaches the observer

    def deliver(self, item: BusItem) -> None:
        self.items.queue.put_nowait(item)
        self.loop.settle()

    def deliver_token(self) -> None:
        run, item = self.tokens.pop(0)
        self.token_up = isinstance(item, NodeUp)
        self.tokens_come += self.token_up
        if self.token_up:
            self.newest_token = run.number
        self.deliver(item)

    def deliver_event(self, index: int, *, keep: bool = False) -> None:
        run, payload = self.events[index] if keep else self.events.pop(index)
        before = self.view.node(NODE)
        self.deliver(EventReceived(NODE, payload))
        after = self.view.node(NODE)
        left = after is not None and after.state is NodeState.LEFT and before != after
        if left and EventKind.NODE_LEAVING.encode() in payload:
            self.seen_off.add(run.number)

    def drop_event(self, index: int) -> None:
        self.events.pop(index)
        self.lost = True

    def reach(self, question: Question) -> None:
        """The question has come to the node, which answers as it is now."""
        if not question.replies:
            question.replies += [
                StateReply(NODE, run.state(), self.loop.time() - run.since) for run in self.runs if run.up
            ]

    def answered(self, question: Question) -> None:
        """The answer has come to the observer, or the end of the answers without one."""
        self.questions.remove(question)
        question.answer.set_result(None)
        self.loop.settle()

    # What must hold

    def check(self) -> None:
        """At every moment."""
        record = self.view.node(NODE)
        if record is None:
            return
        run = next(each for each in self.runs if str(each.epoch) == record.epoch)
        assert record.gpu_discovery_timestamp == f"run {run.number}, event {record.seq}" or record.seq == run.seq, (
            "believed what was never true"
        )
        if self.first_believed is None:
            self.first_believed = run.number if run.number < self.newest_token else -1
        assert run.number >= self.newest_believed, "went back to an earlier run"
        self.newest_believed = run.number
        if record.state is NodeState.HEALTHY:
            assert self.token_up, "healthy without a token"
            assert run.number not in self.seen_off, "healthy after its goodbye"
            # Where nothing was known, an answer is better than nothing, also where its run has just ended.
            if run.number != self.first_believed:
                assert run.number >= self.newest_token, "healthy by the token of a later run"
        if record.state is NodeState.LEFT and self.token_up and run.up and not run.said_goodbye:
            # By the goodbye or the token of an earlier run, until the question about the new token is answered.
            assert self.observer._nodes[NODE].asking, "left, and nobody asks"  # pyright: ignore[reportPrivateUsage]

    def check_end(self) -> None:
        """Once everything has been delivered, in whatever order, the newest run is believed."""
        if not self.runs:
            return
        if self.alive is not None and self.alive.said_goodbye:
            self.gone(self.alive)
        for question in tuple(self.questions):
            self.reach(question)
            self.answered(question)
        self.prompt = True
        while self.tokens:
            self.deliver_token()
        while self.events:
            self.deliver_event(0)
        self.check()
        self.loop.advance(CHECKED_S if self.lost else SETTLED_S)
        self.check()
        record, run = self.view.node(NODE), self.runs[-1]
        if record is None or str(run.epoch) != record.epoch:
            # It has ended before anybody could ask it. Nobody can know what it was; that it is gone is known.
            assert not run.up, "the newest run is not known"
            assert record is None or record.state in (NodeState.LOST, NodeState.LEFT)
            return
        if run.up:
            assert record.state is NodeState.HEALTHY, "the newest run is not believed to be there"
            assert record.seq == run.seq, "something of the newest run is missing"
            assert record.gpu_discovery_timestamp == f"run {run.number}, event {run.seq}"
        elif run.said_goodbye:
            assert record.state is NodeState.LEFT
        else:
            assert record.state is NodeState.LOST
        asked = self.observer.resyncs.total()
        self.loop.advance(SETTLED_S)
        assert self.observer.resyncs.total() <= asked + 1, "it goes on to ask"

    def end(self) -> None:
        self.loop.end(self.task)


class Orders(RuleBasedStateMachine):
    """Any order of what may happen."""

    loop: VirtualLoop

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @property
    def here(self) -> World:
        assert self.world is not None
        return self.world

    @initialize(forgetful=st.booleans())
    def begin(self, forgetful: bool) -> None:
        self.world = World(self.loop, forgetful=forgetful)
        self.world.start()

    @rule()
    @precondition(lambda self: self.here.alive is None)
    def starts(self) -> None:
        self.here.start()

    @rule(times=st.integers(1, 4))
    @precondition(lambda self: self.here.alive is not None and not self.here.alive.said_goodbye)
    def says(self, times: int) -> None:
        for _ in range(times):
            assert self.here.alive is not None
            self.here.say(self.here.alive)

    @rule(goodbye=st.booleans())
    @precondition(lambda self: self.here.alive is not None)
    def ends(self, goodbye: bool) -> None:
        run = self.here.alive
        assert run is not None
        if goodbye and not run.said_goodbye:
            self.here.say_goodbye(run)
        else:
            self.here.gone(run)

    @rule()
    @precondition(lambda self: bool(self.here.tokens))
    def token(self) -> None:
        self.here.deliver_token()

    @rule(where=st.integers(0, 50), what=st.sampled_from(["first", "first", "first", "any", "again", "lost"]))
    @precondition(lambda self: bool(self.here.events))
    def event(self, where: int, what: str) -> None:
        index = 0 if what == "first" else where % len(self.here.events)
        if what == "lost":
            self.here.drop_event(index)
        else:
            self.here.deliver_event(index, keep=what == "again")

    @rule(what=st.sampled_from(["reached", "answered", "both"]))
    @precondition(lambda self: bool(self.here.questions))
    def question(self, what: str) -> None:
        question = self.here.questions[0]
        if what != "answered":
            self.here.reach(question)
        if what != "reached":
            self.here.answered(question)

    @rule(seconds=st.sampled_from([0.1, 0.3, 2.1]))
    def later(self, seconds: float) -> None:
        self.here.loop.advance(seconds)

    @invariant()
    def believed(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is not None:
            try:
                self.world.check_end()
            finally:
                self.world.end()


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def _orders(loop: VirtualLoop, examples: int, steps: int) -> None:
    machine = type("OrdersHere", (Orders,), {"loop": loop})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_an_observer_believes_only_what_was_true_and_in_the_end_the_newest_run(loop: VirtualLoop) -> None:
    _orders(loop, 50, 20)


def walk(loop: VirtualLoop, seed: int, steps: int = 30) -> None:
    """One random order; the same for the same seed. A hundred times as many an hour as ``Orders`` tries."""
    chance = random.Random(seed)
    world = World(loop, forgetful=chance.random() < 0.4)
    # Each walk has likings of its own: where everything is equally likely, nothing happens twice in a row.
    liking = {
        name: chance.choice([0.1, 0.5, 1, 3]) for name in ("time", "say", "end", "token", "event", "odd", "answer")
    }
    try:
        world.start()
        for _ in range(chance.randint(3, steps)):
            _step(world, chance, liking)
            world.check()
        world.check_end()
    finally:
        world.end()


def _step(world: World, chance: random.Random, liking: dict[str, float]) -> None:
    alive = world.alive
    seconds = chance.choice([0.1, 0.3, 2.1])
    possible: list[tuple[str, Callable[[], object]]] = [("time", lambda: world.loop.advance(seconds))]
    if alive is None:
        possible.append(("say", world.start))
    elif alive.said_goodbye:
        possible.append(("end", lambda: world.gone(alive)))
    else:
        times = chance.randint(1, 4)
        possible += [
            ("say", lambda: [world.say(alive) for _ in range(times)]),
            ("end", lambda: (world.say_goodbye if times > 1 else world.gone)(alive)),
        ]
    if world.tokens:
        possible.append(("token", world.deliver_token))
    if world.events:
        anywhere = chance.randrange(len(world.events))
        possible += [
            ("event", lambda: world.deliver_event(0)),
            ("event", lambda: world.deliver_event(anywhere)),
            ("odd", lambda: world.deliver_event(anywhere, keep=True)),
            ("odd", lambda: world.drop_event(anywhere)),
        ]
    if world.questions:
        question = world.questions[0]
        possible += [("answer", lambda: world.reach(question)), ("answer", lambda: world.answered(question))]
    chosen = chance.choices(possible, [liking[name] for name, _ in possible])
    chosen[0][1]()


class Doubled(World):
    """Processes of one name, two of which may live at the same time."""

    def __init__(self, loop: VirtualLoop, chance: random.Random) -> None:
        super().__init__(loop)
        self.chance = chance
        self.decided: tuple[Run, Run] | None = None
        """Who keeps the name and who does not, as the observer has been answered by both."""

    @property
    def living(self) -> list[Run]:
        return [run for run in self.runs if run.up]

    def join(self) -> None:
        """Its epoch may be earlier than that of the other one: each counts in a registry of its own."""
        number = len(self.runs)
        self.runs.append(Run(number, Epoch(self.chance.randint(1, 3), f"{number:032x}"), self.loop.time()))
        # There is one token for both. Some buses tell that it was set once more.
        if len(self.living) == 1 or self.chance.random() < 0.5:
            self.tokens.append((self.runs[-1], NodeUp(NODE)))
        self.say(self.runs[-1])

    def gone(self, run: Run) -> None:
        run.up = False
        if not self.living:
            self.tokens.append((run, NodeDown(NODE, run.said_goodbye)))

    @staticmethod
    def first(runs: list[Run]) -> Run:
        """Who keeps the name: of those that cannot be told apart by time, the earlier run."""
        joined = min(run.since for run in runs)
        return min((run for run in runs if run.since < joined + HELD_EQUAL_S), key=lambda run: run.epoch)

    def answered(self, question: Question) -> None:
        replied = [
            run for run in self.living if any(str(run.epoch).encode() in each.payload for each in question.replies)
        ]
        super().answered(question)
        # Where a token has come meanwhile, the observer asks again.
        if len(replied) == 2 and question.tokens == self.tokens_come:
            first = self.first(replied)
            self.decided = first, next(run for run in replied if run is not first)

    def check(self) -> None:
        record = self.view.node(NODE)
        if record is None:
            return
        run = next(each for each in self.runs if str(each.epoch) == record.epoch)
        assert record.gpu_discovery_timestamp == f"run {run.number}, event {record.seq}" or record.seq == run.seq, (
            "believed what was never true"
        )
        assert record.state is not NodeState.HEALTHY or self.token_up, "healthy without a token"
        if self.decided is not None and any(not each.up or each.said_goodbye for each in self.decided):
            self.decided = None
        if self.decided is not None:
            first, other = self.decided
            assert record.epoch == str(first.epoch), "the name went to another live process"
            conflict = self.view.conflict(NODE)
            assert conflict is not None, "nobody is told that the name is used twice"
            assert conflict.refused_epoch == str(other.epoch)

    def check_end(self) -> None:
        for run in self.living:
            if run.said_goodbye:
                self.gone(run)
        for question in tuple(self.questions):
            self.reach(question)
            self.answered(question)
        self.prompt = True
        while self.tokens:
            self.deliver_token()
        while self.events:
            self.deliver_event(0)
        self.check()
        self.loop.advance(CHECKED_S)
        self.check()
        record = self.view.node(NODE)
        if not self.living:
            assert record is None or record.state in (NodeState.LOST, NodeState.LEFT)
            return
        first = self.first(self.living)
        assert record is not None
        assert (record.epoch, record.state) == (str(first.epoch), NodeState.HEALTHY)
        assert record.seq == first.seq, "something of it is missing"
        conflict = self.view.conflict(NODE)
        assert (conflict is not None) == (len(self.living) > 1), "a conflict is there exactly while there are two"


def double_walk(loop: VirtualLoop, seed: int, steps: int = 40) -> None:
    chance = random.Random(seed)
    world = Doubled(loop, chance)
    liking = {name: chance.choice([0.1, 0.5, 1, 3]) for name in ("time", "say", "end", "token", "event", "answer")}
    try:
        world.join()
        for _ in range(chance.randint(3, steps)):
            _double_step(world, chance, liking)
            world.check()
        world.check_end()
    finally:
        world.end()


def _double_step(world: Doubled, chance: random.Random, liking: dict[str, float]) -> None:
    seconds = chance.choice([0.02, 0.1, 0.3, 2.1, 6.0])
    possible: list[tuple[str, Callable[[], object]]] = [("time", lambda: world.loop.advance(seconds))]
    if len(world.living) < 2:
        possible.append(("say", world.join))
    if world.living:
        run = chance.choice(world.living)
        if run.said_goodbye:
            possible.append(("end", lambda: world.gone(run)))
        else:
            possible += [("say", lambda: world.say(run)), ("end", lambda: world.gone(run))]
            if len(world.living) == 1 or run is world.first(world.living):
                # Who sees that its name is another's ends without a goodbye.
                possible.append(("end", lambda: world.say_goodbye(run)))
    if world.tokens:
        possible.append(("token", world.deliver_token))
    if world.events:
        anywhere = chance.randrange(len(world.events))
        possible += [
            ("event", lambda: world.deliver_event(0)),
            ("event", lambda: world.deliver_event(anywhere, keep=chance.random() < 0.2)),
            ("event", lambda: world.drop_event(anywhere)),
        ]
    if world.questions:
        question = world.questions[0]
        possible += [("answer", lambda: world.reach(question)), ("answer", lambda: world.answered(question))]
    chosen = chance.choices(possible, [liking[name] for name, _ in possible])
    chosen[0][1]()


def test_of_two_live_processes_the_first_holder_keeps_the_name(loop: VirtualLoop) -> None:
    for seed in range(200):
        double_walk(loop, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_twenty_thousand_orders_of_two_live_processes(loop: VirtualLoop, block: int) -> None:
    for seed in range(1000 + 1000 * block, 2000 + 1000 * block):
        double_walk(loop, seed, steps=60)


def test_the_last_answer_of_a_run_is_no_answer_to_the_next_ones_token(loop: VirtualLoop) -> None:
    world = World(loop)
    world.start()
    world.deliver_token()
    world.reach(world.questions[0])
    world.answered(world.questions[0])
    world.check()
    (one,) = world.runs
    world.say(one)
    world.say(one)
    world.deliver_event(2)  # behind a hole
    loop.advance(0.3)
    (question,) = world.questions
    world.reach(question)
    world.say_goodbye(one)
    world.gone(one)
    world.drop_event(len(world.events) - 1)
    world.deliver_token()
    world.start()
    world.deliver_token()
    world.answered(question)
    world.check()
    world.check_end()
    world.end()


def test_what_a_node_says_that_counts_from_1_again_is_kept_for_its_answer(loop: VirtualLoop) -> None:
    world = World(loop, forgetful=True)
    world.start()
    world.deliver_token()
    world.reach(world.questions[0])
    world.answered(world.questions[0])
    world.deliver_event(0)
    world.gone(world.runs[0])
    world.start()
    world.deliver_token()
    world.deliver_token()
    world.answered(world.questions[0])  # without a reply
    world.deliver_event(0)
    loop.advance(0.3)
    world.reach(world.questions[0])
    world.say(world.runs[1])
    world.deliver_event(0)  # after the answer was given, and before it has come
    world.answered(world.questions[0])
    world.check_end()
    world.end()


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(block, marks=pytest.mark.wide) for block in (2, 3))])
def test_a_thousand_random_orders(loop: VirtualLoop, block: int) -> None:
    for seed in range(250 * block, 250 * (block + 1)):
        walk(loop, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100))
def test_a_hundred_thousand_random_orders(loop: VirtualLoop, block: int) -> None:
    for seed in range(1000 + 1000 * block, 2000 + 1000 * block):
        walk(loop, seed, steps=60)


@pytest.mark.slow
def test_many_orders_with_small_counterexamples(loop: VirtualLoop) -> None:
    _orders(loop, 5000, 40)
