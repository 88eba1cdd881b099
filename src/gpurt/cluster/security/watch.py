"""Tells, in the log of a hub, whose certificates connect."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from gpurt.cluster.security.authority import Role
from gpurt.cluster.zenoh_callbacks import SessionCallbacks

_log = logging.getLogger("gpurt.cluster.security")


def watch_links(session: Any, callbacks: SessionCallbacks, opened: Any, roster: Mapping[str, Role]) -> None:
    """Watch until ``session`` is closed.

    Args:
        opened: the kind of an event that tells of an opened link.
    """

    def changed(event: Any) -> None:  # on a thread of zenoh
        if event.kind != opened:
            return
        link = event.link
        name = str(link.auth_identifier)
        role = roster.get(name)
        if role is None:
            _log.warning(
                "%r has a certificate of this cluster, but is not on the roster, and is let say and hear nothing "
                "(from %s). If it was enrolled since this hub was started: start the hub again with the new roster",
                name[:64],
                link.dst,
            )
        else:
            _log.info("%s %s is connected from %s", role, name, link.dst)

    # Without a handle to hold: in the background it lives as long as the session.
    session.info.declare_link_events_listener(callbacks.wrap(changed), history=True)
