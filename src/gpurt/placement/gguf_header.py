"""The header of a GGUF file, read strictly: no count in it is believed before its bytes have been seen.

Layout of versions 2 and 3: ``GGUF``, version (u32), number of tensors and of metadata (u64 each), the metadata (name,
type, value), the tensors (name, extents with the fastest first, type, offset), padding, then the data. All integers in
the byte order of the file, which is little unless the version reads as if it were turned round.

The format's own package (``gguf`` 0.19) is not used: it maps the file, which a truncation under way turns into a signal
that ends the process; a cut file is an IndexError or ValueError of NumPy's; it walks all that a count claims (100 bytes
that claim 2^26 elements kept it busy for more than a minute); and it brings packages for downloads and progress bars.
This reader needs names, shapes and a few numbers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import BinaryIO, Final, Literal

from gpurt.placement.ggml_types import GGML_TYPES, WITHDRAWN
from gpurt.weights.document import MAX_DOCUMENT_BYTES
from gpurt.weights.errors import WeightsError, shown
from gpurt.weights.header import TensorInfo

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_METADATA: Final = 65_536
"""Entries. Real files have less than 200."""
MAX_TENSORS: Final = 262_144
"""Of one file. Real ones have less than 3,000."""
MAX_NAME_BYTES: Final = 65_535
"""The format's limit on a key."""
MAX_EXTENTS: Final = 4
"""GGML's tensors have no more."""
KEPT_ELEMENTS: Final = 4096
"""An array with more elements (a vocabulary) is walked but not kept."""
MAX_KEPT_ELEMENTS: Final = 1 << 20
"""Of all arrays together."""
MAX_WALKED_ELEMENTS: Final = 1 << 22
"""Texts and arrays in all arrays together, each of which is a step; the largest vocabularies have a million with their
merges."""
DEEPEST: Final = 4
"""Arrays of arrays; no real file has any."""
DEFAULT_ALIGNMENT: Final = 32
_LARGEST: Final = 2**63 - 1

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9
_LEAST_BYTES: Final = {number: struct.calcsize(code) for number, code in _SCALARS.items()} | {_STRING: 8, _ARRAY: 12}
"""That one value of a type takes in the file."""
_LEAST_METADATA: Final = 8 + 4 + 1
_LEAST_TENSOR: Final = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array among the metadata. ``values`` is None where it is too long to keep or holds arrays."""

    length: int
    values: tuple[GgufScalar, ...] | None


GgufScalar = int | float | bool | str
GgufValue = GgufScalar | GgufArray


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata in the file's order, tensors in the order of their data (shapes with the slowest extent first)."""

    version: int
    alignment_bytes: int
    metadata: Mapping[str, GgufValue]
    tensors: tuple[TensorInfo, ...]


def read_gguf_header(file: BinaryIO, path: str) -> GgufHeader:
    """The header of an open, seekable file. ``path`` is for messages. Blocks.

    Raises:
        WeightsError: not a well-formed GGUF file. OSError: it cannot be read.
    """
    reader = _Reader(file, path)
    magic = reader.take(4, "magic number")
    if magic != MAGIC:
        raise WeightsError(
            f"it is no GGUF file: it begins with the bytes {magic.hex(' ')}, not with {MAGIC.decode()}", path=path
        )
    version = int.from_bytes(reader.take(4, "version"), "little")
    if version not in VERSIONS:
        turned = int.from_bytes(version.to_bytes(4, "little"), "big")
        if turned not in VERSIONS:
            raise WeightsError(
                f"GGUF version {version:,} is not one of {', '.join(map(str, VERSIONS))}",
                path=path,
                hint="version 1 was in use for three weeks of 2023: convert the model again" if version == 1 else None,
            )
        version, reader.order = turned, ">"
    tensors = reader.count("tensors", MAX_TENSORS, _LEAST_TENSOR)
    entries = reader.count("metadata entries", MAX_METADATA, _LEAST_METADATA)
    metadata = _metadata(reader, entries)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 0 < alignment <= 1 << 30:
        raise WeightsError(f"general.alignment is {shown(alignment)}, not a number of bytes", path=path)
    if alignment & (alignment - 1):
        raise WeightsError(f"general.alignment is {alignment:,}, not a power of two", path=path)
    return GgufHeader(version, alignment, metadata, _tensors(reader, tensors, alignment))


