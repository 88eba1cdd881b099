"""The conformance kit over TFLite on LiteRT's CPU accelerator, on the interpreter, and on a GPU's memory made here."""

from __future__ import annotations

import pytest

from gpurt.driver import Driver
from gpurt.testing import DriverConformance
from tests.conformance.test_backends import Conformance
from tests.support import tflite_backends


class TestLiteRT(Conformance):
    factory = "tests.support.tflite_backends:litert_cpu"
    runs_kernels = False
    one_loop = True
    large_bytes = 16 << 20


@pytest.mark.slow
class TestInterpreter(Conformance):
    factory = "tests.support.tflite_backends:interpreter_cpu"
    runs_kernels = False
    one_loop = True
    large_bytes = 16 << 20


@pytest.mark.slow
class TestMemoryOfAGPU(Conformance):
    factory = "tests.support.tflite_backends:fake_gpu"
    runs_kernels = False
    one_loop = True
    large_bytes = 16 << 20


class TestLiteRTDriver(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return tflite_backends.there(tflite_backends.litert_cpu_driver())


class TestInterpreterDriver(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return tflite_backends.there(tflite_backends.interpreter_cpu_driver())


class TestMemoryOfAGPUDriver(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return tflite_backends.fake_gpu_driver()
