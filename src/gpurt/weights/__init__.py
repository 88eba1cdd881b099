"""Weights from safetensors files to devices: everything is checked before a device is touched.

::

    async with await load_safetensors("model.safetensors.index.json", backend, "cuda:0") as weights:
        tensor = weights["model.layers.0.mlp.up_proj.weight"]
        first = await backend.copy_from_device(tensor.handle, tensor.offset_bytes, tensor.size_bytes)
"""

from gpurt.weights.errors import WeightsError
from gpurt.weights.header import DTYPES, DType, Header, TensorInfo, parse_header, read_header
from gpurt.weights.index import parse_index
from gpurt.weights.loaded import LoadedTensor, LoadedWeights
from gpurt.weights.loader import load_safetensors
from gpurt.weights.peer import copy_shard_from_peer, update_shard_from_peer
from gpurt.weights.selection import Only, Placement

__all__ = [
    "DTYPES",
    "DType",
    "Header",
    "LoadedTensor",
    "LoadedWeights",
    "Only",
    "Placement",
    "TensorInfo",
    "WeightsError",
    "copy_shard_from_peer",
    "load_safetensors",
    "parse_header",
    "parse_index",
    "read_header",
    "update_shard_from_peer",
]
