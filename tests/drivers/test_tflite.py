"""TFLite: what is claimed of which runtime, memory in chunks, budgets, names. No machine here has a GPU for it, so the
GPU is one that behaves as LiteRT's sources say it does."""

from __future__ import annotations

import ctypes.util
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tflite_backends import (
    HOST_MEMORY,
    FakeLiteRT,
    fake_gpu_driver,
    importer,
    interpreter_cpu_driver,
    litert_cpu_driver,
)

from gpurt.backends.tflite.litert import LiteRT
from gpurt.backends.tflite.runtime import said
from gpurt.backends.tflite.soc import chip
from gpurt.backends.tflite_gpu_backend import TFLiteGPUBackend, TFLiteGPUDriver, create
from gpurt.errors import BackendUnavailable, OutOfMemory, ReasonCode
from gpurt.platforms import Platform
from gpurt.sources import host
from gpurt.types import DeviceKind, GPUDevice

MIB = 1 << 20
PLATFORMS: tuple[Platform, ...] = ("linux", "win32", "darwin", "android", "ios")
LIBRARY = ctypes.util.find_library("c")
"""Any shared library: the delegate's own is asked of the stand-in."""


def opened(fake: FakeLiteRT, platform: Platform = "android", **options: Any) -> tuple[TFLiteGPUDriver, GPUDevice]:
    driver = TFLiteGPUDriver(platform=platform, import_module=importer(fake.modules), **options)
    [device] = driver.open()
    driver.attach(0)
    return driver, device


def refused(driver: TFLiteGPUDriver) -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as caught:
        driver.open()
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.backend == "tflite"
    return caught.value


def real_cpu() -> TFLiteGPUDriver:
    pytest.importorskip("ai_edge_litert", reason="pip install 'gpurt[tflite]'")
    return litert_cpu_driver()


def real_interpreter() -> TFLiteGPUDriver:
    pytest.importorskip("ai_edge_litert", reason="pip install 'gpurt[tflite]'")
    return interpreter_cpu_driver()


# What is claimed


def test_the_cpu_accelerator_is_software_and_never_full() -> None:
    driver = real_cpu()
    [first] = driver.open()
    driver.close()
    [second] = driver.open()
    driver.close()
    assert first.kind is DeviceKind.SOFTWARE
    assert first.support_level == "partial"
    assert first.identity == second.identity
    assert first.identity is not None
    assert first.identity.stable
    assert first.unified_memory
    assert first.memory_pool_id == f"host:{host.host_fingerprint()}"
    assert (first.driver_version or "").startswith("ai_edge_litert 2.")


@pytest.mark.parametrize("platform", ["android", "ios"])
def test_a_phone_that_runs_all_of_a_model_is_full(platform: Platform) -> None:
    driver, device = opened(FakeLiteRT(), platform)
    assert device.support_level == "full"
    assert device.kind is DeviceKind.INTEGRATED_GPU
    assert device.unified_memory
    assert device.memory_bytes == host.memory_budget().total_bytes
    driver.close()


def test_a_phone_that_runs_a_part_of_it_is_partial() -> None:
    driver, device = opened(FakeLiteRT(fully=False))
    assert device.support_level == "partial"
    driver.close()


def test_a_gpu_of_a_host_without_any_is_software(tmp_path: Path) -> None:
    """Dawn may take a software Vulkan, and LiteRT says that all of the model runs on the GPU."""
    driver, device = opened(FakeLiteRT(), "linux", root=tmp_path)
    assert (device.kind, device.support_level) == (DeviceKind.SOFTWARE, "partial")
    driver.close()
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/dri/renderD128").touch()
    driver, device = opened(FakeLiteRT(), "linux", root=tmp_path)
    assert (device.kind, device.support_level) == (DeviceKind.GPU, "full")
    # Whose memory that is, nobody tells.
    assert device.memory_bytes is None
    assert device.memory_pool_id is None
    reading = driver.telemetry(0)
    assert reading.memory_total_bytes is None
    assert reading.unavailable["memory_total_bytes"] == "unsupported"
    driver.close()


