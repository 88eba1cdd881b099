"""The parameters of a kernel, read from its source: C, CUDA, HIP and OpenCL declare them alike.

Only what is beyond doubt is read. A kernel that macros declare, that is overloaded, or whose types have names of their
own is checked as far as it is understood, which may be not at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpurt.errors import OutOfRange

_COMMENT: Final = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_QUALIFIERS: Final = re.compile(
    r"\b(?:const|volatile|restrict|__restrict__|__restrict|__global|global|__constant|constant|__private|private|register"
    r"|signed|struct)\b"
)
_SCALARS: Final[dict[str, tuple[str, int]]] = {
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
    scalar = _SCALARS.get({"long long int": "long long", "short int": "short"}.get(plain, plain))
    return Parameter(text, None if scalar is None else False, scalar)
