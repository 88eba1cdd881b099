"""The conformance kit over OpenCL on pocl, a software device."""

from __future__ import annotations

import pytest

from gpurt.driver import Driver
from gpurt.testing import DriverConformance
from tests.conformance.test_backends import Conformance as _Conformance
from tests.support import opencl_backends


class TestOpenCL(_Conformance):
    factory = "tests.support.opencl_backends:opencl"
    one_loop = True
    large_bytes = 16 << 20


@pytest.mark.slow
class TestOpenCLPooled(_Conformance):
    factory = "tests.support.opencl_backends:pooled"
    one_loop = True
    large_bytes = 16 << 20


class TestOpenCLDriver(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return opencl_backends.driver()
