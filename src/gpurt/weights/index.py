"""The index of a sharded checkpoint: ``model.safetensors.index.json`` says which file holds which tensor."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, cast

from gpurt.weights.document import check_name, members
from gpurt.weights.errors import WeightsError, shown
from gpurt.weights.quiet import quiet
from gpurt.weights.reader import Form


def parse_index(document: bytes, path: str) -> dict[str, str]:
    """Tensor name → file name relative to the index, from the JSON text of an index. Pure.

    Shards stay inside the folder of the index: names that are absolute, have a drive or a ``..`` are refused.
    Symbolic links are the owner's business, and download caches are made of them. The limits are those of a header
    (:mod:`gpurt.weights.header`); what else the index has is read over, whatever its size.

    Raises:
        WeightsError: not an index, or a shard's name is refused.
    """
    with quiet(len(document) // 100):  # bytes of an entry, about
        return _parse(document, path)


def _parse(document: bytes, path: str) -> dict[str, str]:
    weight_map: Any = None
    for name, value in members(document, path, "index", Form("weight_map", skip=True)):
        if name == "weight_map":
            weight_map = value
    if not isinstance(weight_map, dict):
        raise WeightsError("the index has no object weight_map", path=path, hint="is it a checkpoint's index file?")
    shards = cast("dict[str, Any]", weight_map)
    inside: set[str] = set()  # there are few files, and each is named by many tensors
    for name, shard in shards.items():
        check_name(name, path, "index")
        if isinstance(shard, str) and (shard in inside or _inside(shard)):
            inside.add(shard)
        else:
            raise WeightsError(
                f"its file {shown(shard)} is not a file name inside the folder of the index", path=path, tensor=name
            )
    return shards


def _inside(shard: str) -> bool:
    """Judged by the rules of every system, so that a checkpoint is as safe on one as on the other."""
    posix, windows = PurePosixPath(shard), PureWindowsPath(shard)
    return (
        bool(posix.parts)
        and "\0" not in shard
        and shard.isprintable()
        and not posix.is_absolute()
        and not windows.drive
        and not windows.root
        and ".." not in posix.parts
        and ".." not in windows.parts
    )
