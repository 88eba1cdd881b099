"""Kernels through pyopencl, on whatever OpenCL device there is: a software device will do."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpurt.backends.opencl import kernels as opencl_kernels
from gpurt.errors import CompileFailed, OutOfRange
from gpurt.testing.kit.kernels import FIELD_ADD, operands, scalars

cl = pytest.importorskip("pyopencl")

SOURCE = FIELD_ADD["opencl"]


@dataclass
class Rig:
    device: Any
    context: Any

    def queue(self) -> Any:
        return cl.CommandQueue(self.context, self.device)

    def put(self, array: Any) -> Any:
        return cl.Buffer(self.context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=array)

    def get(self, buffer: Any) -> bytes:
        out = bytearray(buffer.size)
        cl.enqueue_copy(self.queue(), out, buffer, is_blocking=True)
        return bytes(out)


@pytest.fixture(scope="module")
def rig() -> Rig:
    try:
        devices = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error as exc:
        pytest.skip(f"no OpenCL platform: {exc}")
    if not devices:
        pytest.skip("no OpenCL device")
    return Rig(devices[0], cl.Context(devices[:1]))


@pytest.fixture(scope="module")
def field_add(rig: Rig) -> Any:
    return opencl_kernels.build(rig.context, rig.device, SOURCE, "field_add")


def test_kernel_writes_what_it_should(rig: Rig, field_add: Any) -> None:
    a, b, total = operands(1000)
    first, second, out = rig.put(a), rig.put(b), rig.put(np.zeros_like(a))
    args = (first, second, out, *scalars(1000))
    opencl_kernels.launch(rig.queue(), field_add, (16, 1, 1), (64, 1, 1), args)
    assert rig.get(out) == total.tobytes()


def test_threads_do_not_mix_their_arguments(rig: Rig, field_add: Any) -> None:
    """Arguments belong to the kernel object, which several lanes of one device may launch at once."""
    wrong: list[int] = []

    def work(count: int) -> None:
        a, b, total = operands(count)
        first, second, out, queue = rig.put(a), rig.put(b), rig.put(np.zeros_like(a)), rig.queue()
        for _ in range(20):
            opencl_kernels.launch(queue, field_add, (64, 1, 1), (64, 1, 1), (first, second, out, *scalars(count)))
            if rig.get(out) != total.tobytes():
                wrong.append(count)

    threads = [threading.Thread(target=work, args=(1000 + n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_bad_source_comes_with_the_log(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(CompileFailed) as caught:
        opencl_kernels.build(rig.context, rig.device, SOURCE.replace("modulus", "other", 1), "field_add")
    assert "modulus" in caught.value.log
    assert caught.value.code == -11
    assert list(tmp_path.iterdir()) == []  # where pyopencl.Program leaves what fails


def test_missing_kernel(rig: Rig) -> None:
    with pytest.raises(CompileFailed, match="no kernel field_mul"):
        opencl_kernels.build(rig.context, rig.device, SOURCE, "field_mul")


def test_wrong_arguments_are_refused(rig: Rig, field_add: Any) -> None:
    out = rig.put(np.zeros(64, np.uint32))
    good = (out, out, out, *scalars(64))
    for args in (good[:4], (*good, np.uint32(1)), ()):
        with pytest.raises(OutOfRange, match="takes 5 arguments"):
            opencl_kernels.launch(rig.queue(), field_add, (1, 1, 1), (64, 1, 1), args)
    with pytest.raises(cl.LogicError, match="INVALID_ARG_SIZE"):
        opencl_kernels.launch(rig.queue(), field_add, (1, 1, 1), (64, 1, 1), (*good[:4], np.float64(1)))
    opencl_kernels.launch(rig.queue(), field_add, (1, 1, 1), (64, 1, 1), good)
