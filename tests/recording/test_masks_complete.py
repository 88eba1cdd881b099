"""A recording is there when it is complete, and not before."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from gpurt.discover import main
from gpurt.errors import GPUError
from gpurt.recording import record as module
from gpurt.recording.record import record
from gpurt.recording.staging import Staging


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_leaves_nothing(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "make_stand_ins", fail)
    if exists:
        (tmp_path / "there").mkdir()
    assert main(["--backend", "cpu", "--record", str(tmp_path / "there")]) == 2
    assert "No space left" in capsys.readouterr().err
    assert names(tmp_path) == (["there"] if exists else [])
    assert not exists or names(tmp_path / "there") == []


@pytest.mark.parametrize("exists", [False, True])
def test_what_was_written_is_there(exists: bool, tmp_path: Path) -> None:
    if exists:
        (tmp_path / "there").mkdir()
    assert main(["--backend", "cpu", "--record", str(tmp_path / "there")]) == 0
    assert names(tmp_path) == ["there"]
    assert set(names(tmp_path / "there")) == {
        "drivers.json",
        "environ.json",
        "meta.json",
        "nodes.json",
        "root",
        "tables",
    }


async def test_a_cancelled_recording_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    async def hang(*arguments: Any) -> dict[str, Any]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(module, "read_tables", hang)
    task = asyncio.create_task(record(tmp_path / "there", environ=dict(os.environ), backends=["cpu"]))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(names, tmp_path) == []


@pytest.mark.parametrize("exists", [False, True])
def test_what_came_in_between_is_not_overwritten(exists: bool, tmp_path: Path) -> None:
    directory = tmp_path / "there"
    if exists:
        directory.mkdir()
    staging = Staging(directory)
    (staging.place / "meta.json").write_text("{}")
    directory.mkdir(exist_ok=True)
    (directory / "mine").write_text("precious")
    with pytest.raises(GPUError, match="there is something"):
        staging.publish()
    staging.clear()
    staging.clear()
    assert names(directory) == ["mine"]
    assert names(tmp_path) == ["there"]


def test_a_writer_whom_nobody_waits_for_publishes_nothing(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "there")
    staging.clear()
    staging.place.mkdir()
    with pytest.raises(GPUError, match="given up"):
        staging.publish()
    staging.clear()
    assert names(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes and links")
def test_only_its_owner_and_no_link(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "there")
    assert stat.S_IMODE(staging.place.stat().st_mode) == 0o700
    assert staging.place.parent == tmp_path
    staging.clear()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(GPUError, match="there is something"):
        Staging(tmp_path / "link")
