"""Streams of MLX that outlive the thread that works on them."""

from __future__ import annotations

import threading
from typing import Any, Final

_lock: Final = threading.Lock()
_idle: Final[list[tuple[Any, Any]]] = []
"""Device and stream."""


def take_stream(mx: Any, device: Any) -> Any:
    """A stream that nobody uses, for one thread at a time.

    A thread's default stream would cost the process a thread of MLX's for every lane that ever was: MLX never ends one,
    and who clears a thread's streams cannot use that thread again.
    """
    with _lock:
        for place, (owner, stream) in enumerate(_idle):
            if owner == device:
                del _idle[place]
                return stream
    return mx.new_thread_unsafe_stream(device)


def give_back_stream(device: Any, stream: Any) -> None:
    """Nothing is under way on it."""
    with _lock:
        _idle.append((device, stream))
