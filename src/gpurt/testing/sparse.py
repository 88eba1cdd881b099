"""Device memory that costs nothing until it is written: pages of host memory on demand.

An 80 GiB allocation fits a laptop as long as only a part of it is used; a byte never written reads as 0. Copies
are a few native calls per page and release the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Page: TypeAlias = NDArray[np.uint8]

PAGE_BYTES = 1 << 20
"""Unit in which it becomes host memory: large enough that a copy is a few native calls."""


class MemoryReleased(RuntimeError):
    """The memory went away under a copy."""


class HostBudget:
    """How much host memory all pages together may take. Its lock also guards the page tables."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.lock = threading.Lock()


class SparseMemory:
    """One allocation of ``size`` bytes. No two calls that touch the same bytes may run at once."""

    def __init__(self, size: int, budget: HostBudget) -> None:
        self.size = size
        self._budget = budget
        self._pages: dict[int, Page] = {}
        self._released = False

    def write(self, offset: int, src: memoryview) -> None:
        """Copy ``src`` to ``offset``.

        Raises:
            RuntimeError: over the budget. MemoryReleased.
        """
        import numpy as np

        for number, start, begin, end in _pages(offset, len(src)):
            np.copyto(self._page(number)[start : start + end - begin], np.frombuffer(src[begin:end], np.uint8))

    def read(self, offset: int, dst: memoryview) -> None:
        """Fill ``dst`` from ``offset``."""
        import numpy as np

        for number, start, begin, end in _pages(offset, len(dst)):
            target = np.frombuffer(dst[begin:end], np.uint8)
            page = self._pages.get(number)
            if page is None:
                target.fill(0)
            else:
                np.copyto(target, page[start : start + end - begin])

    def release(self) -> None:
        """Give the pages back. Idempotent; later writes raise."""
        with self._budget.lock:
            self._released = True
            self._budget.used_bytes -= sum(page.nbytes for page in self._pages.values())
            # A new table, because a read may still be looking at the old one.
            self._pages = {}

    def _page(self, number: int) -> Page:
        import numpy as np

        budget = self._budget
        with budget.lock:
            if self._released:
                raise MemoryReleased("the memory was released during the copy")
            page = self._pages.get(number)
            if page is None:
                size = min(PAGE_BYTES, self.size - number * PAGE_BYTES)
                if budget.used_bytes + size > budget.limit_bytes:
                    raise RuntimeError(
                        f"{budget.used_bytes} of {budget.limit_bytes} bytes of host memory behind the simulation are "
                        "written: pass a larger real_bytes_limit"
                    )
                page = self._pages[number] = np.zeros(size, np.uint8)
                budget.used_bytes += size
            return page


def _pages(offset: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
    """The pages that ``nbytes`` at ``offset`` touch: page number, start in the page, begin and end in the data."""
    done = 0
    while done < nbytes:
        number, start = divmod(offset + done, PAGE_BYTES)
        end = min(nbytes, done + PAGE_BYTES - start)
        yield number, start, done, end
        done = end
