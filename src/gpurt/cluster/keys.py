"""Names on the bus: ``gpurt/v1/{cluster}/node/{node}/{leaf}``.

Names are restricted to what is safe as one chunk of a zenoh key expression, as a token of a NATS subject and as
the common name of a certificate.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from gpurt.cluster.errors import InvalidName

ROOT: Final = "gpurt/v1"
EVENTS: Final = "ev"
STATE: Final = "state"
LIVE: Final = "live"
COMMAND: Final = "cmd"
TELEMETRY: Final = "telemetry"
"""Readings, best effort: no order, no repetition, no history."""
LEAVING: Final = "leaving"
"""A token that a node shows while it takes back ``LIVE``: it leaves, it has not died."""
FLUSH: Final = "flush"
"""Nobody answers here: a question to it only travels behind what was sent before."""

ANY: Final = "*"
"""In place of a node: every node of the cluster."""

RESERVED: Final = frozenset({"all", "any", "authority", "hub", "master", "observer"})
"""Names that no participant has: they mean a role, or everybody. Compared without regard to case."""

_NAME: Final = re.compile(r"[a-z0-9_-]{1,64}")


def check_name(name: str, what: str) -> str:
    """``name`` itself when it is 1 to 64 of ``a-z 0-9 _ -``, and for a node none of ``RESERVED``.

    Raises:
        InvalidName: otherwise; ``what`` ("node", "cluster") says which name it was.
    """
    if isinstance(name, str) and what == "node" and name.casefold() in RESERVED:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidName(
            f"node name {name!r} is reserved", hint=f"choose another; reserved are {', '.join(sorted(RESERVED))}"
        )
    # The type says str; configuration files and command lines say otherwise.
    if not isinstance(name, str) or not _NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidName(
            f"{what} name {name!r} is not valid", hint="use 1 to 64 of lower-case letters, digits, '-' and '_'"
        )
    return name


def node_key(cluster: str, node: str, leaf: str) -> str:
    """The key of one leaf (``EVENTS STATE LIVE LEAVING COMMAND TELEMETRY FLUSH``) of a node, or of every node with
    ``ANY``.

    Raises:
        InvalidName: cluster or node.
    """
    if node != ANY:
        check_name(node, "node")
    return f"{ROOT}/{check_name(cluster, 'cluster')}/node/{node}/{leaf}"


@lru_cache(maxsize=8192)  # every event says it
def node_of(key: str) -> str:
    """The node that a key belongs to.

    Raises:
        InvalidName: not a key of a node.
    """
    chunks = key.split("/")
    if len(chunks) != 6 or "/".join(chunks[:2]) != ROOT or chunks[3] != "node":
        raise InvalidName(f"key {key!r} does not belong to a node")
    return check_name(chunks[4], "node")


def leaf_of(key: str) -> str:
    """The last chunk of a node's key."""
    return key.rpartition("/")[2]
