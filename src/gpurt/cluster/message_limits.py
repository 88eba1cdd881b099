"""The one door for what nodes say: every message is read into records whose every value is within limits.

What passes can be shown on a terminal, summed, written as strict JSON and planned on by everything behind. A value that
does not pass costs its field where a record can do without it, else the smallest record that it belongs to (a device, a
link, a reading), else the message; never another node's. It is counted by node and field (:class:`Refusals`).

The limits stand in :data:`NUMBERS`, :data:`TEXTS` and :data:`LENGTHS`, by the names of fields. They are worked into
the schemas that pydantic has made of the records, so that an ordinary message is read and checked in one pass of native
code, and only one that something is wrong with is looked at by Python.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaValidator, from_json

from gpurt.cluster.errors import MalformedEvent
from gpurt.cluster.log_limit import LimitedLog
from gpurt.placement.version import MAX_NUMBER
from gpurt.printable import printable
from gpurt.types import Telemetry

M = TypeVar("M", bound=BaseModel)


class Range(NamedTuple):
    """Least and greatest value, both allowed."""

    least: float
    most: float


BYTES: Final = Range(0, 1 << 53)
"""Up to 8 PiB, twenty thousand times the largest device: to here every reader of JSON tells a byte from the next, and
placement counts no further."""
COUNT: Final = Range(0, (1 << 31) - 1)
RATE: Final = Range(0, 1e6)
"""GB/s and TFLOPS: a hundred times the fastest device."""

NUMBERS: Final[Mapping[str, Range]] = {
    "memory_bytes": BYTES,
    "memory_available": BYTES,
    "memory_usable_bytes": BYTES,
    "memory_total_bytes": BYTES,
    "memory_used_bytes": BYTES,
    "memory_free_bytes": BYTES,
    "memory_reserved_bytes": BYTES,
    "bytes": BYTES,
    "short_bytes": BYTES,
    "clock_rate_mhz": Range(0, 1e6),
    "clock_mhz": Range(0, 1e6),
    "bandwidth_gbps": RATE,
    "to_device_gbps": RATE,
    "from_device_gbps": RATE,
    "memory_gbps": RATE,
    "load_gbps": RATE,
    "load_together_gbps": RATE,
    "fp32_tflops": RATE,
    "bf16_tflops": RATE,
    # Linux writes -1 for "no node".
    "numa_node": Range(-1, 1 << 16),
    # 32 bits on Windows, 22 on Linux.
    "pid": Range(0, (1 << 32) - 1),
    # A probe is given up after minutes.
    "elapsed_ms": Range(0, 1e9),
    # Above absolute zero, and below what melts silicon.
    "temperature_c": Range(-273.15, 1e4),
    # A rack draws a tenth.
    "power_w": Range(0, 1e6),
    "utilization_percent": Range(0, 100),
    # Ten years.
    "age_s": Range(0, 3.2e8),
    # An hour. A way that takes longer is none.
    "round_trip_s": Range(0, 3600),
    # Bytes/s. Placement divides by it; the upper end is a thousand times the fastest wire.
    "bandwidth": Range(1, 1e15),
    "samples": Range(1, 1 << 53),
    # As in commands: a node may have heard of any term. Which are believed is decided in ``terms``.
    "term": Range(0, MAX_NUMBER),
    "before": Range(0, MAX_NUMBER),
    "n": Range(0, MAX_NUMBER),
    # 64 bits, as their own checks have them.
    "seq": Range(0, (1 << 64) - 1),
    "start": COUNT,
    "end": COUNT,
    "schema_version": COUNT,
    "compute_units": COUNT,
    "tensor_core_count": COUNT,
    "max_threads_per_block": COUNT,
}
"""By field. A number without an entry is a COUNT."""

MAX_WORD: Final = 256
"""Characters of a name, a key, a path or a code: as many as a certificate's or a file's name has. None that cannot be
printed, because a key that was changed would be another key."""
MAX_TEXT: Final = 2048
"""Characters of a text for people: a driver's error with its reason. A longer one is cut; what would move a cursor is
shown instead (``\\x1b``), and several lines become one."""
TEXTS: Final = frozenset(
    {
        "name", "state_reason", "message", "hint", "hostname", "system", "python", "reason", "refused", "unkept",
        "driver_version", "backend_name", "compute_capability", "memory_usable_source", "notes", "unavailable",
        "failed",
    }
)  # fmt: skip
"""Fields for people, and lists and maps of such. All other text is words."""
WORDS: Final[Mapping[str, int]] = {"id": 1024, "source": 1024, "type": 1024, "subject": 1024, "endpoint": 512}
"""Characters of words that may be longer."""

ESSENTIAL: Final = frozenset({"shards", "resident"})
"""Lists of which an entry that is wrong makes all worthless: they are looked at as far as to it."""

LENGTHS: Final[Mapping[str, int]] = {
    "gpu_devices": 4096,
    # Backends that a machine was searched with; there are twenty.
    "reports": 256,
    "device_ids": 4096,
    "backends": 64,
    "notes": 64,
    # Devices that one message has readings of: 64 in those that gpurt sends.
    "devices": 1024,
    "unavailable": 64,
    "shards": 64,
    "resident": 1024,
    "measured": 1024,
    "failed": 1024,
}
"""Entries of lists and maps, by field. What is too long is cut."""
MAX_ENTRIES: Final = 1024
"""Where a field has no entry."""

TIMES: Final = (datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 29, tzinfo=UTC))
"""Within these a time can be told in every time zone. A node's clock may be as wrong as it likes."""