def test_a_gpu_that_computes_wrongly_is_refused() -> None:
    driver = TFLiteGPUDriver(platform="android", import_module=importer(FakeLiteRT(works=False).modules))
    assert refused(driver).reason is ReasonCode.UNSUPPORTED_DEVICE


@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_gpu_is_refused_with_what_was_said(platform: Platform) -> None:
    fake = FakeLiteRT(refusal=RuntimeError("ERROR: [compiled_model.cc:1036]\n└ No adapters found"))
    error = refused(TFLiteGPUDriver(platform=platform, import_module=importer(fake.modules)))
    assert error.reason is ReasonCode.NO_DEVICE
    assert "No adapters found" in error.message
    assert "compiled_model.cc" not in error.message
    assert error.hint
    assert error.install_hint is None
    assert fake.live == 0


def test_the_real_gpu_accelerator_is_refused_or_true() -> None:
    pytest.importorskip("ai_edge_litert", reason="pip install 'gpurt[tflite]'")
    driver = TFLiteGPUDriver()
    refusals: list[BackendUnavailable] = []
    try:
        [device] = driver.open()
    except BackendUnavailable as exc:
        refusals.append(exc)
    else:
        assert (device.kind is DeviceKind.SOFTWARE) == (device.support_level == "partial")
        driver.close()
    for refusal in refusals:
        assert refusal.reason is ReasonCode.NO_DEVICE
        assert "GPU accelerator" in refusal.message
        assert refusal.hint


def test_what_litert_says_without_its_sources() -> None:
    text = "ERROR: [./litert/cc/litert_compiled_model.h:1961]\n└ Some ops are not accelerated."
    assert said(RuntimeError(text)) == "Some ops are not accelerated."
    assert "stderr" in said(RuntimeError("ERROR: [a.h:1]\n└ ERROR: [b.cc:2]"))
    assert "stderr" in said(RuntimeError())


def test_no_other_accelerator() -> None:
    with pytest.raises(ValueError, match="npu"):
        TFLiteGPUDriver(accelerator="npu")  # pyright: ignore[reportArgumentType]


async def test_the_backend_asks_for_the_gpu() -> None:
    backend = create()
    assert isinstance(backend, TFLiteGPUBackend)
    assert backend.name == "tflite"
    assert backend.devices == ()


# Delegates


class Interpreters:
    """The modules of ``tflite_runtime`` over the real interpreter, with a delegate that is made here."""

    def __init__(self, *, loads: Exception | None = None, runs: Exception | None = None, works: bool = True) -> None:
        real: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="pip install 'gpurt[tflite]'")
        self.delegates: list[str] = []

        def load_delegate(library: str) -> str:
            if loads is not None:
                raise loads
            self.delegates.append(library)
            return library

        def interpreter(model_content: bytes, experimental_delegates: list[str] | None = None) -> Any:
            made = real.Interpreter(model_content=model_content)
            names = ("allocate_tensors", "get_input_details", "get_output_details", "tensor", "invoke")
            shown = SimpleNamespace(**{name: getattr(made, name) for name in names})
            if experimental_delegates and runs is not None:
                shown.invoke = Mock(side_effect=runs)
            elif experimental_delegates and not works:
                shown.invoke = Mock()
            return shown

        module = SimpleNamespace(Interpreter=interpreter, load_delegate=load_delegate)
        self.tflite_runtime = {
            "tflite_runtime": SimpleNamespace(__version__="2.14.0"),
            "tflite_runtime.interpreter": module,
        }
        experimental = SimpleNamespace(load_delegate=load_delegate)
        lite = SimpleNamespace(Interpreter=interpreter, experimental=experimental)
        self.tensorflow = {"tensorflow": SimpleNamespace(__version__="2.21.0", lite=lite)}


