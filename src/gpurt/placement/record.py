"""The base of placement's records: frozen, strict about names, and plain about what is wrong with them."""

from __future__ import annotations

from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from gpurt.placement.errors import InvalidPlacementInput

MOST_BYTES: Final = 1 << 53
"""Largest size of one thing: 8 PiB, up to which floating point tells every byte from the next."""
MOST_TOGETHER: Final = 1 << 60
"""Largest sum of sizes: sums of several such still fit into 64 bits."""
MOST_COUNT: Final = (1 << 31) - 1
"""Of tokens, sequences, stages, nodes."""
LEAST_RATE: Final = 1e-3
"""Bytes or operations a second: below, a stage would take longer than any number says."""
MOST_OPERATIONS: Final = 1e30
"""Of a layer, for one token."""
MOST_SECONDS: Final = 1e9
"""Thirty years: sums and products of such stay far within what floating point holds."""


def invalid_input(kind: str, error: ValidationError) -> InvalidPlacementInput:
    """The first thing that is wrong, with the dotted path of its field also where records are nested."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidPlacementInput):
        return InvalidPlacementInput(cause.message, field=".".join([*path, cause.field]))
    message = first["msg"].removeprefix("Value error, ")
    return InvalidPlacementInput(message, field=".".join(path) or kind, record=kind)


class PlacementRecord(BaseModel):
    """A frozen record whose construction raises :class:`InvalidPlacementInput`, which names the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise invalid_input(type(self).__name__, error) from error

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise invalid_input(cls.__name__, error) from error

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            raise invalid_input(cls.__name__, error) from error
