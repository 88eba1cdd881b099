"""Tensors of a checkpoint added up: by layer, and what lies before and behind the layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from gpurt.weights.header import TensorInfo


@dataclass(slots=True)
class Group:
    """The tensors of a layer, or of another part. A token meets ``used`` of ``experts`` routed experts."""

    size_bytes: int = 0
    expert_bytes: int = 0
    """Of ``size_bytes``, those of routed experts."""
    largest_bytes: int = 0
    elements: int = 0
    expert_elements: int = 0
    matrix_elements: int = 0
    """Of tensors with two extents or more, routed experts' not among them."""
    expert_matrix_elements: int = 0
    names: set[str] = field(default_factory=set[str])
    """Within the part: ``attn_q.weight``."""

    def add(self, tensor: TensorInfo, name: str = "", *, expert: bool = False) -> None:
        elements, is_matrix = prod(tensor.shape), len(tensor.shape) > 1
        self.size_bytes += tensor.size_bytes
        self.largest_bytes = max(self.largest_bytes, tensor.size_bytes)
        self.elements += elements
        self.names.add(name)
        if expert:
            self.expert_bytes += tensor.size_bytes
            self.expert_elements += elements
            self.expert_matrix_elements += elements if is_matrix else 0
        elif is_matrix:
            self.matrix_elements += elements

    def read_bytes(self, used: int, experts: int) -> int | None:
        """That one token needs; None: all."""
        if not self.expert_bytes or used >= experts:
            return None
        return self.size_bytes - self.expert_bytes + _share(self.expert_bytes, used, experts)

    def active_elements(self, used: int, experts: int) -> int:
        return self.elements - self.expert_elements + _share(self.expert_elements, used, experts)

    def flops_per_token(self, used: int, experts: int) -> float:
        """A multiplication and an addition for every element of a matrix in use."""
        return 2.0 * (self.matrix_elements + _share(self.expert_matrix_elements, used, experts))


def _share(amount: int, used: int, experts: int) -> int:
    """Rounded up: never less than what is read."""
    return -(-amount * used // experts) if experts else amount
