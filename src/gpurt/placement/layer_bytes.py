"""How many whole layers fit into how many bytes: counting, without times and links."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gpurt.placement.constraints import Workload
from gpurt.placement.instance import Ints
from gpurt.placement.spec import LayerSpec, ModelSpec


class LayerBytes:
    """What ranges of layers of one model take under one workload.

    Where layers are equal, figures are exact. Where they differ by the byte that a size leaves over, every range of so
    many layers counts as its largest twin, as everywhere in placement, unless places matter (``placed``: pins, or a
    price on movement). Else figures are of the smallest range: nothing holds more.
    """

    def __init__(self, model: ModelSpec, work: Workload, *, placed: bool = False) -> None:
        layers = model.layers
        self.model, self.work = model, work
        self.count = len(layers)
        kinds = list({id(layer): layer for layer in layers}.values())
        self.weights = np.array([layer.weight_bytes for layer in layers], dtype=np.int64)
        kv = {id(layer): layer.kv_bytes(work.context_tokens) * work.batch for layer in kinds}
        scratch = {id(layer): layer.workspace_bytes_per_token * work.batch * work.prefill_tokens for layer in kinds}
        self.kv = np.array([kv[id(layer)] for layer in layers], dtype=np.int64)
        self.workspace = np.array([scratch[id(layer)] for layer in layers], dtype=np.int64)
        self.uniform = all(layer == kinds[0] for layer in kinds) or (not placed and alike(kinds))
        self.ends = model.embedding_bytes, model.head_bytes
        self.both = model.embedding_bytes + model.head_bytes - model.tied_bytes
        self._needs: dict[tuple[int, int], Ints] = {}
        self.groups: dict[tuple[object, ...], Ints] = {}
        """What groups of devices hold, by their bytes: worked out once for all rules that are tried on them."""

    @cached_property
    def least(self) -> int:
        """Bytes of all layers, embedding and head, without workspaces: no set of devices holds them with less."""
        return int(self.weights.sum() + self.kv.sum()) + self.both

    @property
    def total(self) -> int:
        """Bytes of all layers, embedding and head on one device."""
        return int(self.weights.sum() + self.kv.sum() + self.workspace.max()) + self.both

    @cached_property
    def _tables(self) -> tuple[Ints, Ints, Ints]:
        """Weights, cache and workspace of ``n`` layers, by ``n``."""
        return (
            windows(self.weights, largest=self.uniform),
            windows(self.kv, largest=self.uniform),
            _workspaces(self.workspace),
        )

    def need(self, share: int, extra: int = 0) -> Ints:
        """``[n]``: bytes on each of ``share`` devices that split ``n`` layers and ``extra`` bytes of weights."""
        key = share, extra
        if key not in self._needs:
            weights, kv, workspace = self._tables
            table = -(-(weights + extra) // share) + -(-kv // share) + workspace
            table[0] = 0
            # A stage without layers does not exist, whatever it would take.
            self._needs[key] = np.maximum.accumulate(table)
        return self._needs[key]

    def fit(self, budgets: Ints, share: int = 1, extra: int = 0) -> Ints:
        """Most layers for each budget; ``budgets``: bytes of the smallest device of each group."""
        found = np.searchsorted(self.need(share, extra), np.maximum(budgets, 0), side="right") - 1
        # A device without a byte takes no part, not even for layers without one.
        return np.where(budgets > 0, found, 0).astype(np.int64)


def alike(kinds: list[LayerSpec]) -> bool:
    """All layers are equal, but for a byte of weights."""
    first = kinds[0]
    sizes = [layer.weight_bytes for layer in kinds]
    return max(sizes) - min(sizes) <= 1 and all(
        layer is first or layer.model_copy(update={"weight_bytes": first.weight_bytes}) == first for layer in kinds
    )


def windows(values: Ints, *, largest: bool) -> Ints:
    """``[n]``: sum of the largest or the smallest ``n`` neighbours."""
    total = np.concatenate([[0], np.cumsum(values)])
    count = len(values)
    if int(values.min()) == int(values.max()):
        return np.arange(count + 1, dtype=np.int64) * values[0]
    pick = np.max if largest else np.min
    return np.array([pick(total[n:] - total[: count + 1 - n]) for n in range(count + 1)], dtype=np.int64)


def _workspaces(values: Ints) -> Ints:
    """``[n]``: the least that the greatest of ``n`` neighbours can be."""
    count = len(values)
    found = np.zeros(count + 1, dtype=np.int64)
    if int(values.min()) == int(values.max()):
        found[1:] = values[0]
        return found
    run = values
    for n in range(1, count + 1):
        found[n] = run.min()
        if n < count:
            run = np.maximum(run[:-1], values[n:])
    return found
