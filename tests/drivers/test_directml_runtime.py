"""Which onnxruntime is installed: every wrong one is named, with the command that mends it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpurt.backends.directml.runtime import load, meaning
from gpurt.errors import BackendUnavailable, DeviceLost, OutOfMemory, ReasonCode

CPU = ["AzureExecutionProvider", "CPUExecutionProvider"]
DML = ["DmlExecutionProvider", "CPUExecutionProvider"]
INSTALL = "pip install onnxruntime-directml"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Make this interpreter one that has these packages, and this module (None: no module)."""

    def install(packages: list[str], module: Any) -> Any:
        for name in packages:
            folder = tmp_path / f"{name.replace('-', '_')}-1.24.4.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.24.4\n")
        others = [path for path in sys.path if "site-packages" not in path]
        monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
        if module is None:
            monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
        else:
            monkeypatch.setitem(sys.modules, "onnxruntime", module)
        return module

    return install


def module(providers: list[str], version: str = "1.24.4") -> Any:
    return SimpleNamespace(get_available_providers=lambda: providers, __version__=version)


def refusal(wheels: str = "win-amd64") -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as caught:
        load("dml", wheels=wheels)
    assert caught.value.reason is ReasonCode.NO_LIBRARY
    assert caught.value.backend == "directml"
    return caught.value


def test_the_right_one_is_taken(install: Callable[..., Any]) -> None:
    runtime = install(["onnxruntime-directml"], module(DML))
    assert load("dml", wheels="win-amd64") is runtime


def test_nothing_installed(install: Callable[..., Any]) -> None:
    install([], None)
    error = refusal()
    assert error.message == "the Python package onnxruntime-directml is not installed"
    assert (error.install_hint, error.hint) == (INSTALL, INSTALL)


@pytest.mark.parametrize("wheels", ["win-arm64", "win32"])
def test_no_wheel_for_this_python(install: Callable[..., Any], wheels: str) -> None:
    install([], None)
    error = refusal(wheels)
    assert f"there is none for {wheels}" in error.message
    assert error.install_hint is None
    assert error.hint is not None
    assert "64-bit Python for x86" in error.hint


def test_plain_onnxruntime_has_no_directml(install: Callable[..., Any]) -> None:
    install(["onnxruntime"], module(CPU))
    error = refusal()
    assert error.message == "onnxruntime has no DirectML"
    assert error.hint == f"pip uninstall -y onnxruntime, then {INSTALL}"
    assert error.install_hint == INSTALL


def test_plain_onnxruntime_hides_the_directml_one(install: Callable[..., Any]) -> None:
    install(["onnxruntime", "onnxruntime-directml"], module(CPU))
    error = refusal()
    assert error.message == "plain onnxruntime hides the DirectML one"
    # Both go: what pip takes away of the one is the other's, too, and pip would think the other whole.
    assert error.hint == f"pip uninstall -y onnxruntime onnxruntime-directml, then {INSTALL}"


def test_another_flavour_hides_it(install: Callable[..., Any]) -> None:
    install(["onnxruntime-gpu", "onnxruntime-directml"], module(["CUDAExecutionProvider", "CPUExecutionProvider"]))
    error = refusal()
    assert error.message == "onnxruntime-gpu hides the DirectML one"
    assert error.hint == f"pip uninstall -y onnxruntime-directml onnxruntime-gpu, then {INSTALL}"


def test_two_of_which_the_right_one_won(install: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    runtime = install(["onnxruntime", "onnxruntime-directml"], module(DML))
    assert load("dml", wheels="win-amd64") is runtime
    assert "onnxruntime and onnxruntime-directml share one directory" in caplog.text


def test_built_by_hand_without_a_package(install: Callable[..., Any]) -> None:
    install([], module(CPU))
    assert refusal().message == "the onnxruntime that is there has no DirectML"


def test_left_over_after_one_of_two_was_removed(install: Callable[..., Any]) -> None:
    install(["onnxruntime-directml"], ModuleType("onnxruntime"))
    error = refusal()
    assert error.message == "onnxruntime-directml is installed and cannot be loaded: files of it are missing"
    assert error.install_hint == "pip install --force-reinstall onnxruntime-directml"


def test_its_library_does_not_load(install: Callable[..., Any], tmp_path: Path) -> None:
    install(["onnxruntime-directml"], None)
    text = "DLL load failed while importing onnxruntime_pybind11_state"
    (tmp_path / "onnxruntime.py").write_text(f"raise ImportError({text!r})\n")
    error = refusal()
    assert text in error.message
    assert error.hint is not None
    assert "Visual C++ runtime" in error.hint


def test_what_it_needs_is_missing(install: Callable[..., Any], tmp_path: Path) -> None:
    install(["onnxruntime-directml"], None)
    (tmp_path / "onnxruntime.py").write_text("import sympy_of_another_name\n")
    assert "needs the Python package sympy_of_another_name" in refusal().message


@pytest.mark.parametrize(("version", "new_enough"), [("1.16.3", False), ("1.17.0", True), ("1.24.4", True)])
def test_old_versions_cannot_write(install: Callable[..., Any], version: str, new_enough: bool) -> None:
    runtime = install(["onnxruntime-directml"], module(DML, version))
    if new_enough:
        assert load("dml", wheels="win-amd64") is runtime
        return
    error = refusal()
    assert error.message == "onnxruntime 1.16.3 cannot write to a device's memory, 1.17 can"
    assert error.install_hint == "pip install --upgrade onnxruntime-directml"


def test_the_stand_in_takes_any(install: Callable[..., Any]) -> None:
    runtime = install(["onnxruntime-directml"], module(DML))
    assert load("cpu") is runtime


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        (MemoryError("std::bad_alloc"), OutOfMemory),
        (RuntimeError("bad allocation"), OutOfMemory),
        (
            RuntimeError(
                "[ONNXRuntimeError] : 1 : FAIL : D:\\a\\_work\\1\\s\\DmlExternalGpuAllocator.cpp(44)\\x.pyd!00007FF8: "
                "(caller: 00007FF8) Exception(1) tid(2a4) 8007000E Not enough memory resources are available to "
                "complete this operation.\n"
            ),
            OutOfMemory,
        ),
        (
            RuntimeError(
                "ExecutionProvider.cpp(563): Exception(3) tid(5c8) 887A0005 The GPU device instance has been suspended."
            ),
            DeviceLost,
        ),
        (RuntimeError("Exception(3) tid(5c8) 887A0006 The GPU will not respond to more commands"), DeviceLost),
        (RuntimeError("DXGI_ERROR_DEVICE_RESET"), DeviceLost),
        (RuntimeError("The input size of numpy arrays does not match the size of the OrtValue."), None),
        (RuntimeError("80070057 The parameter is incorrect."), None),
        (LookupError("nothing of this library"), None),
    ],
)
def test_what_its_texts_mean(exc: Exception, expected: type | None) -> None:
    assert meaning(exc) is expected
