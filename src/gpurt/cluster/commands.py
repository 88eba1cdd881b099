"""What a master may ask a node to do."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpurt.cluster.bus import EventEngine
from gpurt.cluster.envelope import strict_json, summary
from gpurt.cluster.errors import MalformedEvent


class Command(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    command: Literal["rediscover"]
    term: int = Field(default=0, ge=0)
    """The master's term, from whoever elects masters: nodes refuse a command of an earlier term than the latest
    that they have seen."""


def decode_command(payload: bytes) -> Command:
    """
    Raises:
        MalformedEvent: not a command of this version.
    """
    try:
        return Command.model_validate(strict_json(payload, "command"))
    except ValidationError as exc:
        raise MalformedEvent(f"command: {summary(exc)}") from exc


async def request_rediscovery(engine: EventEngine, node: str, *, term: int = 0, timeout: float = 60.0) -> Any:
    """Have ``node`` look up its devices now; what changed comes as events. Returns the node's short answer.

    Args:
        timeout: seconds; a first look-up may take 30.

    Raises:
        NoAnswer: not there, or no reply in time. ClusterError: the node's own error.
    """
    command = Command(command="rediscover", term=term)
    reply = await engine.command(node, command.model_dump_json().encode(), timeout=timeout)
    return strict_json(reply, f"answer of node {node}")


def encode_answer(**fields: Any) -> bytes:
    return json.dumps(fields, allow_nan=False).encode()
