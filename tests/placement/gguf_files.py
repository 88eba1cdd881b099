"""GGUF files, written byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpurt.placement.ggml_types import GGML_TYPES

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}
Typed = tuple[int, Any]
"""Number of the type, value; of an array the value is (type of its elements, elements)."""


@dataclass
class File:
    """What to write. ``tensors``: name → type, extents with the fastest first."""

    metadata: Mapping[str, Typed]
    tensors: Mapping[str, tuple[str, Sequence[int]]] = field(default_factory=dict[str, Any])
    order: str = "<"
    version: int = 3
    alignment: int = 32

    def header(self) -> bytes:
        order = self.order
        parts = [b"GGUF", struct.pack(f"{order}IQQ", self.version, len(self.tensors), len(self.metadata))]
        for key, (kind, value) in self.metadata.items():
            parts += [text(key, order), struct.pack(f"{order}I", kind), packed(kind, value, order)]
        offset = 0
        for name, (kind, extents) in self.tensors.items():
            parts += [text(name, order), struct.pack(f"{order}I", len(extents))]
            parts += [struct.pack(f"{order}Q", extent) for extent in extents]
            parts += [struct.pack(f"{order}IQ", NUMBERS[kind], offset)]
            offset = padded(offset + size(kind, extents), self.alignment)
        header = b"".join(parts)
        return header + bytes(padded(len(header), self.alignment) - len(header))

    def data_bytes(self) -> int:
        end = 0
        for kind, extents in self.tensors.values():
            end = padded(end, self.alignment) + size(kind, extents)
        return end

    def raw(self) -> bytes:
        return self.header() + bytes(self.data_bytes())


def size(kind: str, extents: Sequence[int]) -> int:
    block = GGML_TYPES[NUMBERS[kind]]
    elements = 1
    for extent in extents:
        elements *= extent
    return elements // block.block_elements * block.block_bytes


def padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def text(value: str | bytes, order: str = "<") -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack(f"{order}Q", len(data)) + data


def packed(kind: int, value: Any, order: str = "<") -> bytes:
    if kind == STRING:
        return text(value, order)
    if kind == ARRAY:
        inner, items = value
        return struct.pack(f"{order}IQ", inner, len(items)) + b"".join(packed(inner, item, order) for item in items)
    return struct.pack(order + CODES[kind], value)


def llama(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    inner: int = 128,
    vocabulary: int = 100,
    kind: str = "F16",
    tied: bool = False,
    architecture: str = "llama",
    more: Mapping[str, Typed] | None = None,
) -> File:
    """A small model of that shape."""
    metadata: dict[str, Typed] = {
        "general.architecture": (STRING, architecture),
        "general.name": (STRING, "Small"),
        f"{architecture}.block_count": (U32, layers),
        f"{architecture}.context_length": (U32, 4096),
        f"{architecture}.embedding_length": (U32, hidden),
        f"{architecture}.feed_forward_length": (U32, inner),
        f"{architecture}.attention.head_count": (U32, heads),
        f"{architecture}.attention.head_count_kv": (U32, kv_heads),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, [f"t{number}" for number in range(vocabulary)])),
        **(more or {}),
    }
    key = hidden // heads * kv_heads
    tensors: dict[str, tuple[str, Sequence[int]]] = {"token_embd.weight": (kind, (hidden, vocabulary))}
    for index in range(layers):
        tensors |= {
            f"blk.{index}.attn_norm.weight": ("F32", (hidden,)),
            f"blk.{index}.attn_q.weight": (kind, (hidden, hidden)),
            f"blk.{index}.attn_k.weight": (kind, (hidden, key)),
            f"blk.{index}.attn_v.weight": (kind, (hidden, key)),
            f"blk.{index}.attn_output.weight": (kind, (hidden, hidden)),
            f"blk.{index}.ffn_norm.weight": ("F32", (hidden,)),
            f"blk.{index}.ffn_gate.weight": (kind, (hidden, inner)),
            f"blk.{index}.ffn_up.weight": (kind, (hidden, inner)),
            f"blk.{index}.ffn_down.weight": (kind, (inner, hidden)),
        }
    tensors["output_norm.weight"] = ("F32", (hidden,))
    if not tied:
        tensors["output.weight"] = (kind, (hidden, vocabulary))
    return File(metadata, tensors)
