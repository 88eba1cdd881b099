"""``gpurt load``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpurt.backend import GPUBackend
from gpurt.cli import load
from gpurt.errors import BackendUnavailable, DeviceNotFound, GPUError
from gpurt.factory import GPUBackendFactory
from gpurt.testing import create_simulated
from gpurt.weights import WeightsError
from tests.weights.support import tensor, write, write_sharded

CONTENT = {"layers.0.w": tensor("F32", 1000, 100), "layers.1.w": tensor("BF16", 70_000), "norm": tensor("F32", 10)}
TOTAL = 400_000 + 140_000 + 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "model.safetensors", CONTENT)


def gpurt_load(*words: object) -> int:
    parser = argparse.ArgumentParser()
    load.add_arguments(parser)
    return load.run(parser.parse_args([str(word) for word in words]))


def test_summary(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpurt_load(path, "--backend", "cpu") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"1 file, 3 tensors, {TOTAL:,} bytes to cpu:0 ")
    assert out.endswith(" GB/s\n")
    assert out.count("\n") == 1
    assert err == ""


def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpurt_load(path, "--device", "cpu:0", "--json", "--only", "layers.0", "--only", "norm") == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert summary["schema"] == 1
    assert summary["files"] == [str(path)]
    assert (summary["tensors"], summary["bytes"]) == (2, 400_040)
    assert (summary["backend"], summary["device_id"], summary["simulated"]) == ("cpu", "cpu:0", False)
    assert summary["seconds"] > 0
    assert summary["gbps"] == pytest.approx(summary["bytes"] / summary["seconds"] / 1e9)


def test_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = write_sharded(tmp_path, {"1.safetensors": CONTENT, "2.safetensors": {"head": tensor("U8", 1)}})
    assert gpurt_load(index, "--backend", "cpu") == 0
    assert capsys.readouterr().out.startswith("2 files, 4 tensors, ")


def test_simulated_devices_are_marked(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(name: str | None = None) -> GPUBackend:
        assert name == "simulated"
        backend = create_simulated("h100x2")
        await backend.initialize()
        return backend

    monkeypatch.setattr("gpurt.factory.create_backend", create)
    assert gpurt_load(path, "--device", "simulated:1") == 0
    assert "bytes to simulated:1 Simulated " in capsys.readouterr().out
    assert gpurt_load(path, "--backend", "simulated") == 0
    assert " (simulated) in " in capsys.readouterr().out


def test_bar_on_a_terminal(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    assert gpurt_load(path, "--backend", "cpu") == 0
    out, err = capsys.readouterr()
    assert "loading" in err
    assert out.startswith("1 file, 3 tensors")
    assert "loading" not in out


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (["{path}.missing", "--backend", "cpu"], WeightsError, "No such file"),
        (["{path}", "--backend", "cpu", "--only", "layers.7"], WeightsError, "layers.7"),
        (["{path}", "--backend", "cpu", "--device", "cpu:9"], DeviceNotFound, "cpu:0"),
        (["{path}", "--device", "cuda:0", "--backend", "cpu"], DeviceNotFound, "cuda:0"),
        (["{path}", "--device", "nosuch:0"], GPUError, "nosuch"),
    ],
)
def test_failures(path: Path, words: list[str], error: type[GPUError], says: str) -> None:
    with pytest.raises(error) as caught:
        gpurt_load(*(word.format(path=path) for word in words))
    assert says in str(caught.value)


def test_backend_that_is_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPUBackendFactory, "_override", None)
    with pytest.raises(BackendUnavailable):
        gpurt_load(path, "--backend", "directml")
