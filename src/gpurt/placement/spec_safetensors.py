"""A model to be placed from the headers of its safetensors files: bytes are those of the files, to the last one."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpurt.placement.arguments import check_path
from gpurt.placement.config_fields import CONFIG_NAME, Fields, called, config_path, read_config
from gpurt.placement.config_shape import shape_of
from gpurt.placement.errors import InvalidPlacementInput, blamed_on
from gpurt.placement.model_shape import ModelShape
from gpurt.placement.number_formats import NumberFormat
from gpurt.placement.quantised_config import configured_format
from gpurt.placement.spec import LayerSpec, ModelSpec
from gpurt.placement.spec_config import WORKSPACE, Numbers, numbers_of, workspace_bytes
from gpurt.placement.tensor_groups import Group
from gpurt.weights.errors import shown
from gpurt.weights.header import TensorInfo
from gpurt.weights.sources import Sources

_FILE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_IN_LAYER: Final = re.compile(r"(?:^|(?P<stem>.*?)\.)(?P<row>layers|h|blk|blocks)\.(?P<index>[0-9]{1,6})\.(?P<name>.+)")
_EXPERT: Final = re.compile(r"(?:^|\.)experts\.")
_EMBEDDING: Final = frozenset(
    {"embed_tokens", "wte", "wpe", "word_embeddings", "word_embeddings_layernorm", "embed_in", "tok_embeddings"}
    | {"token_embd", "embed_positions"}
)
_HEAD: Final = frozenset({"lm_head", "embed_out", "output"})
_LAST_NORM: Final = frozenset({"norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm", "norm_f"})
_BESIDE: Final = frozenset(
    {"vision_tower", "vision_model", "visual", "vision_encoder", "multi_modal_projector", "mm_projector", "mtp"}
    | {"audio_tower", "audio_model", "embed_vision", "embed_audio", "vision_embed_tokens", "img_processor"}
)
"""Parts that are not the model of text: they are not placed with it."""
_DTYPES: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TOLERANCE: Final = 0.01
"""Buffers that some files keep (frequencies of rotary embeddings) are far less than this share of a layer."""


@dataclass
class _Parts:
    """The tensors of a model of text, by where they belong."""

    layers: dict[int, Group] = field(default_factory=dict[int, Group])
    embedding: Group = field(default_factory=Group)
    head: Group = field(default_factory=Group)
    last_norm: Group = field(default_factory=Group)
    unknown: list[str] = field(default_factory=list[str])
    stem: str | None = None
    """What stands before the layers' row in names."""
    dtypes: Counter[str] = field(default_factory=Counter[str])


def spec_from_safetensors(
    path: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    cache_dtype: str | None = None,
    name: str | None = None,
) -> ModelSpec:
    """A model from its checkpoint. Blocks; of the files only the headers are read, but of all of them.

    Args:
        path: a safetensors file, an index, or the folder of either.
        config: the model's configuration; the ``config.json`` beside the files by default. Caches and FLOPs are its.
        cache_dtype: of the key-value cache; that of computation by default.

    Raises:
        WeightsError: a file is missing or malformed. InvalidPlacementInput: the configuration is missing, is not
            understood, or contradicts the files.
    """
    check_path(path, "path")
    files = _files(Path(path))
    with blamed_on(str(files)):
        return _read(files, config, cache_dtype, name)


def _read(
    files: Path, config: str | os.PathLike[str] | Mapping[str, Any] | None, cache_dtype: str | None, name: str | None
) -> ModelSpec:
    beside = files.parent / CONFIG_NAME
    if config is None and not beside.is_file():
        raise InvalidPlacementInput(
            "there is none beside it, and it alone says what a token adds to the cache",
            field=CONFIG_NAME,
            hint="put it there, or name another: `config` here, --config FILE of gpurt place",
        )
    source = beside if config is None else config
    values, _ = read_config(source)
    fields = Fields(values)
    with blamed_on(None if isinstance(source, Mapping) else str(config_path(source))):
        shape = shape_of(fields)
        stored = configured_format(fields)
    parts = _Parts()
    sources = Sources(files)
    try:
        for _, tensors in sources.tensors(sources.names()):
            for tensor in tensors:
                _sort(tensor, parts)
    finally:
        sources.close()
    _check_layers(parts, shape, fields)
    label = name or fields.text("_name_or_path") or called(files, _FILE, _INDEX)
    return _spec(label, shape, parts, stored, cache_dtype)


def _files(path: Path) -> Path:
    """The index, or the one file."""
    if not path.is_dir():
        return path
    index = path / _INDEX
    return index if index.is_file() else path / _FILE


