"""What changed between two discoveries."""

from __future__ import annotations

from gpurt.discovery.events import DeviceEvent, EventType, carry_over, diff, settled
from gpurt.errors import ReasonCode
from gpurt.identity import device_identity
from gpurt.types import DeviceState
from tests.discovery.records import GIB, UUIDS, absent, cpu, device, ok, result

MIB = 1 << 20


def kinds(events: tuple[DeviceEvent, ...]) -> list[tuple[str, str | None]]:
    return [(event.type.value, event.stable_id or event.backend) for event in events]


def test_the_first_result_is_one_snapshot_not_many_additions() -> None:
    first = result(device(0), device(1))
    (event,) = diff(None, first, reason="recovered: the registry was corrupt")
    assert event.type is EventType.SNAPSHOT
    assert event.snapshot == first
    assert event.reason == "recovered: the registry was corrupt"


def test_nothing_changed() -> None:
    assert diff(result(device(0)), result(device(0))) == ()


def test_added_and_removed() -> None:
    before, after = result(device(0), cpu()), result(device(1), cpu())
    events = diff(before, after)
    assert kinds(events) == [("removed", UUIDS[0]), ("added", UUIDS[1])]
    assert events[0].device is not None
    assert events[0].device.state is DeviceState.REMOVED
    assert events[0].previous_state is DeviceState.HEALTHY


def test_permuted_indices_add_and_remove_nothing() -> None:
    before = result(device(0, device_id="cuda:0"), device(1, device_id="cuda:1"))
    after = result(device(1, device_id="cuda:0"), device(0, device_id="cuda:1"))
    events = diff(before, after)
    assert kinds(events) == [("changed", UUIDS[1]), ("changed", UUIDS[0])]
    assert {event.reason for event in events} == {"device_id"}


def test_a_failed_enumeration_removes_nothing_and_says_so_once() -> None:
    before = result(device(0), device(1), cpu())
    failing = result(cpu(), reports=[absent("cuda", ReasonCode.ERROR, "code 999"), ok("cpu")])
    events = diff(before, failing)
    assert kinds(events) == [("backend_unavailable", "cuda"), ("health", UUIDS[0]), ("health", UUIDS[1])]
    state = carry_over(before, failing)
    assert [(d.usable, d.state) for d in state.devices if d.backend == "cuda"] == [(False, DeviceState.SUSPECT)] * 2
    # The next poll fails as well, with another text: nothing new.
    again = result(cpu(), reports=[absent("cuda", ReasonCode.ERROR, "code 999 again"), ok("cpu")])
    assert diff(state, again) == ()
    recovered = diff(carry_over(state, again), before)
    assert kinds(recovered) == [
        ("backend_available", "cuda"),
        ("recovered", UUIDS[0]),
        ("recovered", UUIDS[1]),
    ]


def test_a_hang_makes_devices_unresponsive() -> None:
    state = carry_over(result(device(0)), result(reports=[absent("cuda", ReasonCode.TIMEOUT)]))
    assert [d.state for d in state.devices] == [DeviceState.UNRESPONSIVE]


def test_no_device_is_a_successful_enumeration() -> None:
    for reason in (ReasonCode.NO_DEVICE, ReasonCode.HIDDEN_BY_ENVIRONMENT):
        events = diff(result(device(0)), result(reports=[absent("cuda", reason)]))
        assert ("removed", UUIDS[0]) in kinds(events)


def test_a_backend_that_was_not_asked_says_nothing() -> None:
    only_cpu = result(cpu(), reports=[ok("cpu")])
    assert diff(result(device(0), cpu()), only_cpu) == ()
    assert carry_over(result(device(0), cpu()), only_cpu).devices == only_cpu.devices


def test_a_device_that_two_backends_show_is_looked_for_by_either() -> None:
    shown = device(0, backends=("cuda", "vulkan"))
    after = result(reports=[absent("cuda", ReasonCode.CRASHED), ok("vulkan")])
    assert ("removed", UUIDS[0]) in kinds(diff(result(shown), after))


