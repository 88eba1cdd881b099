"""A model to be placed from its GGUF file: bytes are its tensors', caches follow its metadata as llama.cpp has them."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpurt.placement.arguments import check_path
from gpurt.placement.config_shape import MAX_LAYERS
from gpurt.placement.errors import blamed_on
from gpurt.placement.ggml_types import GGML_TYPES
from gpurt.placement.gguf_header import GgufHeader, read_gguf_header
from gpurt.placement.gguf_metadata import Metadata
from gpurt.placement.model_shape import divisors
from gpurt.placement.number_formats import DTYPE_BYTES, known_dtype
from gpurt.placement.spec import LayerSpec, ModelSpec
from gpurt.placement.tensor_groups import Group
from gpurt.weights.errors import WeightsError
from gpurt.weights.header import TensorInfo
from gpurt.weights.sources import reading

CACHE_DTYPE: Final = "float16"
"""Of llama.cpp's cache unless it is told otherwise."""
BETWEEN_LAYERS: Final = 4
"""Bytes per element of what a layer hands on: 32-bit floats, whatever the weights are stored as."""
_BUFFER: Final = 1 << 20
_IN_LAYER: Final = re.compile(r"blk\.([0-9]{1,6})\.(.+)")
_SPLIT_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
MAX_SPLITS: Final = 10_000
_EMBEDDING: Final = frozenset(
    {"token_embd", "token_embd_norm", "token_types", "position_embd", "per_layer_token_embd", "per_layer_model_proj"}
    | {"per_layer_proj_norm", "rope_freqs", "rope_factors_long", "rope_factors_short"}
)
_HEAD: Final = frozenset({"output", "output_norm", "cls"})
_PLAIN: Final = frozenset(kind.name for kind in GGML_TYPES.values() if kind.block_elements == 1)


@dataclass
class _Parts:
    layers: dict[int, Group] = field(default_factory=dict[int, Group])
    embedding: Group = field(default_factory=Group)
    head: Group = field(default_factory=Group)
    token_embedding: TensorInfo | None = None
    output: TensorInfo | None = None
    unknown: list[str] = field(default_factory=list[str])
    types: Counter[str] = field(default_factory=Counter[str])
    """Bytes of every type in the layers."""


def spec_from_gguf(
    path: str | os.PathLike[str], *, cache_dtype: str = CACHE_DTYPE, name: str | None = None
) -> ModelSpec:
    """A model from its GGUF file, or from any file of a model in several. Blocks; only headers are read.

    Args:
        cache_dtype: of the key-value cache.

    Raises:
        WeightsError: a file is missing or malformed. InvalidPlacementInput: its metadata lack something, or are of an
            architecture whose cache is not understood; the key is named.
    """
    check_path(path, "path")
    first = Path(path)
    cache_bytes = DTYPE_BYTES[known_dtype(cache_dtype, "cache_dtype")]
    with blamed_on(str(first)):
        headers = _headers(first)
        metadata = Metadata(headers[0].metadata)
        parts = _Parts()
        for header in headers:
            for tensor in header.tensors:
                _sort(tensor, parts)
        return _spec(name or metadata.title() or first.stem, metadata, parts, cache_dtype, cache_bytes)


def _headers(path: Path) -> list[GgufHeader]:
    """Of all files of the model, the first one first."""
    header = _header(path)
    count = Metadata(header.metadata).count("split.count", default=1, least=0)
    if count <= 1:
        return [header]
    found = _SPLIT_NAME.fullmatch(path.name)
    if found is None or int(found["count"]) != count or count > MAX_SPLITS:
        raise WeightsError(
            f"it is one of {count:,} files, and its name does not say so",
            path=str(path),
            hint="the files of a model are called NAME-00001-of-00002.gguf and so on",
        )
    headers: list[GgufHeader] = []
    seen: set[str] = set()
    for number in range(count):
        shard = path.with_name(f"{found['stem']}-{number + 1:05}-of-{count:05}.gguf")
        part = header if shard == path else _header(shard)
        own = Metadata(part.metadata)
        if own.count("split.count", default=1) != count or own.count("split.no", default=0, least=0) != number:
            raise WeightsError(f"it is not file {number} of {count}", path=str(shard))
        for tensor in part.tensors:
            if tensor.name in seen:
                raise WeightsError("is in two files of the model", path=str(shard), tensor=tensor.name)
            seen.add(tensor.name)
        headers.append(part)
    stated = Metadata(headers[0].metadata).count("split.tensors.count", default=len(seen), least=0)
    if stated != len(seen):
        raise WeightsError(f"its files have {len(seen):,} tensors and should have {stated:,}", path=str(path))
    return headers


def _header(path: Path) -> GgufHeader:
    if "\0" in str(path):
        raise WeightsError("no file name has a NUL character", path=str(path))
    with reading(path):
        # Before it is opened: a named pipe would wait for somebody to write to it.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise WeightsError("not a regular file", path=str(path))
        with path.open("rb", buffering=_BUFFER) as file:
            return read_gguf_header(file, str(path))


