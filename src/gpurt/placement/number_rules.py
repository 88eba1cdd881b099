"""The rules that counting knows: of stages, nodes, domains, and of devices that must or must not hold so much."""

from __future__ import annotations

from copy import copy

import numpy as np

from gpurt.placement.constraints import Constraints
from gpurt.placement.field import Field
from gpurt.placement.spec import ModelSpec


class Rules:
    """Of the constraints what is a number of stages, nodes or layers; of the model how it may be split."""

    def __init__(self, model: ModelSpec, constraints: Constraints, field: Field) -> None:
        most = constraints.tensor_parallel_max
        self.sizes = tuple(size for size in model.tensor_parallel if most is None or size <= most)
        self.stages = constraints.max_stages
        self.min_stages = constraints.min_stages
        self.nodes = constraints.max_nodes
        self.min_nodes = constraints.min_nodes
        self.domains = [(field.domain(limit.domain), limit.stages) for limit in constraints.domain_limits]
        self.required = np.array(
            sorted(field.place[name] for name in constraints.require_devices if name in field.place), dtype=np.intp
        )
        self.lost = len(self.required) < len(constraints.require_devices)
        """A required device is not among these."""
        self.required_nodes = {field.node_names[name] for name in constraints.require_nodes if name in field.node_names}
        self.lost |= len(self.required_nodes) < len(constraints.require_nodes)
        self.most = np.full(len(field.devices), model.layer_count, dtype=np.int64)
        self.least = np.ones(len(field.devices), dtype=np.int64)
        special: list[int] = []
        for entry in constraints.stage_layers:
            if (index := field.place.get(entry.device)) is not None:
                special.append(index)
                self.least[index] = max(self.least[index], entry.minimum)
                if entry.maximum is not None:
                    self.most[index] = min(self.most[index], entry.maximum)
        self.alone = np.unique(np.array([*special, *self.required], dtype=np.intp))
        self.ruled = bool(self.alone.size or self.required_nodes)
        self.limited = self.stages is not None or bool(self.domains)

    def without_names(self) -> Rules:
        """Without the rules that ask for something: for a part of the layers."""
        rules = copy(self)
        rules.min_stages = rules.min_nodes = 1
        rules.required, rules.required_nodes = self.required[:0], set[int]()
        rules.lost = False
        rules.ruled = bool(self.alone.size)
        return rules
