"""Identity: which device is meant. The numbers are those of docs/problems.md."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from gpurt.cluster.bus import StateReply
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.errors import NodeNameTaken
from gpurt.cluster.inprocess import InProcessEngine
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.state import HostInfo
from gpurt.discovery.registry import RegistryFile
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from tests.discovery.cuda_rig import FakeCuPy
from tests.discovery.records import UUIDS, device, result
from tests.problems.rig import a_cluster
from tests.support.nvml_stub import PCI_A, PCI_B, UUID_A, UUID_B, NvmlStub, nvml_stub

__all__ = ["nvml_stub"]

IN_USE_B = 8192 << 20
"""Of the second card, by somebody else."""


class Cards:
    """CUDA and NVML over two equal cards, asked in processes of their own."""

    def __init__(self, stub: NvmlStub, folder: Path) -> None:
        self.cupy = FakeCuPy(folder)
        self.registry = folder / "registry.json"
        self._stub = stub

    async def look(self, scenario: str = "ok2", **variables: str) -> DiscoveryResult:
        environ = self._stub.env(scenario) | {"PYTHONPATH": str(self.cupy.site)} | variables
        async with GPUDiscoveryService(self.registry, backends=["cuda", "cpu"], environ=environ) as service:
            return await service.discover_all_devices()


@pytest.fixture
def cards(nvml_stub: NvmlStub, tmp_path: Path) -> Cards:
    return Cards(nvml_stub, tmp_path)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for NVML is an ELF library")


@on_linux
@pytest.mark.parametrize(("order", "scenario"), [("1,0", "ok2"), ("0,1", "swapped"), ("1,0", "swapped")])
async def test_i39_cuda_and_nvml_count_differently_and_mean_the_same_cards(
    cards: Cards, order: str, scenario: str
) -> None:
    found = await cards.look(scenario, CUDA_VISIBLE_DEVICES=order)
    shown = [each for each in found.devices if each.backend == "cuda"]
    by_order = [(UUID_A, PCI_A), (UUID_B, PCI_B)] if order == "0,1" else [(UUID_B, PCI_B), (UUID_A, PCI_A)]
    assert [each.device_id for each in shown] == ["cuda:0", "cuda:1"]
    assert [(each.stable_id, each.identity and each.identity.pci_address) for each in shown] == by_order
    assert all(each.usable for each in shown)


@on_linux
async def test_i40_the_memory_is_that_of_the_card_that_the_variable_names(cards: Cards) -> None:
    await cards.look(CUDA_VISIBLE_DEVICES="1")
    found = await cards.look(CUDA_VISIBLE_DEVICES="1")  # by NVML alone now: CUDA is not opened again
    (shown,) = (each for each in found.devices if each.usable and each.backend == "cuda")
    assert (shown.device_id, shown.stable_id) == ("cuda:0", UUID_B)
    assert shown.memory_available is not None
    first = await cards.look(CUDA_VISIBLE_DEVICES="0")
    (other,) = (each for each in first.devices if each.usable and each.backend == "cuda")
    assert other.stable_id == UUID_A
    assert other.memory_available is not None
    # Both are empty for CUDA's stand-in; NVML knows that 8 GiB of the second are taken.
    assert other.memory_available - shown.memory_available == IN_USE_B


class Deaf(InProcessEngine):
    """As when two nodes start at the same moment: neither hears the other yet."""

    async def snapshot(self, node: str, *, timeout: float = 2.0) -> tuple[StateReply, ...]:
        return ()


async def test_i41_two_machines_with_one_copied_file_are_noticed(tmp_path: Path) -> None:
    """The registry file was copied with the whole disk, machine id included."""
    first, copy = tmp_path / "a" / "registry.json", tmp_path / "b" / "registry.json"

    def copied() -> list[Epoch]:
        RegistryFile(first).next_epoch()
        copy.parent.mkdir()
        copy.write_bytes(first.read_bytes())
        return [Epoch.new(RegistryFile(path).next_epoch()) for path in (first, copy)]

    epochs = await asyncio.to_thread(copied)
    assert epochs[0].counter == epochs[1].counter  # the file alone would make the two one run
    assert epochs[0] != epochs[1]
    async with a_cluster(tmp_path) as cluster:
        for epoch, name, card in zip(epochs, ("alpha", "beta"), (0, 1), strict=True):
            engine = Deaf(cluster.bus)
            await engine.start()
            host = HostInfo(hostname=name, fingerprint="f" * 16, pid=card)
            await NodePublisher(engine, "n1", host=host, epoch=epoch).start(result(device(card)))
        await cluster.until(lambda: cluster.view.conflict("n1"))
        conflict = cluster.view.conflict("n1")
        assert conflict is not None
        assert {conflict.kept.hostname, conflict.refused.hostname} == {"alpha", "beta"}
        # One of the two is the node; their devices are not mixed.
        assert len(cluster.available("n1")) == 1
        assert set(conflict.refused_devices) | set(cluster.node("n1").devices) == set(UUIDS[:2])
        # Whoever comes later is told so, and stays away.
        late = InProcessEngine(cluster.bus)
        await late.start()
        host = HostInfo(hostname="gamma", fingerprint="f" * 16)
        third = NodePublisher(late, "n1", host=host, epoch=Epoch.new(9))
        with pytest.raises(NodeNameTaken, match=r"alpha|beta"):
            await third.start(result(device(2)))