@pytest.mark.skipif(LIBRARY is None, reason="no shared library is found by name here")
@pytest.mark.parametrize("package", ["tflite_runtime", "tensorflow"])
def test_a_delegate_that_works_is_partial(package: str) -> None:
    """Tensors of the interpreter stay in host memory, whoever computes."""
    modules = Interpreters()
    driver = TFLiteGPUDriver(platform="android", delegate=LIBRARY, import_module=importer(getattr(modules, package)))
    [device] = driver.open()
    driver.attach(0)
    assert device.support_level == "partial"
    assert device.backend_name == package
    assert device.kind is DeviceKind.INTEGRATED_GPU
    assert modules.delegates == [LIBRARY]
    mem = driver.alloc(0, 5000)
    driver.write(0, mem, 3, memoryview(b"through an interpreter"))
    target = bytearray(22)
    driver.read(0, mem, 3, memoryview(target))
    assert target == b"through an interpreter"
    driver.free(0, mem)
    driver.close()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_delegate_that_is_not_there_is_refused(platform: Platform) -> None:
    modules = Interpreters().tflite_runtime
    error = refused(TFLiteGPUDriver(platform=platform, import_module=importer(modules)))
    assert error.reason is ReasonCode.NO_LIBRARY
    assert "tensorflowlite_gpu_delegate" in error.message
    assert "delegate=" in (error.hint or "")


@pytest.mark.skipif(LIBRARY is None, reason="no shared library is found by name here")
@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"loads": ValueError("no OpenCL")}, ReasonCode.NO_DEVICE),
        ({"runs": RuntimeError("node 0 failed to invoke")}, ReasonCode.UNSUPPORTED_DEVICE),
        ({"works": False}, ReasonCode.UNSUPPORTED_DEVICE),
    ],
)
def test_a_delegate_that_fails_is_refused(behaviour: dict[str, Any], reason: ReasonCode) -> None:
    modules = Interpreters(**behaviour).tflite_runtime
    error = refused(TFLiteGPUDriver(platform="android", delegate=LIBRARY, import_module=importer(modules)))
    assert error.reason is reason
    assert "delegate" in error.message


# Which runtime


def test_the_order_of_the_runtimes() -> None:
    interpreters = Interpreters()
    litert, tflite_runtime, tensorflow = (
        FakeLiteRT(kinds=(HOST_MEMORY,)).modules,
        interpreters.tflite_runtime,
        interpreters.tensorflow,
    )
    names: list[str] = []
    for modules in (litert | tflite_runtime | tensorflow, tflite_runtime | tensorflow, tensorflow):
        driver = TFLiteGPUDriver(accelerator="cpu", import_module=importer(modules))
        names.append(driver.open()[0].backend_name)
        driver.close()
    assert names == ["ai_edge_litert", "tflite_runtime", "tensorflow"]


def test_a_runtime_that_cannot_be_loaded_is_passed_over() -> None:
    broken = {
        "ai_edge_litert": SimpleNamespace(),
        "ai_edge_litert.compiled_model": ImportError("numpy.core.multiarray"),
    }
    driver = TFLiteGPUDriver(accelerator="cpu", import_module=importer(broken | Interpreters().tensorflow))
    assert driver.open()[0].backend_name == "tensorflow"
    driver.close()


@pytest.mark.parametrize(
    "modules",
    [
        {"ai_edge_litert": SimpleNamespace()},  # older than 2.0: no compiled models
        {"ai_edge_litert.compiled_model": ImportError("numpy.core.multiarray failed to import")},
        {"ai_edge_litert.compiled_model": AttributeError("_ARRAY_API not found")},
    ],
)
def test_why_none_can_be_loaded(modules: dict[str, Any]) -> None:
    error = refused(TFLiteGPUDriver(platform="linux", import_module=importer(modules)))
    assert error.reason is ReasonCode.NO_LIBRARY
    assert "ai_edge_litert is installed and cannot be loaded" in error.message


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nothing_installed(platform: Platform) -> None:
    error = refused(TFLiteGPUDriver(platform=platform, import_module=importer({})))
    assert error.reason is ReasonCode.NO_LIBRARY
    assert "ai_edge_litert" in error.message
    if platform in ("android", "ios"):
        # There is nothing to install there: the app brings it.
        assert error.install_hint is None
        assert {"android": "Android", "ios": "iOS"}[platform] in (error.hint or "")
    else:
        assert error.install_hint == "pip install 'gpurt[tflite]'  # ai-edge-litert"
        assert error.hint == error.install_hint


