"""A model to be placed from its Hugging Face ``config.json`` alone: no weights are needed, or read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpurt.placement.arguments import check_kind
from gpurt.placement.config_fields import Fields, config_path, read_config
from gpurt.placement.config_shape import shape_of
from gpurt.placement.errors import blamed_on
from gpurt.placement.model_shape import LayerShape, Matrix, ModelShape
from gpurt.placement.number_formats import DTYPE_BYTES, EMBEDDING, HEAD, NumberFormat, known_dtype
from gpurt.placement.quantised_config import configured_format, format_of, named_format
from gpurt.placement.spec import LayerSpec, ModelSpec

USUAL_DTYPE: Final = "bfloat16"
"""Of a model that does not say, which is noted among what is estimated."""
WORKSPACE: Final = "layers.workspace_bytes_per_token"
"""What of a layer's intermediate results is alive at once is up to the engine; always noted as estimated."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The data types of a model: of computation and plain weights, of the cache, and how weights are stored."""

    dtype: str
    cache_dtype: str
    stored: NumberFormat | None

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def cache_bytes(self) -> int:
        return DTYPE_BYTES[self.cache_dtype]

    def bytes_of(self, matrix: Matrix, prefix: str) -> int:
        """Of one copy, its bias included. ``prefix`` is the name of what it is in, with the dot."""
        stored = None
        if self.stored is not None and (self.stored.routers or not matrix.plain):
            stored = self.stored.of_module(f"{prefix}{matrix.name}")
        bias = matrix.rows * self.element_bytes if matrix.bias else 0
        return bias + self.plain_or(stored, matrix.rows, matrix.columns)

    def plain_or(self, stored: NumberFormat | None, rows: int, columns: int) -> int:
        return rows * columns * self.element_bytes if stored is None else stored.bytes_of(rows, columns)

    def of_vocabulary(self, name: str, shape: ModelShape) -> int:
        """Of embedding or head."""
        stored = None if self.stored is None else self.stored.of_module(name)
        return self.plain_or(stored, shape.vocabulary, shape.hidden_size)


def spec_from_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    quantisation: str | Mapping[str, Any] | None = None,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    name: str | None = None,
) -> ModelSpec:
    """A model from its configuration. Blocks where it is a file.

    Only the model of text counts; towers for images or sound beside it do not, nor do layers that only draft.

    Args:
        source: the file, its folder, or what is in it.
        quantisation: how weights are stored, instead of what the configuration says: a short name
            (:data:`~gpurt.placement.quantised_config.NAMED`, ``q4_k``, ``q4_k_m`` and the like of GGML, or ``none``),
            or an object like ``quantization_config``.
        dtype: of computation and of plain weights, instead of what the configuration says.
        cache_dtype: of the key-value cache; that of computation by default.

    Raises:
        InvalidPlacementInput: an architecture that is not known here, a field that is missing, or one that cannot be.
            Its field is named.
        WeightsError: the file cannot be read, or is not a JSON object.
    """
    # Arguments first: what is wrong with them is not the file's fault.
    dtype = None if dtype is None else known_dtype(dtype, "dtype")
    cache_dtype = None if cache_dtype is None else known_dtype(cache_dtype, "cache_dtype")
    asked = None
    if isinstance(quantisation, str):
        asked = named_format(quantisation)
    elif quantisation is not None:
        check_kind(quantisation, Mapping, "quantisation")
        asked = format_of(Fields(quantisation, "quantisation."))
    values, found = read_config(source)
    config = Fields(values)
    with blamed_on(None if isinstance(source, Mapping) else str(config_path(source))):
        shape = shape_of(config)
        estimated = [*shape.assumed, WORKSPACE]
        if quantisation is None:
            stored = configured_format(config)
        else:
            stored = asked
            estimated.append("layers.weight_bytes")
        numbers = numbers_of(shape, stored, dtype, cache_dtype, estimated)
        label = name or config.text("_name_or_path") or found
        return _spec(label, shape, numbers, tuple(estimated))


