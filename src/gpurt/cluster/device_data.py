"""What an event of a device says of it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from gpurt.cluster.node_fields import NodeFields
from gpurt.types import GPUDevice


class DeviceData(BaseModel):
    """``data`` of an event that has a device, as a receiver sees it: checked while it is read, because reading it first
    and checking it then takes half as long again."""

    model_config = ConfigDict(frozen=True, extra="allow")

    device: GPUDevice
    node: NodeFields | None = None
    reason: Any = None

    @property
    def fields(self) -> NodeFields | None:
        """Those of the node; None where the event says nothing of them."""
        return NodeFields() if self.node is None and "node" in self.model_fields_set else self.node
