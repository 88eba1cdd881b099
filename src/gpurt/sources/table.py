"""Recorded tables (JSON, or what a library's wrapper returned): values checked one by one, each or the reason why not.

A table is a mapping. Where nothing could be asked at all it has the one key ``error``, see :class:`Absence`. A row of
it has values under field names and, where a value could not be had, the reason under its name in ``errors``. Reasons
are those of :mod:`gpurt.sources.sysfs`, and ``ambiguous``: told, but impossible beside what is told of another device.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from gpurt.errors import ReasonCode
from gpurt.printable import quoted
from gpurt.sources.sysfs import Skipped, parse_number

REASONS: Final = frozenset({"unsupported", "no_permission", "invalid", "error", "ambiguous"})
_LONGEST_TEXT: Final = 1024


@dataclass(frozen=True, slots=True)
class Absence:
    """Why a source shows nothing at all."""

    reason: ReasonCode
    message: str

    def as_table(self) -> dict[str, Any]:
        """The table that says so."""
        return {"error": {"reason": str(self.reason), "message": self.message}}


def absent_driver(variables: Sequence[str], text: str, environ: Mapping[str, str] | None = None) -> Absence:
    """That a loader finds no driver: ``text``, unless a variable has told it where to look."""
    told = os.environ if environ is None else environ
    for variable in variables:
        if told.get(variable):
            why = f"{variable}={quoted(told[variable])} hides the drivers that are installed, or there is none"
            return Absence(ReasonCode.HIDDEN_BY_ENVIRONMENT, f"{text.replace('is installed', 'is found')}: {why}")
    return Absence(ReasonCode.NO_DRIVER, text)


def load_package(module: str, *, library: str | None = None) -> Any:
    """The module of an optional package, or the :class:`Absence` that says why there is none. Blocking.

    Args:
        library: the shared library whose absence an ``OSError`` of the import means, for people.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        return Absence(ReasonCode.NO_LIBRARY, f"the Python package {exc.name} is not installed")
    except Exception as exc:  # packages with native parts raise anything while they are imported
        if library is not None and isinstance(exc, OSError):
            return Absence(ReasonCode.NO_LIBRARY, f"the {library} is not installed: {exc}")
        return Absence(ReasonCode.ERROR, f"the Python package {package} does not load: {exc or type(exc).__name__}")


class Row:
    """One record of a table. Keeps, by field name, why a field stays empty."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self._values = values
        self._errors = as_mapping(values.get("errors")) or {}
        self.unavailable: dict[str, str] = {}

    def raw(self, field: str, key: str | None = None) -> Any:
        """Whatever is in the table. None notes the reason."""
        value = self._values.get(key or field)
        if value is None:
            self.missing(field, known_reason(self._errors.get(key or field, "unsupported")))
        return value

    def integer(self, field: str, low: int, high: int, key: str | None = None) -> int | None:
        """A number within ``low`` and ``high``; also as text, decimal or ``0x``. What is not between is no value.

        Args:
            key: its name in the table, where that is another.
        """
        value = self.raw(field, key)
        if isinstance(value, str):
            value = parse_number(value.strip())
            if value is None:
                return self.missing(field, "invalid")
        if value is None:
            return None
        # A double has lost the low digits of a 64-bit number already.
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            return self.missing(field, "invalid")
        return value

    def text(self, field: str, key: str | None = None) -> str | None:
        """Text in one line. An empty one says nothing."""
        value = self.raw(field, key)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
            return self.missing(field, "invalid")
        # Lone surrogates cannot be written as UTF-8, and control characters would drive a terminal.
        text = "".join(c if c.isprintable() else " " for c in value.split("\0", 1)[0]).strip()
        return text or self.missing(field, "unsupported")

    def flag(self, field: str, key: str | None = None) -> bool | None:
        """True or False, also as 1 and 0."""
        value = self._values.get(key or field)
        if isinstance(value, bool):
            return value
        number = self.integer(field, 0, 1, key)
        return None if number is None else bool(number)

    def octets(self, field: str, count: int, key: str | None = None) -> bytes | None:
        """``count`` bytes, written as hexadecimal digits."""
        value = self.raw(field, key)
        if value is None:
            return None
        try:
            octets = bytes.fromhex(value) if isinstance(value, str) else b""
        except ValueError:
            octets = b""
        return octets if len(octets) == count else self.missing(field, "invalid")

    def missing(self, field: str, reason: str) -> None:
        """Notes why a field is empty."""
        self.unavailable[field] = reason


def known_reason(value: object) -> str:
    """``value`` if it is a reason, else ``error``."""
    return value if isinstance(value, str) and value in REASONS else "error"


def as_mapping(value: object) -> Mapping[Any, Any] | None:
    """``value`` if it is a mapping."""
    return cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else None


def rows(value: object, where: str) -> tuple[list[tuple[int, Mapping[Any, Any]]], list[Skipped]]:
    """The records of a list with their places, and what in it is no record. ``where`` names the list."""
    if not isinstance(value, (list, tuple)):
        return [], [Skipped(where, f"not a list but {type(value).__name__}")]
    found: list[tuple[int, Mapping[Any, Any]]] = []
    skipped: list[Skipped] = []
    for place, item in enumerate(cast("list[object]", value)):
        row = as_mapping(item)
        if row is None:
            skipped.append(Skipped(f"{where}[{place}]", f"not a record but {type(item).__name__}"))
        else:
            found.append((place, row))
    return found, skipped


def absence_of(table: Mapping[Any, Any]) -> Absence | None:
    """What a table says about itself where nothing could be asked; None for a table with answers."""
    if "error" not in table:
        return None
    error = as_mapping(table["error"]) or {}
    try:
        reason = ReasonCode(error.get("reason"))
    except ValueError:
        reason = ReasonCode.ERROR
    message = error.get("message")
    return Absence(reason, message if isinstance(message, str) and message else "the table does not say why")


def repeated(values: Iterable[str | None]) -> frozenset[str]:
    """What more than one has."""
    seen: set[str] = set()
    twice: set[str] = set()
    for value in values:
        if value is not None:
            (twice if value in seen else seen).add(value)
    return frozenset(twice)
