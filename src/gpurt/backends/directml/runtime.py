"""ONNX Runtime: which of its many packages is installed, whether DirectML is in it, and what to do where it is not.

All of them unpack into one directory, ``onnxruntime``: of two that are installed, the one that came last is used, and
removing either leaves the other broken.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
import sysconfig
from collections.abc import Mapping
from typing import Any, Final, Literal

from gpurt.errors import BackendUnavailable, DeviceLost, GPUError, OutOfMemory, ReasonCode

DeviceType = Literal["dml", "cpu"]
"""What ONNX Runtime calls the memory of a device."""

PROVIDERS: Final[Mapping[DeviceType, str]] = {"dml": "DmlExecutionProvider", "cpu": "CPUExecutionProvider"}

_PACKAGES: Final[Mapping[DeviceType, str]] = {"dml": "onnxruntime-directml", "cpu": "onnxruntime"}
_FLAVOURS: Final = (
    "onnxruntime",
    "onnxruntime-directml",
    "onnxruntime-gpu",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-windowsml",
)
_WHEELS: Final = "win-amd64"
"""What ``onnxruntime-directml`` has wheels for, as :func:`sysconfig.get_platform` writes it."""
_OLDEST: Final = (1, 17)
"""The first version whose ``OrtValue`` can be written to and read from in DirectML's memory."""

# HRESULTs of winerror.h and dxgi.h, as ONNX Runtime writes them into its texts, with 0x or without.
_OUT_OF_MEMORY: Final = re.compile(r"8007000E|bad_alloc|bad allocation|not enough (?:GPU |video )?memory", re.I)
_LOST: Final = re.compile(r"887A000[567]|887A0020|DXGI_ERROR_DEVICE_(?:REMOVED|HUNG|RESET)", re.I)

log = logging.getLogger("gpurt.directml")


def load(device_type: DeviceType, *, wheels: str | None = None) -> Any:
    """The module ``onnxruntime``, which can use memory of that type. Blocking.

    Args:
        wheels: the platform that wheels are chosen for; None asks the interpreter.

    Raises:
        BackendUnavailable: ``no_library``.
    """
    package = _PACKAGES[device_type]
    found = _installed()
    try:
        runtime: Any = importlib.import_module("onnxruntime")
    except ModuleNotFoundError as exc:
        if exc.name != "onnxruntime" and found:
            raise _broken(found, package, f"it needs the Python package {exc.name}") from exc
        raise _missing(package, wheels or sysconfig.get_platform()) from exc
    except (ImportError, OSError) as exc:
        first_line = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
        raise _broken(found, package, first_line) from exc
    if not hasattr(runtime, "get_available_providers"):
        # What is left of the directory after one of two packages was removed.
        raise _broken(found, package, "files of it are missing")
    if PROVIDERS[device_type] not in runtime.get_available_providers():
        raise _without_provider(found, package)
    if _version(runtime.__version__) < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        raise _refusal(
            f"onnxruntime {runtime.__version__} cannot write to a device's memory, {needed} can",
            f"pip install --upgrade {package}",
        )
    if len(found) > 1:
        log.warning("%s share one directory; the one that was installed last is used: keep one", " and ".join(found))
    return runtime


def meaning(exc: Exception) -> type[GPUError] | None:
    """Which error of gpurt an exception of ONNX Runtime means; None for what its text does not tell.

    Its exceptions tell nothing by their class: DirectML's failures are HRESULTs within the text.
    """
    text = str(exc)
    if isinstance(exc, MemoryError) or _OUT_OF_MEMORY.search(text):
        return OutOfMemory
    return DeviceLost if _LOST.search(text) else None


def _installed() -> list[str]:
    found: list[str] = []
    for name in _FLAVOURS:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _missing(package: str, wheels: str) -> BackendUnavailable:
    text = f"the Python package {package} is not installed"
    if package == _PACKAGES["dml"] and wheels != _WHEELS:
        hint = f"use a 64-bit Python for x86, which Windows on ARM emulates, and there: pip install {package}"
        return _refusal(f"{text}, and there is none for {wheels}", None, hint)
    return _refusal(text, f"pip install {package}")


def _broken(found: list[str], package: str, why: str) -> BackendUnavailable:
    names = " and ".join(found) or "onnxruntime"
    text = f"{names} {'are' if len(found) > 1 else 'is'} installed and cannot be loaded: {why}"
    if found == [package]:
        hint = f"pip install --force-reinstall {package}; on Windows it needs the Visual C++ runtime, too"
        return _refusal(text, f"pip install --force-reinstall {package}", hint)
    return _refusal(text, *_replaced(found, package))


def _without_provider(found: list[str], package: str) -> BackendUnavailable:
    if package not in found:
        others = " and ".join(found) or "the onnxruntime that is there"
        return _refusal(f"{others} has no DirectML", *_replaced(found, package))
    hides = "plain onnxruntime" if "onnxruntime" in found else " and ".join(n for n in found if n != package)
    return _refusal(f"{hides or 'another onnxruntime'} hides the DirectML one", *_replaced(found, package))


def _replaced(found: list[str], package: str) -> tuple[str, str]:
    """The command, and what to do besides: all of them go first, because one's removal takes the other's files."""
    return f"pip install {package}", f"pip uninstall -y {' '.join(found) or 'onnxruntime'}, then pip install {package}"


def _refusal(text: str, install_hint: str | None, hint: str | None = None) -> BackendUnavailable:
    return BackendUnavailable(
        text, reason=ReasonCode.NO_LIBRARY, backend="directml", install_hint=install_hint, hint=hint
    )
