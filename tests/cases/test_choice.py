"""Choosing among adapters: by what they say of themselves, and only the winner is opened. Names carry the case."""

from __future__ import annotations

from gpurt import factory
from gpurt.errors import ReasonCode
from gpurt.sources.vulkan_properties import read_vulkan
from tests.cases.rig import GIB
from tests.factory.conftest import clean_factory, shelf
from tests.factory.toy import Shelf, ToyBackend, device
from tests.sources.test_vulkan_properties import LAVAPIPE, heap, nvidia, radv

__all__ = ["clean_factory", "shelf"]


def test_vk_5_ranked_by_what_is_told() -> None:
    inside = radv("c", 4, device_type=1, heaps=[heap(64 * GIB, True)])
    inventory = read_vulkan({"devices": [LAVAPIPE, inside, nvidia("a", 1), radv("b", 3)]})
    assert [found.index for found in inventory.ranked()] == [3, 2, 1]


async def test_vk_5_only_the_winner_is_opened_and_the_next_if_it_fails(shelf: Shelf) -> None:
    opened: list[str] = []

    def toy(name: str, fails: bool) -> ToyBackend:
        async def initialize() -> None:
            opened.append(name)
            if fails:
                raise RuntimeError("device lost")

        return ToyBackend((device(f"{name}:0"),), on_initialize=initialize)

    shelf.put("cuda", lambda: toy("cuda", True))
    shelf.put("rocm", lambda: toy("rocm", False))
    shelf.put("vulkan", lambda: toy("vulkan", False))
    assert await factory.create_backend() is shelf["rocm"]
    assert opened == ["cuda", "rocm"]
    first, second = factory.last_reports()
    assert (first.reason, second.status) == (ReasonCode.ERROR, "ok")


async def test_mob_1_a_driver_that_tries_itself_makes_room_for_the_next(shelf: Shelf) -> None:
    """A library that fails at the first use only: its driver uses it once when it is opened."""

    async def invoke() -> None:
        raise OSError("Can not find OpenCL library on this device")

    shelf.put("tflite", lambda: ToyBackend((device("tflite:0"),), on_initialize=invoke))
    backend = await factory.create_backend()
    assert backend is shelf["cpu"]