PIECEMEAL_BYTES: Final = 64 << 10
"""A message that is larger is read piece by piece: native code lets no other thread run for as long as it takes, which
is a fifth of a second for four thousand devices."""
MAX_HALVES: Final = 1000
"""Halves of surrogate pairs that are replaced in one message; with more it is refused."""
LEAST_VALUES: Final = 20_000
VALUE_BYTES: Final = 16
"""A message with wrong numbers in it is looked at as far as to so many values, or one for so many bytes: no message of
gpurt has more."""
MAX_FAULTS: Final = 8192
"""Wrong values in one message, past which nothing of it is kept: each device of a node may have two."""
_ROUNDS: Final = 4
"""What was mended may show another fault."""


class Refusals:
    """What was refused, by node and field. For one observer, on its loop.

    Args:
        clock: monotonic seconds.
        max_nodes: those whose last refusal is longest ago are forgotten; :attr:`total` and :attr:`by_field` are not.
        log: False: somebody else does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, max_nodes: int = 4096, log: bool = True) -> None:
        self.by_field: Counter[str] = Counter()
        """Of all nodes, those that are forgotten included. Fields are those of this version's records."""
        self._nodes: OrderedDict[str, Counter[str]] = OrderedDict()
        self._max_nodes = max_nodes
        self._log = LimitedLog(logging.getLogger("gpurt.cluster.observer"), clock=clock) if log else None

    @property
    def total(self) -> int:
        return self.by_field.total()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those of which something was refused."""
        return tuple(self._nodes)

    def of(self, node: str) -> Mapping[str, int]:
        """How often each field of ``node`` was refused; empty: never."""
        return self._nodes.get(node, {})

    def add(self, node: str, faults: Mapping[str, int]) -> None:
        if not faults:
            return
        known = self._nodes.setdefault(node, Counter())
        self._nodes.move_to_end(node)
        if len(self._nodes) > self._max_nodes:
            self._nodes.popitem(last=False)
        known.update(faults)
        self.by_field.update(faults)
        if self._log is None:
            return
        fields = ", ".join(f"{field} ({count}×)" for field, count in Counter(faults).most_common(5))  # noqa: RUF001
        self._log.warning(
            node, "node %s: values beyond all limits were refused: %s; gpurt top --json counts them", node, fields
        )


class MessageReader(Generic[M]):
    """Reads one kind of record.

    Args:
        model: what comes out.
        what: "readings", for messages: "readings of node w1: …".
        whole: nothing of it is left out: it is taken as it is, or not at all.
        essential: fields without which nothing is worth keeping, each with what raises ValueError where it breaks rules
            of its own: that costs the message. What is only beyond the limits here costs as little as elsewhere.
        pieces: lists that may be long, each with the reader of its entries: one is read after the other, so that no
            other thread waits for all.
    """

    def __init__(
        self,
        model: type[M],
        what: str,
        *,
        whole: bool = False,
        essential: Mapping[str, Callable[[Any], object]] = MappingProxyType({}),
        pieces: Mapping[str, MessageReader[Any]] = MappingProxyType({}),
    ) -> None:
        self._model, self.what, self._whole = model, what, whole
        self._essential, self._pieces = essential, pieces

    @cached_property
    def _prompt(self) -> SchemaValidator:
        """Ends with the first entry of a list that is wrong: of a million wrong ones nobody wants to know."""
        return self._made(fail_fast=True)

    @cached_property
    def _validator(self) -> SchemaValidator:
        return self._made(fail_fast=False)

    def _made(self, *, fail_fast: bool) -> SchemaValidator:
        schema = cast("dict[str, Any]", self._model.__pydantic_core_schema__)
        known = {"type": "definitions", "schema": _bounded(schema, "", fail_fast), "definitions": [_JSON]}
        with _without_their_own(_models_of(schema)):
            return SchemaValidator(cast("Any", known))

    @cached_property
    def _shape(self) -> _Shape:
        return _shape_of(cast("dict[str, Any]", self._model.__pydantic_core_schema__), "", "")

    def read(self, payload: bytes, node: str | None, refusals: Refusals | None = None) -> M:
        """The record in ``payload``, which is JSON.

        Raises:
            MalformedEvent: it is none, or nothing of it can be kept.
        """
        if plain(payload) and not (self._pieces and len(payload) > PIECEMEAL_BYTES):
            try:
                return self._prompt.validate_json(payload)
            except ValidationError:
                pass  # what follows says it better, or mends it
        return self.parse(strict_json(payload, self._named(node)), node, refusals)

    def parse(self, document: object, node: str | None, refusals: Refusals | None = None) -> M:
        """The record in plain JSON values, which are left as they are.

        Raises:
            MalformedEvent: as of ``read``.
        """
        faults: Counter[str] = Counter()
        try:
            cleaned = self._cleaned(document, faults, cut=not self._whole)
            for field, reader in self._pieces.items():
                entries = cast("dict[str, Any]", cleaned).get(field) if isinstance(cleaned, dict) else None
                if isinstance(entries, list):
                    cleaned[field] = reader.each(cast("list[Any]", entries), field, faults)
            return self._mended(cleaned, node, faults)
        finally:
            if refusals is not None and node is not None:
                refusals.add(node, faults)

    def each(self, documents: list[Any], field: str, faults: Counter[str]) -> list[M]:
        """Those of which something can be kept, from values whose texts can be printed."""
        kept: list[M] = []
        for document in documents:
            mine: Counter[str] = Counter()
            try:
                kept.append(self._mended(document, None, mine))
            except MalformedEvent:
                faults[field] += 1
            else:
                for name, count in mine.items():
                    faults[f"{field}.{name}"] += count
        return kept

    def _cleaned(self, document: object, faults: Counter[str], *, cut: bool) -> Any:
        try:
            return _clean(document, self._shape, faults, cut=cut)
        except RecursionError:
            raise MalformedEvent(f"{self.what}: lists or objects in each other, too deep to be read") from None

    def _mended(self, document: Any, node: str | None, faults: Counter[str]) -> M:
        for _ in range(_ROUNDS):
            try:
                return self._validator.validate_python(document)
            except ValidationError as exc:
                count = exc.error_count()
                if count > MAX_FAULTS:
                    faults["message"] += 1
                    raise MalformedEvent(f"{self._named(node)}: {count:,} of its values are wrong") from None
                lost = any(_breaks(rules, document, field) for field, rules in self._essential.items())
                mended = _mend(document, self._shape, exc, faults)
                if self._whole or lost or not mended:
                    faults["message"] += 1
                    raise MalformedEvent(f"{self._named(node)}: {summary(exc)}") from exc
        faults["message"] += 1
        raise MalformedEvent(f"{self._named(node)}: more is wrong with it than can be left out")

    def _named(self, node: str | None) -> str:
        return self.what if node is None else f"{self.what} of node {node}"


def _breaks(rules: Callable[[Any], object], document: Any, field: str) -> bool:
    if not isinstance(document, dict) or field not in document:
        return False
    try:
        rules(document[field])
    except ValueError:
        return True
    return False


def _models_of(schema: object) -> set[type[BaseModel]]:
    """Every record class in a schema."""
    if isinstance(schema, Mapping):
        known = cast("Mapping[str, Any]", schema)
        inner = set[type[BaseModel]]().union(*map(_models_of, known.values()))
        return inner | {known["cls"]} if known.get("type") == "model" else inner
    if isinstance(schema, (list, tuple)):
        return set[type[BaseModel]]().union(*map(_models_of, cast("list[object]", schema)))
    return set()


@contextmanager
def _without_their_own(models: set[type[BaseModel]]) -> Generator[None]:
    """Have pydantic build the validators of these records anew: of a record within a record it takes the one that the
    class has already, whatever the schema says."""
    complete = [model for model in models if vars(model).get("__pydantic_complete__")]
    try:
        for model in complete:
            model.__pydantic_complete__ = False
        yield
    finally:
        for model in complete:
            model.__pydantic_complete__ = True


def plain(payload: bytes) -> bool:
    """No text in it can be anything but printable ASCII, so native code alone tells whether all is within limits. JSON
    itself allows no control character unless it is escaped."""
    return payload.isascii() and b"\\" not in payload and b"\x7f" not in payload


def strict_json(payload: bytes, what: str) -> Any:
    """Plain JSON values, of which each is one that can be written as JSON again: a number that is too large to be one
    is a text that no field takes for a number.

    Raises:
        MalformedEvent: it is not JSON in UTF-8, which has no NaN and Infinity, or nested too deeply.
    """
    try:
        document = from_json(payload, allow_inf_nan=False)
    except ValueError as exc:
        # JSON can spell two things that no parser here can hold: half of a surrogate pair, and a number of thousands
        # of digits.
        mended = _ENDLESS_NUMBER.sub(_BEYOND, payload)
        if 0 < mended.count(b"\\ud") + mended.count(b"\\uD") <= MAX_HALVES:
            mended = _ESCAPE.sub(_whole_escape, mended)
        try:
            document = from_json(mended, allow_inf_nan=False)
        except ValueError:
            raise MalformedEvent(f"{what}: not JSON, which has no NaN or infinity either: {exc}") from exc
    if _LONG_NUMBER.search(payload):
        document = _finite(document, what, [max(LEAST_VALUES, len(payload) // VALUE_BYTES)])
    return document


def summary(error: ValidationError) -> str:
    """The first three complaints in one line, without the values: those are a stranger's."""
    parts = [
        f"{'.'.join(map(str, item['loc'])) or 'document'}: {item['msg']}"
        for item in error.errors(include_url=False, include_input=False)[:3]
    ]
    return printable("; ".join(parts), 1000)


