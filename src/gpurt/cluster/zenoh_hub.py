"""Tells, in the log, when a client's hub goes away and when it is there again.

Nothing fails meanwhile: events wait and are repeated. But a worker that nobody can see should not look healthy to
who started it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from gpurt.cluster.connection import connection_log
from gpurt.cluster.zenoh_callbacks import SessionCallbacks

_log = logging.getLogger("gpurt.cluster.zenoh")


def watch_hub(
    session: Any,
    callbacks: SessionCallbacks,
    endpoint: str,
    opened: Any,
    in_use: Callable[[], bool],
    trouble: Callable[[], str | None] | None = None,
) -> None:
    """Watch until ``session`` is closed. A client has one connection, that to its hub.

    Args:
        opened: the kind of an event that tells of an opened connection.
        in_use: False once the session is being closed, when the end of its connection is no news.
        trouble: what on this side may have ended the connection; called on a thread of zenoh.
    """
    away = False

    def changed(event: Any) -> None:  # on a thread of zenoh, one event at a time
        nonlocal away
        if event.kind == opened:
            if away:
                connection_log.info("connected to the hub at %s again", endpoint)
            away = False
        elif in_use():
            away = True
            why = None if trouble is None else trouble()
            _log.warning("the hub at %s went away; waiting until it is back%s", endpoint, f" ({why})" if why else "")

    # Without a handle to hold: in the background it lives as long as the session.
    session.info.declare_transport_events_listener(callbacks.wrap(changed))