# Memory


@pytest.mark.parametrize("make", [real_cpu, real_interpreter, fake_gpu_driver])
def test_ranges_across_chunks_touch_nothing_else(make: Any) -> None:
    driver = make()
    driver.open()
    driver.attach(0)
    chunk = LiteRT.chunk_bytes  # the interpreter's are too large to be met here
    size = 3 * chunk + 12_345
    expected = bytearray(random.Random(1).randbytes(size))
    mem = driver.alloc(0, size)
    driver.write(0, mem, 0, memoryview(expected))
    rng = random.Random(2)
    edges = [0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk - 7, 3 * chunk, size - 1]
    for offset in edges:
        for length in (1, 2, 4096, chunk, chunk + 1, 2 * chunk + 5, size):
            count = min(length, size - offset)
            content = rng.randbytes(count)
            driver.write(0, mem, offset, memoryview(content))
            expected[offset : offset + count] = content
            part = bytearray(count)
            driver.read(0, mem, offset, memoryview(part))
            assert (part == content) is True
    whole = bytearray(size)
    driver.read(0, mem, 0, memoryview(whole))
    assert (whole == expected) is True
    driver.free(0, mem)
    driver.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_copies_between_allocations_of_a_gpu(data: st.DataObject) -> None:
    driver = fake_gpu_driver()
    driver.open()
    sizes = st.integers(1, 5 * LiteRT.chunk_bytes // 2)
    src_size, dst_size = data.draw(sizes), data.draw(sizes)
    src, dst = bytearray(random.Random(3).randbytes(src_size)), bytearray(random.Random(4).randbytes(dst_size))
    src_mem, dst_mem = driver.alloc(0, src_size), driver.alloc(0, dst_size)
    driver.write(0, src_mem, 0, memoryview(src))
    driver.write(0, dst_mem, 0, memoryview(dst))
    count = data.draw(st.integers(1, min(src_size, dst_size)))
    src_at, dst_at = data.draw(st.integers(0, src_size - count)), data.draw(st.integers(0, dst_size - count))
    driver.copy(0, src_mem, src_at, 0, dst_mem, dst_at, count)
    dst[dst_at : dst_at + count] = src[src_at : src_at + count]
    for mem, expected in ((src_mem, src), (dst_mem, dst)):
        got = bytearray(len(expected))
        driver.read(0, mem, 0, memoryview(got))
        assert (got == expected) is True
        driver.free(0, mem)
    driver.close()


def test_sizes_share_models_and_waste_little() -> None:
    fake = FakeLiteRT()
    driver, _ = opened(fake)
    for nbytes in range(1, 3 * LiteRT.chunk_bytes, 32_003):
        mem = driver.alloc(0, nbytes)
        held = mem.cost_bytes // 2  # see test_more_than_there_is_makes_no_tensor
        rest = nbytes % LiteRT.chunk_bytes
        assert 0 <= held - nbytes < max(512, rest // 8 + 1)
        driver.free(0, mem)
    assert len(fake.compiled) == len(set(fake.compiled)) < 100
    assert fake.live == 0
    driver.close()


def small_host(root: Path) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 131072 kB\nMemAvailable: 131072 kB\n")
    return root


def test_more_than_there_is_makes_no_tensor(tmp_path: Path) -> None:
    fake = FakeLiteRT()
    driver, device = opened(fake, root=small_host(tmp_path))
    assert device.memory_bytes == device.memory_available == 128 * MIB
    # The runtime keeps a copy of a GPU's tensors in the memory that both share.
    assert device.memory_usable_bytes == 64 * MIB
    made = len(fake.compiled)
    for nbytes in (65 * MIB, 1 << 40, 1 << 62):
        with pytest.raises(MemoryError) as caught:
            driver.alloc(0, nbytes)
        assert driver.classify(caught.value) is OutOfMemory
    assert len(fake.compiled) == made
    held = driver.alloc(0, 40 * MIB)
    with pytest.raises(MemoryError):
        driver.alloc(0, 40 * MIB)
    driver.free(0, held)
    driver.free(0, driver.alloc(0, 60 * MIB))
    driver.close()


def test_host_tensors_are_counted_once(tmp_path: Path) -> None:
    driver, device = opened(FakeLiteRT(kinds=(HOST_MEMORY,)), root=small_host(tmp_path))
    assert device.memory_usable_bytes == 128 * MIB
    driver.free(0, driver.alloc(0, 100 * MIB))
    with pytest.raises(MemoryError):
        driver.alloc(0, 129 * MIB)
    driver.close()


def test_an_allocation_that_fails_half_way_gives_all_back(tmp_path: Path) -> None:
    fake = FakeLiteRT()
    driver, _ = opened(fake, root=small_host(tmp_path))
    fake.room = 3 * LiteRT.chunk_bytes + MIB // 2
    for _ in range(20):
        with pytest.raises(RuntimeError) as caught:
            driver.alloc(0, 10 * LiteRT.chunk_bytes)
        assert driver.classify(caught.value) is OutOfMemory
        assert fake.live == 0
    driver.free(0, driver.alloc(0, 3 * LiteRT.chunk_bytes))
    assert driver.classify(RuntimeError("invalid capsule")) is None
    driver.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries return what is freed, or never do")
@pytest.mark.parametrize("make", [real_cpu, real_interpreter])
def test_freed_memory_goes_back_to_the_system(make: Any) -> None:
    driver = make()
    driver.open()
    content = memoryview(bytes(96 * MIB))
    before = host.resident_bytes()
    mem = driver.alloc(0, len(content))
    driver.write(0, mem, 0, content)
    assert host.resident_bytes() - before > 80 * MIB
    driver.free(0, mem)
    assert host.resident_bytes() - before < 32 * MIB
    assert driver.trim(0) == 0
    driver.close()


# Names


@pytest.mark.parametrize(
    ("properties", "name", "vendor"),
    [
        ({"ro.soc.manufacturer": "QTI", "ro.soc.model": "SM8650"}, "Qualcomm SM8650 GPU", "qualcomm"),
        ({"ro.soc.manufacturer": "Google", "ro.soc.model": "Tensor G3"}, "Google Tensor G3 GPU", "google"),
        ({"ro.soc.manufacturer": "Mediatek", "ro.soc.model": "MT6989"}, "Mediatek MT6989 GPU", "mediatek"),
        ({"ro.soc.manufacturer": "Acme", "ro.board.platform": "roadrunner"}, "Acme roadrunner GPU", "unknown"),
        ({"ro.board.platform": "kona"}, "kona GPU", "unknown"),
        ({"ro.soc.model": "  "}, "TFLite GPU", "unknown"),
    ],
)
def test_android_names_the_chip(properties: dict[str, str], name: str, vendor: str, tmp_path: Path) -> None:
    (tmp_path / "vendor").mkdir()
    lines = ["# begin build properties", "", "no property", *(f"{key}={value}" for key, value in properties.items())]
    (tmp_path / "vendor/build.prop").write_text("\n".join(lines))
    assert chip("android", tmp_path) == (name, vendor)


def test_vendor_properties_come_before_the_systems(tmp_path: Path) -> None:
    for folder, model in (("system", "wrong"), ("vendor", "SM8650")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "build.prop").write_text(f"ro.soc.model={model}\n")
    assert chip("android", tmp_path).name == "SM8650 GPU"


def test_names_elsewhere(tmp_path: Path) -> None:
    assert chip("android", tmp_path) == ("TFLite GPU", "unknown")
    assert chip("android", Path("/")).name  # asks the C library, which is not Android's here
    assert chip("ios", tmp_path, "iPhone14,2") == ("Apple GPU (iPhone14,2)", "apple")
    assert chip("darwin", tmp_path, "arm64") == ("Apple GPU", "apple")
    assert chip("darwin", tmp_path, "x86_64") == ("TFLite GPU", "unknown")
    assert chip("linux", tmp_path, "x86_64") == ("TFLite GPU", "unknown")
    assert chip("win32", tmp_path, "AMD64") == ("TFLite GPU", "unknown")
