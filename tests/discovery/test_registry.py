"""The registry file against crashes, other processes, full disks and rubbish."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpurt.discovery.backoff import FIRST_S, LONGEST_S, Backoff
from gpurt.discovery.registry import Attempts, RegistryDocument, RegistryFile, RegistryTooNew
from gpurt.errors import ReasonCode
from gpurt.registry.measured import MeasuredFile
from tests.discovery.records import absent, cpu, device, ok
from tests.registry.test_measured import tuning

DOCUMENT = RegistryDocument(
    backend_name="cuda",
    devices=(device(0), device(1, memory_bytes=None, state_reason="näme ☃"), cpu()),
    reports=(ok("cuda"), absent("rocm", ReasonCode.NO_LIBRARY)),
    verified=("GPU-a cuda/cupy 590",),
    attempts={"rocm": Attempts(failures=2, retry_at=1.5e9)},
)


@pytest.fixture
def file(tmp_path: Path) -> RegistryFile:
    return RegistryFile(tmp_path / "state" / "registry.json")


def content(document: RegistryDocument | None) -> dict[str, object]:
    assert document is not None
    return document.model_dump(exclude={"saved_at", "epoch"})


def quarantined(file: RegistryFile) -> list[Path]:
    return sorted(file.path.parent.glob("registry.json.corrupt-*"))


def test_what_is_saved_is_loaded(file: RegistryFile) -> None:
    assert file.load() is None
    file.save(DOCUMENT)
    assert content(file.load()) == content(DOCUMENT)
    assert file.path.stat().st_mode & 0o777 == 0o600
    stored = json.loads(file.path.read_text())
    assert stored["schema"] == 1
    assert {
        *("device_id", "name", "vendor", "backend", "compute_capability", "memory_bytes", "memory_available"),
        *("compute_units", "tensor_core_count", "max_threads_per_block", "clock_rate_mhz", "bandwidth_gbps"),
        *("support_level", "driver_version", "backend_name"),
    } <= stored["devices"][0].keys()
    assert sorted(p.name for p in file.path.parent.iterdir()) == ["registry.json", "registry.json.lock"]


def test_the_last_good_copy_is_kept(file: RegistryFile) -> None:
    file.save(DOCUMENT)
    file.save(DOCUMENT.model_copy(update={"devices": ()}))
    file.save(DOCUMENT.model_copy(update={"reports": ()}))
    backup = RegistryFile(file.backup_path).load()
    assert backup is not None
    assert backup.devices == ()
    assert backup.reports == DOCUMENT.reports


@pytest.mark.parametrize(
    "rubbish",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\0" * 4096, id="nul"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"3", id="number"),
        pytest.param(b"{}", id="no schema"),
        pytest.param(b'{"schema": "1"}', id="schema of wrong type"),
        pytest.param(b'{"schema": true}', id="schema of another wrong type"),
        pytest.param(b"[" * 100_000, id="too deep"),
        pytest.param(b"\xff\xfe\xfa", id="not text"),
    ],
)
def test_rubbish_is_put_aside_with_one_warning(
    file: RegistryFile, rubbish: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(rubbish)
    assert file.load() is None
    assert file.load() is None
    (aside,) = quarantined(file)
    assert aside.read_bytes() == rubbish
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
    file.save(DOCUMENT)
    assert content(file.load()) == content(DOCUMENT)


def test_a_truncated_file_falls_back_to_the_last_good_copy(file: RegistryFile) -> None:
    file.save(DOCUMENT)
    file.save(DOCUMENT)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[: len(whole) * 6 // 10])
    assert content(file.load()) == content(DOCUMENT)
    assert len(quarantined(file)) == 1


def test_a_save_does_not_overwrite_the_evidence(file: RegistryFile) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(b"{broken")
    file.save(DOCUMENT)
    (aside,) = quarantined(file)
    assert aside.read_bytes() == b"{broken"


def test_a_newer_schema_is_left_alone(file: RegistryFile) -> None:
    newer = b'{"schema": 2, "devices": {"by": "then"}}'
    file.path.parent.mkdir()
    file.path.write_bytes(newer)
    assert file.load() is None
    with pytest.raises(RegistryTooNew, match="schema 2"):
        file.save(DOCUMENT)
    assert file.next_epoch() > 0
    assert file.path.read_bytes() == newer
    assert quarantined(file) == []


def test_unknown_fields_and_states_of_a_newer_peer_are_tolerated(file: RegistryFile) -> None:
    file.save(DOCUMENT)
    stored = json.loads(file.path.read_text())
    stored["surprise"] = 1
    stored["devices"][0] |= {"surprise": 2, "state": "sleeping"}
    file.path.write_text(json.dumps(stored))
    loaded = file.load()
    assert loaded is not None
    assert loaded.devices[0].state == "unknown"


@pytest.mark.parametrize(
    "section",
    [{"devices": "none"}, {"devices": [{"device_id": "cuda:0"}]}, {"epoch": "7"}, {"discovery_status": "later"}],
    ids=str,
)
def test_what_a_newer_peer_means_differently_is_left_out(file: RegistryFile, section: dict[str, object]) -> None:
    """And stays as it is, with the rest that is read. :mod:`tests.registry.test_newer` has everything of this kind."""
    file.save(DOCUMENT)
    (name,) = section
    file.path.write_text(json.dumps(json.loads(file.path.read_text()) | section))
    loaded = file.load()
    assert loaded is not None
    assert loaded.reports == DOCUMENT.reports
    assert getattr(loaded, name) == getattr(RegistryDocument(), name)
    MeasuredFile(file.path).keep_links([])
    MeasuredFile(file.path).keep_tuning(tuning())
    assert json.loads(file.path.read_text())[name] == section[name]
    assert quarantined(file) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_leaves_the_old_version(
    file: RegistryFile, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.save(DOCUMENT)
    before = file.path.read_bytes()

    def fails(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=os.strerror(code)):
        file.save(DOCUMENT.model_copy(update={"devices": ()}))
    assert file.path.read_bytes() == before
    assert list(file.path.parent.glob(".*.tmp")) == []


def test_a_path_below_a_file_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = RegistryFile(tmp_path / "file" / "registry.json")
    assert file.load() is None
    with pytest.raises(OSError, match="file"):
        file.save(DOCUMENT)
    assert file.next_epoch() > 0


def test_epochs_grow_and_survive_saves(file: RegistryFile) -> None:
    first = file.next_epoch()
    assert file.next_epoch() == first + 1
    file.save(DOCUMENT)  # its own epoch is 0
    assert file.next_epoch() == first + 2
    assert content(file.load()) == content(DOCUMENT)


def test_epochs_grow_although_the_registry_is_lost(file: RegistryFile, monkeypatch: pytest.MonkeyPatch) -> None:
    first = file.next_epoch()
    file.path.unlink()
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    assert file.next_epoch() > first


def test_orphans_of_killed_writers_are_removed(file: RegistryFile) -> None:
    file.save(DOCUMENT)
    orphan = file.path.with_name(".registry.json.dead.tmp")
    orphan.write_bytes(b"half")
    file.save(DOCUMENT)
    assert not orphan.exists()


WRITER = """
import sys
from pathlib import Path
from gpurt.discovery.registry import RegistryDocument, RegistryFile
from tests.discovery.records import device
file, who, count = RegistryFile(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for n in range(count):
    devices = tuple(device(i, name=f"{who} {n}") for i in range(6))
    file.update(lambda old: RegistryDocument(devices=devices, epoch=(old.epoch if old else 0) + 1))
    if not n:
        print("one is saved", flush=True)  # on a busy machine a victim might be killed before it comes to that
"""


def writer(file: RegistryFile, who: str, count: int) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", WRITER, str(file.path), who, str(count)]
    path = os.pathsep.join([root, *filter(None, sys.path)])
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path})


def whole(file: RegistryFile) -> int:
    """The epoch of a version that was written in one piece."""
    loaded = RegistryFile(file.path).load()
    assert loaded is not None
    assert len({d.name for d in loaded.devices}) == 1
    assert len(loaded.devices) == 6
    return loaded.epoch


def test_reg_2_two_processes_and_a_reader_see_whole_versions(file: RegistryFile) -> None:
    writers = [writer(file, who, 200) for who in ("left", "right")]
    while any(process.poll() is None for process in writers):
        if file.path.exists():
            whole(file)
        time.sleep(0.005)
    assert [process.wait() for process in writers] == [0, 0]
    # Read, change and write happened under the lock: no update was lost.
    assert whole(file) == 400
    assert quarantined(file) == []
    for process in writers:
        assert process.stdout is not None
        process.stdout.close()


def kill_while_saving(file: RegistryFile, kills: int) -> None:
    for n in range(kills):
        process = writer(file, "victim", 1_000_000)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.002 + (n * 7 % 40) / 1000)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if file.path.exists():
            whole(file)
    assert whole(file) > 0
    assert quarantined(file) == []
    # What was left behind is cleaned up by the next writer.
    file.save(DOCUMENT)
    assert list(file.path.parent.glob(".*.tmp")) == []


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_kill_9_while_saving_leaves_a_whole_version(file: RegistryFile) -> None:
    kill_while_saving(file, 12)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_200_kills_while_saving_leave_a_whole_version(file: RegistryFile) -> None:
    kill_while_saving(file, 200)


def test_backoff_doubles_to_five_minutes_and_ends_with_success() -> None:
    now = 0.0
    backoff = Backoff(clock=lambda: now)
    waits: list[float] = []
    for _ in range(8):
        backoff.failed("cuda")
        began = now
        while not backoff.is_due("cuda"):
            now += 1.0
        waits.append(now - began)
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]
    assert backoff.is_due("rocm")
    backoff.succeeded("cuda")
    assert backoff.is_due("cuda")
    for _ in range(5000):
        backoff.failed("cuda")


def test_backoff_is_restored_and_a_jumping_clock_does_not_block_for_ever() -> None:
    before = Backoff(clock=lambda: 5.0, wall=lambda: 1000.0)
    before.failed("cuda")
    dumped = before.dump()
    assert dumped["cuda"] == Attempts(failures=1, retry_at=1000.0 + FIRST_S)
    now = 70.0
    after = Backoff(clock=lambda: now, wall=lambda: 1000.0 - 1e6)
    after.restore(dumped)
    assert not after.is_due("cuda")
    now += LONGEST_S
    assert after.is_due("cuda")


def test_only_the_last_directory_is_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RegistryFile(tmp_path / "a" / "b" / "registry.json").save(RegistryDocument())
    assert not (tmp_path / "a").exists()


def test_the_state_directory_is_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "home" / "state" / "gpurt" / "registry.json"
    monkeypatch.setattr("gpurt.registry.file.default_registry_path", lambda: path)
    RegistryFile().save(RegistryDocument())
    assert path.exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_a_place_without_files_is_not_taken_for_a_held_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurt.registry.file.LOCK_TIMEOUT_S", 60.0)
    with pytest.raises(OSError, match="no file can be made in /proc"):
        RegistryFile("/proc/registry.json").save(RegistryDocument())
