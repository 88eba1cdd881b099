"""Kernels through CuPy's bindings: over the stand-in runtime, and on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeRuntime
from tests.support.fake_nvrtc import FakeDriverApi, FakeNvrtc, install_compiler

from gpurt.backends.cuda_backend import CUDADriver
from gpurt.backends.cupy.kernels import CuPyKernels
from gpurt.errors import CompileFailed, DeviceLost, Unsupported
from gpurt.testing.kit.kernels import FIELD_ADD, operands, scalars

SOURCE = FIELD_ADD["cuda"]


class Rig:
    """Kernels over a stand-in of two devices, called as a lane does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, hip: bool = False) -> None:
        self.runtime = fake_cuda.install(monkeypatch, FakeRuntime(is_hip=hip))
        self.nvrtc: FakeNvrtc
        self.driver: FakeDriverApi
        self.nvrtc, self.driver = install_compiler(monkeypatch, self.runtime)
        self.streams: dict[int, int] = {}
        self.kernels = CuPyKernels(self.select, self.on_stream)

    def select(self, index: int) -> FakeRuntime:
        self.runtime.setDevice(index)
        return self.runtime

    def on_stream(self, index: int) -> tuple[FakeRuntime, int]:
        self.select(index)
        if index not in self.streams:
            self.streams[index] = self.runtime.streamCreateWithFlags(1)
        return self.runtime, self.streams[index]

    def put(self, index: int, array: np.ndarray) -> int:
        address = self.select(index).malloc(array.nbytes)
        self.runtime.live[address].buffer[:] = array.tobytes()
        return address

    def get(self, address: int) -> bytes:
        return bytes(self.runtime.live[address].buffer)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


@pytest.mark.parametrize("hip", [False, True], ids=["cuda", "hip"])
@pytest.mark.parametrize("index", [0, 1])
def test_kernel_writes_what_it_should(monkeypatch: pytest.MonkeyPatch, hip: bool, index: int) -> None:
    rig = Rig(monkeypatch, hip=hip)
    a, b, total = operands(1000)
    first, second, out = rig.put(index, a), rig.put(index, b), rig.put(index, np.zeros_like(a))
    function = rig.kernels.compile(index, SOURCE, "field_add")
    rig.kernels.launch(index, function, (16, 1, 1), (64, 1, 1), (first, second, out, *scalars(1000)))
    assert rig.get(out) == total.tobytes()
    assert rig.nvrtc.options == [() if hip else ("--gpu-architecture=sm_90",)]
    assert rig.nvrtc.programs == {}


def test_modules_are_unloaded_on_their_device(rig: Rig) -> None:
    for index in (0, 1, 0):
        rig.kernels.compile(index, SOURCE, "field_add")
    assert sorted(device for device, _ in rig.driver.modules.values()) == [0, 0, 1]
    rig.kernels.close()
    rig.kernels.close()
    assert rig.driver.modules == {}


def test_a_lost_device_does_not_keep_the_driver_open(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.kernels.compile(0, SOURCE, "field_add")
    rig.kernels.compile(1, SOURCE, "field_add")

    def lost(index: int) -> None:
        if index == 0:
            raise fake_cuda.CUDARuntimeError(700)

    monkeypatch.setattr(rig.runtime, "on_set_device", lost)
    rig.kernels.close()
    assert [device for device, _ in rig.driver.modules.values()] == [0]


def test_bad_source_comes_with_the_log(rig: Rig) -> None:
    with pytest.raises(CompileFailed) as caught:
        rig.kernels.compile(0, SOURCE.replace("modulus", "other", 1), "field_add")
    assert "kernel.cu" in caught.value.log
    assert "modulus" in caught.value.log
    assert "\0" not in caught.value.log
    assert rig.nvrtc.programs == {}
    assert rig.driver.modules == {}


def test_missing_kernel_says_how_to_declare_it(rig: Rig) -> None:
    with pytest.raises(CompileFailed) as caught:
        rig.kernels.compile(0, SOURCE, "field_mul")
    assert 'extern "C" __global__ void field_mul' in (caught.value.hint or "")
    rig.kernels.close()
    assert rig.driver.modules == {}


@pytest.mark.parametrize("hip", [False, True], ids=["cuda", "hip"])
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, hip: bool) -> None:
    rig = Rig(monkeypatch, hip=hip)

    def missing() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so"')

    monkeypatch.setattr(rig.nvrtc, "getVersion", missing)
    with pytest.raises(Unsupported, match="cannot be loaded: RuntimeError") as caught:
        rig.kernels.compile(0, SOURCE, "field_add")
    assert ("libhiprtc" if hip else "[ctk]") in (caught.value.hint or "")
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", None)
    with pytest.raises(Unsupported):
        rig.kernels.compile(0, SOURCE, "field_add")


