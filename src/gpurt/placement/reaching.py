"""Which devices reach each other: a pipeline with its way back lies within one set of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.constraints import Constraints
from gpurt.placement.instance import Bools
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import LinkMatrix, Topology


@dataclass(frozen=True, slots=True)
class Together:
    """Devices that reach each other."""

    members: NDArray[np.intp]
    onward: Bools | None
    """``[i, j]``: from member i to member j there is a way that layers may be handed over by; None: between all."""
    back: Bools | None
    """As ``onward``, for the way from the last stage to the first."""

    @property
    def direct(self) -> bool:
        """Any order will do."""
        return self.onward is None


def always_connected(topology: Topology) -> bool:
    """Nothing in the topology forbids a link: told without looking at every pair."""
    if topology.cut:
        return False
    if any(assumed is None for assumed in topology.classes.values()) or len(topology.classes) < 3:
        return False
    return topology.table is None or not np.isinf(topology.table.latency_seconds).any()


def together(
    model: ModelSpec,
    links: LinkMatrix,
    constraints: Constraints,
    cells: NDArray[np.intp],
    *,
    groups: bool,
) -> list[Together]:
    """Sets of devices, the largest first; no plan has devices of two of them.

    ``cells``: number of the node and backend of each device; with ``groups``, devices of a cell are taken together,
    since one of a tensor-parallel group may receive and another one send.
    """
    back = np.isfinite(links.latency)
    payloads = [layer.activation_bytes_per_token * constraints.workload.batch for layer in model.layers[:-1]] or [0]
    limit = constraints.max_link_seconds
    able = sure = back
    if limit is not None:
        able = back & (links.seconds(min(payloads)) <= limit)
        sure = back & (links.seconds(max(payloads)) <= limit)
    alike = cells[:, None] == cells[None, :]
    found: list[Together] = []
    for circle in _components(back | alike if groups else back):
        inside = np.ix_(circle, circle) if len(circle) < len(back) else ...
        # The way back is not limited, so that one limited way suffices between two devices.
        ways = able[inside] | able[inside].T
        for part in _components(ways | alike[inside] if groups else ways):
            members = circle[part]
            if len(members) == 1:
                found.append(Together(members, None, None))
                continue
            block = np.ix_(members, members)
            every = bool(sure[block].all())
            found.append(Together(members, None if every else sure[block], None if every else back[block]))
    return sorted(found, key=lambda part: -len(part.members))


def _components(near: Bools) -> list[NDArray[np.intp]]:
    """Strongly connected components, rows as integers of so many bits."""
    size = len(near)
    if near.all():
        return [np.arange(size)] if size else []

    def rows(table: Bools) -> list[int]:
        packed = np.packbits(table, axis=1, bitorder="little")
        return [int.from_bytes(row.tobytes(), "little") for row in packed]

    onward, backward = rows(near), rows(near.T)

    def reached(start: int, table: list[int], inside: int) -> int:
        seen = fresh = 1 << start
        while fresh:
            low = fresh & -fresh
            new = table[low.bit_length() - 1] & inside & ~seen
            seen |= new
            fresh = (fresh ^ low) | new
        return seen

    left = (1 << size) - 1
    found: list[NDArray[np.intp]] = []
    while left:
        start = (left & -left).bit_length() - 1
        both = reached(start, onward, left) & reached(start, backward, left)
        text = np.frombuffer(both.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
        found.append(np.flatnonzero(np.unpackbits(text, bitorder="little")[:size]).astype(np.intp))
        left &= ~both
    return found
