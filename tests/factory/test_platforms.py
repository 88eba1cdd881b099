from __future__ import annotations

import sys

import pytest

from gpurt.platforms import current_platform

ANDROID_ENV = {"ANDROID_ROOT": "/system", "ANDROID_DATA": "/data"}


@pytest.mark.parametrize(
    ("sys_platform", "options", "expected"),
    [
        ("linux", {}, "linux"),
        ("linux", {"environ": {"ANDROID_ROOT": "/system"}}, "linux"),
        ("linux", {"environ": ANDROID_ENV}, "android"),
        ("linux", {"has_getandroidapilevel": True}, "android"),
        ("android", {}, "android"),
        ("darwin", {"machine": "arm64"}, "darwin"),
        ("darwin", {"machine": "x86_64", "environ": ANDROID_ENV}, "darwin"),
        ("darwin", {"machine": "iPhone14,2"}, "ios"),
        ("darwin", {"machine": "iPad8,1"}, "ios"),
        ("darwin", {"machine": "arm64", "multiarch": "arm64-iphoneos"}, "ios"),
        ("darwin", {"machine": "arm64", "multiarch": "arm64-iphonesimulator"}, "ios"),
        ("ios", {}, "ios"),
        ("win32", {}, "win32"),
        ("cygwin", {}, "win32"),
        ("freebsd14", {}, "linux"),
    ],
)
def test_platform_of(sys_platform: str, options: dict, expected: str) -> None:
    defaults = {"environ": {}, "has_getandroidapilevel": False, "machine": "x86_64", "multiarch": ""}
    assert current_platform(sys_platform=sys_platform, **(defaults | options)) == expected


def test_this_machine_needs_no_arguments() -> None:
    if sys.platform in ("linux", "win32", "darwin"):
        assert current_platform(environ={}) == sys.platform
