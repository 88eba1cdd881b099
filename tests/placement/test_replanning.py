"""Plans that follow the devices: at once after a loss, after thought where others serve better, and no to and fro."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    FailedRepair,
    InfeasiblePlacement,
    Pin,
    PlacementDevice,
    PlacementError,
    Plan,
    PlanVersion,
    ProposedPlan,
    RepairPolicy,
    Replanner,
    Topology,
    validate_plan,
)
from gpurt.placement.repair import Repair
from tests.placement.test_repair import device, model, without

pytestmark = pytest.mark.wide

SPEC = model(12)
FIRST = PlanVersion(term=3, n=7)
POLICY = RepairPolicy(horizon_tokens=1e6, settle_seconds=10, quiet_seconds=60)


class Time:
    """A clock that goes on when everybody waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.asleep = asyncio.Event()
        self.woken = asyncio.Event()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        until = self.now + seconds
        while self.now < until:
            self.woken.clear()
            self.asleep.set()
            await self.woken.wait()

    async def until_asleep(self) -> None:
        await asyncio.wait_for(self.asleep.wait(), 20)

    async def pass_on(self, seconds: float) -> None:
        """Once the replanner sleeps."""
        await self.until_asleep()
        self.asleep.clear()
        self.now += seconds
        self.woken.set()


def solved(devices: list[PlacementDevice], **options: object) -> Plan:
    return ConstraintSatisfactionPlacement().solve_placement(SPEC, devices, **options)  # type: ignore[arg-type]


def replanner(plan: Plan, time: Time, constraints: Constraints | None = None, **options: object) -> Replanner:
    return Replanner(
        SPEC,
        plan,
        FIRST,
        constraints,
        policy=POLICY,
        clock=time,
        sleep=time.sleep,
        time_budget=5.0,
        **options,  # type: ignore[arg-type]
    )


async def take(source: Replanner) -> ProposedPlan | FailedRepair:
    return await asyncio.wait_for(anext(aiter(source)), 20)


def slowed(devices: list[PlacementDevice], name: str, speed: float = 1e4) -> list[PlacementDevice]:
    return [entry.model_copy(update={"memory_bandwidth": speed}) if entry.id == name else entry for entry in devices]


async def test_a_loss_gives_a_plan_at_once_and_the_next_version() -> None:
    devices = [device(name, 4) for name in "abc"] + [device("spare", 4)]
    plan, time = solved(devices), Time()
    async with replanner(plan, time) as follow:
        follow.change(without(devices, plan.devices[0]))
        proposed = await take(follow)
        assert isinstance(proposed, ProposedPlan)
        assert proposed.version == PlanVersion(term=3, n=8)
        assert proposed.version == follow.version
        assert proposed.repair.layers_moved == 4
        assert proposed.plan == proposed.repair.plan == follow.plan
        validate_plan(SPEC, without(devices, plan.devices[0]), Topology(), None, proposed.plan)
        follow.change(without(devices, plan.devices[1]))
        second = await take(follow)
        assert isinstance(second, ProposedPlan)
        assert second.version == PlanVersion(term=3, n=9)
    assert time.waits == []


async def test_a_device_that_joins_is_used_after_its_gain_has_lasted() -> None:
    devices = [device(name, 6) for name in "ab"]
    plan, time = solved(devices), Time()
    async with replanner(plan, time) as follow:
        follow.change([*devices, device("new", 12, speed=1e8)])
        await time.pass_on(9.0)
        await time.until_asleep()
        assert follow.version == FIRST
        await time.pass_on(1.0)
        proposed = await take(follow)
    assert isinstance(proposed, ProposedPlan)
    assert proposed.plan.devices == ("new",)
    assert proposed.repair.layers_lost == 0
    assert proposed.version == FIRST.next()


async def test_the_full_plan_comes_from_the_background_where_it_pays() -> None:
    """The survivors' order is a bad one without what is lost; only a full plan finds the other."""
    devices = [device(name, 6) for name in "ab"]
    fast = [device("fast", 6, speed=1e9), device("fast2", 6, speed=1e9)]
    plan, time = solved(devices), Time()
    async with replanner(plan, time) as follow:
        follow.change([*without(devices, plan.devices[0]), *fast])
        first = await take(follow)
        assert isinstance(first, ProposedPlan)
        follow_up = None
        if set(first.plan.devices) != {"fast", "fast2"}:
            await time.pass_on(10.0)
            follow_up = await take(follow)
            assert isinstance(follow_up, ProposedPlan)
    last = follow_up or first
    assert set(last.plan.devices) == {"fast", "fast2"}


async def test_a_device_that_throttles_on_and_off_changes_nothing() -> None:
    devices = [device(name, 6) for name in "abc"]
    plan, time = solved(devices), Time()
    async with replanner(plan, time) as follow:
        for _ in range(6):
            follow.change(slowed(devices, plan.devices[0]))
            await time.pass_on(8.0)
            await time.until_asleep()
            follow.change(devices)
            await settled(follow, lambda: follow.plan.predicted == plan.predicted)
        assert follow.version == FIRST