_LONG_NUMBER: Final = re.compile(rb"[0-9]{20}|[eE][+]?[0-9]{3}")
"""What a number that is beyond 64 bits, or infinite, has in it; names may have it, too."""
_ENDLESS_NUMBER: Final = re.compile(rb"[0-9]{1000,}")
_BEYOND: Final = b"9" * 400
_ESCAPE: Final = re.compile(rb"\\(?:u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.S)


def _whole_escape(match: re.Match[bytes]) -> bytes:
    escape = match[0]
    half = len(escape) == 6 and escape[2:3] in b"dD" and escape[3:4] in b"89abcdefABCDEF"
    return rb"\ufffd" if half else escape


def _finite(value: Any, what: str, left: list[int]) -> Any:
    """``left``: how many values are looked at."""
    left[0] -= 1
    if left[0] < 0:
        raise MalformedEvent(f"{what}: too many values for one with wrong numbers in it")
    if isinstance(value, dict):
        return {key: _finite(each, what, left) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_finite(each, what, left) for each in cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return "a number beyond all limits"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number beyond all limits"
    return value


# The limits, worked into a schema of pydantic's.

_ANY: Final = {"type": "any"}
_ANY_JSON: Final = {"type": "definition-ref", "schema_ref": "json"}
_JSON: Final = {
    "type": "union",
    "ref": "json",
    "mode": "left_to_right",
    "choices": [
        {"type": "str", "strict": True},
        {"type": "none"},
        {"type": "bool", "strict": True},
        {"type": "int", "strict": True, "ge": -(1 << 63), "le": (1 << 64) - 1},
        {"type": "float", "strict": True, "allow_inf_nan": False},
        {"type": "list", "strict": True, "items_schema": _ANY_JSON},
        {"type": "dict", "strict": True, "keys_schema": {"type": "str"}, "values_schema": _ANY_JSON},
    ],
}
"""What can be written as JSON again: numbers that are numbers."""


def _bounded(schema: dict[str, Any], name: str, fail_fast: bool) -> dict[str, Any]:
    """A copy of the schema of the field ``name`` with its limits.

    Raises:
        TypeError: a kind of schema that has no rule here, which a new field may bring: give it one.
    """
    match schema["type"]:
        case "int":
            return {**schema, **_within(schema, _range(name), int)}
        case "float":
            return {**schema, **_within(schema, _range(name), float), "allow_inf_nan": False}
        case "str":
            most = MAX_TEXT if name in TEXTS else WORDS.get(name, MAX_WORD)
            return {**schema, "max_length": min(most, schema.get("max_length", most))}
        case "datetime":
            return {**schema, "ge": TIMES[0], "le": TIMES[1]}
        case "tuple" | "list":
            # Of one kind of entries: no record has another.
            items = cast("list[dict[str, Any]] | dict[str, Any]", schema["items_schema"])
            bounded = (
                [_bounded(each, name, fail_fast) for each in items]
                if isinstance(items, list)
                else _bounded(items, name, fail_fast)
            )
            prompt = fail_fast or name in ESSENTIAL
            return {**schema, "items_schema": bounded, "max_length": _length(schema, name), "fail_fast": prompt}
        case "dict" if schema.get("values_schema", _ANY)["type"] == "any":
            return {**schema, "values_schema": _ANY_JSON}
        case "dict":
            return {
                **schema,
                "keys_schema": {"type": "str", "max_length": MAX_WORD},
                "values_schema": _bounded(schema["values_schema"], name, fail_fast),
                "max_length": _length(schema, name),
            }
        case "model":
            inner = _bounded(schema["schema"], name, fail_fast)
            if schema.get("config", {}).get("extra_fields_behavior") == "allow":
                # What this version does not know of an event is kept, as far as it is JSON.
                inner = {**inner, "extras_schema": _ANY_JSON}
            # Not by the record's own constructor, which knows nothing of these limits.
            return {**schema, "schema": inner, "custom_init": False}
        case "model-fields":
            fields = {
                key: {**field, "schema": _bounded(field["schema"], key, fail_fast)}
                for key, field in schema["fields"].items()
            }
            return {**schema, "fields": fields}
        case "default" | "nullable" | "function-after":
            return {**schema, "schema": _bounded(schema["schema"], name, fail_fast)}
        case "union":
            return {**schema, "choices": [_bounded(choice, name, fail_fast) for choice in schema["choices"]]}
        case "any":
            return _ANY_JSON
        case "bool" | "enum" | "literal":
            return schema
        case other:
            raise TypeError(f"the field {name!r} is of a kind that has no limits: {other}")


def _range(name: str) -> Range:
    return NUMBERS.get(name, COUNT)


def _within(schema: dict[str, Any], limits: Range, kind: type[int] | type[float]) -> dict[str, Any]:
    least, most = kind(limits.least), kind(limits.most)
    return {"ge": max(least, schema.get("ge", least)), "le": min(most, schema.get("le", most))}


def _length(schema: dict[str, Any], name: str) -> int:
    most = LENGTHS.get(name, MAX_ENTRIES)
    return min(most, schema.get("max_length", most))


# What to do with a message that is not within the limits.


class _Field(NamedTuple):
    path: str
    drop: str | None
    """How a record does without it: ``omit`` it, say that it is ``null``, or not at all."""
    shape: _Shape


class _Shape:
    """As much of a schema as it takes to leave out what is wrong."""

    __slots__ = ("entries", "fields", "item", "most", "path", "text", "unavailable")

    def __init__(self, path: str) -> None:
        self.path = path
        self.fields: dict[str, _Field] | None = None
        self.item: _Shape | None = None
        """Of a list."""
        self.entries: _Shape | None = None
        """Of a map."""
        self.text: bool | None = None
        """It is a text for people; False: a word."""
        self.most = 0
        self.unavailable = False
        """It says why a value is not there."""


def _shape_of(schema: dict[str, Any], name: str, path: str) -> _Shape:
    shape = _Shape(path)
    match schema["type"]:
        case "default" | "nullable" | "function-after" | "model":
            shape = _shape_of(schema["schema"], name, path)
            if schema["type"] == "model":
                shape.unavailable = issubclass(schema["cls"], Telemetry)
        case "model-fields":
            shape.fields = {}
            for key, field in schema["fields"].items():
                inner, here = field["schema"], f"{path}.{key}" if path else key
                outer = inner
                while outer["type"].startswith("function-"):
                    outer = outer["schema"]
                drop = {"default": "omit", "nullable": "null"}.get(outer["type"])
                made = _Field(here, drop, _shape_of(inner, key, here))
                shape.fields[key] = made
                if isinstance(alias := field.get("validation_alias"), str):
                    shape.fields[alias] = made
        case "tuple" | "list":
            items: dict[str, Any] | list[dict[str, Any]] = schema["items_schema"]
            shape.item = _shape_of(items[0] if isinstance(items, list) else items, name, path)
            shape.most = _length(schema, name)
        case "union":
            shape = _shape_of(schema["choices"][0], name, path)
        case "dict" if schema.get("values_schema", _ANY)["type"] != "any":
            shape.entries = _shape_of(schema["values_schema"], name, path)
            shape.most = _length(schema, name)
        case "str":
            shape.text = name in TEXTS
            shape.most = min(MAX_TEXT if shape.text else WORDS.get(name, MAX_WORD), schema.get("max_length", MAX_TEXT))
        case "any" if name in TEXTS:
            shape.text, shape.most = True, MAX_WORD * 4
        case _:
            pass
    return shape


def _clean(value: Any, shape: _Shape, faults: Counter[str], *, cut: bool) -> Any:
    """A copy with every text fit to be printed and, where ``cut``, lists and maps of their lengths. Values of another
    kind than the shape's are left to the schema."""
    if isinstance(value, dict):
        known = cast("dict[str, Any]", value)
        if (fields := shape.fields) is not None:
            return {
                key: each if (field := fields.get(key)) is None else _clean(each, field.shape, faults, cut=cut)
                for key, each in known.items()
            }
        if (entries := shape.entries) is not None:
            kept = [key for key in known if key.isprintable() and len(key) <= MAX_WORD]
            kept = kept[: shape.most] if cut else kept
            if len(kept) < len(known):
                faults[shape.path] += len(known) - len(kept)
            return {key: _clean(known[key], entries, faults, cut=cut) for key in kept}
        return known
    if isinstance(value, (list, tuple)) and (item := shape.item) is not None:
        several = cast("list[Any]", value)
        if cut and len(several) > shape.most:
            faults[shape.path] += len(several) - shape.most
            several = several[: shape.most]
        return [_clean(each, item, faults, cut=cut) for each in several]
    if isinstance(value, str) and shape.text is not None:
        return _clean_text(value, shape, faults)
    return cast("object", value)


def _clean_text(value: str, shape: _Shape, faults: Counter[str]) -> str | None:
    if value.isprintable() and (len(value) <= shape.most or not shape.text):
        return value  # a word that is too long is left to the schema
    if not shape.text:
        faults[shape.path] += 1
        return None
    # Several lines are what drivers write.
    line = " ".join(value[: 2 * shape.most].split()) if any(c in value for c in "\n\r\t") else value
    if line.isprintable() and len(line) <= shape.most:
        return line
    faults[shape.path] += 1
    # Each character that cannot be printed is shown as ten at most.
    return printable(line, shape.most)[: shape.most]


_GONE: Final = object()


def _mend(document: Any, shape: _Shape, error: ValidationError, faults: Counter[str]) -> bool:
    """Leave out what is wrong, as little as possible. False: nothing can be left out."""
    thinned: dict[int, list[Any]] = {}
    mended = True
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        found = _droppable(document, shape, fault["loc"])
        if found is None:
            mended = False
        else:
            found.leave_out(thinned)
            faults[found.path] += 1
    for several in thinned.values():
        several[:] = [each for each in several if each is not _GONE]
    return mended


@dataclass(slots=True)
class _Droppable:
    """A value that can be left out of the list, or the record or map, that it is in."""

    path: str
    item: tuple[list[Any], int] | None = None
    entry: tuple[dict[str, Any], str] | None = None
    null: bool = False
    """The record says that there is none."""
    reading: bool = False
    """Its record says why there is none."""

    def leave_out(self, thinned: dict[int, list[Any]]) -> None:
        """``thinned``: lists, by identity, that have an item less from now on."""
        if self.item is not None:
            several, place = self.item
            several[place] = _GONE
            thinned[id(several)] = several
        if self.entry is not None:
            record, key = self.entry
            if self.null:
                record[key] = None
            else:
                record.pop(key, None)
            if self.reading:
                reasons = record.setdefault("unavailable", {})
                if isinstance(reasons, dict):
                    reasons[key] = "invalid"


def _droppable(document: Any, shape: _Shape, place: tuple[int | str, ...]) -> _Droppable | None:
    """The smallest thing around the value at ``place`` that can be left out."""
    value, found = document, None
    for key in place:
        if isinstance(value, dict) and isinstance(key, str):
            record = cast("dict[str, Any]", value)
            if shape.fields is not None:
                field = shape.fields.get(key)
                if field is None or key not in record:
                    break  # missing: the record that lacks it goes
                if field.drop is not None:
                    found = _Droppable(
                        field.path, entry=(record, key), null=field.drop == "null", reading=shape.unavailable
                    )
                value, shape = record[key], field.shape
            elif shape.entries is not None and key in record:
                found = _Droppable(shape.path, entry=(record, key))
                value, shape = record[key], shape.entries
            else:
                break
        elif isinstance(value, list) and isinstance(key, int) and shape.item is not None:
            several = cast("list[Any]", value)
            if key >= len(several):
                break
            found = _Droppable(shape.path, item=(several, key))
            value, shape = several[key], shape.item
        else:
            break
    return found
