"""The header of a safetensors file, read strictly: what comes out can be trusted with device memory.

Layout of the format: 8 bytes little-endian length, that many bytes of JSON (a map from tensor name to ``dtype``,
``shape`` and ``data_offsets``), then the data, which the tensors must cover without overlap and without a hole.

A header may have 100 MB, as in the reference implementation, and is read in time proportional to its size: about 1 s
for 100,000 tensors. What the reference would accept and no checkpoint has is refused, because one call of the
interpreter would take long for it, and every other thread would wait: shapes of more than 64 extents, entries and names
of more than 65,536 characters, notes of more than 16,777,216, and more than 1,000,000 tensors or notes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise
from operator import attrgetter
from typing import Any, BinaryIO, Final, cast

from gpurt.runtime.elements import MOST_EXTENTS
from gpurt.weights.document import MAX_DOCUMENT_BYTES, check_name, members
from gpurt.weights.errors import WeightsError, shown
from gpurt.weights.quiet import drop, quiet
from gpurt.weights.reader import Form

LENGTH_BYTES: Final = 8
ENTRY_BYTES: Final = 100
"""Of one tensor in a header, about."""
RUN: Final = 4096
_LARGEST: Final = 2**63 - 1
_FORM: Final = Form("__metadata__")


@dataclass(frozen=True, slots=True)
class DType:
    """An element type of the format."""

    bits: int
    numpy: str | None
    """NumPy's name of it, or None where NumPy has no such type."""


DTYPES: Final[Mapping[str, DType]] = {
    "BOOL": DType(8, "bool"),
    "U8": DType(8, "uint8"),
    "I8": DType(8, "int8"),
    "U16": DType(16, "uint16"),
    "I16": DType(16, "int16"),
    "U32": DType(32, "uint32"),
    "I32": DType(32, "int32"),
    "U64": DType(64, "uint64"),
    "I64": DType(64, "int64"),
    "F16": DType(16, "float16"),
    "F32": DType(32, "float32"),
    "F64": DType(64, "float64"),
    "C64": DType(64, "complex64"),
    "BF16": DType(16, None),
    "F8_E4M3": DType(8, None),
    "F8_E5M2": DType(8, None),
    "F8_E8M0": DType(8, None),
    "F8_E4M3FNUZ": DType(8, None),
    "F8_E5M2FNUZ": DType(8, None),
    "F6_E2M3": DType(6, None),
    "F6_E3M2": DType(6, None),
    "F4": DType(4, None),
}
"""Every type that version 0.8 of the reference implementation knows, by the name used in files."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. ``offset_bytes`` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """All tensors of a file in the order of their data, and the file's own notes."""

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]


def read_header(file: BinaryIO | int, path: str) -> Header:
    """The header of an open file or file descriptor, which must be seekable. ``path`` is for messages. Blocks.

    Raises:
        WeightsError: not a well-formed safetensors file. OSError: it cannot be read.
    """
    if isinstance(file, int):
        with os.fdopen(os.dup(file), "rb", buffering=0) as own:
            return read_header(own, path)
    file_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file_bytes < LENGTH_BYTES:
        raise WeightsError(f"{file_bytes} bytes are too few for a safetensors file", path=path)
    length = int.from_bytes(_read_all(file, LENGTH_BYTES, path), "little")
    hint = "is it a safetensors file, and is it complete?"
    if length > MAX_DOCUMENT_BYTES:
        raise WeightsError(
            f"the header claims {length:,} bytes; at most {MAX_DOCUMENT_BYTES:,} are allowed", path=path, hint=hint
        )
    if LENGTH_BYTES + length > file_bytes:
        raise WeightsError(
            f"the header claims {length:,} bytes; the file has {file_bytes:,} in all", path=path, hint=hint
        )
    return parse_header(_read_all(file, length, path), file_bytes, path)


