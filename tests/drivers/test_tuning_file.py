"""What a process measures of copies is there for the next one, and never stands in the way of a copy."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from tests.support.fake_cuda import MIB, FakeNvml, FakeRuntime, install, install_nvml, nvml_record

from gpurt.backends.cuda_backend import CUDABackend, CUDADriver
from gpurt.backends.cupy import copy_tuning, host_copies, staging, staging_member, tuning_file
from gpurt.backends.cupy.copy_tuning import CopyTuning
from gpurt.backends.cupy.tuning_file import TuningFile
from gpurt.registry.measured import MeasuredFile

FROM = 256 << 10
THREADS = 4
UUID = "GPU-0000000{}-0000-0000-0000-000000000000"


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One name a direction for each calibration; striping wins from FROM on to a device, and never from it."""
    for module in (staging_member, host_copies):
        monkeypatch.setattr(module, "STRIPE_BYTES", FROM // 4)
    monkeypatch.setattr(copy_tuning, "SIZES", (FROM, 2 * FROM))
    monkeypatch.setattr(host_copies, "LARGEST", 2 * FROM)
    monkeypatch.setattr(staging, "crew_size", lambda: THREADS)
    calls: list[str] = []

    def smallest(plain: Any, striped: Any) -> int | None:
        direction = plain.args[0]
        calls.append(direction)
        return FROM if direction == "write" else None

    monkeypatch.setattr(host_copies, "smallest_worth_striping", smallest)
    install_nvml(monkeypatch, FakeNvml([nvml_record(0), nvml_record(1)]))
    return calls


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, path: Path) -> Iterator[Callable[..., CUDADriver]]:
    """Opens a driver that knows of earlier ones what the file says: another runtime is as another process."""
    drivers: list[CUDADriver] = []

    def start(place: Path = path) -> CUDADriver:
        end()
        install(monkeypatch, FakeRuntime())
        driver = CUDADriver(environ={}, tunings=TuningFile(place))
        driver.open()
        drivers.append(driver)
        return driver

    def end() -> None:
        while drivers:
            driver = drivers.pop()
            for index in (0, 1):
                driver.detach(index)
            driver.close()

    yield start
    end()


def large_copy(driver: CUDADriver, index: int = 0, direction: str = "write") -> None:
    mem = driver.alloc(index, FROM)
    getattr(driver, direction)(index, mem, 0, memoryview(bytearray(FROM)))
    driver.free(index, mem)


def edit(path: Path, **fields: Any) -> None:
    data = json.loads(path.read_text())
    for entry in data["tuning"]:
        entry.update(fields)
    path.write_text(json.dumps(data))


def test_the_second_process_does_not_measure_again(
    process: Callable[..., CUDADriver], path: Path, measured: list[str]
) -> None:
    large_copy(process())
    assert sorted(measured) == ["read", "write"]
    second = process()
    (record,) = MeasuredFile(path).tunings()
    assert (record.device, record.backend, record.driver_version) == (UUID.format(0), "cuda", "580.159")
    assert (record.threads, record.write_min_bytes, record.read_min_bytes) == (THREADS, FROM, None)
    large_copy(second)
    large_copy(second, direction="read")
    assert len(measured) == 2
    large_copy(second, index=1)  # another device
    assert len(measured) == 4
    process()
    assert {record.device for record in MeasuredFile(path).tunings()} == {UUID.format(0), UUID.format(1)}


def test_in_a_real_second_process(path: Path) -> None:
    child = """
import sys
from pathlib import Path
import pytest
from tests.support.fake_cuda import FakeNvml, FakeRuntime, install, install_nvml, nvml_record
from gpurt.backends.cupy import host_copies
from gpurt.backends.cuda_backend import CUDADriver
from gpurt.backends.cupy.tuning_file import TuningFile
patch = pytest.MonkeyPatch()
install_nvml(patch, FakeNvml([nvml_record(0), nvml_record(1)]))
runtime = install(patch, FakeRuntime())
measured = []
patch.setattr(host_copies, "smallest_worth_striping", lambda plain, striped: measured.append(1) or 8 << 20)
driver = CUDADriver(environ={}, tunings=TuningFile(sys.argv[1]))
driver.open()
mem = driver.alloc(0, 8 << 20)
driver.write(0, mem, 0, memoryview(bytes(8 << 20)))
print(len(measured))
# No close(): what has been measured is not lost with a process that just ends.
"""
    root = str(Path(__file__).parents[2])
    answers = [
        subprocess.run(
            [sys.executable, "-c", child, str(path)],
            cwd=root,
            env=os.environ | {"PYTHONPATH": root},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert answers == ["2\n", "0\n"]


@pytest.mark.parametrize("direction", ["write", "read"])
def test_what_is_kept_decides_how_copies_go(
    process: Callable[..., CUDADriver], path: Path, direction: str, measured: list[str]
) -> None:
    large_copy(process())
    driver = process()
    threads: set[str] = set()
    driver._runtime.on_call = lambda name, index: threads.add(threading.current_thread().name)  # pyright: ignore
    large_copy(driver, direction=direction)
    striped = any(name.startswith("gpurt:stage") for name in threads if name != threading.current_thread().name)
    copied_here = threading.current_thread().name in threads
    assert (striped, copied_here) == ((True, False) if direction == "write" else (True, True))
    assert len(measured) == 2


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"driver_version": "590.1"}, id="another driver"),
        pytest.param({"threads": THREADS + 1}, id="another crew"),
        pytest.param({"revision": 0}, id="another way of copying"),
        pytest.param({"device": "GPU-of-somebody-else"}, id="another device"),
        pytest.param({"backend": "rocm"}, id="another backend"),
        pytest.param({"write_min_bytes": 12345}, id="a size that is not measured"),
        pytest.param({"read_min_bytes": "large"}, id="malformed"),
    ],
)
def test_what_was_measured_with_something_else_counts_for_nothing(
    process: Callable[..., CUDADriver], path: Path, change: dict[str, Any], measured: list[str]
) -> None:
    large_copy(process())
    process()
    edit(path, **change)
    large_copy(process())
    assert len(measured) == 4
    large_copy(process())
    assert len(measured) == 4


