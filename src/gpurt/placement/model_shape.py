"""What a transformer is made of, counted: the matrices and vectors of every layer, and what it caches per token.

Counts only: bytes follow from them with a number format (:mod:`gpurt.placement.number_formats`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix of a layer, or so many alike (experts).

    Attributes:
        name: within its layer, as the modules are called: ``mlp.experts.0.down_proj``.
        rows: outputs, each with an element of the bias where there is one.
        columns: inputs.
        used: copies that one token is multiplied with.
        plain: never stored in another number format than the model's (routers).
    """

    name: str
    rows: int
    columns: int
    bias: bool = False
    copies: int = 1
    used: int = 1
    plain: bool = False

    @property
    def bias_elements(self) -> int:
        return self.rows * self.copies if self.bias else 0

    @property
    def elements(self) -> int:
        return self.rows * self.columns * self.copies + self.bias_elements

    @property
    def active_elements(self) -> int:
        """That one token meets."""
        return self.rows * (self.columns + self.bias) * self.used


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer.

    Attributes:
        vector_elements: of norms and other vectors.
        cache_elements: that a token adds to the layer's cache, keys and values together.
        window: tokens that the cache holds at most, or None without limit.
    """

    matrices: tuple[Matrix, ...]
    vector_elements: int
    cache_elements: int
    window: int | None

    @property
    def elements(self) -> int:
        return sum(matrix.elements for matrix in self.matrices) + self.vector_elements

    @property
    def active_elements(self) -> int:
        return sum(matrix.active_elements for matrix in self.matrices) + self.vector_elements

    @property
    def flops_per_token(self) -> int:
        """Of the matrices: a multiplication and an addition per element in use."""
        return 2 * sum(matrix.rows * matrix.columns * matrix.used for matrix in self.matrices)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole model of text.

    Attributes:
        split: numbers that a tensor-parallel group must divide: heads, key-value heads and extents.
        final_elements: of the last norm and of the head's bias.
        assumed: fields that the model's files do not give and for which a family's usual value stands.
    """

    family: str
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    layers: tuple[LayerShape, ...]
    split: tuple[int, ...]
    final_elements: int
    context: int | None
    dtype: str | None
    assumed: tuple[str, ...] = ()

    @property
    def embedding_elements(self) -> int:
        return self.vocabulary * self.hidden_size

    @property
    def parameters(self) -> int:
        """All, an embedding that is also the head counted once."""
        heads = 1 if self.tied else 2
        return heads * self.embedding_elements + self.final_elements + sum(layer.elements for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """That one token meets: of the experts, those in use."""
        heads = 1 if self.tied else 2
        return (
            heads * self.embedding_elements + self.final_elements + sum(layer.active_elements for layer in self.layers)
        )

    @property
    def tensor_parallel_divisors(self) -> tuple[int, ...]:
        """Sizes of group that divide every number in :attr:`split`, 1 first."""
        return divisors(self.split)


def divisors(numbers: tuple[int, ...], most: int = 64) -> tuple[int, ...]:
    """Common divisors up to ``most``, more than which no machine has devices."""
    common = gcd(*numbers)
    return tuple(size for size in range(1, min(common, most) + 1) if common % size == 0)