async def settled(follow: Replanner, done: Callable[[], bool]) -> None:
    """Until the replanner has seen the last change."""
    for _ in range(2000):
        if done():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the replanner did not get there")


async def test_noise_starts_nothing() -> None:
    devices = [device(name, 6) for name in "abc"]
    plan, time = solved(devices), Time()
    async with replanner(plan, time) as follow:
        topology = Topology()
        follow.change(devices, topology)
        await settled(follow, lambda: not follow.thinking)
        follow.change([entry.model_copy(update={"memory_bandwidth": 0.9e6}) for entry in devices], topology)
        follow.change(
            [entry.model_copy(update={"usable_bytes": entry.usable_bytes + 20}) for entry in devices], topology
        )
        assert not follow.thinking
        follow.change(
            [entry.model_copy(update={"usable_bytes": entry.usable_bytes - 1}) for entry in devices], topology
        )
        assert follow.thinking  # a byte less than the plan needs is no noise


async def test_no_plan_is_said_and_the_next_change_is_answered() -> None:
    devices = [device(name, 6) for name in "ab"]
    plan, time = solved(devices), Time()
    async with replanner(plan, time) as follow:
        follow.change(without(devices, "a"))
        failed = await take(follow)
        assert isinstance(failed, FailedRepair)
        assert isinstance(failed.error, InfeasiblePlacement)
        assert follow.version == FIRST
        follow.change([*without(devices, "a"), device("c", 6)])
        proposed = await take(follow)
        assert isinstance(proposed, ProposedPlan)
        assert set(proposed.plan.devices) == {"b", "c"}


async def test_rules_hold_in_every_proposal() -> None:
    devices = [device(name, 6) for name in "abc"]
    rules = Constraints(pins=(Pin(start=0, end=2, devices=frozenset({"a"})),), exclude_devices=frozenset({"c"}))
    plan, time = solved(devices, constraints=rules), Time()
    async with replanner(plan, time, rules) as follow:
        now = [*without(devices, "b"), device("d", 12, speed=1e9)]
        follow.change(now)
        proposed = await take(follow)
        assert isinstance(proposed, ProposedPlan)
        validate_plan(SPEC, now, Topology(), rules, proposed.plan)


async def test_a_newer_change_ends_the_search_for_a_full_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [device(name, 4) for name in "abcd"]
    plan, time = solved(devices), Time()
    started, ended = asyncio.Event(), asyncio.Event()

    async def endless(repair: Repair, time_budget: float) -> Plan:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    monkeypatch.setattr(Repair, "rethought", endless)
    async with replanner(plan, time) as follow:
        follow.change(without(devices, plan.devices[0]))
        assert isinstance(await take(follow), ProposedPlan)
        await asyncio.wait_for(started.wait(), 20)
        assert not ended.is_set()
        follow.change([*without(devices, plan.devices[0]), device("e", 4)])
        await asyncio.wait_for(ended.wait(), 20)


async def test_leaving_ends_the_proposals_and_the_work() -> None:
    devices = [device(name, 6, speed=1e6) for name in "ab"]
    time = Time()
    async with replanner(solved(devices), time) as follow:
        follow.change([*devices, device("new", 12, speed=1e8)])
        await time.until_asleep()
    assert [item async for item in follow] == []


def test_a_replanner_is_made_without_a_loop() -> None:
    devices = [device(name, 6, speed=1e6) for name in "ab"]
    follow = Replanner(SPEC, solved(devices), FIRST)
    assert follow.version == FIRST
    assert follow.plan.devices


@pytest.mark.parametrize("before", [False, True], ids=["left at once", "left while waited for"])
async def test_leaving_ends_everybody_who_iterates_and_whoever_comes_later(before: bool) -> None:
    devices = [device(name, 6, speed=1e6) for name in "ab"]
    follow = replanner(solved(devices), Time())

    async def all_of_it() -> list[object]:
        return [item async for item in follow]

    waiting: list[asyncio.Task[list[object]]] = []
    async with follow:
        if before:
            waiting = [asyncio.create_task(all_of_it()) for _ in range(2)]
            for _ in range(3):
                await asyncio.sleep(0)
    for _ in range(2):
        waiting.append(asyncio.create_task(all_of_it()))
    assert await asyncio.wait_for(asyncio.gather(*waiting), 20) == [[]] * len(waiting)
    follow.change(devices)
    assert not follow.thinking
    with pytest.raises(PlacementError, match="entered once"):
        await follow.__aenter__()


async def test_an_error_that_ends_the_work_is_told_to_everybody_who_iterates(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [device(name, 6, speed=1e6) for name in "ab"]

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Repair, "unchanged", broken)
    async with replanner(solved(devices), Time()) as follow:
        follow.change(devices)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await take(follow)
        assert not follow.thinking
