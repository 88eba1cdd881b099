"""Calls that end a process in which the library makes them: ours answer with a typed error, in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PREAMBLE = """
import resource, sys
from gpurt.backends.opencl_backend import OpenCLDriver
from gpurt.errors import BackendUnavailable
driver = OpenCLDriver()
try:
    driver.open()
except BackendUnavailable as exc:
    print("absent", exc)
    sys.exit(0)

def said(call):
    try:
        call()
    except Exception as exc:
        meaning = driver.classify(exc)
        print(meaning.__name__ if meaning else type(exc).__name__)
    else:
        print("nothing")

def round_trip():
    mem, target = driver.alloc(0, 1 << 20), bytearray(1 << 20)
    driver.write(0, mem, 0, memoryview(b"x" * (1 << 20)))
    driver.read(0, mem, 0, memoryview(target))
    driver.free(0, mem)
    print("alive" if target == b"x" * (1 << 20) else "corrupt")
"""

ADDRESS_SPACE = """
live = driver.alloc(0, 64)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for size in (1 << 30, 2 << 30):
    said(lambda: driver.alloc(0, size))
round_trip()
"""

OVERCOMMIT = """
total = driver.telemetry(0).memory_total_bytes
largest = min(driver.capabilities.max_allocation_bytes, total)
mems = []
def fill():
    for _ in range(total // largest * 4 + 4):
        mems.append(driver.alloc(0, largest))
said(fill)
print(len(mems) * largest <= total)
for mem in mems:
    driver.free(0, mem)
round_trip()
"""

FREED = """
mem = driver.alloc(0, 4096)
driver.free(0, mem)
said(lambda: driver.free(0, mem))
said(lambda: driver.write(0, mem, 0, memoryview(b"x" * 4096)))
said(lambda: driver.read(0, mem, 0, memoryview(bytearray(4096))))
round_trip()
"""

BEYOND = """
mem = driver.alloc(0, 4096)
said(lambda: driver.write(0, mem, 4000, memoryview(b"x" * 4096)))
said(lambda: driver.read(0, mem, 1 << 40, memoryview(bytearray(4096))))
said(lambda: driver.copy(0, mem, 0, 0, mem, 4000, 4096))
driver.free(0, mem)
round_trip()
"""


@pytest.mark.skipif(importlib.util.find_spec("pyopencl") is None, reason="pyopencl is not installed")
@pytest.mark.parametrize(
    ("body", "answers"),
    [
        pytest.param(ADDRESS_SPACE, ["OutOfMemory"] * 2, id="no address space"),
        pytest.param(OVERCOMMIT, ["OutOfMemory", "True"], id="more than there is"),
        pytest.param(FREED, ["InvalidHandle"] * 3, id="freed"),
        pytest.param(BEYOND, ["OutOfRange"] * 3, id="beyond the end"),
    ],
)
def test_an_error_and_a_living_process(body: str, answers: list[str]) -> None:
    if body is ADDRESS_SPACE and sys.platform != "linux":
        pytest.skip("needs limits of Linux")
    command = [sys.executable, "-c", PREAMBLE + body]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if ended.stdout.startswith("absent"):
        pytest.skip(ended.stdout)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [*answers, "alive"], ended.stderr
