"""CUDA's driver library is loaded and asked without holding the GIL."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpurt.backends.cupy.cuda_properties import read_properties

SLOW_TO_LOAD = """
#include <stdlib.h>
#include <unistd.h>
/* Says that it is being loaded, and waits for an answer by another thread of the process. */
__attribute__((constructor)) static void wait_for_an_answer(void) {
    char byte = 'x';
    if (write(atoi(getenv("ENTERED_FD")), &byte, 1) != 1) abort();
    if (read(atoi(getenv("ANSWER_FD")), &byte, 1) != 1) abort();
}
int cuInit(unsigned int flags) { return (int)flags; }
"""

PROGRAM = """
import os, sys, threading
from gpurt.backends.cupy.cuda_context import PrimaryContexts
entered, say_entered = os.pipe()
answered, answer = os.pipe()
os.environ |= {"ENTERED_FD": str(say_entered), "ANSWER_FD": str(answered)}
contexts = PrimaryContexts(sys.argv[1])
thread = threading.Thread(target=contexts.prepare)
thread.start()
os.read(entered, 1)  # never returns if the loading thread keeps the GIL until it has its answer
os.write(answer, b"x")
thread.join()
print(contexts._library is not None)
"""


DRIVER = """
#include <string.h>
int cuDeviceGet(int *device, int index) { *device = 40 + index; return index < 2 ? 0 : 101; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "NVIDIA H100", size); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 85000000000 + device; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, device, 16); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1000 + attribute; return 0; }
"""


def build(tmp_path: Path, text: str) -> Path:
    """``text`` as a shared library."""
    if sys.platform != "linux":
        pytest.skip("builds an ELF library")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang)")
    source, library = tmp_path / "library.c", tmp_path / "library.so"
    source.write_text(text)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def test_other_threads_run_while_the_library_loads(tmp_path: Path) -> None:
    library = build(tmp_path, SLOW_TO_LOAD)
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(library)], capture_output=True, text=True, timeout=30)
    assert run.stdout.strip() == "True", run.stderr


def test_properties_are_those_of_the_driver(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(build(tmp_path, DRIVER)))
    assert read_properties(library, 1) == {
        "name": b"NVIDIA H100",
        "totalGlobalMem": 85_000_000_041,
        "uuid": bytes([41] * 16),
        "maxThreadsPerBlock": 1001,
        "clockRate": 1013,
        "multiProcessorCount": 1016,
        "integrated": 1018,
        "memoryClockRate": 1036,
        "memoryBusWidth": 1037,
        "major": 1075,
        "minor": 1076,
    }


def test_a_call_that_fails_or_is_not_there_leaves_the_question_to_cupy(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(build(tmp_path, DRIVER)))
    assert read_properties(library, 2) is None
    assert read_properties(ctypes.CDLL(None), 0) is None


@pytest.mark.gpu
def test_properties_are_those_that_cupy_tells() -> None:
    pytest.importorskip("cupy_backends")
    from cupy_backends.cuda.api import runtime

    library = ctypes.CDLL("libcuda.so.1")
    assert library.cuInit(0) == 0
    for index in range(runtime.getDeviceCount()):
        ours, theirs = read_properties(library, index), runtime.getDeviceProperties(index)
        assert ours is not None
        assert ours["name"].decode() == theirs["name"].decode()
        # CUDA 13 took the clocks out of the structure.
        for key in ours.keys() & theirs.keys() - {"name", "uuid"}:
            assert ours[key] == theirs[key], key
