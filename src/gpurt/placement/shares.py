"""Devices divided among replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpurt.placement.devices import PlacementDevice

Block = tuple[PlacementDevice, ...]
"""Devices of which only one replica may use some."""


def blocks_of(devices: Sequence[PlacementDevice], kind: str | None) -> list[Block]:
    """Devices that no two replicas may share: of one failure domain of that kind, of one memory, or one by one."""
    leader: dict[tuple[str, ...], int] = {}
    blocks: list[list[PlacementDevice]] = []
    for device in devices:
        keys: list[tuple[str, ...]] = [("device", device.id)]
        if device.memory_pool_id is not None:
            keys.append(("pool", device.node, device.memory_pool_id))
        if kind is not None and (domain := device.domain(kind)) is not None:
            keys.append(("domain", domain))
        there = sorted({leader[key] for key in keys if key in leader})
        number = there[0] if there else len(blocks)
        if not there:
            blocks.append([])
        for other in there[1:]:
            blocks[number] += blocks[other]
            blocks[other] = []
            leader = {key: number if place == other else place for key, place in leader.items()}
        blocks[number].append(device)
        leader.update(dict.fromkeys(keys, number))
    return [tuple(block) for block in blocks if block]


def divisions(blocks: Sequence[Block], count: int) -> Iterator[list[list[PlacementDevice]]]:
    """Shares of about equal memory: neighbours together, nodes dealt out, blocks dealt out."""
    nodes: dict[str, list[Block]] = {}
    for block in blocks:
        nodes.setdefault(block[0].node, []).append(block)
    together = [tuple(device for block in group for device in block) for group in nodes.values()]
    for units in (together, list(blocks)):
        if len(units) >= count:
            ordered = sorted(units, key=lambda unit: (unit[0].zone, unit[0].node, unit[0].id))
            yield _cut(ordered, count)
            yield _dealt(units, count)


def _memory(unit: Block) -> int:
    return sum(device.budget_bytes for device in unit)


def _dealt(units: Sequence[Block], count: int) -> list[list[PlacementDevice]]:
    """The largest first, each to the share that has least."""
    shares: list[list[PlacementDevice]] = [[] for _ in range(count)]
    held = [0] * count
    for unit in sorted(units, key=lambda unit: (-_memory(unit), unit[0].id)):
        least = held.index(min(held))
        shares[least] += unit
        # An empty device is a device all the same: no share stays without one.
        held[least] += max(1, _memory(unit))
    return shares


def _cut(units: Sequence[Block], count: int) -> list[list[PlacementDevice]]:
    """Neighbours stay together: cut where a share has its part of the memory."""
    total = sum(max(1, _memory(unit)) for unit in units)
    shares: list[list[PlacementDevice]] = [[]]
    held = 0
    for place, unit in enumerate(units):
        short = count - len(shares)
        if shares[-1] and (held >= total * len(shares) / count or len(units) - place <= short) and short:
            shares.append([])
        shares[-1] += unit
        held += max(1, _memory(unit))
    return shares
