"""Versions of plans: which one is the newer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.placement import InvalidPlacementInput, PlanVersion
from gpurt.placement.version import MAX_NUMBER

pytestmark = pytest.mark.wide

versions = st.builds(PlanVersion, term=st.integers(0, MAX_NUMBER), n=st.integers(0, MAX_NUMBER - 1))


@given(versions, versions)
def test_term_first_then_number(a: PlanVersion, b: PlanVersion) -> None:
    assert (a < b, a <= b, a == b) == (
        (a.term, a.n) < (b.term, b.n),
        (a.term, a.n) <= (b.term, b.n),
        (a.term, a.n) == (b.term, b.n),
    )
    assert (a > b, a >= b) == (b < a, b <= a)


@given(versions)
def test_the_next_one_is_later_and_nothing_lies_between(version: PlanVersion) -> None:
    following = version.next()
    assert following > version
    assert (following.term, following.n) == (version.term, version.n + 1)
    assert PlanVersion.model_validate_json(version.model_dump_json()) == version


def test_a_later_term_begins_again_and_an_earlier_one_is_refused() -> None:
    assert PlanVersion(term=1, n=7).next(term=3) == PlanVersion(term=3, n=1)
    assert str(PlanVersion(term=3, n=1)) == "(3, 1)"
    with pytest.raises(InvalidPlacementInput) as caught:
        PlanVersion(term=3, n=1).next(term=2)
    assert caught.value.field == "term"


@pytest.mark.parametrize("fields", [{"term": -1, "n": 1}, {"term": 1, "n": 2**64}, {"term": 1}, {"term": "x", "n": 1}])
def test_what_is_no_version_is_named(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidPlacementInput):
        PlanVersion.model_validate(fields)