def test_failures_of_the_driver_interface_are_the_runtimes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    function = rig.kernels.compile(0, SOURCE, "field_add")
    with pytest.raises(fake_cuda.CUDARuntimeError) as caught:
        rig.kernels.launch(0, function, (1, 1, 1), (2048, 1, 1), (0, 0, 0, *scalars(0)))
    assert caught.value.status == 1

    def refuse(image: bytes) -> int:
        raise rig.driver.CUDADriverError(700)

    monkeypatch.setattr(rig.driver, "moduleLoadData", refuse)
    with pytest.raises(fake_cuda.CUDARuntimeError) as caught:
        rig.kernels.compile(0, SOURCE, "field_add")
    driver = CUDADriver()
    driver._runtime = rig.runtime
    assert driver.classify(caught.value) is DeviceLost


@pytest.mark.gpu
class TestGPU:
    """On a real one, where NVRTC is installed; the kit's kernel tests run there, too."""

    @pytest.fixture
    def driver(self) -> Iterator[CUDADriver]:
        driver = CUDADriver()
        driver.open()
        driver.attach(0)
        try:
            driver.compile(0, SOURCE, "field_add")
        except Unsupported as exc:
            pytest.skip(str(exc))
        yield driver
        driver.detach(0)
        driver.close()

    def test_kernel_writes_what_it_should(self, driver: CUDADriver) -> None:
        count = 1 << 20
        a, b, total = operands(count)
        mems = [driver.alloc(0, a.nbytes) for _ in range(3)]
        driver.write(0, mems[0], 0, memoryview(a).cast("B"))
        driver.write(0, mems[1], 0, memoryview(b).cast("B"))
        kernel = driver.compile(0, SOURCE, "field_add")
        driver.launch(0, kernel, (count // 256, 1, 1), (256, 1, 1), (*mems, *scalars(count)))
        out = bytearray(a.nbytes)
        driver.read(0, mems[2], 0, memoryview(out))
        assert out == total.tobytes()
        for mem in mems:
            driver.free(0, mem)

    def test_bad_source_comes_with_the_log(self, driver: CUDADriver) -> None:
        with pytest.raises(CompileFailed) as caught:
            driver.compile(0, SOURCE.replace("modulus", "other", 1), "field_add")
        assert 'identifier "modulus" is undefined' in caught.value.log
        with pytest.raises(CompileFailed):
            driver.compile(0, SOURCE, "field_mul")

    def test_every_scalar_arrives_with_its_type(self, driver: CUDADriver) -> None:
        source = """
extern "C" __global__ void every_type(double *out, bool a, signed char b, unsigned char c, short d, unsigned short e,
        int f, unsigned int g, long long h, unsigned long long i, float j, double k) {
    double all[] = {(double)a, (double)b, (double)c, (double)d, (double)e, (double)f, (double)g, (double)h, (double)i,
                    (double)j, k};
    out[threadIdx.x] = all[threadIdx.x];
}
"""
        given = [
            np.bool_(True), np.int8(-128), np.uint8(255), np.int16(-32768), np.uint16(65535), np.int32(-(2**31)),
            np.uint32(2**32 - 1), np.int64(-(2**53)), np.uint64(2**53), np.float32(0.1), np.float64(0.1),
        ]  # fmt: skip
        mem = driver.alloc(0, 8 * len(given))
        driver.launch(0, driver.compile(0, source, "every_type"), (1, 1, 1), (len(given), 1, 1), (mem, *given))
        out = bytearray(8 * len(given))
        driver.read(0, mem, 0, memoryview(out))
        assert np.frombuffer(out, np.float64).tolist() == [float(scalar) for scalar in given]
        driver.free(0, mem)
