"""Compiled kernels of one backend, and the checks that stand between a launch and a vendor library.

What a driver is given was checked here: that the kernel is live and of this backend, the shape of the launch, and the
arguments, as far as the source says what it expects (:mod:`gpurt.kernel_source`): few libraries tell.
"""

from __future__ import annotations

import itertools
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from gpurt.errors import InvalidHandle, OutOfRange
from gpurt.kernel_source import Parameter, check_arguments
from gpurt.memory.handles import Allocation, HandleTable, brief, whole_number
from gpurt.types import Kernel, MemoryHandle

Extent = tuple[int, int, int]

_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SCALARS: Final = frozenset("?bBhHiIlLqQfd")
"""NumPy's characters of the types that C, CUDA, HIP and OpenCL lay out alike."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel, the device that it is for, and the driver's token."""

    kernel: Kernel
    index: int
    token: Any
    parameters: tuple[Parameter, ...] | None
    """What the source declares; None where that could not be read."""


class KernelTable:
    """Kernels of one opening of a backend. Lanes add, the event loop's thread looks up."""

    def __init__(self) -> None:
        # Random, so that a kernel of another instance, process or run is refused.
        self._generation = secrets.randbits(63)
        self._ids = itertools.count(1)
        self._live: dict[int, Compiled] = {}
        self._sources: dict[tuple[str, str, str], Kernel] = {}
        self._names: dict[tuple[str, str], Kernel] = {}

    def add(
        self, device_id: str, index: int, source: str, name: str, token: Any, parameters: tuple[Parameter, ...] | None
    ) -> Kernel:
        kernel = Kernel(next(self._ids), device_id, name, self._generation)
        self._live[kernel.kernel_id] = Compiled(kernel, index, token, parameters)
        self._sources[device_id, source, name] = kernel
        return kernel

    def find(self, device_id: str, source: str, name: str) -> Kernel | None:
        """What was compiled from the same text before."""
        return self._sources.get((device_id, source, name))

    def remember(self, kernel: Kernel) -> None:
        """``named`` answers with it from now on."""
        self._names[kernel.device_id, kernel.name] = kernel

    def named(self, device_id: str, name: str) -> Kernel | None:
        """The one of that name which somebody asked for last."""
        return self._names.get((device_id, name))

    def get(self, kernel: Kernel) -> Compiled:
        """
        Raises:
            InvalidHandle: and says which kind of wrong it is.
        """
        if not isinstance(kernel, Kernel):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidHandle(f"{type(kernel).__name__} is not a Kernel")
        if kernel.generation != self._generation:
            raise InvalidHandle("the kernel belongs to another backend instance, process or run")
        compiled = self._live.get(kernel.kernel_id)
        if compiled is None or compiled.kernel != kernel:
            raise InvalidHandle("the kernel was tampered with")
        return compiled


def check_source(source: object, name: object) -> None:
    """
    Raises:
        OutOfRange: not text, or not a name that a kernel can have.
    """
    if not isinstance(source, str):
        raise OutOfRange(f"the source must be text, not {type(source).__name__}")
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
        raise OutOfRange(f"the name of a kernel is an identifier of letters, digits and underscores: {name!r:.80}")


def extent(value: object, what: str) -> Extent:
    """``value`` as three numbers; what is not given is 1.

    Raises:
        OutOfRange: not one to three positive numbers, or larger than any library can count.
    """
    given = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else (value,)
    numbers = [whole_number(number, what) for number in given]
    if not 1 <= len(numbers) <= 3 or any(not 1 <= number < 1 << 31 for number in numbers):
        raise OutOfRange(f"{what} must be one to three numbers from 1 to 2^31-1, not {brief(numbers)}")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def check_shape(grid: Extent, block: Extent, most_threads: int | None) -> None:
    """
    Raises:
        OutOfRange: the block is larger than the device can run, or there are more threads than can be counted.
    """
    threads = block[0] * block[1] * block[2]
    if most_threads is not None and threads > most_threads:
        raise OutOfRange(f"a block of {threads:,} threads; this device runs at most {most_threads:,}")
    if grid[0] * grid[1] * grid[2] * threads > sys.maxsize:
        raise OutOfRange(f"more than {sys.maxsize:,} threads in all")


def listed(args: object) -> tuple[Any, ...]:
    """
    Raises:
        OutOfRange: not a list or a tuple.
    """
    if not isinstance(args, (list, tuple)):
        raise OutOfRange(f"the arguments must be a list or a tuple, not {type(args).__name__}")
    return tuple(cast("Sequence[Any]", args))


def arguments(args: object, handles: HandleTable, compiled: Compiled) -> tuple[tuple[Any, ...], tuple[Allocation, ...]]:
    """What the driver gets, memory tokens and scalars in order, and the allocations among them.

    Raises:
        OutOfRange: something else than allocations and NumPy scalars. InvalidHandle.
    """
    numpy: Any = sys.modules.get("numpy")  # not imported: then nobody has a scalar of it, and the loop need not wait
    passed: list[Any] = []
    allocations: list[Allocation] = []
    for position, argument in enumerate(listed(args)):
        if isinstance(argument, MemoryHandle):
            allocation = handles.get(argument)
            if allocation.index != compiled.index:
                raise InvalidHandle(
                    f"argument {position} is memory of {argument.device_id}, and the kernel was compiled for "
                    f"{compiled.kernel.device_id}"
                )
            allocations.append(allocation)
            passed.append(allocation.token)
        elif numpy is not None and isinstance(argument, numpy.generic) and argument.dtype.char in _SCALARS:
            passed.append(argument)
        else:
            raise OutOfRange(
                f"argument {position} is neither a MemoryHandle nor a NumPy scalar that kernels understand: "
                f"{brief(argument)}",
                hint="say which type the kernel expects: numpy.int32(5), numpy.float32(0.5)",
            )
    check_arguments(compiled.kernel.name, compiled.parameters, listed(args))
    return tuple(passed), tuple(allocations)
