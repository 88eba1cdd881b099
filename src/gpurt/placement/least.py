"""The least amount of a change that makes a plan possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpurt.placement.feasibility import Feasibility

Ask = Callable[[int, bool], bool | None]
"""``ask(steps, search)``: whether there is a plan with so many steps of a change; with or without a search."""


@dataclass(frozen=True, slots=True)
class Least:
    steps: int
    minimal: bool
    """Proved: with one step less there is none."""


def least_steps(feasibility: Feasibility, ask: Ask, most: int, *, search: bool, guess: int = 1) -> Least | None:
    """The fewest steps, of ``most`` at most, with which there surely is a plan; with none of them there is none.

    More steps never make a plan impossible. What counting leaves open is searched last, in the range that is left.
    """
    if most < 1:
        return None
    low, refuted, high = 0, 0, None
    step = min(max(1, guess), most)
    while high is None:
        if feasibility.over():
            return None
        answer = ask(step, False)
        if answer:
            high = step
        else:
            low = step
            refuted = step if answer is False else refuted
            if step == most:
                break
            step = min(most, step * 4)
    while high is not None and high - low > 1 and not feasibility.over():
        middle = (low + high) // 2
        answer = ask(middle, False)
        if answer:
            high = middle
        else:
            low = middle
            refuted = middle if answer is False else refuted
    if search and refuted < (most if high is None else high - 1):
        refuted, high = _searched(feasibility, ask, refuted, high, most)
    return None if high is None else Least(high, minimal=refuted == high - 1)


def _searched(feasibility: Feasibility, ask: Ask, refuted: int, high: int | None, most: int) -> tuple[int, int | None]:
    if high is None:
        if feasibility.over() or ask(most, True) is not True:
            return refuted, None
        high = most
    low = refuted
    while high - low > 1 and not feasibility.over():
        middle = (low + high) // 2
        answer = ask(middle, True)
        if answer:
            high = middle
        else:
            low = middle
            refuted = middle if answer is False else refuted
    return refuted, high
