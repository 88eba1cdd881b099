"""Which plan is the newer one: the master's term first, then a number within the term."""

from __future__ import annotations

from functools import total_ordering
from typing import Final

from pydantic import Field

from gpurt.placement.arguments import check_count
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.record import PlacementRecord

MAX_NUMBER: Final = 2**63 - 1
"""The greatest term, and the greatest number within a term: both fit a signed integer of 64 bits, which every language
has. Nanoseconds since 1970, by which some elect masters, fit until 2262."""


@total_ordering
class PlanVersion(PlacementRecord):
    """Version of a plan. Versions are totally ordered: by term, then by number.

    A term is of one master; whoever elects masters gives each a higher one. So a plan of an earlier master is older
    than every plan of a later one, however many it has made.
    """

    term: int = Field(ge=0, le=MAX_NUMBER, strict=True)
    n: int = Field(ge=0, le=MAX_NUMBER, strict=True)
    """Counts the plans of one term. 0 stands for "no plan yet"."""

    def next(self, *, term: int | None = None) -> PlanVersion:
        """The version that follows: in this term, or the first of a later one.

        Args:
            term: of the master that makes the plan; None: the term of this version.

        Raises:
            InvalidPlacementInput: ``term`` is no term, or an earlier one, or the number has reached ``MAX_NUMBER``.
        """
        if term is not None:
            check_count(term, "term", least=0, most=MAX_NUMBER)
        if term is None or term == self.term:
            return PlanVersion(term=self.term, n=self.n + 1)
        if term < self.term:
            raise InvalidPlacementInput(f"{term} is earlier than {self.term}, of {self}", field="term")
        return PlanVersion(term=term, n=1)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, PlanVersion):
            return NotImplemented
        return (self.term, self.n) < (other.term, other.n)

    def __str__(self) -> str:
        return f"({self.term}, {self.n})"
