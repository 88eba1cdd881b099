"""Messages that no honest node sends: valid ones of every type with something wrong at any place, spelt as JSON can
spell it and worse."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, Final

from gpurt.cluster.envelope import EventKind
from tests.cluster.support import E1, device

EVIL: Final = "evil"


class Raw(str):
    """Stands in a document as it is, without quotation marks."""


HORRORS: Final[tuple[Any, ...]] = (
    *map(Raw, ("1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1" * 400, "-" + "9" * 400, "9" * 5000, "1e-400")),
    *map(
        Raw, ('"\\ud800"', '"\\udfff\\ud800 x"', '"a\\u0000b"', "[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300)
    ),
    Raw("[" * 150 + "1e999" + "]" * 150),
    Raw("[" * 100 + "1" + "]" * 100),
    *(0, -1, 1, -5, 2**31, 2**53, 2**53 + 1, 2**62, 2**63, 2**64 - 1, 2**64, 10**30, 1.5, -0.0, 1e308, -1e308, 5e-324),
    *(True, False, None, "", "x", "7", "1e400", "nan", "-1", "x" * 300, "x" * 5000, [], {}, [[]], [None], {"": None}),
    "\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "line\nforged: node joined w9\r\tend",
    "\u202egpj.exe\u2066\u200f\u061c",
    "\x00\x7f\x9b31m\x85\u2028\u2029\ufeff",
    "Z̸̢̛͎a̷l̵g̶o̴" * 50,
    "\U0001f4a9" * 100,
    "../../etc/passwd",
    "node/key",
    ["x"] * 5000,
    [{"device": "x"}] * 100,
    {f"k{number}": "v" for number in range(3000)},
    {"a": [1, {"b": Raw("1e999")}]},
)


def spell(value: Any) -> str:
    """JSON, with what stands for itself as it stands."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{spell(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spell, value)) + "]"
    return json.dumps(value)


DEVICE: Final = device(
    "GPU-e", speeds=None, numa_node=0, memory_usable_bytes=70 << 30, memory_pool_id="pool", state_reason="well"
).model_dump(mode="json") | {
    "speeds": {
        "backend": "cuda",
        "driver_version": "1",
        "measured_at": "2026-01-01T00:00:00Z",
        "to_device_gbps": 20.0,
        "memory_gbps": 2000.0,
        "fp32_tflops": 60.0,
        "bf16_tflops": 600.0,
        "load_gbps": 4.0,
        "load_together_gbps": 9.0,
        "notes": ["one"],
    }
}
FIELDS: Final = {
    "gpu_backend": "cuda",
    "gpu_discovery_timestamp": "2026-01-01T00:00:00Z",
    "primary_gpu_device_id": "cuda:0",
    "discovery_status": "complete",
    "draining": False,
}
REPORT: Final = {
    "name": "cuda",
    "status": "unavailable",
    "reason": "error",
    "message": "no",
    "elapsed_ms": 3.0,
    "hint": "try",
    "device_ids": ["cuda:0"],
}
SHARD: Final = {
    "instance": "a",
    "model": "m",
    "version": {"term": 1, "n": 2},
    "state": "loaded",
    "message": "well",
    "resident": [{"device": "GPU-e", "start": 0, "end": 2, "bytes": 5}],
}
PLACEMENT: Final = {"term": 3, "shards": [SHARD]}
LINK: Final = {
    "peer": "good",
    "round_trip_s": 0.001,
    "bandwidth": 1e9,
    "samples": 3,
    "measured_at": "2026-01-01T00:00:00Z",
}
LINKS: Final = {"endpoint": "tcp/10.0.0.1:1", "measured": [LINK]}


def snapshot_document() -> dict[str, Any]:
    host = {"hostname": "h", "fingerprint": "e" * 16, "boot_id": "b", "pid": 3, "system": "Linux", "python": "3.11"}
    return copy.deepcopy(
        {
            **FIELDS,
            "schema": 1,
            "node": EVIL,
            "epoch": str(E1),
            "seq": 0,
            "host": host,
            "gpu_devices": [DEVICE, {**DEVICE, "device_id": "cuda:1", "identity": None}],
            "reports": [REPORT],
            "placement": PLACEMENT,
            "links": LINKS,
        }
    )