def _sort(tensor: TensorInfo, parts: _Parts) -> None:
    found = _IN_LAYER.fullmatch(tensor.name)
    if found is not None:
        inside = found[2]
        parts.layers.setdefault(int(found[1]), Group()).add(tensor, inside, expert="exps." in inside)
        parts.types[tensor.dtype] += tensor.size_bytes
        return
    part = tensor.name.split(".")[0]
    if part in _HEAD:
        parts.head.add(tensor)
    else:
        # What nobody knows must lie somewhere: on the first stage, and it is said.
        parts.embedding.add(tensor)
        if part not in _EMBEDDING:
            parts.unknown.append(tensor.name)
    if tensor.name == "token_embd.weight":
        parts.token_embedding = tensor
    elif tensor.name == "output.weight":
        parts.output = tensor


def _spec(label: str, metadata: Metadata, parts: _Parts, cache_dtype: str, cache_bytes: int) -> ModelSpec:
    architecture = metadata.architecture()
    # Blocks that draft further tokens are counted among all, and are the last ones.
    count = metadata.count("block_count", least=1) - metadata.count("nextn_predict_layers", default=0, least=0)
    if not 0 < count <= MAX_LAYERS:
        raise metadata.wrong("block_count", f"makes {count:,} layers; from 1 to {MAX_LAYERS:,} are allowed")
    missing = next((index for index in range(count) if index not in parts.layers), None)
    if missing is not None:
        raise metadata.wrong("block_count", f"says {count:,} layers, and the file has no tensor of blk.{missing}")
    embedding = parts.token_embedding
    if embedding is None or len(embedding.shape) != 2:
        raise metadata.wrong("embedding_length", "the file has no matrix token_embd.weight")
    hidden = metadata.count("embedding_length")
    if embedding.shape[1] != hidden:
        raise metadata.wrong(
            "embedding_length", f"is {hidden:,}; the rows of token_embd.weight have {embedding.shape[1]:,}"
        )
    estimated = ["layers.workspace_bytes_per_token"]
    if parts.unknown:
        estimated.append("embedding_bytes")
    recurrent = [any(name.startswith("ssm_") for name in parts.layers[index].names) for index in range(count)]
    if any(recurrent):
        estimated.append("layers.state_bytes")
    experts = metadata.count("expert_count", default=0, least=0)
    used = metadata.count("expert_used_count", default=0, least=0)
    if experts and not 0 < used <= experts:
        raise metadata.wrong("expert_used_count", f"is {used}, of {experts} experts")
    heads, kv_heads = metadata.per_layer("attention.head_count", count), metadata.kv_heads(count)
    layers = tuple(
        _layer(index, count, metadata, parts.layers[index], cache_bytes, recurrent[index], used, experts)
        for index in range(count)
    )
    tied = parts.output is None
    head = parts.head.size_bytes + (embedding.size_bytes if tied else 0)
    split = {
        hidden,
        *heads,
        *(() if metadata.latent() else kv_heads),
        *metadata.per_layer("feed_forward_length", count, default=0),
    } - {0}
    mine = [parts.layers[index] for index in range(count)]
    outside = parts.embedding.elements + parts.head.elements
    kinds = parts.types.most_common(1)
    return ModelSpec(
        name=label,
        architecture=architecture,
        layers=layers,
        embedding_bytes=parts.embedding.size_bytes,
        head_bytes=head,
        tied_bytes=embedding.size_bytes if tied else 0,
        head_flops_per_token=2.0 * embedding.shape[0] * hidden,
        hidden_size=hidden,
        attention_heads=max(heads) or None,
        kv_heads=max(kv_heads) or None,
        vocabulary_size=embedding.shape[0] or None,
        kv_dtype=cache_dtype,
        quantisation=kinds[0][0].lower() if kinds and kinds[0][0] not in _PLAIN else None,
        tensor_parallel=divisors(tuple(split)),
        context_tokens_max=metadata.count("context_length", default=0, least=0) or None,
        parameters=outside + sum(group.elements for group in mine),
        active_parameters=outside + sum(group.active_elements(used, experts) for group in mine),
        estimated=tuple(estimated),
    )


def _layer(
    index: int,
    count: int,
    metadata: Metadata,
    group: Group,
    cache_bytes: int,
    recurrent: bool,
    used: int,
    experts: int,
) -> LayerSpec:
    window = metadata.window(index, count)
    hidden = metadata.count("embedding_length")
    inner = max(metadata.per_layer("feed_forward_length", count, default=0)[index], hidden)
    return LayerSpec(
        weight_bytes=group.size_bytes,
        read_bytes_per_token=group.read_bytes(used, experts),
        kv_bytes_per_token=metadata.cache_elements(index, count, window is not None, recurrent) * cache_bytes,
        kv_tokens_max=window,
        state_bytes=metadata.state_bytes() if recurrent else 0,
        flops_per_token=group.flops_per_token(used, experts),
        activation_bytes_per_token=hidden * BETWEEN_LAYERS,
        workspace_bytes_per_token=(2 * inner + hidden) * BETWEEN_LAYERS,
        largest_tensor_bytes=group.largest_bytes,
    )
