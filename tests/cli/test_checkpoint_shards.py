"""What a worker with a checkpoint does about its part of a plan, and how the demo finds out that it is true."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurt.backend import GPUBackend
from gpurt.cli.checkpoint_shards import CheckpointShards
from gpurt.cli.demo_model import EMBEDDING, HEAD, LAYERS, demo_spec, tensors_of, write_model
from gpurt.cli.demo_placement import DemoPlacement
from gpurt.cluster.assignment import AssignedDevice, AssignedStage, Assignment
from gpurt.errors import DeviceNotFound, GPUError, TransferFailed, Unsupported
from gpurt.placement.version import PlanVersion
from gpurt.runtime.backend import DriverBackend
from gpurt.testing import Fault, FaultyDriver, SimulatedDriver, create_simulated, parse_simulation


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    return path, write_model(path)


def assignment(backend: GPUBackend, *stages: tuple[int, int, int], n: int = 1) -> Assignment:
    """Stages of device, start and end."""
    parts = [
        AssignedStage(
            start=start,
            end=end,
            devices=(AssignedDevice(device=backend.devices[index].stable_id, weight_bytes=1),),
        )
        for index, start, end in stages
    ]
    version = PlanVersion(term=1, n=n)
    return Assignment(instance="demo", model="demo", layer_count=LAYERS, version=version, stages=tuple(parts))


class Told(list[dict[str, Any]]):
    def __call__(self, message: dict[str, Any]) -> None:
        self.append(message)

    @property
    def shards(self) -> dict[str, Any]:
        return next(each for each in reversed(self) if each["event"] == "shards")


def test_the_model_is_what_its_description_says(model: tuple[Path, dict[str, str]]) -> None:
    path, digests = model
    spec = demo_spec()
    assert list(digests) == tensors_of(0, LAYERS)
    assert [tensors_of(0, 2)[0], tensors_of(LAYERS - 1, LAYERS)[-1]] == [EMBEDDING, HEAD]
    assert EMBEDDING not in tensors_of(1, LAYERS)
    assert spec.weight_bytes < path.stat().st_size < spec.weight_bytes + 4096
    assert spec.layer_count == LAYERS
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    assert hashlib.sha256(content[begin : begin + spec.embedding_bytes]).hexdigest() == digests[EMBEDDING]


async def test_layers_come_stay_and_go_as_plans_say(model: tuple[Path, dict[str, str]]) -> None:
    path, digests = model
    spec, told = demo_spec(), Told()
    each = spec.layers[0].weight_bytes
    async with create_simulated("h100x2") as backend:
        shards = CheckpointShards(backend, path, told, verify=True)
        await shards.load(assignment(backend, (0, 0, 3), (1, 3, 5)))
        assert told.shards["sha256"] == {name: digests[name] for name in tensors_of(0, 5)}
        assert told.shards["version"] == "(1, 1)"
        assert told.shards["loaded_bytes"] == told.shards["held_bytes"] == spec.embedding_bytes + 5 * each
        assert [message["done"] for message in told if message["event"] == "loading"] == [1, 2, 3, 4, 5, 6]
        before = dict(shards._held["demo"])

        await shards.load(assignment(backend, (0, 1, 4), n=2))
        assert told.shards["loaded_bytes"] == each  # layer 3 came; 1 and 2 stay; all others went
        assert told.shards["sha256"] == {name: digests[name] for name in tensors_of(1, 4)}
        for layer in (1, 2):
            assert shards._held["demo"]["simulated:0", layer] is before["simulated:0", layer]

        await shards.load(assignment(backend, (1, LAYERS - 1, LAYERS), n=3))
        assert set(told.shards["sha256"]) == {f"model.layers.{LAYERS - 1}.weight", HEAD}

        await shards.load(assignment(backend, n=4))
        assert (told.shards["stages"], told.shards["sha256"], told.shards["held_bytes"]) == ([], {}, 0)
        assert shards._held == {}
        assert backend.driver.live_allocations == 0  # type: ignore[attr-defined]


async def test_closed_it_holds_nothing(model: tuple[Path, dict[str, str]]) -> None:
    async with create_simulated("h100") as backend:
        shards = CheckpointShards(backend, model[0], Told())
        await shards.load(assignment(backend, (0, 0, 2)))
        await shards.close()
        assert backend.driver.live_allocations == 0  # type: ignore[attr-defined]


async def test_a_failure_leaves_nothing_and_the_next_plan_loads_all(model: tuple[Path, dict[str, str]]) -> None:
    driver, told = FaultyDriver(SimulatedDriver(parse_simulation("h100"))), Told()
    async with DriverBackend(driver, pool_bytes=0) as backend:
        shards = CheckpointShards(backend, model[0], told, verify=True)
        await shards.load(assignment(backend, (0, 0, 2)))
        driver.inject(Fault("write", nth=2, raises=OSError("link down")))
        with pytest.raises(GPUError, match="link down"):
            await shards.load(assignment(backend, (0, 0, 5), n=2))
        assert shards._held == {}
        await shards.load(assignment(backend, (0, 0, 5), n=3))
        assert told.shards["sha256"] == {name: model[1][name] for name in tensors_of(0, 5)}


async def test_what_cannot_be_done_is_refused(model: tuple[Path, dict[str, str]]) -> None:
    async with create_simulated("h100x2") as backend:
        shards = CheckpointShards(backend, model[0], Told())
        both = tuple(AssignedDevice(device=device.stable_id, weight_bytes=1) for device in backend.devices)
        whole = assignment(backend, (0, 0, 1))
        split = whole.model_copy(update={"stages": (AssignedStage(start=0, end=1, devices=both),)})
        with pytest.raises(Unsupported, match="split"):
            await shards.load(split)
        other = AssignedStage(start=0, end=1, devices=(AssignedDevice(device="GPU-9", weight_bytes=1),))
        with pytest.raises(DeviceNotFound, match="GPU-9"):
            await shards.load(whole.model_copy(update={"stages": (other,)}))
        last = AssignedStage(start=LAYERS, end=LAYERS + 1, devices=both[:1])
        with pytest.raises(GPUError, match=f"no tensor of layer {LAYERS}"):
            await shards.load(whole.model_copy(update={"layer_count": LAYERS + 1, "stages": (last,)}))


async def test_other_bytes_on_a_device_end_the_demo(model: tuple[Path, dict[str, str]]) -> None:
    path, digests = model
    driver, told = FaultyDriver(SimulatedDriver(parse_simulation("h100"))), Told()
    driver.inject(Fault("read", nth=2, corrupt=7))
    async with DriverBackend(driver) as backend:
        await CheckpointShards(backend, path, told, verify=True).load(assignment(backend, (0, 0, 3)))
        said: list[str] = []
        screen = SimpleNamespace(say=said.append)
        workers: Any = {"worker-1": SimpleNamespace(shards=told.shards)}
        nobody: Any = None
        placement = DemoPlacement(nobody, nobody, workers, digests, screen, nobody)  # type: ignore[arg-type]
        with pytest.raises(TransferFailed, match=r"model\.layers\.1\.weight"):
            placement._check("worker-1", 0, 3)
        assert said == []
        await CheckpointShards(backend, path, told, verify=True).load(assignment(backend, (0, 0, 3)))
        workers["worker-1"].shards = told.shards
        placement._check("worker-1", 0, 3)
        assert "SHA-256 equal" in said[0]
