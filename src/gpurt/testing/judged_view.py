"""A master view that judges what it is given, and can be compared with what is true of the nodes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from gpurt.cluster.envelope import Envelope
from gpurt.cluster.state import NodeSnapshot
from gpurt.cluster.view import MasterView
from gpurt.types import GPUDevice


class JudgedView(MasterView):
    """Counts what must not happen: an event that does not follow on what the view holds of its node, and a snapshot
    that takes it back."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: Counter[str] = Counter()
        self.applied = 0
        self.contained = 0
        """Events that came with a snapshot instead of one by one."""

    def apply_event(self, event: Envelope) -> bool:
        record = self.node(event.nodeid)
        if record is not None:
            epoch, seq = event.position
            if str(epoch) != record.epoch:
                self.faults["of another run"] += 1
            elif seq <= record.seq:
                self.faults["twice"] += 1
            elif seq > record.seq + 1:
                self.faults["lost"] += seq - record.seq - 1
        self.applied += 1
        return super().apply_event(event)

    def apply_snapshot(self, snapshot: NodeSnapshot, *, sole: bool = False) -> bool:
        record = self.node(snapshot.node)
        if record is not None and record.epoch == snapshot.epoch:
            if snapshot.seq < record.seq:
                self.faults["taken back"] += 1
            self.contained += max(0, snapshot.seq - record.seq)
        return super().apply_snapshot(snapshot, sole=sole)

    def picture(self) -> dict[str, list[Any]]:
        """State, epoch, number of the last event and digest of the devices, by node."""
        return {
            name: [record.state, record.epoch, record.seq, digest(record.gpu_devices)]
            for name, record in self.snapshot().nodes.items()
        }


def digest(devices: Iterable[GPUDevice]) -> str:
    """Of all that is said of these devices."""
    said = sorted(device.model_dump_json() for device in devices)
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]