def test_driver_loaded_late_adds() -> None:
    before = result(cpu(), reports=[absent("cuda", ReasonCode.NO_DRIVER), ok("cpu")])
    events = diff(before, result(device(0), cpu()))
    assert kinds(events) == [("backend_available", "cuda"), ("added", UUIDS[0])]


def test_lost_and_back() -> None:
    lost = device(0, state=DeviceState.LOST, usable=False, state_reason="Xid 79")
    assert kinds(diff(result(device(0)), result(lost))) == [("lost", UUIDS[0])]
    assert kinds(diff(result(lost), result(device(0)))) == [("recovered", UUIDS[0])]
    degraded = device(0, state=DeviceState.DEGRADED, usable=False)
    assert kinds(diff(result(device(0)), result(degraded))) == [("health", UUIDS[0])]


def test_a_lost_card_without_a_name_gets_its_record_back() -> None:
    nameless = device(
        3,
        device_id="nvml:3",
        usable=False,
        state=DeviceState.LOST,
        state_reason="GPU is lost",
        identity=device_identity(fallback="nvml:None:3"),
    )
    before = result(*(device(n) for n in range(4)))
    after = result(*(device(n) for n in range(3)), nameless)
    assert kinds(diff(before, after)) == [("lost", UUIDS[3])]
    assert [d.stable_id for d in carry_over(before, after).devices] == UUIDS[:4]


def test_small_changes_of_memory_are_not_events_but_add_up() -> None:
    told = result(device(0, memory_available=70 * GIB))
    free = 70 * GIB
    said = 0
    for _ in range(20):
        free -= 100 * MIB
        now = result(device(0, memory_available=free))
        events = diff(told, now)
        said += len(events)
        assert all(event.type is EventType.MEMORY for event in events)
        told = settled(told, now)
    # 1 % of 80 GiB is 819 MiB: 2,000 MiB in steps of 100 are two messages.
    assert said == 2


def test_held_memory_is_said_later() -> None:
    told = result(device(0, memory_available=70 * GIB))
    now = result(device(0, memory_available=10 * GIB))
    told = settled(told, now, hold_memory=True)
    assert kinds(diff(told, now)) == [("memory", UUIDS[0])]


def test_memory_that_becomes_unknown_is_an_event() -> None:
    assert kinds(diff(result(device(0)), result(device(0, memory_available=None)))) == [("memory", UUIDS[0])]


def test_urgent_events_come_first() -> None:
    before = result(device(0), device(1), device(2))
    after = result(
        device(0, memory_available=1 * GIB, name="Renamed"),
        device(1, state=DeviceState.LOST, usable=False),
        device(3),
    )
    assert [event.type.value for event in diff(before, after)] == ["lost", "removed", "added", "changed", "memory"]


def test_events_survive_json() -> None:
    for event in (*diff(None, result(device(0), cpu())), *diff(result(device(0)), result(device(1)))):
        assert DeviceEvent.model_validate_json(event.model_dump_json()) == event


def test_the_result_answers_keys_and_attributes_alike() -> None:
    found = result(device(0), cpu())
    assert found["devices"] == found.devices
    assert found["backend_name"] == "cuda"
    assert found["schema"] == 1
    assert list(found.document()) == [
        *("schema", "backend_name", "devices", "reports", "discovery_status", "timestamp", "registry"),
    ]


def test_status() -> None:
    assert result(device(0)).discovery_status == "complete"
    assert result(cpu(), reports=[absent("cuda", ReasonCode.NO_DRIVER), ok("cpu")]).discovery_status == "complete"
    assert result(cpu(), reports=[absent("cuda", ReasonCode.TIMEOUT), ok("cpu")]).discovery_status == "partial"
    assert result(reports=[absent("cuda", ReasonCode.NO_DRIVER)]).discovery_status == "failed"
