"""The kit itself: what third parties may tell it, and that lies do not pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

THIRD_PARTY = """
import pytest
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.runtime.backend import DriverBackend
from gpurt.testing import BackendConformance, DriverConformance
from gpurt.types import Capabilities, Telemetry
from tests.support.reference_driver import ReferenceDriver


class Mine(BackendConformance):
    driver_class = ReferenceDriver
    runs_kernels = False

    @pytest.fixture
    async def backend(self):
        async with DriverBackend(self.driver_class()) as backend:
            yield backend


class TestExcused(Mine):
    unsupported = {"test_view_*": "no views here"}
    expected_failures = {
        "test_memory_info": "bug 12: should fail but passes",
        "test_temperature_power_and_clock_are_plausible_or_none": "bug 13: the clock says 0",
    }

    class driver_class(ReferenceDriver):
        def telemetry(self, index):
            return super().telemetry(index).model_copy(update={"clock_mhz": 0})


class TestLiar(Mine):
    @pytest.fixture
    def capabilities(self, backend):
        return Capabilities(host_visible=False)


class TestUnclaimed(Mine):
    class driver_class(ReferenceDriver):
        def telemetry(self, index):
            return super().telemetry(index).model_copy(update={"power_w": 100.0})


class TestCorrupt(Mine):
    class driver_class(ReferenceDriver):
        def read(self, index, mem, offset, dst):
            super().read(index, mem, offset, dst)
            if len(dst) > 4000:
                dst[4000] ^= 1


class TestMissing(BackendConformance):
    @pytest.fixture
    async def backend(self):
        raise BackendUnavailable("no card", reason=ReasonCode.NO_DEVICE, backend="mine")


class TestBroken(BackendConformance):
    @pytest.fixture
    async def backend(self):
        raise OSError("the fixture itself is broken")


class TestStubDriver(DriverConformance):
    @pytest.fixture
    def driver(self):
        class Stub(ReferenceDriver):
            def write(self, index, mem, offset, src): ...
            def copy(self, *args): ...

        return Stub()
"""

TESTS = (
    "test_view_shares_memory or test_view_keeps or test_memory_info or plausible or claim_telemetry or round_trip "
    "or devices_are_listed or bytes_come_back or copy_within or bytes_come_back"
)


def _pytest(folder: Path, source: str, *arguments: str, **environment: str) -> str:
    (folder / "test_third_party.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "--tb=line", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _pytest(tmp_path_factory.mktemp("third_party"), THIRD_PARTY, "-k", TESTS)


def outcomes(report: str, name: str) -> set[str]:
    return {m[1] for m in re.finditer(rf"^(\w+) test_third_party\.py::{re.escape(name)}\b", report, re.MULTILINE)}


def test_unsupported_is_skipped_with_its_reason(report: str) -> None:
    assert outcomes(report, "TestExcused::test_view_shares_memory") == set()
    assert "unsupported: no views here" in report


def test_expected_failures_are_strict(report: str) -> None:
    assert outcomes(report, "TestExcused::test_memory_info") == {"FAILED"}
    assert "[XPASS(strict)] bug 12" in report
    assert outcomes(report, "TestExcused::test_temperature_power_and_clock_are_plausible_or_none") == {"XFAIL"}


def test_wrong_claims_fail(report: str) -> None:
    assert outcomes(report, "TestLiar::test_view_shares_memory") == {"FAILED"}
    assert outcomes(report, "TestUnclaimed::test_claim_telemetry") == {"FAILED"}


def test_corrupt_and_stub_drivers_fail(report: str) -> None:
    assert "FAILED" in outcomes(report, "TestCorrupt::test_round_trip")
    assert outcomes(report, "TestCorrupt::test_large_round_trip") == {"FAILED"}
    assert "FAILED" in outcomes(report, "TestStubDriver::test_bytes_come_back")
    assert outcomes(report, "TestStubDriver::test_copy_within_one_device") == {"FAILED"}


def test_unavailable_is_skipped_and_broken_is_not(report: str) -> None:
    assert outcomes(report, "TestMissing::test_devices_are_listed_alike") == set()
    assert "[no_device] mine: no card" in report
    assert outcomes(report, "TestBroken::test_devices_are_listed_alike") == {"ERROR"}


@pytest.mark.wide
def test_required_backend_must_be_there(tmp_path: Path) -> None:
    arguments = ("-k", "TestMissing and devices_are_listed")
    required = _pytest(tmp_path, THIRD_PARTY, *arguments, GPURT_TEST_REQUIRE="other,mine")
    assert "GPURT_TEST_REQUIRE asks for this backend" in required
    assert "1 error" in required
    assert "1 skipped" in _pytest(tmp_path, THIRD_PARTY, *arguments, GPURT_TEST_REQUIRE="other")


@pytest.mark.wide
def test_excuse_for_no_test_is_an_error(tmp_path: Path) -> None:
    source = (
        "from gpurt.testing import BackendConformance\n"
        "class TestMine(BackendConformance):\n    unsupported = {'test_veiw_*': 'typing error'}\n"
    )
    assert "no test matches 'test_veiw_*'" in _pytest(tmp_path, source)


def test_plugin_loads_nothing_heavy() -> None:
    # pytest itself imports much; what counts is what this module adds to it.
    code = (
        "import sys, pytest\n"
        "before = set(sys.modules)\n"
        "import gpurt.testing.plugin\n"
        "print(sorted(m for m in set(sys.modules) - before if not m.startswith(('gpurt', 'importlib'))))\n"
        "print('gpurt.errors' in sys.modules, 'numpy' in sys.modules, 'pydantic' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    added, loaded = result.stdout.splitlines()
    assert added == "[]"
    assert loaded == "False False False"
