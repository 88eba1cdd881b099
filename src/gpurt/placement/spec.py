"""What a model asks of the devices that hold it. Bytes, FLOPs (2 per multiply-add), tokens.

A model is an embedding, a sequence of layers and a head. The embedding lies on the first stage, the head (with the
last norm) on the last one, layers in contiguous ranges between them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, Self

from pydantic import Field, field_validator, model_validator

from gpurt.placement.arguments import check_count
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.record import MOST_BYTES, MOST_COUNT, MOST_OPERATIONS, MOST_TOGETHER, PlacementRecord

MOST_LAYERS: Final = 4096


class LayerSpec(PlacementRecord):
    """One layer. Per token means per token of one sequence."""

    weight_bytes: int = Field(ge=0, le=MOST_BYTES)
    """Bytes held for the weights, quantisation scales and tables included."""
    read_bytes_per_token: int | None = Field(default=None, ge=0, le=MOST_BYTES)
    """Weight bytes read to process one token; None: all of them. Smaller for a mixture of experts."""
    kv_bytes_per_token: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Cache bytes that one token of one sequence occupies; 0 for a layer without attention."""
    kv_tokens_max: int | None = Field(default=None, ge=1, le=MOST_COUNT)
    """The cache keeps at most so many tokens of a sequence (sliding window); None: all of them."""
    state_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Bytes kept per sequence whatever its length (recurrent state)."""
    flops_per_token: float = Field(default=0.0, ge=0, le=MOST_OPERATIONS)
    """2 x the parameters that one token passes."""
    activation_bytes_per_token: int = Field(default=0, ge=0, le=MOST_BYTES)
    """What this layer hands to the next one, per token."""
    workspace_bytes_per_token: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Greatest scratch memory while this layer runs, per token processed at once."""
    largest_tensor_bytes: int | None = Field(default=None, ge=0, le=MOST_BYTES)
    """Largest single allocation that this layer needs; None: not known, not checked."""
    dtype: str | None = None
    """Data type that the device must be able to compute in; None: the model's."""
    operations: frozenset[str] = frozenset()
    """Operations that a device must not list as unsupported."""

    def kv_bytes(self, context_tokens: int) -> int:
        """Cache and state of one sequence of that length."""
        kept = context_tokens if self.kv_tokens_max is None else min(context_tokens, self.kv_tokens_max)
        return kept * self.kv_bytes_per_token + self.state_bytes


class ModelSpec(PlacementRecord):
    """A model to be placed."""

    name: str = Field(min_length=1)
    architecture: str | None = None
    layers: tuple[LayerSpec, ...] = Field(min_length=1, max_length=MOST_LAYERS)
    embedding_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Held by the first stage."""
    head_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Held by the last stage: output projection and last norm."""
    tied_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Bytes that embedding and head share: counted once where first and last stage are one; 0 where not tied."""
    head_flops_per_token: float = Field(default=0.0, ge=0, le=MOST_OPERATIONS)
    hidden_size: int | None = Field(default=None, ge=1, le=MOST_COUNT)
    attention_heads: int | None = Field(default=None, ge=1, le=MOST_COUNT)
    kv_heads: int | None = Field(default=None, ge=1, le=MOST_COUNT)
    vocabulary_size: int | None = Field(default=None, ge=1, le=MOST_COUNT)
    dtype: str | None = None
    """Data type of computation (``bfloat16``); None: any device will do."""
    kv_dtype: str | None = None
    quantisation: str | None = None
    """How the weights are stored (``q4_k_m``, ``fp8``); None: in ``dtype``."""
    backends: frozenset[str] | None = None
    """Short names of the backends that can run it; None: any."""
    tensor_parallel: tuple[int, ...] = (1,)
    """Allowed sizes of a tensor-parallel group, ascending, from the divisors of heads and hidden size."""
    context_tokens_max: int | None = Field(default=None, ge=1, le=MOST_COUNT)
    parameters: int | None = Field(default=None, ge=0, le=MOST_TOGETHER)
    active_parameters: int | None = Field(default=None, ge=0, le=MOST_TOGETHER)
    estimated: tuple[str, ...] = ()
    """Names of fields that rest on an assumption instead of on the model's files."""

    @field_validator("tensor_parallel")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(size < 1 for size in value):
            raise ValueError("a tensor-parallel group has at least one device")
        if any(size > MOST_COUNT for size in value):
            raise ValueError(f"a tensor-parallel group has at most {MOST_COUNT:,} devices")
        return tuple(sorted({1, *value}))

    @model_validator(mode="after")
    def _shared(self) -> Self:
        if self.tied_bytes > min(self.embedding_bytes, self.head_bytes):
            raise InvalidPlacementInput("it exceeds embedding_bytes or head_bytes", field="tied_bytes")
        return self

    @property
    def tied(self) -> bool:
        return self.tied_bytes > 0

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def weight_bytes(self) -> int:
        """All weights, what embedding and head share counted once."""
        layers = sum(layer.weight_bytes for layer in self.layers)
        return layers + self.embedding_bytes + self.head_bytes - self.tied_bytes

    @classmethod
    def uniform(cls, name: str, *, layers: int, size_bytes: int, **fields: Any) -> Self:
        """A model of equal layers that together have ``size_bytes`` exactly.

        Where the size does not divide, layers differ by one byte, so that no prefix is ever rounded up: layer *i*
        ends at byte ``size_bytes * (i + 1) // layers``. ``fields`` are of :class:`LayerSpec` where it has them, else
        of :class:`ModelSpec`.

        Raises:
            InvalidPlacementInput: a number or field that no model has, or one of another kind.
        """
        check_count(layers, "layers", least=1, most=MOST_LAYERS)
        check_count(size_bytes, "size_bytes", least=0)
        of_layer = {key: fields.pop(key) for key in tuple(fields) if key in LayerSpec.model_fields}
        for key in tuple(of_layer):
            if key in cls.model_fields and key == "dtype":
                fields[key] = of_layer.pop(key)
        ends = [size_bytes * (index + 1) // layers for index in range(layers)]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        distinct = {size: LayerSpec(weight_bytes=size, **of_layer) for size in set(sizes)}
        fields["layers"] = tuple(distinct[size] for size in sizes)
        return cls(name=name, **fields)

    @classmethod
    def from_config(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any],
        *,
        quantisation: str | None = None,
        dtype: str | None = None,
    ) -> ModelSpec:
        """From a Hugging Face ``config.json``: see :func:`gpurt.placement.spec_config.spec_from_config`."""
        from gpurt.placement.spec_config import spec_from_config

        return spec_from_config(source, quantisation=quantisation, dtype=dtype)

    @classmethod
    def from_safetensors(cls, path: str | os.PathLike[str]) -> ModelSpec:
        """From the headers of a checkpoint: see :func:`gpurt.placement.spec_safetensors.spec_from_safetensors`."""
        from gpurt.placement.spec_safetensors import spec_from_safetensors

        return spec_from_safetensors(path)

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> ModelSpec:
        """From the header of a GGUF file: see :func:`gpurt.placement.spec_gguf.spec_from_gguf`."""
        from gpurt.placement.spec_gguf import spec_from_gguf

        return spec_from_gguf(path)
