"""Shapes and element types, in every spelling that NumPy takes, as plain numbers and one name.

Names and not NumPy's dtypes: importing that takes 0.1 s, which the event loop cannot spare, and checkpoints have types
that NumPy does not know.
"""

from __future__ import annotations

import importlib
import math
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, TypeAlias, cast

from gpurt.errors import OutOfRange, Unsupported
from gpurt.runtime.handles import brief, whole_number
from gpurt.runtime.lane import off_loop

if TYPE_CHECKING:
    import numpy as np

Shape: TypeAlias = "SupportsIndex | Sequence[SupportsIndex]"
"""Extents, or one number of elements."""
DType: TypeAlias = "str | type[Any] | np.dtype[Any]"
"""A name (``"float32"``, ``"bfloat16"``), a short code (``"f4"``), a dtype or a scalar type of NumPy."""

MOST_EXTENTS: Final = 64
"""As many dimensions as NumPy 2 allows."""

_ITEM_BYTES: Final = {
    "bool": 1,
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": bits // 8 for bits in (16, 32, 64)},
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
}


def extents_of(shape: Shape, *, least: int = 1) -> tuple[int, ...]:
    """``shape`` as extents. Whatever counts as an integer to Python's indexing is one; floats and booleans are not.

    Raises:
        OutOfRange: no shape, an extent below ``least``, too many of them, or more elements than memory has bytes.
    """
    numbers = _numbers(shape)
    if len(numbers) > MOST_EXTENTS:
        raise OutOfRange(f"a shape has at most {MOST_EXTENTS} extents, not {len(numbers):,}")
    extents = tuple(whole_number(number, "an extent") for number in numbers)
    if any(extent < least for extent in extents):
        raise OutOfRange(f"an array of shape {extents} has {'no element' if least else 'a negative extent'}")
    if math.prod(extents) > sys.maxsize:
        raise OutOfRange(f"an array of shape {brief(extents)} is beyond any memory")
    return extents


def _numbers(shape: Any) -> Sequence[object]:
    if isinstance(shape, tuple):
        return cast("tuple[object, ...]", shape)
    given: object = shape
    # Text, bytes and mappings are sequences of something, but nobody means a shape by them; an iterator may never end.
    if not isinstance(shape, bool | str | bytes | bytearray | memoryview | Mapping):
        try:
            return (operator.index(shape),)
        except TypeError:  # NumPy's arrays look like integers until they are asked
            if hasattr(shape, "__len__") and hasattr(shape, "__getitem__"):
                return list(shape)
    raise OutOfRange(f"{brief(given)} is not a shape", hint="pass extents, or one number of elements")


def itemsize(name: str) -> int:
    """Bytes of an element.

    Raises:
        OutOfRange: no such name.
    """
    size = _ITEM_BYTES.get(name)
    if size is None:
        raise OutOfRange(f"{brief(name)} is not one of {', '.join(_ITEM_BYTES)}")
    return size


async def understand_array(shape: Shape, dtype: DType, operation: str) -> tuple[tuple[int, ...], str, int]:
    """Extents, the name of the element type, and bytes of an array of numbers.

    Raises:
        OutOfRange: no shape, no element, or no type of numbers in this machine's byte order.
    """
    try:
        extents = extents_of(shape)
        name = dtype if isinstance(dtype, str) and dtype in _ITEM_BYTES else _name_of(await load_numpy(), dtype)
        return extents, name, math.prod(extents) * itemsize(name)
    except OutOfRange as exc:
        exc.operation = operation
        raise


def _name_of(np: Any, dtype: DType) -> str:
    known = _numpy_dtype(np, dtype)
    if known is None:
        return str(dtype)  # which itemsize() refuses, and tells the names
    if not known.isnative:
        raise OutOfRange(f"{brief(dtype)} is not in the byte order of this machine", hint="leave the order away")
    return known.name


def any_element(np: Any, dtype: DType) -> tuple[str, int, np.dtype[Any] | None]:
    """Name, bytes and NumPy's dtype of what memory may be seen as: numbers as above, and whatever else NumPy keeps
    bytes of: text, times, records, foreign byte order. The dtype is None where NumPy does not know it.

    Raises:
        OutOfRange: unknown, of no size, or of Python objects.
    """
    known = _numpy_dtype(np, dtype)
    if known is None:
        if isinstance(dtype, str) and dtype in _ITEM_BYTES:
            return dtype, _ITEM_BYTES[dtype], None
        raise OutOfRange(f"{brief(dtype)} is not a NumPy dtype, nor one of {', '.join(_ITEM_BYTES)}")
    if known.hasobject:
        raise OutOfRange(f"{brief(dtype)} holds references to Python objects, which mean nothing in other memory")
    if not known.itemsize:
        raise OutOfRange(f"elements of {brief(dtype)} have no size", hint="give it one: 'S8', 'V16'")
    if known.subdtype is not None:
        raise OutOfRange(f"{brief(dtype)} is an array itself", hint="put its extents into the shape")
    plain = known.isnative and known.name in _ITEM_BYTES
    return known.name if plain else str(known), known.itemsize, known


def _numpy_dtype(np: Any, dtype: Any) -> np.dtype[Any] | None:
    if dtype is None:  # to NumPy: float64
        return None
    try:
        return np.dtype(dtype)
    except (TypeError, ValueError, KeyError, OverflowError, SyntaxError):  # what np.dtype answers to nonsense
        return None


def numpy_dtype(np: Any, name: str) -> np.dtype[Any]:
    """NumPy's dtype of an element type.

    Raises:
        Unsupported: it has none.
    """
    dtype = _numpy_dtype(np, name)
    if dtype is None:
        raise Unsupported(f"NumPy has no dtype {name}", hint="read the bytes, or import ml_dtypes, which adds it")
    return dtype


async def load_numpy() -> Any:
    """NumPy, whose first import takes 0.1 s and so happens off the event loop."""
    loaded = sys.modules.get("numpy")
    # A module that another thread is still importing is there already, without its contents.
    if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
        return loaded
    return await off_loop("host", lambda: importlib.import_module("numpy"))
