"""The hub as its clients see it: when it goes away and is there again, and what it answers to who asks at its door.

Nothing fails meanwhile: events wait and are repeated. But a worker that nobody can see should not look healthy to
who started it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from gpurt.cluster.connection import connection_log
from gpurt.cluster.errors import InvalidName, MalformedEvent
from gpurt.cluster.keys import ANY, ROOT, check_name
from gpurt.cluster.message_limits import strict_json
from gpurt.cluster.security.protection import Protection
from gpurt.cluster.zenoh_callbacks import SessionCallbacks

MAX_ADMISSION_BYTES: Final = 1024

_log = logging.getLogger("gpurt.cluster.zenoh")


def watch_hub(
    session: Any,
    callbacks: SessionCallbacks,
    endpoint: str,
    opened: Any,
    in_use: Callable[[], bool],
    trouble: Callable[[], str | None] | None = None,
    tell: Callable[[bool], None] | None = None,
) -> None:
    """Watch until ``session`` is closed. A client has one connection, that to its hub.

    Args:
        opened: the kind of an event that tells of an opened connection.
        in_use: False once the session is being closed, when the end of its connection is no news.
        trouble: what on this side may have ended the connection; called on a thread of zenoh.
        tell: called there with False when the hub is away, and with True when it is there again.
    """
    away = False

    def changed(event: Any) -> None:  # on a thread of zenoh, one event at a time
        nonlocal away
        if event.kind == opened:
            if away:
                connection_log.info("connected to the hub at %s again", endpoint)
                if tell is not None:
                    tell(True)
            away = False
        elif in_use():
            away = True
            if tell is not None:
                tell(False)
            why = None if trouble is None else trouble()
            _log.warning("the hub at %s went away; waiting until it is back%s", endpoint, f" ({why})" if why else "")

    # Without a handle to hold: in the background it lives as long as the session.
    session.info.declare_transport_events_listener(callbacks.wrap(changed))


@dataclass(frozen=True, slots=True)
class Admission:
    """What a hub says to who asks at its door."""

    cluster: str
    listed: bool
    """The name is on its roster, or it has none."""


def door_key(cluster: str, name: str) -> str:
    return f"{ROOT}/{cluster}/door/{name}"


def admission_of(payload: bytes) -> Admission | None:
    """None: it is no answer of a hub."""
    with suppress(MalformedEvent, InvalidName, KeyError, TypeError):
        document = strict_json(payload, "answer of a hub")
        return Admission(check_name(document["cluster"], "cluster"), document["listed"] is True)
    return None


def answer_at_door(session: Any, callbacks: SessionCallbacks, cluster: str, protection: Protection | None) -> None:
    """Have the hub say, until ``session`` is closed, which cluster it is of and whether a name is on its roster.

    A node that the hub lets in and does not listen to would else only see that nobody asks for it. Without certificates
    everybody may ask in the name of any cluster; with them only who has one of this cluster's authority.
    """

    def answer(query: Any) -> None:  # on a thread of zenoh
        with query:
            name = str(query.key_expr).rpartition("/")[2]
            known = protection is None or name in protection.roster
            query.reply(query.key_expr, json.dumps({"cluster": cluster, "listed": known}).encode())

    # A cluster's name in the question is only for access control: whoever may ask at all is answered.
    asked_of = ANY if protection is None else cluster
    # Without a handle to hold: in the background it lives as long as the session.
    session.declare_queryable(door_key(asked_of, ANY), callbacks.wrap(answer))
