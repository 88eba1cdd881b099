"""Which devices the environment leaves visible, and the environment that shows a child exactly some of them. Pure.

::

    result = await service.discover_all_devices()
    child = env_for(["cuda:1"], result)
    subprocess.run(command, env=child)

:func:`resolve` answers the first question for devices described as :class:`Candidate`, :func:`env_for` the second for
what discovery found. The names are imported on first use: a quick discovery needs neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpurt.visibility.candidates import Candidate
    from gpurt.visibility.children import env_for
    from gpurt.visibility.resolver import Visibility, resolve

__all__ = ["Candidate", "Visibility", "env_for", "resolve"]

_HOMES = {"Candidate": "candidates", "Visibility": "resolver", "env_for": "children", "resolve": "resolver"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
