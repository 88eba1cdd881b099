"""WeightsError: what is wrong with a file of weights."""

from __future__ import annotations

import reprlib
from typing import Any

from gpurt.errors import GPUError
from gpurt.runtime.files import brief_path

# Names and values come from the file and may be megabytes long; an error shows this much of one.
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 120
_brief.maxlist = _brief.maxtuple = 8


class WeightsError(GPUError, ValueError):
    """A file of weights that is missing, malformed, inconsistent or changed while it was read.

    Attributes:
        path: the file, or None.
        tensor: the name of the tensor that is wrong, or None when the trouble is with the file.
    """

    _extra = ("path", "tensor")

    def __init__(self, message: str, *, path: str | None = None, tensor: str | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.path = path
        self.tensor = tensor

    def __str__(self) -> str:
        where = [brief_path(self.path)] if self.path is not None else []
        if self.tensor is not None:
            where.append(f"tensor {shown(self.tensor)}")
        return ": ".join([*where, super().__str__()])


def shown(value: object) -> str:
    """Something that was read from a file, fit for one line of a message."""
    return _brief.repr(value)
