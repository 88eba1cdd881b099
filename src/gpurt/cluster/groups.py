"""Task groups, for callers who do not know that there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar, cast

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in the order of ``work``. The first error ends the rest, which is waited for, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failed:
        raise cast("tuple[BaseException, ...]", failed.exceptions)[0] from None
    return [task.result() for task in tasks]


def single(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error in ``failed``; ``failed`` itself when there are several."""
    inside = cast("tuple[BaseException, ...]", failed.exceptions)
    if len(inside) != 1:
        return failed
    (error,) = inside
    # Narrowing by isinstance forgets what the group is of.
    return single(cast("BaseExceptionGroup[BaseException]", error)) if hasattr(error, "exceptions") else error