def _metadata(reader: _Reader, entries: int) -> dict[str, GgufValue]:
    metadata: dict[str, GgufValue] = {}
    for _ in range(entries):
        key = reader.name("metadata")
        if key in metadata:
            raise WeightsError(f"metadata {shown(key)} is there twice", path=reader.path)
        metadata[key] = reader.value(reader.number("I", key), key)
    return metadata


def _tensors(reader: _Reader, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    path, tensors, names = reader.path, list[TensorInfo](), set[str]()
    for _ in range(count):
        tensor = _tensor(reader)
        if tensor.name in names:
            raise WeightsError("is there twice", path=path, tensor=tensor.name)
        names.add(tensor.name)
        tensors.append(tensor)
    data_start = _padded(reader.position, alignment)
    end, before = 0, None
    for tensor in sorted(tensors, key=attrgetter("offset_bytes", "size_bytes")):
        place = f"its data begins at byte {tensor.offset_bytes:,} of the data"
        if tensor.offset_bytes % alignment:
            raise WeightsError(f"{place}, which is no multiple of {alignment}", path=path, tensor=tensor.name)
        if tensor.offset_bytes < end:
            raise WeightsError(f"{place}, inside that of {shown(before)}", path=path, tensor=tensor.name)
        if tensor.offset_bytes != _padded(end, alignment):
            raise WeightsError(f"{place}; the data before end at {end:,}", path=path, tensor=tensor.name)
        end, before = tensor.offset_bytes + tensor.size_bytes, tensor.name
        if data_start + end > reader.file_bytes:
            raise WeightsError(
                f"its data ends at byte {data_start + end:,}; the file has {reader.file_bytes:,}",
                path=path,
                tensor=tensor.name,
                hint="the file is truncated, or its header is wrong",
            )
    return tuple(
        TensorInfo(tensor.name, tensor.dtype, tensor.shape, data_start + tensor.offset_bytes, tensor.size_bytes)
        for tensor in sorted(tensors, key=attrgetter("offset_bytes", "size_bytes"))
    )


def _tensor(reader: _Reader) -> TensorInfo:
    """One entry, its offset still that within the data."""
    name = reader.name("tensor")

    def wrong(message: str) -> WeightsError:
        return WeightsError(message, path=reader.path, tensor=name)

    extents = reader.number("I", name)
    if extents > MAX_EXTENTS:
        raise wrong(f"has {extents:,} extents; at most {MAX_EXTENTS} are allowed")
    shape = [reader.number("Q", name) for _ in range(extents)]
    number, offset = reader.number("I", name), reader.number("Q", name)
    if number not in GGML_TYPES:
        known = f"{WITHDRAWN[number]}, which was withdrawn" if number in WITHDRAWN else "unknown"
        raise wrong(f"type {number:,} is {known}")
    kind = GGML_TYPES[number]
    elements = 1
    for extent in shape:
        # Zero counts as one here: strides must be countable even where there is nothing.
        elements *= max(1, extent)
        if elements > _LARGEST:
            raise wrong(f"shape {shown(shape)} has more elements than 64 bits can count")
    row = shape[0] if shape else 1
    if row % kind.block_elements:
        raise wrong(f"rows of {row:,} elements are not whole blocks of {kind.name} ({kind.block_elements})")
    size = 0 if 0 in shape else elements // kind.block_elements * kind.block_bytes
    return TensorInfo(name, kind.name, tuple(reversed(shape)), offset, size)


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


class _Reader:
    """Takes bytes off a file and refuses before it reads what cannot be there."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.file_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        self.path = path
        self.position = 0
        self.order: Literal["<", ">"] = "<"
        self._file = file
        self._kept = 0
        self._walked = 0

    def take(self, size: int, what: str) -> bytes:
        self._check(size, what)
        data = self._file.read(size)
        if len(data) != size:
            raise WeightsError(f"the file ended while its {shown(what)} was read", path=self.path)
        self.position += size
        return data

    def number(self, code: str, what: str) -> int:
        return int(self._unpack(code, what))

    def count(self, what: str, most: int, least_bytes: int) -> int:
        count = self.number("Q", f"number of {what}")
        if count > most:
            raise WeightsError(f"it claims {count:,} {what}; at most {most:,} are allowed", path=self.path)
        self._check(count * least_bytes, what)
        return count

    def name(self, what: str) -> str:
        """A name, which must be text: it is what everything else is found by."""
        size = self.number("Q", f"length of a name of {what}")
        if size > MAX_NAME_BYTES:
            raise WeightsError(f"a name of {what} claims {size:,} bytes", path=self.path)
        data = self.take(size, f"name of {what}")
        try:
            return data.decode()
        except UnicodeDecodeError as exc:
            raise WeightsError(
                f"a name of {what} is not UTF-8: {shown(data.decode(errors='backslashreplace'))}", path=self.path
            ) from exc

    def value(self, kind: int, key: str) -> GgufValue:
        return self._array(key, 1) if kind == _ARRAY else self._scalar(kind, key)

    def _scalar(self, kind: int, key: str) -> GgufScalar:
        if kind == _STRING:
            # Values may be halves of characters, such as a tokeniser's pieces.
            return self.take(self.number("Q", key), key).decode(errors="replace")
        if kind not in _SCALARS:
            raise WeightsError(f"metadata {shown(key)} is of unknown type {kind:,}", path=self.path)
        value = self._unpack(_SCALARS[kind], key)
        if kind != _BOOL:
            return value
        if value > 1:
            raise WeightsError(f"metadata {shown(key)} is neither true nor false but {value}", path=self.path)
        return bool(value)

    def _array(self, key: str, depth: int) -> GgufArray:
        if depth > DEEPEST:
            raise WeightsError(f"metadata {shown(key)} has arrays more than {DEEPEST} deep", path=self.path)
        kind, length = self.number("I", key), self.number("Q", key)
        if kind not in _LEAST_BYTES:
            raise WeightsError(f"metadata {shown(key)} is an array of unknown type {kind:,}", path=self.path)
        self._check(length * _LEAST_BYTES[kind], key)
        if kind in (_STRING, _ARRAY):
            self._walked += length
            if self._walked > MAX_WALKED_ELEMENTS:
                raise WeightsError(
                    f"metadata {shown(key)} makes more than {MAX_WALKED_ELEMENTS:,} texts in arrays", path=self.path
                )
        if kind == _ARRAY:
            for _ in range(length):
                self._array(key, depth + 1)
        elif depth == 1 and length <= min(KEPT_ELEMENTS, MAX_KEPT_ELEMENTS - self._kept):
            self._kept += length
            return GgufArray(length, tuple(self._scalar(kind, key) for _ in range(length)))
        elif kind == _STRING:
            for _ in range(length):
                self._skip(self.number("Q", key), key)
        else:
            self._skip(length * _LEAST_BYTES[kind], key)
        return GgufArray(length, None)

    def _unpack(self, code: str, what: str) -> int | float:
        form = self.order + code
        (value,) = struct.unpack(form, self.take(struct.calcsize(form), what))
        return value

    def _skip(self, size: int, what: str) -> None:
        self._check(size, what)
        self._file.seek(size, os.SEEK_CUR)
        self.position += size

    def _check(self, size: int, what: str) -> None:
        end = self.position + size
        if end > self.file_bytes:
            raise WeightsError(
                f"its {shown(what)} would end at byte {end:,}; the file has {self.file_bytes:,}",
                path=self.path,
                hint="is it a GGUF file, and is it complete?",
            )
        if end > MAX_DOCUMENT_BYTES:
            raise WeightsError(f"its header is longer than {MAX_DOCUMENT_BYTES:,} bytes", path=self.path)
