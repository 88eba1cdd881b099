"""`gpurt calibrate`: measured beside assumed, kept, shown again, and what is left alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurt.backends.cpu import kernels as cpu_kernels
from gpurt.cli.main import main
from gpurt.registry.measured import MeasuredFile
from gpurt.testing.profiles import PROFILES
from gpurt.testing.simulated import SimulatedBackend

MIB = 1 << 20
SMALL = replace(PROFILES["h100"], key="small", memory_bytes=16 * MIB)


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedBackend:
    """Two devices that every command of the test gets."""
    backend = SimulatedBackend([SMALL, SMALL])

    async def create(name: str | None = None) -> Any:
        assert name in (None, "simulated")
        await backend.initialize()
        return backend

    monkeypatch.setattr("gpurt.factory.create_backend", create)
    return backend


def test_measured_now_and_known_later(
    simulated: SimulatedBackend, registry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--registry", str(registry)]) == 0
    out = capsys.readouterr().out
    assert out.count("Simulated NVIDIA H100 80GB HBM3 (simulated), measured now") == 2
    assert "(assumed: 2345 GB/s)" in out  # 3,350 by the datasheet, of which weights get 70 %
    assert "(assumed: 33.45 TFLOPS)" in out  # half of 132 multiprocessors * 128 lanes * 2 * 1.98 GHz
    assert out.count("to all devices at once") == 2
    first = MeasuredFile(registry).calibrations()
    assert len(first) == 2
    assert main(["calibrate", "--registry", str(registry), "--device", "simulated:1"]) == 0
    out = capsys.readouterr().out
    assert "measured now" not in out
    assert out.count(f"as of {first[1].speeds.measured_at}") == 1
    assert main(["calibrate", "--registry", str(registry), "--device", "simulated:1", "--again"]) == 0
    assert MeasuredFile(registry).calibrations()[0].speeds != first[1].speeds


def test_a_busy_device_is_told_and_makes_the_exit_code_1(
    simulated: SimulatedBackend, registry: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = simulated.driver.open

    def busy() -> Any:
        devices = opened()
        simulated.driver.set_telemetry(0, utilization_percent=80.0)  # type: ignore[attr-defined]
        return devices

    monkeypatch.setattr(simulated.driver, "open", busy)
    assert main(["calibrate", "--registry", str(registry), "--json"]) == 1
    used, idle = json.loads(capsys.readouterr().out)["devices"]
    assert used["measured"] is None
    assert "80 % busy" in used["failure"]
    assert used["assumed"]["memory_gbps"] == pytest.approx(2345)
    assert idle["fresh"]
    assert idle["measured"]["memory_gbps"] > 0
    assert main(["calibrate", "--registry", str(registry)]) == 1
    out = capsys.readouterr().out
    assert "simulated:0  Simulated NVIDIA H100 80GB HBM3 (simulated), not measured" in out
    assert main(["calibrate", "--registry", str(registry), "--busy"]) == 0


@pytest.mark.skipif(not cpu_kernels.LANGUAGES, reason="kernels in C run on Linux and macOS")
@pytest.mark.slow
def test_the_processor_of_this_machine(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--backend", "cpu", "--registry", str(registry), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["devices"]
    assert found["measured"]["fp32_tflops"] > 0
    assert found["measured"]["load_gbps"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu:7"], "no such device; there are cpu:0"),
        (["--device", "cpu:0", "--device", "cuda:0"], "one backend at a time"),
        (["--backend", "warp-drive"], "warp-drive"),
        (["--weights", "/nonexist"], "'/nonexist' is no directory"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], words: str, registry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--registry", str(registry), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.strip().splitlines()) == 1
