"""What every stage would cost, and whether it fits: windows of layers against units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpurt.placement.constraints import Constraints
from gpurt.placement.costs import group_layer_seconds, head_seconds, resident_layers
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.grouping import can_compute, representatives
from gpurt.placement.instance import Bools, Floats, Ints, Unit, Windows
from gpurt.placement.spec import LayerSpec, ModelSpec
from gpurt.placement.topology import LinkMatrix


def _equal_but_for_a_byte(kinds: Sequence[LayerSpec]) -> bool:
    sizes = [layer.weight_bytes for layer in kinds]
    first = kinds[0]
    return max(sizes) - min(sizes) <= 1 and all(
        layer.model_copy(update={"weight_bytes": first.weight_bytes}) == first for layer in kinds
    )


class LayerSums:
    """Sums over every window of layers, and which device may hold which layer."""

    def __init__(self, model: ModelSpec, constraints: Constraints, devices: Sequence[PlacementDevice]) -> None:
        work = constraints.workload
        layers = model.layers
        count = len(layers)
        self.kinds = list({id(layer): layer for layer in layers}.values())
        self.kinds = list(dict.fromkeys(self.kinds))
        position = {layer: index for index, layer in enumerate(self.kinds)}
        of_id = {id(layer): position[layer] for layer in layers}
        self.kind = np.array([of_id[id(layer)] for layer in layers], dtype=np.intp)
        self.mean_weight: float | None = None
        if len(self.kinds) > 1 and _equal_but_for_a_byte(self.kinds):
            # A size that does not divide by its layers: they are equal, and each window counts as its largest twin.
            self.mean_weight = sum(layer.weight_bytes for layer in layers) / count
            self.kinds, self.kind = self.kinds[:1], np.zeros(count, dtype=np.intp)
        self.uniform = len(self.kinds) == 1 and not constraints.pins and constraints.movement_seconds_per_byte == 0
        self.starts = 1 if self.uniform else count
        kv = [layer.kv_bytes(work.context_tokens) * work.batch for layer in layers]
        workspace = [layer.workspace_bytes_per_token * work.batch * work.prefill_tokens for layer in layers]
        weights = [layer.weight_bytes for layer in layers]
        self.weights = self._sums(weights)
        if self.uniform and self.mean_weight is not None:
            total = np.concatenate([[0], np.cumsum(np.array(weights, dtype=np.int64))])
            most = [int((total[n:] - total[: count + 1 - n]).max()) for n in range(count + 1)]
            self.weights = np.array([most], dtype=np.int64)
        self.kv = self._sums(kv)
        self.workspace = self._maxima(workspace)
        self.count = np.stack([self._sums((self.kind == index).astype(np.int64)) for index in range(len(self.kinds))])
        self.holds = np.ones((len(devices), count), dtype=np.bool_)
        self.takes = np.ones((len(devices), count), dtype=np.bool_)
        for row, device in enumerate(devices):
            able = np.array([can_compute(device, layer, model) for layer in self.kinds])
            self.holds[row] = able[self.kind]
            # What comes in is of the type of the layer before: a device must be able to read that, too.
            if device.dtypes is not None:
                known = device.dtypes
                reads = np.array([(layer.dtype or model.dtype) in {None, *known} for layer in self.kinds])
                self.takes[row, 1:] = reads[self.kind[:-1]]
            for pin in constraints.pins:
                if device.id not in pin.devices and device.node not in pin.nodes:
                    self.holds[row, pin.start : pin.end] = False

    def _sums(self, values: Sequence[int] | Ints) -> Ints:
        """``[s, n]``: sum of the ``n`` values from ``s``; past the end: of what is there."""
        total = np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))])
        count = len(total) - 1
        start = np.arange(self.starts)[:, None]
        end = np.minimum(start + np.arange(count + 1)[None, :], count)
        return total[end] - total[start]

    def _maxima(self, values: Sequence[int]) -> Ints:
        count = len(values)
        table = np.zeros((self.starts, count + 1), dtype=np.int64)
        for start in range(self.starts):
            run = np.maximum.accumulate(np.array(values[start:], dtype=np.int64))
            table[start, 1 : len(run) + 1] = run
            table[start, len(run) + 1 :] = run[-1]
        return table


def stage_windows(
    model: ModelSpec,
    constraints: Constraints,
    devices: Sequence[PlacementDevice],
    links: LinkMatrix,
    members: tuple[tuple[int, ...], ...],
    units: Sequence[Unit],
    layers: LayerSums,
) -> tuple[Windows, Windows, Floats, Floats]:
    count = model.layer_count
    batch = constraints.workload.batch
    size = len(units)
    speed = np.empty((size, len(layers.kinds)))
    head = np.empty(size)
    budget = np.empty(size, dtype=np.int64)
    share = np.array([unit.size for unit in units], dtype=np.int64)
    low = np.ones(size, dtype=np.int64)
    high = np.full(size, count, dtype=np.int64)
    limits = {entry.device: entry for entry in constraints.stage_layers}
    holds = np.ones((size, count), dtype=np.bool_)
    takes = np.ones((size, count), dtype=np.bool_)
    for row, unit in enumerate(units):
        chosen = representatives(unit, members)
        group = [devices[index] for index in chosen]
        speed[row] = [
            group_layer_seconds(layer, chosen, devices, links, constraints.workload) for layer in layers.kinds
        ]
        head[row] = max(head_seconds(model, device, unit.size, batch) for device in group)
        budget[row] = min(device.budget_bytes for device in group)
        for kind in set(unit.classes):
            holds[row] &= layers.holds[members[kind][0]]
            takes[row] &= layers.takes[members[kind][0]]
        for device in group:
            if (entry := limits.get(device.id)) is not None:
                low[row] = max(low[row], entry.minimum)
                high[row] = min(high[row], entry.maximum or count)

    smallest = np.array(
        [layers.weights[: max(1, min(layers.starts, count - n + 1)), n].min() for n in range(count + 1)]
    )
    width = int((np.searchsorted(smallest, budget * share, side="right")).max()) - 1
    width = max(1, min(count, width, int(high.max())))
    number = np.arange(width + 1)
    ended = np.arange(layers.starts)[:, None] + number[None, :] > count

    def fits(extra: int, start: Ints | slice, count: Ints | slice) -> Bools:
        """Of every unit, the stages that its bytes are enough for: one table of bytes for each size of group, not for
        each unit, which among a thousand that hold everything would be gigabytes of numbers."""
        found: list[Bools] = [np.empty(0, dtype=np.bool_)] * size
        for per in sorted(set(share.tolist())):
            need = -(-(layers.weights[start, count] + extra) // per) - (-layers.kv[start, count] // per)
            need += layers.workspace[start, count]
            for row in np.flatnonzero(share == per):
                found[row] = need <= budget[row]
        return np.array(found)

    allowed = (number[None, None, :] >= low[:, None, None]) & (number[None, None, :] <= high[:, None, None])
    allowed = np.broadcast_to(allowed, (size, layers.starts, width + 1)).copy()
    if layers.uniform:
        allowed &= holds[:, :1, None]
    else:
        bad = np.concatenate([np.zeros((size, 1), dtype=np.int64), np.cumsum(~holds, axis=1)], axis=1)
        end = np.minimum(np.arange(count)[:, None] + number[None, :], count)
        allowed &= bad[:, end] - bad[:, np.arange(count)[:, None]] == 0
    allowed &= ~ended[None]
    enters = takes[:, : layers.starts, None] if not layers.uniform else takes[:, -1:, None]
    seconds = np.einsum("uk,ksn->usn", speed, layers.count[:, :, : width + 1].astype(np.float64))
    everywhere = slice(None), slice(0, width + 1)
    inner = np.where(allowed & enters & fits(0, *everywhere), seconds, np.inf)
    fits_first = fits(model.embedding_bytes, np.zeros_like(number), number)
    first = np.where(allowed[:, 0] & fits_first, seconds[:, 0], np.inf)
    # The last stage of n layers begins n before the end.
    begin = np.where(number > 0, count - number, 0) * (not layers.uniform)
    ends = allowed[:, begin, number] & np.broadcast_to(enters, allowed.shape)[:, begin, number] & (number > 0)
    fits_last = fits(model.head_bytes, begin, number)
    last = np.where(ends & fits_last, seconds[:, begin, number] + head[:, None], np.inf)
    whole = np.full(size, np.inf)
    if width == count:
        both = model.embedding_bytes + model.head_bytes - model.tied_bytes
        alone = fits(both, np.zeros(1, dtype=np.int64), np.full(1, count))[:, 0]
        whole = np.where(allowed[:, 0, count] & alone, seconds[:, 0, count] + head, np.inf)
        first[:, count] = np.inf
        last[:, count] = np.inf
    if not layers.uniform:
        inner[:, 0, :] = np.inf
        for start in range(1, count):
            inner[:, start, max(0, min(width + 1, count - start)) :] = np.inf
    time = Windows(inner, first, last, whole)
    slope = speed[:, 0] if layers.uniform else np.full(size, np.nan)
    if constraints.movement_seconds_per_byte == 0:
        return time, time, slope, head
    return _with_movement(time, model, constraints, devices, members, units, width), time, slope, head


def _with_movement(
    time: Windows,
    model: ModelSpec,
    constraints: Constraints,
    devices: Sequence[PlacementDevice],
    members: tuple[tuple[int, ...], ...],
    units: Sequence[Unit],
    width: int,
) -> Windows:
    count = model.layer_count
    price = constraints.movement_seconds_per_byte
    weights = np.array([layer.weight_bytes for layer in model.layers], dtype=np.float64)
    moved = np.empty((len(units), count + 1))
    for row, unit in enumerate(units):
        total = np.zeros(count)
        for kind in unit.classes:
            total += ~resident_layers(model, devices[members[kind][0]]) / unit.size
        moved[row] = np.concatenate([[0.0], np.cumsum(total * weights)]) * price
    number = np.arange(width + 1)
    start = np.arange(count)[:, None]
    end = np.minimum(start + number[None, :], count)
    extra = moved[:, end] - moved[:, start]
    tail = count - number
    return Windows(
        time.inner + extra,
        time.first + extra[:, 0, :],
        time.last + moved[:, -1:] - moved[:, tail],
        time.whole + moved[:, -1],
    )


def widest(windows: Windows) -> int:
    """Most layers of any stage."""
    width = 0
    for table in (windows.inner.min(axis=1), windows.first, windows.last):
        found = np.flatnonzero(np.isfinite(table).any(axis=0))
        if len(found):
            width = max(width, int(found[-1]))
    return width


def cut_to(windows: Windows, width: int) -> Windows:
    return Windows(
        np.ascontiguousarray(windows.inner[:, :, : width + 1]),
        np.ascontiguousarray(windows.first[:, : width + 1]),
        np.ascontiguousarray(windows.last[:, : width + 1]),
        windows.whole,
    )
