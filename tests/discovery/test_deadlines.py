"""How long a backend may take, and what counts as another installation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpurt.discovery.backoff import Backoff
from gpurt.discovery.deadlines import deadline_for
from gpurt.discovery.installed import installed_mark
from gpurt.errors import ReasonCode
from gpurt.types import BackendReport


def report(seconds: float, reason: ReasonCode | None = None) -> BackendReport:
    status = "ok" if reason is None else "unavailable"
    return BackendReport(name="cuda", status=status, reason=reason, elapsed_ms=seconds * 1000)


@pytest.mark.parametrize(
    ("before", "seconds"),
    [
        (None, 30.0),
        (report(0.4), 10.0),
        (report(12.0), 36.0),  # a host whose library really takes that long must not be cut off by the usual 10 s
        (report(50.0), 60.0),
        (report(10.0, ReasonCode.TIMEOUT), 20.0),
        (report(20.0, ReasonCode.TIMEOUT), 40.0),
        (report(60.0, ReasonCode.TIMEOUT), 60.0),
        (report(0.0, ReasonCode.TIMEOUT), 10.0),  # the process of the probe before was still there
        (report(0.2, ReasonCode.NO_DRIVER), 10.0),
    ],
)
def test_the_deadline_follows_what_the_host_needed(before: BackendReport | None, seconds: float) -> None:
    assert deadline_for(before) == seconds


def test_the_mark_changes_with_the_kernel_driver(tmp_path: Path) -> None:
    without = installed_mark("cuda", root=tmp_path)
    assert installed_mark("cuda", root=tmp_path) == without
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159\n")
    with_driver = installed_mark("cuda", root=tmp_path)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.48\n")
    assert len({without, with_driver, installed_mark("cuda", root=tmp_path)}) == 3
    assert installed_mark("metal", root=tmp_path) == installed_mark("metal", root=tmp_path / "elsewhere")


def test_the_mark_changes_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    without = installed_mark("tflite", root=tmp_path)
    package = tmp_path / "tflite_runtime"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('never run')")
    with_package = installed_mark("tflite", root=tmp_path)
    os.utime(package / "__init__.py", (1, 1))  # installed anew
    assert len({without, with_package, installed_mark("tflite", root=tmp_path)}) == 3


def test_a_new_installation_is_asked_at_once_and_counts_from_one() -> None:
    backoff = Backoff(clock=lambda: 0.0, wall=lambda: 1000.0)
    for _ in range(3):
        backoff.failed("cuda", "driver 1")
    assert not backoff.is_due("cuda", "driver 1")
    assert backoff.is_due("cuda", "driver 2")
    backoff.failed("cuda", "driver 2")
    assert backoff.dump()["cuda"].failures == 1
    again = Backoff(clock=lambda: 0.0, wall=lambda: 1000.0)
    again.restore(backoff.dump())
    assert not again.is_due("cuda", "driver 2")
    assert again.is_due("cuda", "driver 1")
