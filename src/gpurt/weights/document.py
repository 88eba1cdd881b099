"""JSON as the safetensors format means it: one object, no duplicate keys, no NaN, valid Unicode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpurt.weights.errors import WeightsError
from gpurt.weights.reader import WHOLE_CHARACTERS, Form, ObjectReader

MAX_DOCUMENT_BYTES = 100_000_000
"""The reference implementation's limit on a header; the largest real ones are about a hundredth of it."""


def members(document: bytes, path: str, what: str, form: Form | None = None) -> Iterator[tuple[str, Any]]:
    """The members of the JSON object in ``document``, one by one. ``what`` names it in errors: ``header``.
    ``form`` bounds what is larger than a window of the reader.

    Raises:
        WeightsError: it is not one, as soon as that is seen.
    """
    return ObjectReader(document, path, what, form).members()


def check_name(name: str, path: str, what: str) -> None:
    """Refuse a name, or a note, that no UTF-8 text can hold.

    Raises:
        WeightsError: it has half a surrogate pair.
    """
    try:
        if len(name) <= WHOLE_CHARACTERS:
            name.encode()
            return
        for start in range(0, len(name), WHOLE_CHARACTERS):  # one call for megabytes would hold the GIL
            name[start : start + WHOLE_CHARACTERS].encode()
    except UnicodeEncodeError as exc:
        raise WeightsError(f"the {what} has a name that is not valid Unicode", path=path, tensor=name) from exc
