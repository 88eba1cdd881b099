"""Compiled kernels of one opening, and the checks that stand between a launch and a vendor library.

A driver is only given what was checked here: that the kernel is live and of this backend, the shape of the launch, and
the arguments, as far as the source says what it expects: few libraries tell. C, CUDA, HIP and OpenCL declare parameters
alike, and only what is beyond doubt is read. A kernel that macros declare, that is overloaded, or whose types have
names of their own is checked as far as it is understood, which may be not at all.
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
from gpurt.runtime.handles import Allocation, HandleTable, brief, whole_number
from gpurt.types import Kernel, MemoryHandle

Extent = tuple[int, int, int]

_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SCALARS: Final = frozenset("?bBhHiIlLqQfd")
"""NumPy's characters of the types that C, CUDA, HIP and OpenCL lay out alike."""
_COMMENT: Final = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_QUALIFIERS: Final = re.compile(
    r"\b(?:const|volatile|restrict|__restrict__|__restrict|__global|global|__constant|constant|__private|private|register"
    r"|signed|struct)\b"
)
_C_SCALARS: Final[dict[str, tuple[str, int]]] = {
    # Type → whether it is real or whole, and its bytes: with other ones the callee reads something else.
    "float": ("f", 4), "double": ("f", 8),
    "char": ("i", 1), "int8_t": ("i", 1), "uint8_t": ("i", 1), "bool": ("i", 1), "_Bool": ("i", 1),
    "short": ("i", 2), "int16_t": ("i", 2), "uint16_t": ("i", 2), "ushort": ("i", 2),
    "int": ("i", 4), "int32_t": ("i", 4), "uint32_t": ("i", 4), "uint": ("i", 4), "unsigned": ("i", 4),
    "long long": ("i", 8), "int64_t": ("i", 8), "uint64_t": ("i", 8), "size_t": ("i", 8), "ulong": ("i", 8),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. ``pointer`` and ``scalar`` are None where the declaration does not tell for certain."""

    text: str
    pointer: bool | None
    scalar: tuple[str, int] | None


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


def parameters(source: str, name: str, skipped: int = 0) -> tuple[Parameter, ...] | None:
    """Those of the function ``name`` that ``source`` defines, without the first ``skipped``; None: not understood."""
    text = _COMMENT.sub(" ", source)
    found = [
        text[match.end() : end]
        for match in re.finditer(rf"\b{re.escape(name)}\s*\(", text)
        if (end := _closing(text, match.end())) is not None and re.match(r"\)\s*\{", text[end:])
    ]
    if len(found) != 1 or "(" in found[0]:
        return None
    declared = [part.strip() for part in found[0].split(",")]
    if declared in ([""], ["void"]):
        declared = []
    if not all(declared) or len(declared) < skipped:
        return None
    return tuple(map(_parameter, declared[skipped:]))


def check_arguments(name: str, expected: Sequence[Parameter] | None, args: Sequence[Any]) -> None:
    """
    Args:
        args: an object with ``dtype`` for a scalar, anything else for an allocation.

    Raises:
        OutOfRange: another number of arguments than the source declares, or of another kind. A library would read what
            is not there.
    """
    if expected is None:
        return
    if len(args) != len(expected):
        declared = ", ".join(parameter.text for parameter in expected)
        raise OutOfRange(f"kernel {name} takes {len(expected)} arguments, not {len(args)}: ({declared})")
    for position, (parameter, argument) in enumerate(zip(expected, args, strict=True)):
        dtype = getattr(argument, "dtype", None)
        if dtype is None and parameter.pointer is False:
            raise OutOfRange(f"argument {position} of kernel {name} is a scalar, {parameter.text!r}, not an allocation")
        if dtype is not None and parameter.pointer:
            raise OutOfRange(f"argument {position} of kernel {name} is memory, {parameter.text!r}, not a scalar")
        if dtype is not None and parameter.scalar is not None:
            given = ("f" if dtype.kind == "f" else "i", dtype.itemsize)
            if given != parameter.scalar:
                raise OutOfRange(
                    f"argument {position} of kernel {name} is {parameter.text!r}, not a numpy.{dtype.name}"
                )


def _closing(text: str, start: int) -> int | None:
    depth = 1
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if not depth:
            return position
    return None


def _parameter(text: str) -> Parameter:
    text = " ".join(text.split())
    if "*" in text or "[" in text:
        return Parameter(text, True, None)
    words = _QUALIFIERS.sub(" ", text).split()
    if len(words) > 1:
        words = words[:-1]  # its name
    plain = " ".join(word for word in words if word != "unsigned") or "unsigned"
    scalar = _C_SCALARS.get({"long long int": "long long", "short int": "short"}.get(plain, plain))
    return Parameter(text, None if scalar is None else False, scalar)