def test_crews_of_different_sizes_keep_their_own(
    process: Callable[..., CUDADriver], path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for threads in (THREADS, 2, THREADS, 2):
        monkeypatch.setattr(staging, "crew_size", lambda threads=threads: threads)
        large_copy(process())
    assert len(measured) == 4
    process()
    assert sorted(record.threads for record in MeasuredFile(path).tunings()) == [2, THREADS]


@pytest.mark.parametrize("nvml", [True, False])
def test_devices_that_cannot_be_recognised_are_not_kept(
    process: Callable[..., CUDADriver], path: Path, monkeypatch: pytest.MonkeyPatch, nvml: bool, measured: list[str]
) -> None:
    if nvml:
        session = FakeNvml([nvml_record(0), nvml_record(1)])
        session.driver_version = ""
        install_nvml(monkeypatch, session)
        monkeypatch.setattr(FakeRuntime, "driverGetVersion", lambda self: 0)
    else:
        install_nvml(monkeypatch, FakeNvml([]))
        monkeypatch.setattr(FakeRuntime, "deviceGetPCIBusId", lambda self, index: "")
    large_copy(process())
    large_copy(process())
    assert len(measured) == 4
    process()
    assert not path.exists()


def test_without_pinned_memory_nothing_was_measured(
    process: Callable[..., CUDADriver], path: Path, measured: list[str]
) -> None:
    driver = process()
    driver._runtime.pin_limit = 0  # pyright: ignore[reportPrivateUsage]
    large_copy(driver)
    assert driver.calibrate(0) == CopyTuning(0, None, None)
    process()
    assert not path.exists()
    assert not measured


def test_what_a_caller_gives_is_not_kept(process: Callable[..., CUDADriver], path: Path) -> None:
    driver = process()
    driver.use_tuning(0, CopyTuning(THREADS, None, None))
    large_copy(driver)
    process()
    assert not path.exists()


def test_a_new_calibration_replaces_the_old(
    process: Callable[..., CUDADriver], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large_copy(process())
    driver = process()
    monkeypatch.setattr(host_copies, "smallest_worth_striping", lambda plain, striped: 2 * FROM)
    assert driver.calibrate(0) == CopyTuning(THREADS, 2 * FROM, 2 * FROM)
    process()
    (record,) = MeasuredFile(path).tunings()
    assert (record.write_min_bytes, record.read_min_bytes) == (2 * FROM, 2 * FROM)


def test_drivers_without_a_file_write_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    install(monkeypatch)
    driver = CUDADriver(environ={})
    driver.open()
    large_copy(driver)
    driver.detach(0)
    driver.close()
    assert list(tmp_path.iterdir()) == []


def test_one_driver_s_measurement_is_kept_by_another_of_the_process(
    process: Callable[..., CUDADriver], path: Path, measured: list[str]
) -> None:
    keeping = process()
    other = CUDADriver(environ={})
    other.open()
    large_copy(other)
    other.detach(0)
    other.close()
    large_copy(keeping)
    assert len(measured) == 2
    process()
    assert len(MeasuredFile(path).tunings()) == 1


# Trouble with the file


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_registry_that_cannot_be_written_is_said_once(
    process: Callable[..., CUDADriver], tmp_path: Path, caplog: pytest.LogCaptureFixture, measured: list[str]
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "registry.json"
    driver = process(place)
    caplog.clear()
    large_copy(driver, 0)
    large_copy(driver, 1)
    process()
    (text,) = warnings(caplog)
    assert "not kept" in text
    assert str(tmp_path / "file") in text
    assert len(measured) == 4


@pytest.mark.parametrize("content", [b"", b"{broken", b"[]", b'{"schema": 1, "tuning": 7}', b'{"schema": 9}'])
def test_rubbish_in_the_registry_costs_a_calibration(
    process: Callable[..., CUDADriver], path: Path, content: bytes, measured: list[str]
) -> None:
    path.write_bytes(content)
    large_copy(process())
    assert len(measured) == 2
    large_copy(process())
    assert len(measured) == (4 if b"9" in content else 2)
    assert b"9" not in content or path.read_bytes() == content


def test_nobody_waits_for_a_registry_that_is_locked(
    process: Callable[..., CUDADriver], path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuning_file, "CLOSE_WAIT_S", 0.05)
    driver = process()
    with FileLock(f"{path}.lock"):
        large_copy(driver)  # would hang here
        process()  # closes the first
        assert any("still being written" in text for text in warnings(caplog))
        assert not path.exists()
    deadline = time.monotonic() + 5
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(MeasuredFile(path).tunings()) == 1


# Through the backend


async def test_backend_keeps_and_reads(
    monkeypatch: pytest.MonkeyPatch, path: Path, measured: list[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for options in ({"registry_path": path}, {"registry_path": path}, {}, {}):
        install(monkeypatch, FakeRuntime())
        async with (
            CUDABackend(pool_bytes=0, **options) as backend,
            backend.allocation("cuda:1", MIB) as handle,
        ):
            await backend.copy_to_device(bytes(MIB), handle)
            assert await backend.copy_from_device(handle) == bytes(MIB)
    assert len(measured) == 4
    assert (tmp_path / "state" / "gpurt" / "registry.json").exists() or sys.platform != "linux"
