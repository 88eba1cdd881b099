"""Callbacks of a zenoh session, and the end of their threads.

zenoh runs each callback on a native thread, which takes the GIL a last time, to let go of the callback, after whatever
used it was undeclared. An interpreter that is ending by then stops the thread inside native code, and the C library
aborts the process ("FATAL: exception not rethrown"): one Ctrl-C in seven, on a busy machine. So who closes a session
waits for its callbacks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

END_TIMEOUT_S: Final = 1.0
"""They end within a millisecond, unless one is in a call that hangs."""


class SessionCallbacks:
    """Counts the callbacks of one session. Safe to use from any thread."""

    def __init__(self, zenoh: Any) -> None:
        self._zenoh = zenoh
        self._alive = 0
        self._changed = threading.Condition()

    def drain(self, handler: Any, take: Callable[[Any], object]) -> None:
        """Have a thread give every item of ``handler``, which is a channel's, to ``take``, until it is undeclared.

        For what comes in thousands a second: a callback takes the GIL anew for each item, and beside a busy loop each
        time costs as much as the event. This thread keeps it while there are items, as long as the interpreter lets it.
        """

        def run() -> None:
            try:
                with suppress(self._zenoh.ZError):  # no more items will come
                    while True:
                        take(handler.recv())
                        while (item := handler.try_recv()) is not None:
                            take(item)
            finally:
                self._ended()

        with self._changed:
            self._alive += 1
        threading.Thread(target=run, name="gpurt:zenoh:events", daemon=True).start()

    def wrap(self, call: Callable[[Any], object], *, on_end: Callable[[], object] | None = None) -> Any:
        """``call`` as zenoh takes it; ``on_end`` is called on zenoh's thread when it will be called no more."""

        def end() -> None:
            try:
                if on_end is not None:
                    on_end()
            finally:
                self._ended()

        with self._changed:
            self._alive += 1
        return self._zenoh.handlers.Callback(call, end)

    def wait(self, timeout: float = END_TIMEOUT_S) -> bool:
        """Block until every callback has ended, or ``timeout`` seconds; whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._alive == 0, timeout)

    def _ended(self) -> None:
        with self._changed:
            self._alive -= 1
            self._changed.notify_all()