def readings_document() -> dict[str, Any]:
    values = {
        "memory_total_bytes": 80 << 30,
        "memory_used_bytes": 1 << 30,
        "memory_free_bytes": 79 << 30,
        "memory_reserved_bytes": 0,
        "temperature_c": 40.0,
        "power_w": 300.0,
        "clock_mhz": 1500,
        "utilization_percent": 50.0,
        "unavailable": {"fan": "unsupported"},
        "age_s": 0.1,
        "contact": "healthy",
        "throttled": False,
    }
    both = [{**copy.deepcopy(values), "device": name} for name in ("GPU-e", "cuda:1")]
    return {"node": EVIL, "epoch": str(E1), "devices": both}


def event_document(seq: int, kind: str, data: dict[str, Any], subject: str | None = None) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": f"{EVIL}:{seq}",
        "source": f"gpurt://test/{EVIL}",
        "type": kind,
        "time": "2026-01-01T00:00:00Z",
        **({} if subject is None else {"subject": subject}),
        "datacontenttype": "application/json",
        "nodeid": EVIL,
        "nodeepoch": str(E1),
        "nodeseq": str(seq),
        "data": copy.deepcopy(data),
    }


def events(seq: int) -> dict[str, dict[str, Any]]:
    """One of each type."""
    of_device = {"device": DEVICE, "node": FIELDS, "reason": "because", "event": "changed"}
    snapshot = {**snapshot_document(), "seq": seq}
    return {
        "added": event_document(seq, EventKind.DEVICE_ADDED, of_device, "GPU-e"),
        "updated": event_document(seq, EventKind.DEVICE_UPDATED, of_device, "GPU-f"),
        "health": event_document(seq, EventKind.DEVICE_HEALTH, of_device, "GPU-e"),
        "removed": event_document(seq, EventKind.DEVICE_REMOVED, {"node": FIELDS, "reason": "gone"}, "GPU-f"),
        "snapshot": event_document(seq, EventKind.NODE_SNAPSHOT, snapshot),
        "selected": event_document(seq, EventKind.BACKEND_SELECTED, {"report": REPORT, "node": FIELDS}),
        "failed": event_document(seq, EventKind.BACKEND_FAILED, {"report": REPORT, "node": FIELDS}),
        "placement": event_document(seq, EventKind.NODE_PLACEMENT, {"placement": PLACEMENT, "node": FIELDS}),
        "links": event_document(seq, EventKind.NODE_LINKS, {"links": LINKS, "node": FIELDS}),
        "stranger": event_document(seq, "com.example.v9", {"any": [1, {"thing": "x"}]}),
    }


def places(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value in it."""
    found = [at] if at else []
    inner: Any = ()
    if isinstance(document, dict):
        inner = document.items()
    elif isinstance(document, list):
        inner = enumerate(document)
    for key, value in inner:
        found += places(value, (*at, key))
    return found


def horror(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(HORRORS))


def spoiled(document: dict[str, Any], draw: random.Random) -> str:
    """The document with one to four things wrong."""
    twice: list[tuple[str, str]] = []
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        place = draw.choice(places(document))
        holder: Any = document
        for key in place[:-1]:
            holder = holder[key]
        match draw.randrange(10):
            case 0:
                del holder[place[-1]]
            case 1 if isinstance(holder, dict):
                holder[draw.choice(("extra", "\x1b[1m", "schema", ""))] = horror(draw)
            case 2 if isinstance(holder, list):
                holder *= draw.choice((2, 300))
            case 3:
                twice.append((json.dumps(str(place[-1])) + ":", spell(horror(draw))))
            case _:
                holder[place[-1]] = horror(draw)
        if not document:
            break
    text = spell(document)
    for name, value in twice:
        text = text.replace(name, f"{name}{value},{name}", 1)
    if draw.random() < 0.02:
        text = text[: draw.randrange(len(text) + 1)]
    return text
