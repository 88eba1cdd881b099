"""What the functions that users call are given: of the right kind, or an error that names the argument."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel

from gpurt.placement.errors import InvalidPlacementInput
from gpurt.printable import shortened

T = TypeVar("T")

HOW_TO_GET: Final[Mapping[str, str]] = {
    "PlacementDevice": "make them with devices_from_view, or each with device_from_gpu",
    "ModelSpec": "make one with ModelSpec.from_config, from_safetensors, from_gguf or uniform",
    "Plan": "solve_placement gives one; Plan.model_validate_json reads one",
    "ReplicatedPlan": "solve_replicas gives one; ReplicatedPlan.model_validate_json reads one",
    "WorkloadRequest": "make each with WorkloadRequest(name=…, memory_bytes=…)",
    "GPUDevice": "discovery, and list_devices of a backend, give them",
}
"""By the name of the kind."""


def check_kind(value: object, kind: type, field: str, *, optional: bool = False) -> None:
    """
    Raises:
        InvalidPlacementInput: it is not of that kind; the message says how to get one.
    """
    if isinstance(value, kind) or (optional and value is None):
        return
    name = kind.__name__
    article = "an" if name[0] in "AEIOU" else "a"
    raise InvalidPlacementInput(
        f"it must be {article} {name}, not {type(value).__name__}", field=field, hint=HOW_TO_GET.get(name)
    )


def all_of_kind(values: object, kind: type[T], field: str) -> tuple[T, ...]:
    """
    Raises:
        InvalidPlacementInput: they cannot be iterated over, or one is of another kind.
    """
    # A record can be iterated over, too: its fields are.
    if isinstance(values, str | bytes | Mapping | BaseModel) or not isinstance(values, Iterable):
        raise InvalidPlacementInput(
            f"it must be a sequence of {kind.__name__}, not {type(cast('object', values)).__name__}",
            field=field,
            hint=HOW_TO_GET.get(kind.__name__),
        )
    found = tuple(cast("Iterable[Any]", values))
    for place, value in enumerate(found):
        if not isinstance(value, kind):
            check_kind(value, kind, f"{field}.{place}")
    return found


def check_view(devices: object, kind: type, field: str) -> None:
    """
    Raises:
        InvalidPlacementInput: it is no mapping of (node, key) to things of that kind.
    """
    check_kind(devices, Mapping, field)
    for place, device in cast("Mapping[object, object]", devices).items():
        if not isinstance(place, tuple) or len(cast("tuple[object, ...]", place)) != 2:
            raise InvalidPlacementInput(
                f"its keys must be (node, key), and one is {shortened(repr(cast('object', place)))}", field=field
            )
        check_kind(device, kind, f"{field}.{'/'.join(map(str, cast('tuple[object, ...]', place)))}")


def check_count(value: object, field: str, *, least: int, most: int | None = None) -> None:
    """
    Raises:
        InvalidPlacementInput: it is no integer within these limits; true and false are none.
    """
    if (
        not isinstance(value, bool)
        and isinstance(value, Integral)
        and least <= int(value) <= (int(value) if most is None else most)
    ):
        return
    limits = f"from {least}" if most is None else f"from {least:,} to {most:,}"
    raise InvalidPlacementInput(f"it must be an integer {limits}, and is {shortened(repr(value))}", field=field)


def check_share(value: object, field: str) -> None:
    """
    Raises:
        InvalidPlacementInput: it is no number from 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise InvalidPlacementInput(f"it must be from 0 to 1, and is {shortened(repr(value))}", field=field)


def check_path(value: object, field: str, *, also: str = "") -> None:
    """``also``: what else it may be, in words.

    Raises:
        InvalidPlacementInput: it is no path, which is a text or path-like.
    """
    if not isinstance(value, str | os.PathLike):
        raise InvalidPlacementInput(f"it must be a path{also}, not {type(value).__name__}", field=field)


def check_flag(value: object, field: str) -> None:
    """
    Raises:
        InvalidPlacementInput: it is neither true nor false.
    """
    if not isinstance(value, bool):
        raise InvalidPlacementInput(f"it must be True or False, not {shortened(repr(value))}", field=field)
