"""What became of a plan at the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from gpurt.cluster.assignment import Acknowledgement, Refusal
from gpurt.placement.version import PlanVersion


class CommitStatus(StrEnum):
    COMMITTED = "committed"
    """Every node has accepted: the plan holds."""
    ABORTED = "aborted"
    """A node has refused or did not answer, or another plan was decided on: the plan before holds, everywhere."""


class NotFollowing(BaseModel):
    """A node that does not do what was decided."""

    model_config = ConfigDict(frozen=True)

    since: float
    """On the clock of the master's view."""
    reason: Refusal | None = None
    """Why it refuses; None: it does not answer, is away, or could not load its part, as the message says."""
    message: str


class NodeAnswer(BaseModel):
    """What one node said in the last phase that reached it."""

    model_config = ConfigDict(frozen=True)

    acknowledgement: Acknowledgement | None = None
    """None: it did not answer, or its answer was an error."""
    failed: bool = False
    """It answered with an error instead, or its part does not fit a command: ``message`` says which."""
    message: str = ""

    @property
    def accepted(self) -> bool:
        return self.acknowledgement is not None and self.acknowledgement.accepted

    @property
    def refused(self) -> bool:
        return self.acknowledgement is not None and not self.acknowledgement.accepted

    @property
    def reason(self) -> Refusal | None:
        return None if self.acknowledgement is None else self.acknowledgement.reason


class CommitResult(BaseModel):
    """The outcome of one commit."""

    model_config = ConfigDict(frozen=True)

    instance: str
    version: PlanVersion
    status: CommitStatus
    answers: Mapping[str, NodeAnswer]
    """By node; none where nobody was asked."""
    conflict: str | None = None
    """What this master has decided on that rules the plan out."""

    @property
    def committed(self) -> bool:
        return self.status is CommitStatus.COMMITTED

    @property
    def refused(self) -> dict[str, Acknowledgement]:
        """Nodes that do not take their part, with the reason."""
        told = ((node, answer.acknowledgement) for node, answer in self.answers.items() if answer.refused)
        return {node: acknowledgement for node, acknowledgement in told if acknowledgement is not None}

    @property
    def unconfirmed(self) -> tuple[str, ...]:
        """Nodes that have not answered, or only with an error."""
        return tuple(node for node, answer in self.answers.items() if answer.acknowledgement is None)

    @property
    def not_following(self) -> dict[str, str]:
        """Why nodes do not do what was decided, as far as they were heard; ``PlacementCommitter.not_following`` knows
        of later news. Empty where nothing was decided."""
        if not self.committed:
            return {}
        return {node: answer.message for node, answer in self.answers.items() if not answer.accepted}

    @property
    def superseded_by(self) -> int | None:
        """Term of the later master that a node says it has heard of; None: this one is the latest."""
        terms = [each.term for each in self.refused.values() if each.reason is Refusal.STALE_TERM]
        return max(terms, default=None)

    @property
    def message(self) -> str:
        """In one line."""
        parts = [f"plan {self.version} of {self.instance} is {self.status}"]
        if self.conflict is not None:
            parts.append(self.conflict)
        parts += [f"{node} refuses ({each.reason}: {each.message})" for node, each in self.refused.items()]
        parts += [f"{node}: {self.answers[node].message}" for node in self.unconfirmed]
        return "; ".join(parts)
