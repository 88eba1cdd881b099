"""Seconds and moved bytes of the parts of a plan: worked out again from the inputs, without a line of the solver's.

Nothing here imports the solver. Times are those of each kind of layer, links are looked up pair by pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil, inf, log2

from gpurt.placement.constraints import Constraints
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.plan import Stage
from gpurt.placement.spec import LayerSpec, ModelSpec
from gpurt.placement.topology import LinkMatrix


class Recount:
    """``place``: row of each device in ``links``."""

    def __init__(
        self,
        model: ModelSpec,
        by_id: Mapping[str, PlacementDevice],
        links: LinkMatrix,
        place: Mapping[str, int],
        rules: Constraints,
    ) -> None:
        self.model = model
        self.by_id = by_id
        self.links = links
        self.place = place
        self.rules = rules

    def moved(self, stage: Stage) -> float:
        total = 0.0
        for name in stage.devices:
            there: set[int] = set()
            for piece in self.by_id[name].resident:
                if piece.model == self.model.name:
                    # What a device tells is not taken at its word: beyond the last layer there is nothing.
                    there.update(range(piece.start, min(piece.end, self.model.layer_count)))
            missing = (index for index in range(stage.start, stage.end) if index not in there)
            total += sum(self.model.layers[index].weight_bytes for index in missing) / len(stage.devices)
        return total

    def stage_seconds(self, stage: Stage) -> float:
        model, work = self.model, self.rules.workload
        group = [self.by_id[name] for name in stage.devices]
        size = len(group)
        total = 0.0
        launch = max(device.launch_seconds for device in group)
        # Most layers of a model are the very same ones.
        kinds = {id(layer): layer for layer in model.layers[stage.start : stage.end]}
        times = Counter(id(layer) for layer in model.layers[stage.start : stage.end])
        for key, layer in kinds.items():
            each = max(self._layer_seconds(layer, device) / size for device in group) + launch
            if size > 1:
                each += 2 * self._sum_seconds(stage, layer.activation_bytes_per_token * work.batch)
            total += times[key] * each
        if stage.end == model.layer_count:
            total += max(
                max(model.head_bytes / device.memory_bandwidth,
                    model.head_flops_per_token * work.batch / device.compute_flops) / size
                for device in group
            )  # fmt: skip
        return total

    def _layer_seconds(self, layer: LayerSpec, device: PlacementDevice) -> float:
        work = self.rules.workload
        read = layer.weight_bytes
        if layer.read_bytes_per_token is not None and layer.read_bytes_per_token * work.batch < read:
            read = layer.read_bytes_per_token * work.batch
        tokens = work.context_tokens
        if layer.kv_tokens_max is not None and layer.kv_tokens_max < tokens:
            tokens = layer.kv_tokens_max
        cache = work.batch * (tokens * layer.kv_bytes_per_token + layer.state_bytes)
        arithmetic = layer.flops_per_token * work.batch / device.compute_flops
        return max(read / device.memory_bandwidth, arithmetic) + cache / device.memory_bandwidth

    def _sum_seconds(self, stage: Stage, payload: int) -> float:
        latency, slowest, size = 0.0, inf, len(stage.devices)
        for one in stage.devices:
            for other in stage.devices:
                if one != other:
                    latency = max(latency, float(self.links.latency[self.place[one], self.place[other]]))
                    slowest = min(slowest, float(self.links.bandwidth[self.place[one], self.place[other]]))
        return ceil(log2(size)) * latency + 2 * (size - 1) / size * payload / slowest

    def group_estimated(self, stage: Stage) -> bool:
        """Whether some link between its devices was not measured."""
        return any(
            bool(self.links.estimated[self.place[one], self.place[other]])
            for one in stage.devices
            for other in stage.devices
            if one != other
        )

    def hop_seconds(self, source: Stage, target: Stage, payload: int) -> float:
        slowest = 0.0
        for receiver in target.devices:
            best = inf
            for sender in source.devices:
                row, column = self.place[sender], self.place[receiver]
                latency = float(self.links.latency[row, column])
                best = min(best, latency + payload / float(self.links.bandwidth[row, column]))
            slowest = max(slowest, best)
        return slowest