def numbers_of(
    shape: ModelShape,
    stored: NumberFormat | None,
    dtype: str | None,
    cache_dtype: str | None,
    estimated: list[str],
) -> Numbers:
    """The data types, as asked for or as the configuration says; what nobody says is noted in ``estimated``."""
    if dtype is not None:
        known = known_dtype(dtype, "dtype")
    elif shape.dtype is not None:
        known = known_dtype(shape.dtype, "torch_dtype")
    else:
        known = USUAL_DTYPE
        estimated.append("dtype")
    return Numbers(known, known if cache_dtype is None else known_dtype(cache_dtype, "cache_dtype"), stored)


def workspace_bytes(layer: LayerShape, hidden_size: int, element_bytes: int) -> int:
    """The most that a layer's wider part makes for one token: all outputs of its matrices, beside its input."""
    attention = sum(matrix.rows for matrix in layer.matrices if matrix.name.startswith("self_attn."))
    feed_forward = sum(
        matrix.rows * matrix.used for matrix in layer.matrices if not matrix.name.startswith("self_attn.")
    )
    return (max(attention, feed_forward) + hidden_size) * element_bytes


def _spec(label: str, shape: ModelShape, numbers: Numbers, estimated: tuple[str, ...]) -> ModelSpec:
    embedding = numbers.of_vocabulary(EMBEDDING, shape)
    head = embedding if shape.tied else numbers.of_vocabulary(HEAD, shape)
    made: dict[LayerSpec, LayerSpec] = {}  # most layers are alike, and one record will do for them
    layers: list[LayerSpec] = []
    for index, layer in enumerate(shape.layers):
        spec = _layer(index, layer, shape, numbers)
        layers.append(made.setdefault(spec, spec))
    return ModelSpec(
        name=label,
        architecture=shape.family,
        layers=tuple(layers),
        embedding_bytes=embedding,
        head_bytes=head + shape.final_elements * numbers.element_bytes,
        tied_bytes=embedding if shape.tied else 0,
        head_flops_per_token=2.0 * shape.embedding_elements,
        hidden_size=shape.hidden_size,
        attention_heads=shape.heads,
        kv_heads=shape.kv_heads,
        vocabulary_size=shape.vocabulary,
        dtype=numbers.dtype,
        kv_dtype=numbers.cache_dtype,
        quantisation=None if numbers.stored is None else numbers.stored.name,
        tensor_parallel=shape.tensor_parallel_divisors,
        context_tokens_max=shape.context,
        parameters=shape.parameters,
        active_parameters=shape.active_parameters,
        estimated=estimated,
    )


def _layer(index: int, layer: LayerShape, shape: ModelShape, numbers: Numbers) -> LayerSpec:
    prefix = f"model.layers.{index}."
    sizes = [(matrix, numbers.bytes_of(matrix, prefix)) for matrix in layer.matrices]
    vectors = layer.vector_elements * numbers.element_bytes
    total = vectors + sum(size * matrix.copies for matrix, size in sizes)
    read = vectors + sum(size * matrix.used for matrix, size in sizes)
    # Copies whose name has a number are tensors of their own; others are one.
    largest = max(size * (1 if ".0." in matrix.name else matrix.copies) for matrix, size in sizes)
    return LayerSpec(
        weight_bytes=total,
        read_bytes_per_token=None if read == total else read,
        kv_bytes_per_token=layer.cache_elements * numbers.cache_bytes,
        kv_tokens_max=layer.window,
        flops_per_token=float(layer.flops_per_token),
        largest_tensor_bytes=largest,
        activation_bytes_per_token=shape.hidden_size * numbers.element_bytes,
        workspace_bytes_per_token=workspace_bytes(layer, shape.hidden_size, numbers.element_bytes),
    )
