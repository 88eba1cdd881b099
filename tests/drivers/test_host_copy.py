"""Copies of host memory that two threads make: every byte, nothing kept, errors told, and alone where no help comes."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from gpurt.backends import host_copy
from gpurt.backends.host_copy import AGAIN, REMEMBERED, SHARED_BYTES, STRIPES, Choice, copy_host


@pytest.fixture(autouse=True)
def _cpus_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_cpus", lambda: 2)
    monkeypatch.setattr(host_copy, "_helper", host_copy._Helper())


def _content(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize(
    "size", [0, 1, SHARED_BYTES - 1, SHARED_BYTES, SHARED_BYTES + 1, SHARED_BYTES + 4097 * STRIPES]
)
def test_every_byte(size: int) -> None:
    source, around = _content(size), np.zeros(size + 2, np.uint8)
    copy_host(around[1:-1], source)
    assert np.array_equal(around[1:-1], source)
    assert (around[0], around[-1]) == (0, 0)


def test_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads have a hand in it, and neither refers to the memory when it is done."""
    hands: set[str] = set()
    real, both = np.copyto, threading.Barrier(2)

    def copyto(target: np.ndarray, source: np.ndarray) -> None:
        name = threading.current_thread().name
        if name not in hands:
            hands.add(name)
            both.wait(10)
        real(target, source)

    monkeypatch.setattr(np, "copyto", copyto)
    source, target = bytearray(b"s" * SHARED_BYTES), bytearray(SHARED_BYTES)
    copy_host(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
    assert hands == {"gpurt:hostcopy", threading.current_thread().name}
    assert target == source
    for buffer in (source, target):
        buffer.append(0)


def test_the_caller_does_not_wait_for_a_helper_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[host_copy._Shared] = []
    monkeypatch.setattr(host_copy._Helper, "ask", lambda self, shared: late.append(shared))
    source, target = _content(SHARED_BYTES), np.zeros(SHARED_BYTES, np.uint8)
    copy_host(target, source)
    assert np.array_equal(target, source)
    target[:] = 0
    late[0].help()  # comes too late and touches nothing
    assert not target.any()


def test_one_cpu_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_cpus", lambda: 1)
    monkeypatch.setattr(host_copy._Helper, "ask", lambda self, shared: pytest.fail("asked"))
    source, target = _content(SHARED_BYTES), np.zeros(SHARED_BYTES, np.uint8)
    copy_host(target, source)
    assert np.array_equal(target, source)


@pytest.mark.parametrize("pays", [True, False])
def test_help_is_had_where_it_pays_and_tried_again_where_it_does_not(pays: bool) -> None:
    choice, kinds = Choice(), list[bool]()

    def copy(pays: bool) -> bool:
        kinds.append(choice.help())
        choice.took(kinds[-1], 1 << 30, 1.0 if kinds[-1] is pays else 2.0)
        return kinds[-1]

    for _ in range(2 * REMEMBERED):
        copy(pays)
    assert kinds.count(True) == kinds.count(False) == REMEMBERED
    assert [copy(pays) for _ in range(AGAIN)].count(pays) == AGAIN - 1
    # The machine does something else now.
    changed = [copy(not pays) for _ in range(AGAIN * (REMEMBERED + 1))]
    assert changed[-AGAIN:].count(not pays) == AGAIN - 1


def test_a_copy_that_fails_says_nothing_about_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def copyto(target: np.ndarray, source: np.ndarray) -> None:
        raise MemoryError("no page")

    monkeypatch.setattr(np, "copyto", copyto)
    monkeypatch.setattr(Choice, "took", lambda *of: pytest.fail("told"))
    with pytest.raises(MemoryError):
        copy_host(np.zeros(SHARED_BYTES, np.uint8), _content(SHARED_BYTES))


def test_a_second_copy_beside_it_is_made_by_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = host_copy._helper
    asked: list[object] = []
    monkeypatch.setattr(host_copy._Helper, "ask", lambda self, shared: asked.append(shared))
    source, target = _content(SHARED_BYTES), np.zeros(SHARED_BYTES, np.uint8)
    with helper.free:
        copy_host(target, source)
    assert np.array_equal(target, source)
    assert asked == []


def test_an_error_of_the_helper_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    real, begun = np.copyto, threading.Event()

    def copyto(target: np.ndarray, source: np.ndarray) -> None:
        if threading.current_thread().name == "gpurt:hostcopy":
            begun.set()
            raise MemoryError("no page")
        assert begun.wait(10)
        real(target, source)

    monkeypatch.setattr(np, "copyto", copyto)
    with pytest.raises(MemoryError, match="no page"):
        copy_host(np.zeros(SHARED_BYTES, np.uint8), _content(SHARED_BYTES))
    monkeypatch.undo()
    target = np.zeros(SHARED_BYTES, np.uint8)
    copy_host(target, _content(SHARED_BYTES))
    assert np.array_equal(target, _content(SHARED_BYTES))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_helper_of_its_own() -> None:
    before = host_copy._helper
    before.free.acquire()
    pid = os.fork()
    if pid == 0:
        target = np.zeros(SHARED_BYTES, np.uint8)
        copy_host(target, np.ones(SHARED_BYTES, np.uint8))
        os._exit(0 if target.all() and host_copy._helper is not before else 1)
    before.free.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
