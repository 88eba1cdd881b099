"""Which operating system this is, as backend selection sees it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from typing import Final, Literal

Platform = Literal["linux", "win32", "darwin", "android", "ios"]

PLATFORM_BACKEND_PRIORITY: dict[Platform, tuple[str, ...]] = {
    "linux": ("cuda", "rocm", "vulkan", "cpu"),
    "win32": ("directml", "cuda", "rocm", "cpu"),
    "darwin": ("metal", "cpu"),
    "android": ("tflite", "cpu"),
    "ios": ("tflite", "cpu"),
}
"""Backends in the order of trial. May be changed; backends that are not in it are tried just before ``cpu``."""

_IOS_MACHINES: Final = ("iPhone", "iPad", "iPod")
_IOS_MULTIARCH: Final = ("-iphoneos", "-iphonesimulator")


def current_platform(
    *,
    sys_platform: str | None = None,
    environ: Mapping[str, str] | None = None,
    has_getandroidapilevel: bool | None = None,
    machine: str | None = None,
    multiarch: str | None = None,
) -> Platform:
    """The platform of this process; each argument replaces what the interpreter says.

    ``sys.platform`` is ``"android"`` and ``"ios"`` only from Python 3.13 on. Before that Android says ``linux``
    and is known by ``sys.getandroidapilevel`` or by ``ANDROID_ROOT`` together with ``ANDROID_DATA`` (Termux);
    iOS says ``darwin`` and is known by its machine name (``iPhone14,2``) or its multiarch tag. Other Unix systems
    count as ``linux``, whose backends are the ones they have; Cygwin and MSYS count as ``win32``.
    """
    name = sys.platform if sys_platform is None else sys_platform
    env = os.environ if environ is None else environ
    if name == "android" or (name.startswith("linux") and _is_android(env, has_getandroidapilevel)):
        return "android"
    if name == "ios" or (name == "darwin" and _is_ios(machine, multiarch)):
        return "ios"
    if name == "darwin":
        return "darwin"
    if name in ("win32", "cygwin", "msys"):
        return "win32"
    return "linux"


def _is_android(env: Mapping[str, str], has_getandroidapilevel: bool | None) -> bool:
    if has_getandroidapilevel is None:
        has_getandroidapilevel = hasattr(sys, "getandroidapilevel")
    return has_getandroidapilevel or bool(env.get("ANDROID_ROOT") and env.get("ANDROID_DATA"))


def _is_ios(machine: str | None, multiarch: str | None) -> bool:
    if machine is None:
        machine = platform.machine()
    if multiarch is None:
        multiarch = str(getattr(sys.implementation, "_multiarch", ""))
    return machine.startswith(_IOS_MACHINES) or multiarch.endswith(_IOS_MULTIARCH)
