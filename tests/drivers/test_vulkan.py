"""The Vulkan driver on lavapipe, a software device: what the conformance kit does not ask."""

from __future__ import annotations

import gc
import importlib
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.vulkan_backends import StandIn, available, driver, twice

from gpurt.backends.vulkan import stream as vulkan_stream
from gpurt.backends.vulkan_backend import VulkanBackend, VulkanDriver, create
from gpurt.errors import BackendClosed, BackendUnavailable, DeviceLost, GPUError, OutOfMemory, OutOfRange, ReasonCode
from gpurt.types import DeviceKind

pytestmark = pytest.mark.skipif(not available(), reason="no Vulkan device here: apt install mesa-vulkan-drivers")

GIB, MIB = 1 << 30, 1 << 20


def random_array(size: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Iterator[VulkanDriver]:
    """Two devices, staged unless the test asks for mapped ones."""
    one = driver(mapped=getattr(request, "param", False))
    one.open()
    yield one
    for index in range(2):
        one.detach(index)
    one.close()


def get(one: VulkanDriver, index: int, mem: Any, size: int, offset: int = 0) -> bytes:
    target = bytearray(size)
    one.read(index, mem, offset, memoryview(target))
    return bytes(target)


class TestRecord:
    def test_a_software_device_is_one(self) -> None:
        one = VulkanDriver(environ={})
        try:
            device = one.open()[-1]
        finally:
            one.close()
        assert (device.device_id.partition(":")[0], device.backend) == ("vulkan", "vulkan")
        if device.kind is not DeviceKind.SOFTWARE:
            pytest.skip("lavapipe is not among the devices")
        assert device.support_level == "experimental"
        assert device.usable
        assert not device.unified_memory
        assert (device.memory_pool_id or "").startswith("host:")
        assert device.memory_bytes is not None
        assert 0 < (device.memory_usable_bytes or 0) <= device.memory_bytes
        assert device.compute_units is None
        assert (device.max_threads_per_block or 0) >= 128  # what Vulkan guarantees

    def test_free_memory_that_is_not_told_is_none_with_a_reason(self, opened: VulkanDriver) -> None:
        reading = opened.telemetry(0)
        assert (reading.memory_total_bytes or 0) > 0
        assert (reading.memory_free_bytes, reading.memory_used_bytes, reading.temperature_c) == (None, None, None)
        assert reading.unavailable["memory_free_bytes"] == reading.unavailable["memory_used_bytes"] == "unsupported"

    def test_claims_follow_the_memory(self) -> None:
        for mapped in (True, False):
            one = driver(mapped=mapped)
            one.open()
            assert one.capabilities.host_visible is mapped
            assert one.capabilities.unified_memory
            assert (one.capabilities.max_allocation_bytes or 0) >= GIB  # what Vulkan 1.1 guarantees
            one.close()

    async def test_as_a_backend(self) -> None:
        backend = create()
        assert type(backend) is VulkanBackend
        assert backend.name == "vulkan"
        async with backend, backend.allocation("vulkan:0", 5) as handle:
            await backend.copy_to_device(b"bytes", handle)
            with await backend.view(handle) as view:
                assert bytes(view.numpy()) == b"bytes"


class TestBudgetOfTheDriver:
    """VK_EXT_memory_budget, which lavapipe does not have: the driver's answer is filled in."""

    @pytest.fixture
    def budget(self) -> dict[str, int]:
        return {"budget": GIB, "usage": 600 * MIB}

    @pytest.fixture
    def told(self, budget: dict[str, int]) -> Iterator[VulkanDriver]:
        vk = importlib.import_module("vulkan")

        def extensions(physical: Any, layer: Any) -> list[Any]:
            shown = list(vk.vkEnumerateDeviceExtensionProperties(physical, layer))
            return [*shown, StandIn(extensionName="VK_EXT_memory_budget")]

        def memory(physical: Any, asked: Any) -> None:
            vk.vkGetPhysicalDeviceMemoryProperties2(physical, asked)
            chained = vk.ffi.cast("VkPhysicalDeviceMemoryBudgetPropertiesEXT*", asked.pNext)
            chained.heapBudget[0], chained.heapUsage[0] = budget["budget"], budget["usage"]

        stand_in = StandIn(vkEnumerateDeviceExtensionProperties=extensions, vkGetPhysicalDeviceMemoryProperties2=memory)
        one = VulkanDriver(vk=stand_in)
        yield one
        one.close()

    def test_is_telemetry_and_record(self, told: VulkanDriver) -> None:
        device = told.open()[0]
        assert device.memory_available == 424 * MIB
        assert device.memory_usable_bytes is not None
        reading = told.telemetry(0)
        assert reading.memory_free_bytes == 424 * MIB
        assert reading.memory_used_bytes == (reading.memory_total_bytes or 0) - 424 * MIB
        assert {"memory_free_bytes", "memory_used_bytes"} <= told.capabilities.telemetry
        assert "memory_free_bytes" not in reading.unavailable

    def test_bounds_allocations_and_is_asked_again(self, told: VulkanDriver, budget: dict[str, int]) -> None:
        told.open()
        with pytest.raises(MemoryError, match=r"524,288,000 bytes asked for on vulkan:0, 444,596,224"):
            told.alloc(0, 500 * MIB)
        budget["usage"] = 100 * MIB
        mem = told.alloc(0, 500 * MIB)  # others have let go of theirs
        budget["usage"] = 600 * MIB  # ours is in it now
        with pytest.raises(MemoryError):
            told.alloc(0, 450 * MIB)
        told.free(0, mem)
        budget["usage"] = 100 * MIB
        told.free(0, told.alloc(0, 900 * MIB))


class TestMemory:
    def test_the_driver_would_overcommit_and_we_do_not(self, opened: VulkanDriver) -> None:
        total = opened.telemetry(0).memory_total_bytes
        assert total is not None
        if total > 4 * GIB:
            pytest.skip("this Mesa shows all of the host's memory")
        mems = [opened.alloc(0, total // 4) for _ in range(4)]  # never touched
        with pytest.raises(MemoryError, match="1 bytes asked for on vulkan:0, 0 ") as caught:
            opened.alloc(0, 1)
        assert opened.classify(caught.value) is OutOfMemory
        other = opened.alloc(1, 1)  # the other device has its own
        opened.free(1, other)
        # A copy needs its staging memory all the same.
        opened.write(0, mems[0], 7, memoryview(b"full"))
        assert get(opened, 0, mems[0], 4, 7) == b"full"
        opened.free(0, mems.pop())
        mems.append(opened.alloc(0, total // 4))
        for mem in mems:
            opened.free(0, mem)

    def test_one_allocation_has_a_largest_size(self) -> None:
        vk = importlib.import_module("vulkan")

        def small(physical: Any, asked: Any) -> None:
            vk.vkGetPhysicalDeviceProperties2(physical, asked)
            link = asked.pNext
            while link != vk.ffi.NULL:
                base = vk.ffi.cast("VkBaseOutStructure*", link)
                if base.sType == vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES:
                    vk.ffi.cast("VkPhysicalDeviceMaintenance3Properties*", link).maxMemoryAllocationSize = 1 * MIB
                link = base.pNext

        one = VulkanDriver(vk=StandIn(vkGetPhysicalDeviceProperties2=small))
        one.open()
        try:
            assert one.capabilities.max_allocation_bytes == MIB
            with pytest.raises(OutOfRange, match=r"vulkan:0 is 1,048,576 bytes, 1,048,577 asked for"):
                one.alloc(0, MIB + 1)
            one.free(0, one.alloc(0, MIB))
        finally:
            one.close()

    def test_as_many_allocations_as_the_driver_bears(self) -> None:
        vk = importlib.import_module("vulkan")
        kept: list[Any] = []

        def few(physical: Any) -> Any:
            properties = vk.vkGetPhysicalDeviceProperties(physical)
            properties.limits.maxMemoryAllocationCount = 64 + 3
            kept.append(properties)
            return properties

        one = VulkanDriver(vk=StandIn(vkGetPhysicalDeviceProperties=few))
        one.open()
        try:
            mems = [one.alloc(0, 64) for _ in range(3)]
            with pytest.raises(MemoryError, match="holds 3 allocations"):
                one.alloc(0, 64)
            one.free(0, mems.pop())
            one.alloc(0, 64)
        finally:
            one.close()

    def test_a_refusal_of_the_driver_leaves_nothing_behind(self, opened: VulkanDriver) -> None:
        vk = importlib.import_module("vulkan")
        answers: Counter[str] = Counter()

        def refuse(*_: Any) -> Any:
            raise vk.VkErrorOutOfDeviceMemory

        def destroy(*arguments: Any) -> None:
            answers["destroyed"] += 1
            vk.vkDestroyBuffer(*arguments)

        one = VulkanDriver(vk=StandIn(vkAllocateMemory=refuse, vkDestroyBuffer=destroy))
        one.open()
        try:
            for _ in range(3):
                with pytest.raises(vk.VkErrorOutOfDeviceMemory, match=r"4,096 bytes on vulkan:0: .*not enough"):
                    one.alloc(0, 4096)
            assert answers["destroyed"] == 3 + 1  # and the one that asks which memory fits
            assert one.classify(vk.VkErrorOutOfDeviceMemory()) is OutOfMemory
        finally:
            one.close()

    def test_freeing_twice_and_after_the_end_is_harmless(self) -> None:
        one = driver()
        one.open()
        first, second = one.alloc(0, 64), one.alloc(0, 64)
        one.free(0, first)
        device = one._devices[0]
        device.free(first)
        one.close()
        device.free(second)
        with pytest.raises(BackendClosed):
            device.allocate(64)
        with pytest.raises(BackendClosed):
            one.alloc(0, 64)


class TestCopies:
    @pytest.mark.parametrize("opened", [True, False], indirect=True, ids=["mapped", "staged"])
    def test_many_pieces_of_odd_sizes(self, opened: VulkanDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vulkan_stream, "STAGE_BYTES", 1000)
        monkeypatch.setattr(vulkan_stream, "REGION_BYTES", 777)
        rng = random.Random(3)
        size = 10_007
        expected = bytearray(rng.randbytes(size))
        mem, other, far = opened.alloc(0, size), opened.alloc(0, size), opened.alloc(1, size)
        opened.write(0, mem, 0, memoryview(expected))
        for count in (1, 999, 1000, 1001, 2000, 2001, 3000, 5003, size):
            offset = rng.randrange(size - count + 1)
            content = rng.randbytes(count)
            opened.write(0, mem, offset, memoryview(content))
            expected[offset : offset + count] = content
            assert get(opened, 0, mem, count, offset) == content
            assert get(opened, 0, mem, size) == expected
            # Within the device in many regions, and to the other in many pieces.
            opened.copy(0, mem, 0, 0, other, 0, size)
            assert get(opened, 0, other, size) == expected
            opened.copy(0, mem, offset, 1, far, size - count, count)
            assert get(opened, 1, far, count, size - count) == content
        for index, one in ((0, mem), (0, other), (1, far)):
            opened.free(index, one)

    @pytest.mark.parametrize("way", [(True, False), (False, True)], ids=["from_mapped", "to_mapped"])
    def test_between_mapped_and_staged(self, opened: VulkanDriver, way: tuple[bool, bool]) -> None:
        for device, mapped in zip(opened._devices, way, strict=True):
            device.mapped = mapped
        content = random_array(9 * MIB + 1)
        src, dst = opened.alloc(0, len(content)), opened.alloc(1, len(content) + 3)
        opened.write(0, src, 0, memoryview(content))
        opened.copy(0, src, 1, 1, dst, 3, len(content) - 1)
        assert get(opened, 1, dst, len(content) - 1, 3) == content[1:].tobytes()
        opened.free(0, src)
        opened.free(1, dst)

    @pytest.mark.parametrize("opened", [True], indirect=True)
    def test_mapped_memory_that_is_slow_to_read_is_read_by_the_device(self, opened: VulkanDriver) -> None:
        content = random_array(5 * MIB)
        mem, dst = opened.alloc(0, len(content)), opened.alloc(1, len(content))
        assert not opened._lane.streams
        mem.cached = False
        opened.write(0, mem, 0, memoryview(content))
        assert not opened._lane.streams  # written through the mapping
        assert get(opened, 0, mem, len(content)) == content.tobytes()
        assert 0 in opened._lane.streams
        opened.copy(0, mem, 0, 1, dst, 0, len(content))
        assert get(opened, 1, dst, len(content)) == content.tobytes()
        opened.free(0, mem)
        opened.free(1, dst)

    def test_read_only_and_unaligned_host_memory(self, opened: VulkanDriver) -> None:
        content = bytes(random_array(70_001))
        mem = opened.alloc(0, 70_001)
        opened.write(0, mem, 1, memoryview(content)[1:])
        target = bytearray(70_003)
        opened.read(0, mem, 1, memoryview(target)[3:])
        assert target[3:] == content[1:]
        target.append(0)  # nobody keeps it exported
        opened.free(0, mem)

    def test_failure_in_the_middle_leaves_nothing_under_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        vk = importlib.import_module("vulkan")
        monkeypatch.setattr(vulkan_stream, "STAGE_BYTES", 4096)
        calls: Counter[str] = Counter()

        def submit(*arguments: Any) -> None:
            calls["submitted"] += 1
            if calls["submitted"] == 3:
                raise vk.VkErrorOutOfHostMemory
            vk.vkQueueSubmit(*arguments)

        one = VulkanDriver(vk=StandIn(vkQueueSubmit=submit), mapped=False)
        one.open()
        try:
            content = random_array(40_000)
            mem = one.alloc(0, len(content))
            for copy in (
                lambda: one.write(0, mem, 0, memoryview(content)),
                lambda: get(one, 0, mem, len(content)),
            ):
                calls.clear()
                with pytest.raises(vk.VkErrorOutOfHostMemory, match="queue of vulkan:0"):
                    copy()
                one.write(0, mem, 0, memoryview(content))
                assert get(one, 0, mem, len(content)) == content.tobytes()
        finally:
            one.detach(0)
            one.close()


class TestLife:
    def test_no_vkdevice_before_one_is_needed(self) -> None:
        vk = importlib.import_module("vulkan")
        made: Counter[str] = Counter()

        def counted(name: str) -> Any:
            def call(*arguments: Any) -> Any:
                made[name] += 1
                return getattr(vk, name)(*arguments)

            return call

        names = ("vkCreateInstance", "vkDestroyInstance", "vkCreateDevice", "vkDestroyDevice")
        one = VulkanDriver(vk=StandIn(**{name: counted(name) for name in names}))
        one.open()
        one.telemetry(0)
        one.sync(0)
        assert made == {"vkCreateInstance": 1}
        one.free(0, one.alloc(0, 1))
        one.close()
        assert made == dict.fromkeys(names, 1)

    def test_many_times_in_one_process(self) -> None:
        import psutil

        process, content = psutil.Process(), random_array(5 * MIB)

        def once(mapped: bool) -> None:
            one = driver(mapped=mapped)
            one.open()
            mem = one.alloc(0, 5 * MIB)
            one.write(0, mem, 0, memoryview(content))
            one.alloc(1, 3 * MIB)  # a device that was lost leaves what it had
            assert get(one, 0, mem, 16) == content[:16].tobytes()
            one.close()
            one.detach(0)  # late

        for mapped in (True, False):
            once(mapped)
        gc.collect()
        before, threads = process.memory_info().rss, process.num_threads()
        for n in range(10):
            once(n % 2 == 0)
        gc.collect()
        assert process.memory_info().rss - before < 20 * MIB
        assert process.num_threads() <= threads

    def test_open_again_without_a_close_is_a_fresh_start(self) -> None:
        """What a shell does that has left a hung driver behind."""
        one = driver(mapped=False)
        one.open()
        old = one.alloc(0, 64)
        old_device = one._devices[0]
        one.write(0, old, 0, memoryview(b"old"))
        one.open()
        mem = one.alloc(0, 64)
        one.write(0, mem, 0, memoryview(b"new"))
        assert get(one, 0, mem, 3) == b"new"
        one.free(0, mem)
        one.detach(0)
        one.close()
        old_device.free(old)  # the hung call returns after all
        old_device.close()

    @pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "staged"])
    def test_a_lost_device(self, mapped: bool) -> None:
        vk = importlib.import_module("vulkan")
        lost: list[bool] = []

        def wait(*arguments: Any) -> None:
            vk.vkWaitForFences(*arguments)
            if lost:
                raise vk.VkErrorDeviceLost

        one = VulkanDriver(vk=StandIn(vkWaitForFences=wait), mapped=mapped)
        one.open()
        src, dst = one.alloc(0, 64), one.alloc(0, 64)
        one.copy(0, src, 0, 0, dst, 0, 64)
        lost.append(True)
        for call in (lambda: one.copy(0, src, 0, 0, dst, 0, 64), lambda: one.sync(0)):
            with pytest.raises(vk.VkErrorDeviceLost, match="vulkan:0: the device is lost") as caught:
                call()
            assert one.classify(caught.value) is DeviceLost
        one.detach(0)
        one.close()  # with two live allocations
        lost.clear()
        one.open()
        one.free(0, one.alloc(0, 64))
        one.close()

    def test_nothing_on_stdout(self) -> None:
        code = (
            "from tests.support.vulkan_backends import driver\n"
            "one = driver(mapped=False); one.open(); mem = one.alloc(0, 64)\n"
            "one.write(0, mem, 0, memoryview(b'quiet')); one.free(0, mem); one.detach(0); one.close()\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
        )
        assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
        assert "VUID" not in ended.stderr


class TestMask:
    def test_hides_and_keeps_the_numbers(self) -> None:
        one = VulkanDriver(vk=twice(), environ={"GGML_VK_VISIBLE_DEVICES": "1"})
        first, second = one.open()
        one.close()
        assert (first.device_id, first.usable) == ("vulkan:0", False)
        assert first.state_reason == "hidden_by_environment: GGML_VK_VISIBLE_DEVICES does not name it"
        assert (second.device_id, second.usable) == ("vulkan:1", True)

    @pytest.mark.parametrize("value", ["-1", "", "7"])
    def test_that_hides_all_is_a_refusal(self, value: str) -> None:
        one = VulkanDriver(vk=twice(), environ={"GGML_VK_VISIBLE_DEVICES": value})
        with pytest.raises(BackendUnavailable, match="GGML_VK_VISIBLE_DEVICES does not name it") as caught:
            one.open()
        assert caught.value.reason is ReasonCode.HIDDEN_BY_ENVIRONMENT

    def test_of_another_vendor_does_not_matter(self) -> None:
        one = VulkanDriver(vk=twice(), environ={"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""})
        assert all(device.usable for device in one.open())
        one.close()


class TestRefusals:
    def refused(self, one: VulkanDriver) -> BackendUnavailable:
        with pytest.raises(BackendUnavailable) as caught:
            one.open()
        error = caught.value
        assert error.backend == "vulkan"
        assert isinstance(error, GPUError)
        return error

    def test_no_driver_that_the_loader_finds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
            monkeypatch.setenv(variable, "/nonexistent/icd.json")
        error = self.refused(VulkanDriver(platform="linux", root=Path("/nonexistent")))
        assert error.reason is ReasonCode.HIDDEN_BY_ENVIRONMENT
        assert "VK_DRIVER_FILES='/nonexistent/icd.json'" in error.message
        with monkeypatch.context() as nobody_says_so:
            nobody_says_so.setattr("gpurt.sources.vulkan_query._VARIABLES", ())
            error = self.refused(VulkanDriver(platform="linux", root=Path("/nonexistent")))
            assert error.reason is ReasonCode.NO_DRIVER
            assert "mesa-vulkan-drivers" in (error.install_hint or "")
            windows = self.refused(VulkanDriver(platform="win32", root=Path("/nonexistent")))
            assert "apt" not in (windows.hint or "")
        monkeypatch.undo()
        one = VulkanDriver()  # it was the environment's doing
        assert one.open()
        one.close()

    def test_a_list_that_cannot_be_had_ends_the_instance(self) -> None:
        vk = importlib.import_module("vulkan")
        ended: list[Any] = []

        def destroy(*arguments: Any) -> None:
            ended.append(arguments)
            vk.vkDestroyInstance(*arguments)

        def broken(instance: Any) -> list[Any]:
            raise vk.VkErrorInitializationFailed

        error = self.refused(VulkanDriver(vk=StandIn(vkEnumeratePhysicalDevices=broken, vkDestroyInstance=destroy)))
        assert error.reason is ReasonCode.ERROR
        nothing = VulkanDriver(
            vk=StandIn(vkEnumeratePhysicalDevices=lambda instance: [], vkDestroyInstance=destroy),
            root=Path("/nonexistent"),
        )
        assert self.refused(nothing).reason is ReasonCode.NO_DEVICE
        assert len(ended) == 2
