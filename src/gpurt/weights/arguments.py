"""What callers pass, looked at before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from gpurt.backend import GPUBackend
from gpurt.errors import GPUError, OutOfRange
from gpurt.runtime.files import path_name
from gpurt.runtime.handles import brief, whole_number
from gpurt.runtime.progress import check_progress


def check_load(
    path: object, backend: object, placement: object, only: object, on_progress: object, max_concurrent: object
) -> tuple[Path, int | None]:
    """The arguments of ``load_safetensors``: its path and ``max_concurrent``.

    Raises:
        OutOfRange: one is not what it has to be.
    """
    try:
        name = path_name(path)
        check_backend(backend, "backend")
        _check_placement(placement)
        _check_only(only)
        check_progress(on_progress)
        if max_concurrent is not None:
            max_concurrent = whole_number(max_concurrent, "max_concurrent")
            if max_concurrent < 1:
                raise OutOfRange(f"max_concurrent must be positive or None, not {brief(max_concurrent)}")
    except GPUError as exc:
        exc.operation = "load_safetensors"
        raise
    return Path(name), max_concurrent


def check_backend(backend: object, what: str) -> None:
    """Refuse what is no backend.

    Raises:
        OutOfRange: it is something else.
    """
    if not isinstance(backend, GPUBackend):
        raise OutOfRange(f"{what} must be an initialised backend, not {type(backend).__name__}")


def _check_placement(placement: object) -> None:
    if isinstance(placement, str):
        return
    if isinstance(placement, Mapping):
        entries = cast("Mapping[Any, Any]", placement)
        wrong = next((entry for entry in entries if not isinstance(entry, str)), None)
        if wrong is not None:
            raise OutOfRange(
                f"placement maps names of tensors to device ids, and has the name {brief(wrong)}",
                hint='such as {"model.layers.3": "cuda:1", "": "cuda:0"}',
            )
        return
    if not callable(placement):
        raise OutOfRange(
            f"placement must be a device id, a mapping or a function, not {type(placement).__name__}",
            hint='such as "cuda:0", or device.device_id of a device',
        )
    _check_ordinary(placement, "placement")


def _check_only(only: object) -> None:
    if only is None or isinstance(only, str):
        return
    if callable(only):
        _check_ordinary(only, "only")
        return
    if not isinstance(only, Collection) or isinstance(only, (bytes, bytearray, memoryview)):
        kind = type(cast("object", only)).__name__
        raise OutOfRange(f"only must be a list of names or a function, not {kind}")
    for entry in cast("Collection[object]", only):
        if not isinstance(entry, str):
            raise OutOfRange(f"only lists names, prefixes or layers, and has {brief(entry)}")


def _check_ordinary(function: object, what: str) -> None:
    # Its coroutine would count as a device id that is none, or as true.
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise OutOfRange(f"{what} is an async function, and would not be awaited", hint="pass an ordinary function")
