"""What a master may ask a node to do."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from gpurt.cluster.assignment import Acknowledgement, Assignment
from gpurt.cluster.bus import MAX_COMMAND_BYTES, EventEngine
from gpurt.cluster.envelope import check_size
from gpurt.cluster.errors import MalformedEvent, StaleTerm
from gpurt.cluster.link_protocol import LinkBudget
from gpurt.cluster.message_limits import MessageReader, strict_json, summary
from gpurt.cluster.peer_links import PeerLink
from gpurt.cluster.shards import Name
from gpurt.placement.version import MAX_NUMBER, PlanVersion

MAX_PEERS: Final = 64
"""Ways that one command has measured."""


class Command(BaseModel):
    """What all commands have."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    term: int = Field(default=0, ge=0, le=MAX_NUMBER, strict=True)
    """The master's term, from whoever elects masters: nodes refuse a command of an earlier term than the latest
    that they have seen."""


class Rediscover(Command):
    """Look up the devices now."""

    command: Literal["rediscover"] = "rediscover"


class Drain(Command):
    """Take part in no new placement; what lies on the node stays."""

    command: Literal["drain"] = "drain"


class Undrain(Command):
    command: Literal["undrain"] = "undrain"


class Step(StrEnum):
    OFFER = "offer"
    """Could you? Who accepts agrees to no earlier plan of that instance any more, and does nothing yet."""
    ACTIVATE = "activate"
    """Do it. May be sent again, to a node that has forgotten, also without an offer."""
    ABORT = "abort"
    """Forget the offer."""


class Assign(Command):
    """The node's part of a plan."""

    command: Literal["assign"] = "assign"
    step: Step
    assignment: Assignment
    master: Name | None = None
    """Who sends it, for people."""

    @model_validator(mode="after")
    def _one_term(self) -> Assign:
        if self.assignment.version.term != self.term:
            raise ValueError(f"a plan of version {self.assignment.version} from a master of term {self.term}")
        return self


class Withdraw(Command):
    """Let go of one of two plans of one version, which two masters of one term have decided on."""

    command: Literal["withdraw"] = "withdraw"
    instance: Name
    version: PlanVersion
    plan: Annotated[str, Field(max_length=64)]
    """That one; a node that follows another does nothing."""


class PeerAddress(BaseModel):
    """A node to measure the way to, and where it listens for that."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    node: Name
    endpoint: Annotated[str, Field(max_length=512)]


class MeasureLinks(Command):
    """Measure the ways to some other nodes, one after the other."""

    command: Literal["measure_links"] = "measure_links"
    peers: Annotated[tuple[PeerAddress, ...], Field(min_length=1, max_length=MAX_PEERS)]
    budget: LinkBudget = LinkBudget()
    """For each of them."""


class ResetTerm(BaseModel):
    """The way back from a term that no master should have named: an operator's word, which no term keeps out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    command: Literal["reset_term"] = "reset_term"
    term: int = Field(ge=0, le=MAX_NUMBER, strict=True)
    """The latest that the node shall have heard of; what it has promised of later ones is void."""


class ResetAnswer(BaseModel):
    """What the node has done."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    before: int = Field(ge=0, le=MAX_NUMBER)
    """The latest term that it had heard of."""
    term: int = Field(ge=0, le=MAX_NUMBER)
    """The same now."""
    unkept: str | None = None
    """Why that is so only until it is started again."""


class DrainAnswer(BaseModel):
    """Whether the node does it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    term: int = Field(ge=0, le=MAX_NUMBER)
    """The latest that it has heard of."""
    refused: str | None = None
    """In words, where the command was of an earlier one."""
    unkept: str | None = None
    """Why the node does it, but only until it is started again."""


