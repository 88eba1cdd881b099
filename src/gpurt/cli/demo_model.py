"""The demo's model: a few layers of random bytes in a safetensors file, and the SHA-256 of each."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpurt.placement import ModelSpec

NAME: Final = "demo"
LAYERS: Final = 24
LAYER_BYTES: Final = 4 << 20
END_BYTES: Final = 2 << 20
"""Embedding and head, each."""
DEVICE_BYTES: Final = 64 << 20
"""What a worker of the demo may take on a device: the model takes two of them, and any two hold it."""
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


def demo_spec() -> ModelSpec:
    from gpurt.placement import ModelSpec

    return ModelSpec.uniform(
        NAME,
        layers=LAYERS,
        size_bytes=LAYERS * LAYER_BYTES,
        embedding_bytes=END_BYTES,
        head_bytes=END_BYTES,
        flops_per_token=2.0 * LAYER_BYTES,
        activation_bytes_per_token=8192,
    )


def tensors_of(start: int, end: int) -> list[str]:
    """The tensors of layers ``start`` to ``end`` (exclusive), with embedding and head where they belong to them."""
    names = [_layer(index) for index in range(start, end)]
    return [EMBEDDING] * (start == 0) + names + [HEAD] * (end == LAYERS)


def write_model(path: Path) -> dict[str, str]:
    """Write the file; returns the SHA-256 of every tensor. Blocks for half a second."""
    sizes = {EMBEDDING: END_BYTES, **{_layer(index): LAYER_BYTES for index in range(LAYERS)}, HEAD: END_BYTES}
    header: dict[str, object] = {}
    end = 0
    for name, nbytes in sizes.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digests: dict[str, str] = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, nbytes in sizes.items():
            content = os.urandom(nbytes)
            digests[name] = hashlib.sha256(content).hexdigest()
            file.write(content)
    return digests


def _layer(index: int) -> str:
    return f"model.layers.{index}.weight"
