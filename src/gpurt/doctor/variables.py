"""Variables under our prefix that nobody reads: most of them are a name with a letter missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

KNOWN: Final = (
    "GPURT_BACKEND",
    "GPURT_FALLBACK",
    "GPURT_HEALTH_XIDS",
    "GPURT_MEMORY_LIMIT",
    "GPURT_MEMORY_RESERVE",
    "GPURT_PLUGINS",
    "GPURT_PROBE_PATH",
    "GPURT_PROBE_TOKEN",
    "GPURT_TEST_REQUIRE",
    "GPURT_THERMAL_LIMIT",
)
"""Every variable of gpurt's own; a plug-in may have others."""
_PREFIXES: Final = ("GPURT_", "GPUR_", "GPRT_", "GRUPT_")
_OF_TESTS: Final = "GPURT_TEST_"
_LIKENESS: Final = 0.85
"""Of two names by :func:`difflib.get_close_matches`: one letter in a dozen is wrong, or two have changed places."""


def unknown_variables(names: Iterable[str]) -> dict[str, str | None]:
    """Names of variables that look like ours and are not, each with the one that was meant, if that can be told."""
    unknown = sorted(name for name in names if _looks_like_ours(name) and name not in KNOWN)
    if not unknown:
        return {}
    from difflib import get_close_matches

    return {name: next(iter(get_close_matches(name.upper(), KNOWN, 1, _LIKENESS)), None) for name in unknown}


def _looks_like_ours(name: str) -> bool:
    return name.upper().startswith(_PREFIXES) and not name.startswith(_OF_TESTS)
