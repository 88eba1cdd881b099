"""A recording comes from anywhere: one that means no good costs one line and exit code 2, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurt.discover import main
from gpurt.discovery.sight_record import View
from gpurt.errors import GPUError
from gpurt.sources import recorded
from gpurt.sources.recorded import MAX_DEVICES, MAX_FILE_BYTES, check_tree, read_recorded_json
from tests.discovery.records import cpu

FIXTURES = Path(__file__).parents[1] / "fixtures"
posix = pytest.mark.skipif(sys.platform == "win32", reason="links, pipes and device nodes of POSIX")


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / "nvidia-h100", tmp_path / "there")


def refused(directory: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line on stderr."""
    assert main(["--fixture", str(directory), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    line = err.removesuffix("\n")
    assert line.isprintable()
    assert len(line) < 3000
    return line


JSON = ("meta.json", "environ.json", "nodes.json", "drivers.json", "tables/nvml.json")


@posix
@pytest.mark.parametrize("name", [*JSON, "root/proc/meminfo"])
@pytest.mark.parametrize(
    ("put", "why"),
    [
        (os.mkfifo, "no plain file"),
        (lambda path: path.symlink_to("/dev/zero"), "a link out of the recording"),
        (lambda path: path.symlink_to("/etc/hostname"), "a link out of the recording"),
        (lambda path: path.symlink_to("../../../../etc/hostname"), "a link out of the recording"),
        (lambda path: (path.touch(), os.truncate(path, MAX_FILE_BYTES + 1)), "is larger than"),
    ],
    ids=["pipe", "endless", "absolute link", "relative link", "large"],
)
def test_files_that_are_none(
    name: str, put: Callable[[Path], object], why: str, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = there / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    put(path)
    line = refused(there, capsys)
    assert name in line
    assert why in line


@posix
def test_directories_that_lead_out(there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.move(there / "tables", tmp_path / "elsewhere")
    (there / "tables").symlink_to(tmp_path / "elsewhere")
    assert "a link out of the recording" in refused(there, capsys)
    (there / "tables").unlink()
    shutil.rmtree(there / "root")
    (there / "root").symlink_to("/")
    assert "a link out of the recording" in refused(there, capsys)
    (there / "root").unlink()
    (there / "root/sys/class").mkdir(parents=True)
    (there / "root/sys/class/drm").symlink_to("/sys/class/drm")
    assert "a link out of the recording" in refused(there, capsys)


@posix
def test_links_within_are_as_in_sys(there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.move(there / "tables/nvml.json", there / "nvml.json")
    (there / "tables/nvml.json").symlink_to("../nvml.json")
    (there / "root/sys").mkdir(parents=True)
    (there / "root/sys/driver").symlink_to("bus/pci/drivers/nvidia")
    (tmp_path / "link").symlink_to(there)
    assert main(["--fixture", str(tmp_path / "link"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["devices"][0]["name"] == "NVIDIA H100 80GB HBM3"
    (there / "root/sys/itself").symlink_to("itself")
    assert "cannot be read" in refused(there, capsys)


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize(
    "text",
    [
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"\\udfff": 1}',
        '{"a": ' + "[" * 50_000,
        '{"a": ' + "9" * 5000 + "}",
        json.dumps({"a": "x" * 2_000_000}),
        '{"a"',
        b'{"a": "\xed\xa0\x80"}',
        b"\xff\xfe",
    ],
    ids=range(11),
)
def test_json_that_is_none(name: str, text: str | bytes, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (there / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert f"{name} cannot be read: " in refused(there, capsys)


def gpu(**changes: Any) -> dict[str, Any]:
    return cpu().model_copy(update={"device_id": "cuda:0", "backend": "cuda"}).model_dump(mode="json") | changes


@pytest.mark.parametrize("stage", ["opened", "verified"])
@pytest.mark.parametrize(
    "changes",
    [
        {"memory_bytes": 10, "memory_available": 11},
        {"memory_bytes": 10**30, "memory_available": 10**30},
        {"memory_bytes": 1 << 60, "memory_available": 0},
        {"memory_bytes": None, "memory_available": 10**30},
        {"memory_usable_bytes": -1},
        {"memory_bytes": -1},
        {"name": "x" * 5000},
        {"device_id": "x" * 5000},
    ],
    ids=range(8),
)
def test_devices_that_cannot_be(
    changes: dict[str, Any], stage: str, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer: dict[str, Any] = {"verified": [], stage: [gpu(**changes)]}
    (there / "drivers.json").write_text(json.dumps({"cuda": answer}))
    for options in ((), ("--json",), ("--explain",)):
        assert "drivers.json" in refused(there, capsys, *options)


@pytest.mark.parametrize("elapsed", ["nan", "inf", -1])
def test_times_that_cannot_be(elapsed: object, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (there / "drivers.json").write_text(json.dumps({"cuda\x1b[2J": {"verified": [], "elapsed_ms": elapsed}}))
    assert "elapsed_ms" in refused(there, capsys, "--json")


def test_possible_devices_are_taken(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"verified": [gpu(memory_bytes=10, memory_available=10, usable=True, kind="gpu")], "elapsed_ms": 1.5}
    (there / "drivers.json").write_text(json.dumps({"cuda": answer}))
    assert main(["--fixture", str(there), "--json"]) == 0
    assert "cuda:0" in capsys.readouterr().out


@pytest.mark.parametrize("row", [{}, 1, {"uuid": "x"}])
def test_a_table_of_too_many_devices(row: object, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = json.loads((there / "tables/nvml.json").read_text())
    for count in (MAX_DEVICES + 1, 400_000):
        (there / "tables/nvml.json").write_text(json.dumps(table | {"devices": [row] * count}))
        line = refused(there, capsys, "--json")
        assert "1024 are read" in line or "1000000 values" in line


def test_an_answer_of_too_many_devices(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices = [gpu(device_id=f"cuda:{n}") for n in range(MAX_DEVICES + 1)]
    (there / "drivers.json").write_text(json.dumps({"cuda": {"verified": devices}}))
    assert "1025 devices" in refused(there, capsys)


def test_too_many_backends(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meta = json.loads((there / "meta.json").read_text())
    (there / "meta.json").write_text(json.dumps(meta | {"backends": [f"b{n}" for n in range(1000)]}))
    assert "backends" in refused(there, capsys)


def test_too_many_values_and_files(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorded, "MAX_ENTRIES", 20)
    monkeypatch.setattr(recorded, "MAX_VALUES", 1000)
    (there / "nodes.json").write_text(json.dumps({"nodes": [{}] * 2000}))
    assert "more than 1000 values" in refused(there, capsys)
    (there / "nodes.json").unlink()
    for number in range(21):
        (there / "root" / f"d{number}").mkdir(parents=True)
    assert "more than 20 files" in refused(there, capsys)


def test_a_table_that_cannot_be_read_is_no_exception_of_the_view(there: Path) -> None:
    """The sources ask the view, and a source has no error but the table's own."""

    def ask() -> object:
        raise AssertionError("this machine is not asked")

    view = View({}, there / "root", there / "tables")
    assert "devices" in view.table("nvml", ask)  # type: ignore[operator]
    assert view.table("dxgi", ask)["error"]["reason"] == "no_library"  # type: ignore[index]
    (there / "tables/nvml.json").write_text('{"a": NaN}')
    assert "NaN" in view.table("nvml", ask)["error"]["message"]  # type: ignore[index]


@posix
def test_the_readers_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(FileNotFoundError):
        read_recorded_json(tmp_path, "no.json")
    with pytest.raises(FileNotFoundError):
        read_recorded_json(tmp_path / "b.json", "no.json")
    with pytest.raises(GPUError, match="a link out of"):
        read_recorded_json(tmp_path / "a", "../b.json")
    with pytest.raises(GPUError, match="no plain file"):
        read_recorded_json(tmp_path, "a")
    assert read_recorded_json(tmp_path, "b.json") == {}
    check_tree(tmp_path, "nothing there")
    check_tree(tmp_path, "a")
