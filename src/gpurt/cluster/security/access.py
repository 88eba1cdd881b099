"""What each participant may send through the hub, as zenoh's access control takes it.

The hub knows a participant by the common name of its certificate, and by nothing else: a zenoh id is whatever its owner
says. What no rule allows is refused. Rules are for what comes in; what the hub sends on is limited by that, because
nobody gets what it could not ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpurt.cluster.keys import ANY, EVENTS, ROOT, STATE, TELEMETRY, node_key
from gpurt.cluster.security.authority import Role

_WRITE: Final = ("put", "delete", "declare_queryable", "reply", "liveliness_token")
_READ: Final = ("declare_subscriber", "query", "liveliness_query", "declare_liveliness_subscriber")
_RULES: Final[Mapping[Role, Sequence[str]]] = {
    Role.NODE: ("sent-on", "heard"),
    Role.OBSERVER: ("sent-on", "heard", "watching", "membership"),
    Role.MASTER: ("sent-on", "everything", "speaking"),
}
"""Of everybody in a role; a node has one of its own besides."""


def _whole(tree: str) -> list[str]:
    """Every key below ``tree``, also those at which publishers repeat what was lost: only its like matches a chunk that
    begins with @."""
    return [f"{tree}/**", f"{tree}/**/@adv/**"]


def access_control(cluster: str, roster: Mapping[str, Role]) -> dict[str, Any]:
    """zenoh's ``access_control`` for the hub of ``cluster``.

    Args:
        roster: everybody who may connect, by common name.
    """
    rules: list[dict[str, Any]] = []
    subjects: list[dict[str, Any]] = []
    policies: list[dict[str, Any]] = []

    def rule(name: str, messages: Sequence[str], keys: Sequence[str], flow: str = "ingress") -> None:
        entry = {"id": name, "permission": "allow", "flows": [flow], "messages": messages, "key_exprs": keys}
        rules.append(entry)

    tree = f"{ROOT}/{cluster}"
    spoken = [*_whole(f"{tree}/master"), *_whole(f"{tree}/placement")]
    events, readings, state = (node_key(cluster, ANY, leaf) for leaf in (EVENTS, TELEMETRY, STATE))
    rule("sent-on", [*_WRITE, *_READ], _whole(tree), flow="egress")
    rule("heard", _READ, spoken)
    rule("watching", _READ, [events, f"{events}/@adv/**", readings, state])
    # All tokens at once: two subscriptions would bring those that come and those that leave in no order.
    rule("membership", ["liveliness_query", "declare_liveliness_subscriber"], [node_key(cluster, ANY, ANY)])
    rule("everything", _READ, _whole(tree))
    rule("speaking", _WRITE, spoken)
    # Whoever has a certificate of the authority may ask whether the hub knows its name: else it would wait in vain.
    door = [f"{tree}/door/*"]
    rule("asking", ["query"], door)
    rule("answered", ["reply", "declare_queryable"], door, flow="egress")
    subjects.append({"id": "anybody"})
    policies.append({"rules": ["asking", "answered"], "subjects": ["anybody"]})
    for name, role in roster.items():
        if role is Role.HUB:
            continue  # its own session passes no link
        given = [*_RULES[role]]
        if role is Role.NODE:
            own = f"own-{name}"
            rule(own, [*_WRITE, "query"], _whole(node_key(cluster, name, "")[:-1]))
            given.append(own)
        subjects.append({"id": name, "cert_common_names": [name]})
        policies.append({"rules": given, "subjects": [name]})
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": subjects,
        "policies": policies,
    }
