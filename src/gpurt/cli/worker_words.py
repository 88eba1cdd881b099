"""What ``gpurt worker`` says: each time an event for programs, and a line for people where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpurt.cluster.worker import WorkerConfig

Words = tuple[dict[str, Any], str | None]


def joined(config: WorkerConfig, devices: Sequence[str]) -> Words:
    """Args: ``devices`` are stable ids."""
    return (
        {"event": "joined", "node": config.node, "devices": devices},
        f"{config.node} joined {config.cluster} at {config.endpoint} with {counted(len(devices), 'device')}",
    )


def unheard(config: WorkerConfig) -> Words:
    """For people it is a warning in the log."""
    from gpurt.cluster.worker import why_unheard

    return {"event": "unheard", "node": config.node, "message": why_unheard(config)}, None


def drains(node: str, draining: bool, *, unkept: bool = False) -> Words:
    """Args: ``unkept``: the next start will not know of it; why is a warning in the log."""
    if not draining:
        return {"event": "undrained", "node": node}, f"{node} takes new placements again"
    return (
        {"event": "draining", "node": node},
        f"{node} is draining and takes no new placements, {'until' if unkept else 'also when'} it is started again; "
        f"gpurt drain {node} --undo ends that",
    )


def loaded(told: dict[str, Any]) -> Words:
    """Args: ``told`` is what :class:`gpurt.cli.checkpoint_shards.CheckpointShards` tells."""
    if told["event"] != "shards":
        return told, None
    ranges = ", ".join(f"{each['start']}-{each['end'] - 1} on {each['device']}" for each in told["stages"])
    return told, (
        f"{told['instance']} under plan {told['version']}: "
        f"{f'layers {ranges}' if ranges else 'nothing any more'}; "
        f"{told['loaded_bytes']:,} bytes loaded in {told['seconds']:.2f} s"
    )


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
