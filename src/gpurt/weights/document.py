"""JSON as the safetensors format means it: one object, no duplicate keys, no NaN, valid Unicode."""

from __future__ import annotations

import json
from typing import Any

from gpurt.weights.errors import WeightsError, shown

MAX_DOCUMENT_BYTES = 100_000_000
"""The reference implementation's limit on a header; the largest real ones are about a hundredth of it."""


def parse_object(document: bytes, path: str, what: str) -> dict[str, Any]:
    """The JSON object in ``document``. ``what`` names it in errors: ``header``.

    Raises:
        WeightsError: it is not one.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise WeightsError(f"the {what} has the key {shown(twice)} twice", path=path)
        return result

    def refuse(constant: str) -> Any:
        raise WeightsError(f"the {what} is not JSON: {constant} is no JSON value", path=path)

    try:
        text = document.decode()
        # A surrogate escape without its other half is accepted by the parser and fails wherever it is written out.
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except WeightsError:
        raise
    except RecursionError as exc:
        raise WeightsError(f"the {what} is nested too deeply", path=path) from exc
    except ValueError as exc:  # not UTF-8, not JSON, a number of more digits than Python converts
        raise WeightsError(f"the {what} is not JSON: {exc}", path=path) from exc
    if not isinstance(value, dict):
        raise WeightsError(f"the {what} is not a JSON object but {shown(value)}", path=path)
    return value  # pyright: ignore[reportUnknownVariableType]


def check_name(name: str, path: str, what: str) -> None:
    """Refuse a name that no UTF-8 text can hold.

    Raises:
        WeightsError: it has half a surrogate pair.
    """
    try:
        name.encode()
    except UnicodeEncodeError as exc:
        raise WeightsError(f"the {what} has a name that is not valid Unicode", path=path, tensor=name) from exc