class LinksAnswer(BaseModel):
    """What came of it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    measured: tuple[PeerLink, ...] = ()
    """With earlier measurements taken in."""
    failed: dict[str, str] = Field(default_factory=dict[str, str])
    """Why the others were not."""


_DRAIN_ANSWERS: Final = MessageReader(DrainAnswer, "answer")
_RESET_ANSWERS: Final = MessageReader(ResetAnswer, "answer")
_ACKNOWLEDGEMENTS: Final = MessageReader(Acknowledgement, "answer")
LINKS_ANSWERS: Final = MessageReader(LinksAnswer, "answer")

AnyCommand = Rediscover | Drain | Undrain | Assign | Withdraw | MeasureLinks | ResetTerm

_COMMANDS: TypeAdapter[AnyCommand] = TypeAdapter(Annotated[AnyCommand, Field(discriminator="command")])


def decode_command(payload: bytes) -> AnyCommand:
    """
    Raises:
        MalformedEvent: too large, or not a command of this version.
    """
    check_size(payload, "command", MAX_COMMAND_BYTES)
    try:
        return _COMMANDS.validate_python(strict_json(payload, "command"))
    except ValidationError as exc:
        raise MalformedEvent(f"command: {summary(exc)}") from exc


async def request_rediscovery(engine: EventEngine, node: str, *, term: int = 0, timeout: float = 60.0) -> Any:
    """Have ``node`` look up its devices now; what changed comes as events. Returns the node's short answer.

    Args:
        timeout: seconds; a first look-up may take 30.

    Raises:
        NoAnswer: not there, or no reply in time. ClusterError: the node's own error.
    """
    return await send_command(engine, node, Rediscover(term=term), timeout=timeout)


async def request_drain(
    engine: EventEngine, node: str, *, term: int = 0, draining: bool = True, timeout: float = 10.0
) -> DrainAnswer:
    """Have ``node`` take part in no new placement, or with ``draining=False`` in placements again. It stays so, also
    when the node is started again. Its devices are not available any more in the master's view; what lies on them
    stays until a plan moves it. Returns what the node says: ``unkept`` is why it would forget at its next start.

    Args:
        term: of the master that wants it; a node refuses an earlier one than it has heard of
            (``view.node(name).placement.term``).
        timeout: seconds.

    Raises:
        StaleTerm: of an earlier term than ``StaleTerm.latest``, which the node has heard of. NoAnswer: not there, or no
            reply in time. ClusterError: the node's own error. MalformedEvent: an answer that is none.
    """
    command = Drain(term=term) if draining else Undrain(term=term)
    answer = _DRAIN_ANSWERS.parse(await send_command(engine, node, command, timeout=timeout), node)
    if answer.refused is not None:
        raise StaleTerm(f"node {node} answered: {answer.refused}", latest=answer.term)
    return answer


async def reset_term(engine: EventEngine, node: str, term: int, *, timeout: float = 10.0) -> ResetAnswer:
    """Make ``term`` the latest that ``node`` has heard of, where it has heard of a later one that no master should have
    named. What it holds stays until a plan moves it; what it has promised of later terms is void.

    Raises:
        NoAnswer: not there, or no reply in time. ClusterError: the node's own error. MalformedEvent: an answer that is
            none.
    """
    command = ResetTerm(term=term)
    return _RESET_ANSWERS.parse(await send_command(engine, node, command, timeout=timeout), node)


async def send_assignment(
    engine: EventEngine,
    node: str,
    assignment: Assignment,
    step: Step,
    *,
    master: str | None = None,
    timeout: float = 10.0,
) -> Acknowledgement:
    """One step of a commit at one node; see :class:`gpurt.cluster.committer.PlacementCommitter`.

    Raises:
        NoAnswer: not there, or no reply in time. ClusterError: the node's own error.
        MalformedEvent: over ``MAX_COMMAND_BYTES``, or an answer that is none.
    """
    command = Assign(term=assignment.version.term, step=step, assignment=assignment, master=master)
    return _ACKNOWLEDGEMENTS.parse(await send_command(engine, node, command, timeout=timeout), node)


async def withdraw_plan(
    engine: EventEngine, node: str, instance: str, version: PlanVersion, plan: str, *, timeout: float = 10.0
) -> Acknowledgement:
    """Have ``node`` let go of the plan ``plan``, where it follows it.

    Raises:
        NoAnswer: not there, or no reply in time. ClusterError: the node's own error. MalformedEvent: an answer that is
            none.
    """
    command = Withdraw(term=version.term, instance=instance, version=version, plan=plan)
    return _ACKNOWLEDGEMENTS.parse(await send_command(engine, node, command, timeout=timeout), node)


async def send_command(engine: EventEngine, node: str, command: Command | ResetTerm, *, timeout: float) -> Any:
    """Returns the node's answer as JSON values.

    Raises:
        NoAnswer: not there, or no reply in time. ClusterError: the node's own error.
        MalformedEvent: over ``MAX_COMMAND_BYTES``, or an answer that is not JSON.
    """
    payload = command.model_dump_json().encode()
    check_size(payload, f"command for node {node}", MAX_COMMAND_BYTES)
    return strict_json(await engine.command(node, payload, timeout=timeout), f"answer of node {node}")


def encode_answer(**fields: Any) -> bytes:
    return json.dumps(fields, allow_nan=False).encode()