def _sort(tensor: TensorInfo, parts: _Parts) -> None:
    words = tensor.name.split(".")
    if not _BESIDE.isdisjoint(words):
        return
    if tensor.dtype in _DTYPES:
        parts.dtypes[tensor.dtype] += tensor.size_bytes
    found = _IN_LAYER.match(tensor.name)
    if found is not None:
        stem, inside = f"{found['stem'] or ''}.{found['row']}", found["name"]
        if "encoder" in stem.split(".") or "decoder" in stem.split("."):
            raise InvalidPlacementInput(
                f"{shown(tensor.name)} is of an encoder or a decoder; only models with one row of layers are placed",
                field="layers",
            )
        if parts.stem not in (None, stem):
            raise InvalidPlacementInput(
                f"{shown(tensor.name)} is in a second row of layers; only models with one are placed", field="layers"
            )
        parts.stem = stem
        group = parts.layers.setdefault(int(found["index"]), Group())
        group.add(tensor, inside, expert=_EXPERT.search(inside) is not None)
    elif not _HEAD.isdisjoint(words):
        parts.head.add(tensor)
    elif not _LAST_NORM.isdisjoint(words):
        parts.last_norm.add(tensor)
    else:
        # What nobody knows must lie somewhere: on the first stage, and it is said.
        parts.embedding.add(tensor)
        if _EMBEDDING.isdisjoint(words):
            parts.unknown.append(tensor.name)


def _check_layers(parts: _Parts, shape: ModelShape, fields: Fields) -> None:
    count = len(shape.layers)
    missing = next((index for index in range(count) if index not in parts.layers), None)
    if missing is not None:
        raise InvalidPlacementInput(
            f"the files have no tensor of it; the configuration says {count}", field=f"layers.{missing}"
        )
    # Behind the model's own there may be layers that draft further tokens.
    drafting = fields.count("num_nextn_predict_layers", default=0, least=0)
    last = max(parts.layers)
    if last >= count + drafting:
        raise InvalidPlacementInput(
            f"the files have it; the configuration says {count} layers"
            + (f" and {drafting} that draft" if drafting else ""),
            field=f"layers.{last}",
        )


def _spec(
    label: str, shape: ModelShape, parts: _Parts, stored: NumberFormat | None, cache_dtype: str | None
) -> ModelSpec:
    estimated = [*shape.assumed, WORKSPACE]
    if not parts.embedding.size_bytes:
        raise InvalidPlacementInput("the files have no embedding", field="embedding_bytes")
    if not shape.tied and not parts.head.size_bytes:
        raise InvalidPlacementInput("the files have no head, and the configuration ties none", field="head_bytes")
    if parts.unknown:
        estimated.append("embedding_bytes")
    frequent = parts.dtypes.most_common(1)
    dtype = _DTYPES[frequent[0][0]] if shape.dtype is None and frequent else None
    numbers = numbers_of(shape, stored, dtype, cache_dtype, estimated)
    if stored is None and _differs(shape, parts):
        estimated += ["layers.kv_bytes_per_token", "layers.flops_per_token"]
    # A tied head may be in the files all the same; nobody loads it twice.
    embedding = parts.embedding.size_bytes
    head = (embedding if shape.tied else parts.head.size_bytes) + parts.last_norm.size_bytes
    layers = tuple(_layer(index, shape, parts.layers[index], numbers) for index in range(len(shape.layers)))
    return ModelSpec(
        name=label,
        architecture=shape.family,
        layers=layers,
        embedding_bytes=embedding,
        head_bytes=head,
        tied_bytes=embedding if shape.tied else 0,
        head_flops_per_token=2.0 * shape.embedding_elements,
        hidden_size=shape.hidden_size,
        attention_heads=shape.heads,
        kv_heads=shape.kv_heads,
        vocabulary_size=shape.vocabulary,
        dtype=numbers.dtype,
        kv_dtype=numbers.cache_dtype,
        quantisation=None if stored is None else stored.name,
        tensor_parallel=shape.tensor_parallel_divisors,
        context_tokens_max=shape.context,
        parameters=shape.parameters,
        active_parameters=shape.active_parameters,
        estimated=tuple(estimated),
    )


def _differs(shape: ModelShape, parts: _Parts) -> bool:
    """Whether some layer of the files is not what the configuration describes."""
    return any(
        abs(parts.layers[index].elements - layer.elements) > _TOLERANCE * layer.elements
        for index, layer in enumerate(shape.layers)
    )


def _layer(index: int, shape: ModelShape, group: Group, numbers: Numbers) -> LayerSpec:
    layer = shape.layers[index]
    used, experts = next(((matrix.used, matrix.copies) for matrix in layer.matrices if matrix.copies > 1), (1, 1))
    return LayerSpec(
        weight_bytes=group.size_bytes,
        read_bytes_per_token=group.read_bytes(used, experts),
        kv_bytes_per_token=layer.cache_elements * numbers.cache_bytes,
        kv_tokens_max=layer.window,
        flops_per_token=float(layer.flops_per_token),
        activation_bytes_per_token=shape.hidden_size * numbers.element_bytes,
        workspace_bytes_per_token=workspace_bytes(layer, shape.hidden_size, numbers.element_bytes),
        largest_tensor_bytes=group.largest_bytes,
    )
