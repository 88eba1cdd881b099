"""The same question to several devices at once."""

import threading

import pytest

from gpurt.sources.parallel import MOST, ask_each


def test_answers_are_in_order() -> None:
    assert ask_each(lambda n: n * 2, range(100)) == [n * 2 for n in range(100)]
    assert ask_each(lambda n: n, []) == []


def test_all_are_asked_at_once() -> None:
    together = threading.Barrier(4)
    assert ask_each(lambda n: together.wait(10) >= 0 and n, range(4)) == [0, 1, 2, 3]


def test_one_is_asked_here() -> None:
    assert ask_each(lambda _: threading.current_thread(), [0]) == [threading.current_thread()]


def test_threads_are_few_and_gone_after() -> None:
    before = threading.active_count()
    seen = set(ask_each(lambda _: threading.get_ident(), range(500)))
    assert len(seen) <= MOST
    assert threading.active_count() == before


def test_the_first_failure_is_raised_when_all_have_answered() -> None:
    asked: list[int] = []

    def ask(n: int) -> int:
        asked.append(n)
        if n in (2, 5):
            raise ValueError(n)
        return n

    with pytest.raises(ValueError, match="2"):
        ask_each(ask, range(8))
    assert sorted(asked) == list(range(8))
