"""How many bytes numbers take: data types, and the formats in which quantised weights are stored with their scales."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Final

from gpurt.placement.errors import InvalidPlacementInput

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""By PyTorch's names, which model configurations use."""
_SHORT: Final = {"fp64": "float64", "fp32": "float32", "f32": "float32", "float": "float32", "fp16": "float16"} | {
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
}
HEAD: Final = "lm_head"
EMBEDDING: Final = "embed_tokens"
MAX_PATTERN: Final = 256
_UNBOUNDED: Final = re.compile(r"(?<!\\)[*+]")
_NESTED: Final = re.compile(r"\)[*+{?]|\(\?|\\[0-9]")


def known_dtype(value: object, name: str) -> str:
    """PyTorch's name of a data type, from that or a usual short form.

    Raises:
        InvalidPlacementInput: no such type; ``name`` is the field that has it.
    """
    if isinstance(value, str):
        short = value.removeprefix("torch.").lower()
        short = _SHORT.get(short, short)
        if short in DTYPE_BYTES:
            return short
    raise InvalidPlacementInput(f"{str(value)[:80]!r} is no data type of {', '.join(DTYPE_BYTES)}", field=name)


@dataclass(frozen=True)
class NumberFormat:
    """A way to store matrices: elements of so many bits, and scales for blocks of them.

    Attributes:
        element_bits: of one element.
        group_columns: neighbouring elements of a row that share a scale; None: the whole row.
        group_rows: rows that share it; None: all.
        scale_bits: of scale, zero point and minimum of a block together; a fraction where they are quantised, too.
        column_bytes: per input (the order of GPTQ's groups).
        matrix_bytes: per matrix (scales and tables of the whole).
        plain: patterns of modules that are not stored so.
        only: patterns of the modules that are, or None for all.
        head, embedding, routers: whether these are.
        overrides: by full name of the module, a format of its own, or None for plain.
    """

    name: str
    element_bits: int
    group_columns: int | None = None
    group_rows: int | None = 1
    scale_bits: float = 0
    column_bytes: int = 0
    matrix_bytes: int = 0
    plain: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    head: bool = False
    embedding: bool = False
    routers: bool = False
    overrides: Mapping[str, NumberFormat | None] = field(default_factory=dict[str, "NumberFormat | None"])

    def bytes_of(self, rows: int, columns: int) -> int:
        """Of one matrix, scales included."""
        across = 1 if self.group_columns is None else -(-columns // self.group_columns)
        down = 1 if self.group_rows is None else -(-rows // self.group_rows)
        elements = -(-rows * columns * self.element_bits // 8)
        scales = math.ceil(across * down * self.scale_bits / 8)
        return elements + scales + columns * self.column_bytes + self.matrix_bytes

    def of_module(self, name: str) -> NumberFormat | None:
        """The format of the module of that full name (:data:`HEAD` and :data:`EMBEDDING` too); None: plain."""
        if name in self.overrides:
            return self.overrides[name]
        if (name == HEAD and not self.head) or (name == EMBEDDING and not self.embedding):
            return None
        if self._plain.match(name) or (self._only is not None and not self._only.match(name)):
            return None
        return self

    @cached_property
    def _plain(self) -> _Patterns:
        return _Patterns(self.plain)

    @cached_property
    def _only(self) -> _Patterns | None:
        return None if self.only is None else _Patterns(self.only)


class _Patterns:
    """Names of modules as configurations give them: whole parts of the dotted name, ``*``, or ``re:`` and a regular
    expression."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._literal = [f".{text}." for text in patterns if "*" not in text and not text.startswith("re:")]
        self._wild = [f"*.{text}.*" for text in patterns if "*" in text and not text.startswith("re:")]
        self._regular = [_regular(text[3:]) for text in patterns if text.startswith("re:")]

    def match(self, name: str) -> bool:
        dotted = f".{name}."
        return (
            any(text in dotted for text in self._literal)
            or any(fnmatchcase(dotted, text) for text in self._wild)
            or any(text.match(name) for text in self._regular)
        )


def _regular(text: str) -> re.Pattern[str]:
    """A file's regular expression, if it cannot take long on any name."""
    where = "quantization_config.ignore"
    if len(text) > MAX_PATTERN or len(_UNBOUNDED.findall(text)) > 3 or _NESTED.search(text):
        raise InvalidPlacementInput(f"the pattern {text[:80]!r} is not simple enough to be tried on names", field=where)
    try:
        return re.compile(text)
    except re.error as exc:
        raise InvalidPlacementInput(f"{text[:80]!r} is no regular expression: {exc}", field=where) from exc