def parse_header(document: bytes, file_bytes: int, path: str) -> Header:
    """The header in ``document`` (the JSON alone) of a file of ``file_bytes``. Pure.

    Raises:
        WeightsError: names the file, the tensor and what is wrong with it.
    """
    if not document.startswith(b"{"):
        raise WeightsError(f"the header does not begin with '{{' but with {shown(document[:8])}", path=path)
    with quiet(len(document) // ENTRY_BYTES):
        return _parse(document, file_bytes, path)


def _parse(document: bytes, file_bytes: int, path: str) -> Header:
    metadata: dict[str, str] = {}
    data_start = LENGTH_BYTES + len(document)
    tensors: list[TensorInfo] = []
    wrong: WeightsError | None = None
    try:
        for name, entry in members(document, path, "header", _FORM):
            if wrong is not None:
                continue  # the first is what is told, unless the rest is no JSON
            try:
                if name == "__metadata__":
                    metadata = _metadata(entry, path)
                else:
                    tensors.append(_tensor(name, entry, data_start, path))
            except WeightsError as exc:  # that the whole is no JSON would say more
                wrong = exc
        if wrong is not None:
            raise wrong
    except WeightsError:
        drop(tensors)
        raise
    finally:
        del wrong  # this frame is in its traceback: they would keep each other
    tensors = _in_order(tensors)
    end, before = data_start, None
    for tensor in tensors:
        if tensor.offset_bytes + tensor.size_bytes > file_bytes:
            raise WeightsError(
                f"its data ends at byte {tensor.offset_bytes + tensor.size_bytes:,}; the file has {file_bytes:,}",
                path=path,
                tensor=tensor.name,
                hint="the file is truncated, or its header is wrong",
            )
        if tensor.offset_bytes < end:
            raise WeightsError(
                f"its data overlaps that of tensor {shown(before)} by {end - tensor.offset_bytes:,} bytes",
                path=path,
                tensor=tensor.name,
            )
        if tensor.offset_bytes > end:
            raise WeightsError(
                f"{tensor.offset_bytes - end:,} bytes before its data belong to no tensor",
                path=path,
                tensor=tensor.name,
            )
        end, before = tensor.offset_bytes + tensor.size_bytes, tensor.name
    if end != file_bytes:
        raise WeightsError(f"the last {file_bytes - end:,} bytes of the file belong to no tensor", path=path)
    return Header(tuple(tensors), metadata)


def _in_order(tensors: list[TensorInfo]) -> list[TensorInfo]:
    """By their data. Most files have them so; to sort 100,000 others is one call that keeps the GIL for 0.1 s, and
    merging short sorted runs is many."""
    place = attrgetter("offset_bytes", "size_bytes")
    if all(place(earlier) <= place(later) for earlier, later in pairwise(tensors)):
        return tensors
    runs = [sorted(tensors[start : start + RUN], key=place) for start in range(0, len(tensors), RUN)]
    return list(merge(*runs, key=place))


def _tensor(name: str, entry: Any, data_start: int, path: str) -> TensorInfo:
    check_name(name, path, "header")

    def wrong(message: str) -> WeightsError:
        return WeightsError(message, path=path, tensor=name)

    if not isinstance(entry, dict):
        raise wrong(f"its entry is not an object but {shown(entry)}")
    fields = cast("dict[str, Any]", entry)
    # Also unknown keys: they may change the meaning of the bytes.
    if fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong(f"its entry must have dtype, shape and data_offsets, and has {shown(sorted(fields))}")
    dtype, shape = fields["dtype"], _numbers(fields["shape"])
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong(f"unknown dtype {shown(dtype)}; known are {', '.join(DTYPES)}")
    if shape is None:
        raise wrong(f"shape must be a list of integers from 0 to 2^63 - 1, and is {shown(fields['shape'])}")
    offsets = _numbers(fields["data_offsets"])
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"data_offsets must be two ascending integers, and are {shown(fields['data_offsets'])}")
    if len(shape) > MOST_EXTENTS:
        raise wrong(f"shape has {len(shape):,} extents; at most {MOST_EXTENTS} are allowed")
    elements = 1
    for extent in shape:
        # Zero counts as one here: no library can hold the strides of a shape that overflows without its zeros.
        elements *= max(1, extent)
        if elements > _LARGEST:
            raise wrong(f"shape {shown(list(shape))} has more elements than 64 bits can count")
    bits = (0 if 0 in shape else elements) * DTYPES[dtype].bits
    if bits % 8:
        raise wrong(f"{dtype} of shape {shown(list(shape))} does not end at a whole byte")
    begin, end = offsets
    if end - begin != bits // 8:
        raise wrong(f"{dtype} of shape {shown(list(shape))} needs {bits // 8:,} bytes; its data has {end - begin:,}")
    return TensorInfo(name, dtype, shape, data_start + begin, end - begin)


def _numbers(value: Any) -> tuple[int, ...] | None:
    """``value`` as integers that are not negative, or None when it is something else."""
    if not isinstance(value, list):
        return None
    items = cast("list[Any]", value)
    # By type, not isinstance: true and false are integers to Python.
    return tuple(items) if all(type(item) is int and 0 <= item <= _LARGEST for item in items) else None


def _metadata(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise WeightsError(f"__metadata__ is not an object but {shown(value)}", path=path)
    notes = cast("dict[str, Any]", value)
    for key, note in notes.items():
        if not isinstance(note, str):
            raise WeightsError(f"__metadata__[{shown(key)}] is not a string but {shown(note)}", path=path)
        check_name(key, path, "__metadata__")
        check_name(note, path, "__metadata__")
    return notes


def _read_all(file: BinaryIO, count: int, path: str) -> bytes:
    """Unbuffered files may give less than asked for."""
    parts: list[bytes] = []
    missing = count
    while missing:
        part = file.read(missing)
        if not part:
            raise WeightsError(f"the file ended {missing:,} bytes before the end of its header", path=path)
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
