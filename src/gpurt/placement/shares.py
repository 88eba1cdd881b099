"""Devices divided among replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

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


def divisions(blocks: Sequence[Block], count: int) -> Iterator[list[list[Block]]]:
    """Shares of about equal memory: neighbours together, nodes dealt out, blocks dealt out."""
    nodes: dict[str, list[Block]] = {}
    for block in blocks:
        nodes.setdefault(block[0].node, []).append(block)
    for units in (list(nodes.values()), [[block] for block in blocks]):
        if len(units) >= count:
            ordered = sorted(units, key=lambda unit: (unit[0][0].zone, unit[0][0].node, unit[0][0].id))
            yield _cut(ordered, count)
            yield _dealt(units, count)


def moved(shares: Sequence[Sequence[Block]], to: int, used: Sequence[Set[str]]) -> Iterator[list[list[Block]]]:
    """Divisions in which share ``to`` has one block more, or another one in exchange: first what the plans of the
    others do not use, of that the largest and fastest. ``used``: devices of the plan of each share."""
    others = [(place, block) for place, share in enumerate(shares) if place != to for block in share]
    others.sort(key=lambda each: (not used[each[0]].isdisjoint(device.id for device in each[1]), *_worth(each[1])))
    own = sorted(shares[to], key=_worth, reverse=True)
    for place, block in others:
        if len(shares[place]) > 1:
            yield _with(shares, {place: (block, None), to: (None, block)})
    for place, block in others:
        for mine in own:
            if _look(block) != _look(mine):
                yield _with(shares, {place: (block, mine), to: (mine, block)})


def _with(
    shares: Sequence[Sequence[Block]], changes: Mapping[int, tuple[Block | None, Block | None]]
) -> list[list[Block]]:
    """Of the shares named, without one block and with another."""
    found: list[list[Block]] = []
    for place, share in enumerate(shares):
        out, new = changes.get(place, (None, None))
        found.append([block for block in share if block is not out] + ([] if new is None else [new]))
    return found


def _worth(block: Block) -> tuple[object, ...]:
    """The lowest is worth most."""
    return -_memory([block]), -sum(device.memory_bandwidth for device in block), block[0].id


def _look(block: Block) -> list[tuple[object, ...]]:
    """Blocks of one node that look alike are as good as each other."""
    return [(each.node, each.backend, each.budget_bytes, each.memory_bandwidth, each.compute_flops) for each in block]


def _memory(unit: Sequence[Block]) -> int:
    return sum(device.budget_bytes for block in unit for device in block)


def _dealt(units: Sequence[Sequence[Block]], count: int) -> list[list[Block]]:
    """The largest first, each to the share that has least."""
    shares: list[list[Block]] = [[] for _ in range(count)]
    held = [0] * count
    for unit in sorted(units, key=lambda unit: (-_memory(unit), unit[0][0].id)):
        least = held.index(min(held))
        shares[least] += unit
        # An empty device is a device all the same: no share stays without one.
        held[least] += max(1, _memory(unit))
    return shares


def _cut(units: Sequence[Sequence[Block]], count: int) -> list[list[Block]]:
    """Neighbours stay together: cut where a share has its part of the memory."""
    total = sum(max(1, _memory(unit)) for unit in units)
    shares: list[list[Block]] = [[]]
    held = 0
    for place, unit in enumerate(units):
        short = count - len(shares)
        if shares[-1] and (held >= total * len(shares) / count or len(units) - place <= short) and short:
            shares.append([])
        shares[-1] += unit
        held += max(1, _memory(unit))
    return shares
