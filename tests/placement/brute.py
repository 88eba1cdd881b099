"""The best plan by trying them all: every set of groups in every order, every split. From the inputs alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import ceil, inf, log2

from gpurt.placement import Constraints, ModelSpec, PlacementDevice, Topology


class Brute:
    def __init__(
        self, model: ModelSpec, devices: tuple[PlacementDevice, ...], topology: Topology, constraints: Constraints
    ) -> None:
        self.model, self.devices, self.rules = model, devices, constraints
        links = topology.dense(devices)
        size = len(devices)
        self.latency = [[float(links.latency[a, b]) for b in range(size)] for a in range(size)]
        self.bandwidth = [[float(links.bandwidth[a, b]) for b in range(size)] for a in range(size)]
        self.groups = [
            group
            for count in model.tensor_parallel
            if constraints.tensor_parallel_max is None or count <= constraints.tensor_parallel_max
            for group in combinations(range(size), count)
            if len({devices[i].node for i in group}) == 1 and len({devices[i].backend for i in group}) == 1
        ]
        self.stage_cache: dict[tuple[tuple[int, ...], int, int], tuple[float, float]] = {}

    def stage(self, group: tuple[int, ...], start: int, end: int) -> tuple[float, float]:
        """(seconds, moved bytes); infinite where it may not be."""
        key = group, start, end
        if key not in self.stage_cache:
            self.stage_cache[key] = self._stage(group, start, end)
        return self.stage_cache[key]

    def _stage(self, group: tuple[int, ...], start: int, end: int) -> tuple[float, float]:
        model, rules, work = self.model, self.rules, self.rules.workload
        layers = model.layers[start:end]
        size = len(group)
        found = [self.devices[i] for i in group]
        weights = sum(layer.weight_bytes for layer in layers)
        if start == 0:
            weights += model.embedding_bytes
        if end == len(model.layers):
            weights += model.head_bytes - (model.tied_bytes if start == 0 else 0)
        kv = sum(layer.kv_bytes(work.context_tokens) * work.batch for layer in layers)
        scratch = max(layer.workspace_bytes_per_token for layer in layers) * work.batch * work.prefill_tokens
        need = ceil(weights / size) + ceil(kv / size) + scratch
        moved = 0.0
        for device in found:
            if need > device.budget_bytes or device.id in rules.exclude_devices or device.node in rules.exclude_nodes:
                return inf, 0.0
            if model.backends is not None and device.backend not in model.backends:
                return inf, 0.0
            reads = {layer.dtype or model.dtype for layer in model.layers[max(0, start - 1) : end]} - {None}
            if device.dtypes is not None and reads - device.dtypes:
                return inf, 0.0
            if any(layer.operations & device.unsupported_operations for layer in layers):
                return inf, 0.0
            for entry in rules.stage_layers:
                if entry.device == device.id and not entry.minimum <= end - start <= (entry.maximum or end):
                    return inf, 0.0
            for pin in rules.pins:
                overlap = start < pin.end and end > pin.start
                if overlap and device.id not in pin.devices and device.node not in pin.nodes:
                    return inf, 0.0
            there = {i for r in device.resident if r.model == model.name for i in range(r.start, r.end)}
            moved += sum(model.layers[i].weight_bytes for i in range(start, end) if i not in there) / size
        seconds = 0.0
        for layer in layers:
            slowest = 0.0
            for device in found:
                read = layer.weight_bytes
                if layer.read_bytes_per_token is not None:
                    read = min(read, layer.read_bytes_per_token * work.batch)
                busy = max(read / device.memory_bandwidth, layer.flops_per_token * work.batch / device.compute_flops)
                busy += layer.kv_bytes(work.context_tokens) * work.batch / device.memory_bandwidth
                slowest = max(slowest, busy / size)
            seconds += slowest + max(device.launch_seconds for device in found)
            if size > 1:
                pairs = [(a, b) for a in group for b in group if a != b]
                payload = layer.activation_bytes_per_token * work.batch
                bandwidth = min(self.bandwidth[a][b] for a, b in pairs)
                total = ceil(log2(size)) * max(self.latency[a][b] for a, b in pairs)
                seconds += 2 * (total + 2 * (size - 1) / size * payload / bandwidth)
        if end == len(model.layers):
            seconds += (
                max(
                    max(
                        model.head_bytes / d.memory_bandwidth, model.head_flops_per_token * work.batch / d.compute_flops
                    )
                    for d in found
                )
                / size
            )
        return seconds, moved

    def way(self, one: tuple[int, ...], other: tuple[int, ...], payload: float) -> float:
        return max(min(self.latency[a][b] + payload / self.bandwidth[a][b] for a in one) for b in other)

    def plans(self) -> Iterator[tuple[float, float, float]]:
        """(latency, bottleneck, moved bytes) of every plan."""
        count = len(self.model.layers)
        batch = self.rules.workload.batch
        limit = self.rules.max_link_seconds or inf

        def extend(
            path: list[tuple[int, ...]], done: int, latency: float, slowest: float, moved: float
        ) -> Iterator[tuple[float, float, float]]:
            if done == count:
                if not self.allowed(path):
                    return
                if len(path) > 1:
                    back = self.way(path[-1], path[0], 4 * batch)
                    latency, slowest = latency + back, max(slowest, back)
                if latency < inf:
                    yield latency, slowest, moved
                return
            used = {i for group in path for i in group}
            for group in self.groups:
                if used & set(group):
                    continue
                hop = 0.0
                if path:
                    hop = self.way(path[-1], group, self.model.layers[done - 1].activation_bytes_per_token * batch)
                    if hop > limit or hop == inf:
                        continue
                for end in range(done + 1, count + 1):
                    seconds, bytes_moved = self.stage(group, done, end)
                    if seconds < inf:
                        yield from extend(
                            [*path, group],
                            end,
                            latency + hop + seconds,
                            max(slowest, hop, seconds),
                            moved + bytes_moved,
                        )

        yield from extend([], 0, 0.0, 0.0, 0.0)

    def allowed(self, path: list[tuple[int, ...]]) -> bool:
        rules = self.rules
        nodes = {self.devices[group[0]].node for group in path}
        names = {self.devices[i].id for group in path for i in group}
        if not rules.min_stages <= len(path) <= (rules.max_stages or len(path)):
            return False
        if not rules.min_nodes <= len(nodes) <= (rules.max_nodes or len(nodes)):
            return False
        if rules.require_devices - names or rules.require_nodes - nodes:
            return False
        if rules.same_backend and len({self.devices[group[0]].backend for group in path}) > 1:
            return False
        pools = [
            (self.devices[i].node, self.devices[i].memory_pool_id)
            for group in path
            for i in group
            if self.devices[i].memory_pool_id is not None
        ]
        if len(pools) != len(set(pools)):
            return False
        for rule in rules.domain_limits:
            stages = [{self.devices[i].domain(rule.domain) for i in group} - {None} for group in path]
            for name in {name for found in stages for name in found}:
                if sum(name in found for found in stages) > rule.stages:
                    return False
        return True

    def best(self, objective: str) -> float | None:
        """Least value of an objective, or None where there is no plan."""
        price = self.rules.movement_seconds_per_byte
        value = inf
        for latency, slowest, moved in self.plans():
            total = {"latency": latency, "throughput": slowest, "balanced": latency + slowest}[objective]
            value = min(value, total + price * moved)
        return None if value == inf else value
