"""Nodes that send as much as they can, over a zenoh session of their own. Each prints READY, and ends when its standard
input does."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, Final

import zenoh

from gpurt.cluster.keys import node_key
from tests.cluster.hostile import snapshot_document, spell

CLUSTER: Final = "test"


def opened(endpoint: str) -> Any:
    config = zenoh.Config()
    for key, value in {"mode": "client", "connect/endpoints": [endpoint], "scouting/multicast/enabled": False}.items():
        config.insert_json5(key, json.dumps(value))
    return zenoh.open(config)


def garbage(endpoint: str, name: str, size: str) -> None:
    """Events and readings that are none, of random sizes up to ``size``, as fast as they go."""
    session = opened(endpoint)
    token = session.liveliness().declare_token(node_key(CLUSTER, name, "live"))
    keys = [node_key(CLUSTER, name, leaf) for leaf in ("ev", "telemetry")]
    payloads = [os.urandom(int(size) >> shift) for shift in range(6)] + [b'{"nodeid":"x"}', b"[" * 100, b'{"a":1e400}']
    print("READY", flush=True)
    while token is not None:
        for payload in payloads:
            for key in keys:
                session.put(key, payload, congestion_control=zenoh.CongestionControl.BLOCK)


def chatter(endpoint: str, name: str, replies: str) -> None:
    """Answers each question for its state ``replies`` times, with 4 MiB."""
    session = opened(endpoint)
    key = node_key(CLUSTER, name, "state")
    state = spell({**snapshot_document(), "node": name, "extra": "x" * (4_000_000)}).encode()

    def answer(query: Any) -> None:
        for _ in range(int(replies)):
            query.reply(key, state)

    kept = session.declare_queryable(key, answer), session.liveliness().declare_token(node_key(CLUSTER, name, "live"))
    print("READY", flush=True)
    threading.Event().wait()
    del kept


PROGRAMS: Final = {each.__name__: each for each in (garbage, chatter)}


def main() -> None:
    name, *arguments = sys.argv[1:]
    threading.Thread(target=PROGRAMS[name], args=arguments, daemon=True).start()
    sys.stdin.read()
    os._exit(0)  # the flood does not end by itself


if __name__ == "__main__":
    main()
