"""The interpreter's turns are short while a driver opens, and nobody's setting is lost."""

import sys
import threading
from collections.abc import Iterator

import pytest

from gpurt.backends.cpu_backend import CPUBackend
from gpurt.runtime.turns import TURN_S, short_turns


@pytest.fixture(autouse=True)
def interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def test_turns_are_short_within_and_as_before_after(interval: float) -> None:
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
    assert sys.getswitchinterval() == interval


def test_the_last_of_several_threads_puts_it_back(interval: float) -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with short_turns():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with short_turns():
        thread.start()
        assert entered.wait(10)
    assert sys.getswitchinterval() == pytest.approx(TURN_S)
    leave.set()
    thread.join()
    assert sys.getswitchinterval() == interval


def test_a_setting_made_meanwhile_stays() -> None:
    with short_turns():
        sys.setswitchinterval(0.02)
    assert sys.getswitchinterval() == pytest.approx(0.02)


def test_shorter_turns_are_left_alone() -> None:
    sys.setswitchinterval(0.0001)
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(0.0001)
    assert sys.getswitchinterval() == pytest.approx(0.0001)


async def test_a_driver_opens_under_them(monkeypatch: pytest.MonkeyPatch, interval: float) -> None:
    seen: list[float] = []
    backend = CPUBackend()
    real = backend.driver.open

    def open_and_look() -> object:
        seen.append(sys.getswitchinterval())
        return real()

    monkeypatch.setattr(backend.driver, "open", open_and_look)
    async with backend:
        pass
    assert seen == [pytest.approx(TURN_S)]
    assert sys.getswitchinterval() == interval
