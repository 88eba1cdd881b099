"""What ``gpurt place`` reads: the model's file, and the devices of a file, of a live cluster or of this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from gpurt.cli import observing
from gpurt.errors import GPUError
from gpurt.placement.config_fields import CONFIG_NAME
from gpurt.placement.errors import blamed_on
from gpurt.placement.inputs import check_devices
from gpurt.placement.inventory import Inventory, inventory_of
from gpurt.printable import quoted

if TYPE_CHECKING:
    from gpurt.cluster.bus import EventEngine
    from gpurt.cluster.master import MasterConfig
    from gpurt.cluster.records import ClusterSnapshot
    from gpurt.placement import ModelSpec

LIVE: Final = "live"
SETTLE_S: Final = 3.0
"""How long nodes may take to be heard: each that answers is there within one look at the bus."""
_LOOK_S: Final = 0.02


def read_model(
    path: str, *, quantisation: str | None = None, dtype: str | None = None, config: str | None = None
) -> ModelSpec:
    """A model from whichever file there is: GGUF, safetensors or its index, ``config.json``, a folder with one of
    the last three, or a :class:`~gpurt.placement.ModelSpec` as JSON. Where a folder has weights, they are believed.
    ``config`` is the ``config.json`` of safetensors that have none beside them.

    Raises:
        GPUError: there is no such file, or it is none of these.
        InvalidPlacementInput: it is one, with something wrong in it.
    """
    from gpurt.placement import ModelSpec

    place = Path(path)
    name = place.name.lower()
    weights = name.endswith((".gguf", ".safetensors", ".safetensors.index.json")) or any(place.glob("*.safetensors"))
    if config is not None and (not weights or name.endswith(".gguf")):
        raise GPUError("--config is for safetensors: every other file says itself what the model is")
    if weights and (quantisation or dtype):
        raise GPUError("--quantisation and --dtype are for a config.json: weights say how they are stored")
    try:
        if name.endswith(".gguf"):
            return ModelSpec.from_gguf(place)
        if weights:
            from gpurt.placement.spec_safetensors import spec_from_safetensors

            return spec_from_safetensors(place, config=config)
        if place.is_dir():
            if not (place / CONFIG_NAME).exists():
                raise GPUError(f"the folder {quoted(path)} has neither a {CONFIG_NAME} nor safetensors")
            return ModelSpec.from_config(place, quantisation=quantisation, dtype=dtype)
        document = _document(place)
        if "devices" in document or "nodes" in document:
            raise GPUError(f"{quoted(path)} is a file of devices and no model", hint=f"give it as --cluster {path}")
        if "layers" not in document:
            return ModelSpec.from_config(place, quantisation=quantisation, dtype=dtype)
        if quantisation or dtype:
            raise GPUError("--quantisation and --dtype are for a config.json: a model specification has its own")
        with blamed_on(path):
            return ModelSpec.model_validate(document)
    except OSError as exc:
        raise _unreadable(path, exc) from exc


def read_inventory(path: str) -> Inventory:
    """An :class:`Inventory` as JSON, or a :class:`~gpurt.cluster.records.ClusterSnapshot` as JSON.

    Raises:
        GPUError: there is no such file, or it is neither.
        InvalidPlacementInput: it is an inventory with something wrong in it.
    """
    try:
        document = _document(Path(path))
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    if not {"nodes", "devices"} & set(document):
        raise GPUError(f"{quoted(path)} is no file of devices: it has none", hint="docs/placement.md has the format")
    if "nodes" not in document:
        with blamed_on(path):
            inventory = Inventory.model_validate(document)
            check_devices(inventory.devices, inventory.topology)
        return inventory
    from pydantic import ValidationError

    from gpurt.cluster.message_limits import summary
    from gpurt.cluster.records import ClusterSnapshot

    try:
        snapshot = ClusterSnapshot.model_validate(document)
    except ValidationError as exc:
        raise GPUError(f"{quoted(path)} is no snapshot of a cluster: {summary(exc)}") from exc
    with blamed_on(path):
        inventory = inventory_of_snapshot(snapshot)
        check_devices(inventory.devices, inventory.topology)
    return inventory


def save_inventory(path: str, inventory: Inventory) -> None:
    """
    Raises:
        GPUError: it cannot be written.
    """
    try:
        Path(path).write_text(inventory.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as exc:
        raise GPUError(f"{quoted(path)} cannot be written: {exc.strerror or exc}") from exc


def inventory_of_snapshot(snapshot: ClusterSnapshot) -> Inventory:
    """Every device of a master's view, with what lies on it already and the links that nodes have measured; those of
    nodes that are away are left out with that as the reason.

    Raises:
        GPUError: there are devices, and none of them takes a new placement.
    """
    from gpurt.cluster.records import NodeState
    from gpurt.cluster.topology import topology_from_view

    nodes = [node for _, node in sorted(snapshot.nodes.items())]
    devices = {(node.node, key): record.device for node in nodes for key, record in node.devices.items()}
    away = {
        (node.node, key): "its node is draining" if node.state is NodeState.HEALTHY else f"its node is {node.state}"
        for node in nodes
        if not node.offers_devices
        for key in node.devices
    }
    found = inventory_of(devices, away=away, resident=snapshot.resident)
    if found.left_out and not found.devices:
        reasons = Counter(found.left_out.values()).most_common()
        raise GPUError(
            f"no device takes a new placement now: {', '.join(f'{why} ({count})' for why, count in reasons)}",
            hint="gpurt top has them all; gpurt drain NODE --undo lets a draining node take part again",
        )
    return found.model_copy(update={"topology": topology_from_view(snapshot, found.devices)})


async def live_inventory(config: MasterConfig, *, engine: EventEngine | None = None) -> Inventory:
    """The devices of a running cluster, as an observer at its hub sees them.

    Raises:
        BusUnavailable: no hub there, or no zenoh here.
        GPUError: no node has joined, or none of its devices takes a new placement.
    """
    from gpurt.cluster.records import NodeState
    from gpurt.cluster.view import MasterView

    view = MasterView()
    async with observing.observing(config, view, command="gpurt place", engine=engine) as master:
        there = {answer.node for answer in await master.engine.snapshot("*")}

        def told(name: str) -> bool:
            node = view.node(name)
            return node is not None and node.state is not NodeState.SUSPECT

        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and not all(map(told, there)):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        snapshot = view.snapshot()
    if not snapshot.devices:
        raise GPUError(
            f"no node of cluster {config.cluster} has a device now",
            hint="start one with gpurt worker; a node that was lost before is known to a master that was there",
        )
    return inventory_of_snapshot(snapshot)


async def local_inventory(registry: str | None) -> Inventory:
    """The devices of this machine, and the links between them that were measured."""
    from gpurt.cli.worker import default_node
    from gpurt.cluster.state import device_keys
    from gpurt.discovery.service import GPUDiscoveryService

    async with GPUDiscoveryService(registry_path=registry) as service:
        result = await service.discover_all_devices()
    node = default_node()
    devices = {(node, key): device for key, device in device_keys(result.devices).items()}
    return inventory_of(devices, links=result.topology)


async def inventory_for(args: argparse.Namespace) -> Inventory:
    """That of the command's ``--cluster``."""
    if args.cluster == LIVE:
        return await live_inventory(observing.observer_config(args, args.cluster_name))
    return await local_inventory(args.registry)


def _document(place: Path) -> dict[str, Any]:
    try:
        document = json.loads(place.read_bytes())
    except ValueError as exc:
        raise GPUError(f"{quoted(str(place))} is not JSON: {exc}") from exc
    except RecursionError as exc:
        raise GPUError(f"{quoted(str(place))} has lists or objects in each other, too deep to be read") from exc
    if not isinstance(document, dict):
        raise GPUError(f"{quoted(str(place))} has no JSON object")
    return cast("dict[str, Any]", document)


def _unreadable(path: str, exc: OSError) -> GPUError:
    return GPUError(f"{quoted(path)} cannot be read: {exc.strerror or exc}")
