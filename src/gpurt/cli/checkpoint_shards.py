"""What a worker with a checkpoint does about its part of a plan: load layers, let go of layers, say what it holds."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpurt.backend import GPUBackend
from gpurt.cluster.state import device_keys
from gpurt.errors import DeviceNotFound, GPUError, Unsupported
from gpurt.runtime.lane import off_loop
from gpurt.weights import LoadedWeights, load_safetensors
from gpurt.weights.sources import Sources

if TYPE_CHECKING:
    from gpurt.cluster.assignment import Assignment

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blk|blocks)\.(\d{1,6})\.")
_EMBEDDING: Final = re.compile(r"(?:^|\.)(?:embed|wte|wpe|tok_emb|token_embd|word_emb)")
_FIRST, _LAST = "embedding", "head"

Piece = int | str
"""A layer, ``embedding`` (with the first layer) or ``head`` (everything else, with the last one)."""
Tell = Callable[[dict[str, Any]], None]


class CheckpointShards:
    """A :class:`gpurt.cluster.node_assignments.ShardLoader` over one checkpoint and one backend.

    Layers that lie where they are wanted stay untouched. What a failure leaves is freed.

    Args:
        path: a safetensors file, or the index of a sharded checkpoint.
        tell: called with ``{"event": "loading", "done": …, "total": …}`` after each piece that was loaded, and with
            ``{"event": "shards", …}`` when everything lies there.
        verify: read every tensor back and tell its SHA-256.
    """

    def __init__(self, backend: GPUBackend, path: Path, tell: Tell, *, verify: bool = False) -> None:
        self._backend, self._path, self._tell, self._verify = backend, path, tell, verify
        self._held: dict[str, dict[tuple[str, Piece], LoadedWeights]] = {}
        """By instance; device id and piece."""

    async def load(self, assignment: Assignment) -> None:
        """As :class:`ShardLoader` says.

        Raises:
            GPUError: whatever loading raises; nothing of the instance is left. Unsupported: a stage is split over
                several devices. DeviceNotFound: the backend has no such device.
        """
        held = self._held.setdefault(assignment.instance, {})
        began, loaded = time.perf_counter(), 0
        try:
            wanted = self._wanted(assignment)
            for key in held.keys() - wanted:
                await held.pop(key).close()
            if missing := [key for key in wanted if key not in held]:
                names = await off_loop("shards", self._names)
                for done, (device_id, piece) in enumerate(missing, 1):
                    only = names.get(piece)
                    if not only:
                        if piece in (_FIRST, _LAST):
                            continue  # a model without it, or with one that is tied to the other
                        raise GPUError(f"{self._path.name} has no tensor of layer {piece}", operation="load shards")
                    held[device_id, piece] = await load_safetensors(self._path, self._backend, device_id, only=only)
                    loaded += held[device_id, piece].size_bytes
                    self._tell({"event": "loading", "done": done, "total": len(missing)})
            seconds = time.perf_counter() - began
            digests = await self._digests(held) if self._verify else {}
        except GPUError:
            await self.release(assignment.instance)
            raise
        if not assignment.stages:
            del self._held[assignment.instance]
        self._tell(
            {
                "event": "shards",
                "instance": assignment.instance,
                "version": str(assignment.version),
                "stages": [
                    {"device": each.device, "start": each.start, "end": each.end} for each in assignment.resident()
                ],
                "loaded_bytes": loaded,
                "held_bytes": sum(weights.size_bytes for weights in held.values()),
                "seconds": seconds,
                "sha256": digests,
            }
        )

    async def close(self) -> None:
        """Let go of everything."""
        for instance in tuple(self._held):
            await self.release(instance)

    async def release(self, instance: str) -> None:
        """Let go of everything of an instance."""
        for weights in self._held.pop(instance, {}).values():
            with suppress(GPUError):  # the backend closes, or the device is lost: what it held is gone either way
                await weights.close()

    def _wanted(self, assignment: Assignment) -> list[tuple[str, Piece]]:
        known = device_keys(self._backend.devices)
        wanted: list[tuple[str, Piece]] = []
        for stage in assignment.stages:
            key = stage.devices[0].device
            if len(stage.devices) > 1:
                raise Unsupported(f"layers {stage.start} to {stage.end - 1} are split; whole layers are loaded here")
            device = known.get(key)
            if device is None:
                raise DeviceNotFound(f"no device {key}", backend=self._backend.name, operation="load shards")
            pieces: list[Piece] = list(range(stage.start, stage.end))
            if stage.start == 0:
                pieces.append(_FIRST)
            if stage.end == assignment.layer_count:
                pieces.append(_LAST)
            wanted += [(device.device_id, piece) for piece in pieces]
        return wanted

    def _names(self) -> dict[Piece, list[str]]:
        """Tensors by where they belong. Blocks."""
        sources = Sources(self._path)
        try:
            found: dict[Piece, list[str]] = {}
            for name in sources.names():
                layer = _LAYER.search(name)
                piece: Piece = int(layer[1]) if layer else _FIRST if _EMBEDDING.search(name) else _LAST
                found.setdefault(piece, []).append(name)
            return found
        finally:
            sources.close()

    async def _digests(self, held: dict[tuple[str, Piece], LoadedWeights]) -> dict[str, str]:
        digests: dict[str, str] = {}
        for weights in held.values():
            for name, tensor in weights.items():
                content = await self._backend.copy_from_device(tensor.handle, tensor.offset_bytes, tensor.size_bytes)
                digests[name] = await off_loop("sha256", hashlib.sha256(content).hexdigest)
        return digests
