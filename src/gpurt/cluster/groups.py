"""Errors of task groups, for callers who do not know that there is one."""

from __future__ import annotations

from typing import cast


def single(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error in ``failed``; ``failed`` itself when there are several."""
    inside = cast("tuple[BaseException, ...]", failed.exceptions)
    if len(inside) != 1:
        return failed
    (error,) = inside
    # Narrowing by isinstance forgets what the group is of.
    return single(cast("BaseExceptionGroup[BaseException]", error)) if hasattr(error, "exceptions") else error
