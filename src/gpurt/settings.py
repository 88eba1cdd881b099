"""The environment variables that choose a backend, read in one place and checked.

================  =====================  =======================================================================
variable          alias                  meaning
================  =====================  =======================================================================
GPURT_BACKEND     AITBC_GPU_BACKEND      use this backend or fail; ``auto`` (default) chooses
GPURT_FALLBACK    AITBC_GPU_FALLBACK     0: with automatic choice, fail instead of falling back to ``cpu``
GPURT_PLUGINS     none                    0: load no third-party backends
================  =====================  =======================================================================

An empty variable counts as unset, and a variable wins over its alias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpurt.errors import GPUError
from gpurt.printable import quoted, shortened

BACKEND_VARIABLES: Final = ("GPURT_BACKEND", "AITBC_GPU_BACKEND")
FALLBACK_VARIABLES: Final = ("GPURT_FALLBACK", "AITBC_GPU_FALLBACK")
PLUGINS_VARIABLES: Final = ("GPURT_PLUGINS",)

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_ALIASES: Final = {"apple_silicon": "metal"}


@dataclass(frozen=True, slots=True)
class SelectionSettings:
    """What the environment asks for."""

    backend: str | None = None
    """The backend that must be used, or None for automatic choice."""
    backend_source: str | None = None
    """``"GPURT_BACKEND=cuda"``: for error messages."""
    fallback: bool = True
    plugins: bool = True

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SelectionSettings:
        """Read and check the variables. Whether a backend of that name exists is found out when it is used.

        Raises:
            GPUError: a boolean variable has another value than the allowed ones.
        """
        variable, text = _first(environ, BACKEND_VARIABLES)
        backend = canonical_name(text) if text is not None else None
        if backend == "auto":
            backend = None
        return cls(
            backend=backend,
            backend_source=f"{variable}={shortened(text or '')}" if backend else None,
            fallback=_boolean(environ, FALLBACK_VARIABLES),
            plugins=_boolean(environ, PLUGINS_VARIABLES),
        )


def canonical_name(name: str) -> str:
    """The short backend name for what a user wrote: lower case, ``apple_silicon`` is ``metal``."""
    name = name.strip().lower()
    return _ALIASES.get(name, name)


def _first(environ: Mapping[str, str], variables: tuple[str, ...]) -> tuple[str | None, str | None]:
    for variable in variables:
        text = environ.get(variable, "").strip()
        if text:
            return variable, text
    return None, None


def _boolean(environ: Mapping[str, str], variables: tuple[str, ...]) -> bool:
    """All switches are on unless switched off."""
    variable, text = _first(environ, variables)
    if text is None or text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise GPUError(
        f"{variable}={quoted(text)} is neither true nor false",
        hint="use one of 1 true yes on, 0 false no off, or unset it",
    )
