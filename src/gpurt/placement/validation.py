"""Whether a plan keeps every rule: worked out again from the inputs, without a line of the solver's.

Nothing here imports the solver. Sums are made layer by layer, links are looked up pair by pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf, isclose
from typing import NoReturn

from gpurt.placement.arguments import check_kind
from gpurt.placement.constraints import Constraints, ObjectiveKind
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlan
from gpurt.placement.inputs import check_types
from gpurt.placement.plan import Plan, Stage
from gpurt.placement.plan_form import check_form
from gpurt.placement.recounting import Recount
from gpurt.placement.rule_words import layers_words
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import Topology
from gpurt.placement.words import counted, span_words

_SAME = 1e-6
"""Relative difference up to which two times are the same: sums are made in another order."""


def validate_plan(
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    topology: Topology,
    constraints: Constraints | None,
    plan: Plan,
) -> None:
    """Raise :class:`InvalidPlan`, which names the rule and the place, unless the plan keeps every rule and says the
    truth about its bytes and times; InvalidPlacementInput where an argument is of another kind."""
    check_kind(plan, Plan, "plan")
    check_types(model, devices, topology, constraints or Constraints())
    _Validator(model, devices, topology, constraints or Constraints(), plan).run()


class _Validator:
    def __init__(
        self,
        model: ModelSpec,
        devices: Sequence[PlacementDevice],
        topology: Topology,
        constraints: Constraints,
        plan: Plan,
    ) -> None:
        self.model = model
        self.by_id: Mapping[str, PlacementDevice] = {device.id: device for device in devices}
        self.plan = plan
        self.rules = constraints
        used = [self.by_id[name] for name in plan.devices if name in self.by_id]
        place = {device.id: index for index, device in enumerate(used)}
        self.count = Recount(model, self.by_id, topology.dense(used), place, constraints)

    def run(self) -> None:
        self._form()
        for number, stage in enumerate(self.plan.stages):
            self._group(number, stage)
            self._capable(number, stage)
            self._memory(number, stage)
        self._sets()
        self._pins()
        self._times()

    def _form(self) -> None:
        plan, model = self.plan, self.model
        if plan.model != model.name or plan.layer_count != model.layer_count:
            told = f"the plan is for {plan.model} with {counted(plan.layer_count, 'layer')}"
            _broken("model", "model", f"{told}, not for {model.name} with {model.layer_count:,}")
        if plan.workload != self.rules.workload:
            _broken("workload", "workload", f"the plan was made for {plan.workload}, not for {self.rules.workload}")
        for name in plan.devices:
            if name not in self.by_id:
                _broken("device", name, "no such device")
        check_form(plan)

    def _group(self, number: int, stage: Stage) -> None:
        where = f"stages.{number}"
        found = [self.by_id[name] for name in stage.devices]
        if any(device.node != stage.node or device.backend != stage.backend for device in found):
            _broken("group", where, "its devices are not all of the node and backend that it names")
        size = len(found)
        if size not in self.model.tensor_parallel:
            _broken("group", where, f"the model cannot be split over {size} devices")
        most = self.rules.tensor_parallel_max
        if most is not None and size > most:
            _broken("group", where, f"{size} devices, and at most {most} are allowed")

    def _capable(self, number: int, stage: Stage) -> None:
        model = self.model
        for name in stage.devices:
            device = self.by_id[name]
            if name in self.rules.exclude_devices or device.node in self.rules.exclude_nodes:
                _broken("exclude", name, "it is excluded")
            if model.backends is not None and device.backend not in model.backends:
                _broken("backend", name, f"the model does not run on {device.backend}")
            for index in range(stage.start, stage.end):
                layer = model.layers[index]
                wanted = {layer.dtype or model.dtype}
                if index == stage.start and index > 0:
                    wanted.add(model.layers[index - 1].dtype or model.dtype)
                for dtype in sorted(kind for kind in wanted if kind is not None):
                    if device.dtypes is not None and dtype not in device.dtypes:
                        _broken("dtype", name, f"layer {index} needs {dtype}")
                for operation in sorted(layer.operations & device.unsupported_operations):
                    _broken("operation", name, f"layer {index} needs {operation}")
                if (
                    layer.largest_tensor_bytes is not None
                    and device.max_allocation_bytes is not None
                    and layer.largest_tensor_bytes > device.max_allocation_bytes
                ):
                    _broken("allocation", name, f"layer {index} has a tensor of {layer.largest_tensor_bytes} bytes")
            for entry in self.rules.stage_layers:
                if entry.device == name and not (entry.minimum <= stage.layers <= (entry.maximum or stage.layers)):
                    _broken("stage_layers", name, f"{stage.layers} layers in stages.{number}")

    def _memory(self, number: int, stage: Stage) -> None:
        model, work = self.model, self.rules.workload
        size = len(stage.devices)
        weights = kv = workspace = 0
        for layer in model.layers[stage.start : stage.end]:
            weights += layer.weight_bytes
            tokens = work.context_tokens
            if layer.kv_tokens_max is not None and layer.kv_tokens_max < tokens:
                tokens = layer.kv_tokens_max
            kv += work.batch * (tokens * layer.kv_bytes_per_token + layer.state_bytes)
            workspace = max(workspace, layer.workspace_bytes_per_token * work.prefill_tokens * work.batch)
        if stage.start == 0:
            weights += model.embedding_bytes
        if stage.end == model.layer_count:
            weights += model.head_bytes - (model.tied_bytes if stage.start == 0 else 0)
        for held in stage.held:
            device = self.by_id[held.device]
            need = ceil_div(weights, size) + ceil_div(kv, size) + workspace
            have = device.usable_bytes - device.reserve_bytes - device.overhead_bytes
            if have <= 0:
                _broken("memory", device.id, "nothing is left of it for a plan, so it takes no part in one")
            if need > have:
                _broken("memory", device.id, f"{need} bytes on a device that has {have}")
            if (held.weights, held.kv, held.activations) != (ceil_div(weights, size), ceil_div(kv, size), workspace):
                _broken("memory", device.id, f"the bytes told in stages.{number} are not those that it takes")
            if held.usable != device.usable_bytes:
                _broken("memory", device.id, f"it has {device.usable_bytes} usable bytes, not {held.usable}")

    def _sets(self) -> None:
        rules, plan = self.rules, self.plan
        count = len(plan.stages)
        if count < rules.min_stages or (rules.max_stages is not None and count > rules.max_stages):
            allowed = span_words(rules.min_stages, rules.max_stages)
            _broken("stages", "stages", f"{counted(count, 'stage')}, and {allowed} are allowed")
        nodes = {stage.node for stage in plan.stages}
        if len(nodes) < rules.min_nodes or (rules.max_nodes is not None and len(nodes) > rules.max_nodes):
            allowed = span_words(rules.min_nodes, rules.max_nodes)
            _broken("nodes", "stages", f"{counted(len(nodes), 'node')}, and {allowed} are allowed")
        for limit in rules.domain_limits:
            inside: Counter[str] = Counter()
            for stage in plan.stages:
                names = {self.by_id[name].domain(limit.domain) for name in stage.devices}
                inside.update(name for name in names if name is not None)
            for name, stages in inside.items():
                if stages > limit.stages:
                    _broken("domain", f"{limit.domain} {name}", f"{stages} stages, at most {limit.stages} are allowed")
        for name in sorted(rules.require_devices - set(plan.devices)):
            _broken("require", name, "it is required and not used")
        for name in sorted(rules.require_nodes - nodes):
            _broken("require", name, "it is required and not used")
        if rules.same_backend and len({stage.backend for stage in plan.stages}) > 1:
            _broken("backend", "stages", "more than one backend")
        pools: dict[tuple[str, str], str] = {}
        for name in plan.devices:
            device = self.by_id[name]
            if device.memory_pool_id is not None:
                other = pools.setdefault((device.node, device.memory_pool_id), name)
                if other != name:
                    _broken("memory", name, f"it shares its memory with {other}")

    def _pins(self) -> None:
        for number, pin in enumerate(self.rules.pins):
            for stage in self.plan.stages:
                if stage.end <= pin.start or stage.start >= pin.end:
                    continue
                for name in stage.devices:
                    if name not in pin.devices and self.by_id[name].node not in pin.nodes:
                        _broken("pin", f"pins.{number}", f"{name} holds some of {layers_words(pin.start, pin.end)}")

    def _times(self) -> None:
        plan = self.plan
        seconds = [self.count.stage_seconds(stage) for stage in plan.stages]
        for number, (stage, real) in enumerate(zip(plan.stages, seconds, strict=True)):
            if not _close(stage.seconds, real):
                _broken("time", f"stages.{number}", f"{stage.seconds} s are told, {real} s it takes")
            if stage.link_estimated != self.count.group_estimated(stage):
                _broken("estimated", f"stages.{number}.link_estimated", "the links of its group say otherwise")
        ways: list[float] = []
        count = len(plan.stages)
        for number, hop in enumerate(plan.hops):
            last = number == count - 1
            payload = self.rules.workload.batch * (
                4 if last else self.model.layers[plan.stages[number].end - 1].activation_bytes_per_token
            )
            real = self.count.hop_seconds(plan.stages[hop.source], plan.stages[hop.target], payload)
            if real == inf:
                _broken("link", f"hops.{number}", "there is no way")
            limit = self.rules.max_link_seconds
            if limit is not None and not last and real > limit * (1 + 1e-12):
                _broken("link", f"hops.{number}", f"{real} s, at most {limit} s are allowed")
            if hop.payload_bytes != payload or not _close(hop.seconds, real):
                _broken("time", f"hops.{number}", f"{hop.seconds} s are told, {real} s it takes")
            ways.append(real)
        latency, bottleneck = sum(seconds) + sum(ways), max([*seconds, *ways])
        if not _close(plan.predicted.latency_seconds, latency):
            _broken("time", "predicted.latency_seconds", f"it is {latency}")
        if not _close(plan.predicted.bottleneck_seconds, bottleneck):
            _broken("time", "predicted.bottleneck_seconds", f"it is {bottleneck}")
        parts = plan.predicted.memory_seconds + plan.predicted.compute_seconds
        parts += plan.predicted.link_seconds + plan.predicted.overhead_seconds
        if not _close(parts, latency):
            _broken("time", "predicted", f"its parts make {parts} s of {latency} s")
        value = {
            ObjectiveKind.LATENCY: latency,
            ObjectiveKind.THROUGHPUT: bottleneck,
            ObjectiveKind.BALANCED: latency + bottleneck,
        }[plan.objective]
        value += self.rules.movement_seconds_per_byte * sum(self.count.moved(stage) for stage in plan.stages)
        if not _close(plan.value, value):
            _broken("objective", "value", f"it is {value}, not {plan.value}")
        if plan.bound is not None and plan.bound > plan.value * (1 + _SAME):
            _broken("objective", "bound", f"{plan.bound} is above the plan's own value {plan.value}")


def ceil_div(value: int, share: int) -> int:
    return -(-value // share)


def _close(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=_SAME, abs_tol=1e-15)


def _broken(rule: str, where: str, message: str) -> NoReturn:
    raise InvalidPlan(message, rule=rule, where=where)
