"""Kernels in OpenCL C through pyopencl: programs built from source, and launches that are waited for.

Functions for an OpenCL driver, whose memory tokens are ``pyopencl.Buffer``. A kernel is an ordinary ``__kernel``
function: allocations are its ``__global`` pointers, ``get_global_id(0)`` counts over grid times block.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpurt.errors import CompileFailed, OutOfRange

LANGUAGE: Final = "opencl"

# CL/cl.h
_BUILD_PROGRAM_FAILURE: Final = -11
_INVALID_KERNEL_NAME: Final = -46


@dataclass(frozen=True, slots=True)
class OpenCLKernel:
    """A kernel and the lock of its arguments, which belong to the kernel object and not to a launch."""

    kernel: Any
    lock: threading.Lock = field(default_factory=threading.Lock)


def build(context: Any, device: Any, source: str, name: str) -> OpenCLKernel:
    """The kernel ``name`` of ``source``, for one device of the context. Blocks for some 0.1 to 1 s.

    Raises:
        CompileFailed: with the compiler's log.
    """
    cl: Any = importlib.import_module("pyopencl")
    # The binding itself. pyopencl.Program keeps built programs in the user's home, and the source of each that fails
    # in a file that nobody deletes.
    binding: Any = importlib.import_module("pyopencl._cl")
    program: Any = binding._Program(context, source)
    try:
        program.build(b"", [device])
        return OpenCLKernel(cl.Kernel(program, name))
    except cl.Error as exc:
        if exc.code == _BUILD_PROGRAM_FAILURE:
            log = str(program.get_build_info(device, cl.program_build_info.LOG)).strip()
            raise CompileFailed(f"the OpenCL compiler refuses the source of {name}", code=exc.code, log=log) from exc
        if exc.code == _INVALID_KERNEL_NAME:
            raise CompileFailed(f"the source has no kernel {name}", code=exc.code) from exc
        raise


def launch(
    queue: Any, compiled: OpenCLKernel, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Any]
) -> None:
    """Run on a queue of the kernel's device; returns when it is done. Any thread.

    Raises:
        OutOfRange: not as many arguments as the kernel has. pyopencl.LogicError: one of another size.
    """
    cl: Any = importlib.import_module("pyopencl")
    kernel, wanted = compiled.kernel, compiled.kernel.num_args
    if len(args) != wanted:
        raise OutOfRange(f"the kernel takes {wanted} arguments, not {len(args)}")
    sizes = tuple(blocks * threads for blocks, threads in zip(grid, block, strict=True))
    with compiled.lock:
        for position, argument in enumerate(args):
            kernel.set_arg(position, argument)
        done = cl.enqueue_nd_range_kernel(queue, kernel, sizes, block)
    done.wait()
