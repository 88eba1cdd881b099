"""What a node has measured of its ways to other nodes. Part of its state, told as a whole whenever it changes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from gpurt.cluster.shards import Name

MAX_LINKS: Final = 1024
"""That a node keeps; the oldest go first."""
WEIGHT: Final = 0.3
"""Of a new measurement against what was believed before: an exponentially weighted mean."""


class PeerLink(BaseModel):
    """From the node that tells it to ``peer``, over one TCP connection between the two, with TLS where the cluster has
    certificates. A lower bound of what the wire can do."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    peer: Name
    round_trip_s: float = Field(ge=0, allow_inf_nan=False)
    """Of eight bytes: the median of the probe's."""
    bandwidth: float = Field(gt=0, allow_inf_nan=False)
    """Bytes/s, to the peer."""
    samples: int = Field(ge=1)
    """Measurements in the mean."""
    measured_at: AwareDatetime
    """The newest of them, by the node's clock."""


class NodeLinks(BaseModel):
    """How others reach the node, and what it knows of its ways to them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    endpoint: str | None = Field(default=None, max_length=512)
    """``tcp/HOST:PORT`` or ``tls/HOST:PORT`` where others may measure; None: nowhere."""
    measured: Annotated[tuple[PeerLink, ...], Field(max_length=MAX_LINKS)] = ()

    def to(self, peer: str) -> PeerLink | None:
        return next((link for link in self.measured if link.peer == peer), None)

    def with_sample(self, peer: str, round_trip_s: float, bandwidth: float, at: datetime | None = None) -> NodeLinks:
        """One more measurement folded in."""
        before = self.to(peer)
        old = (round_trip_s, bandwidth, 0) if before is None else (*_figures(before), before.samples)
        link = PeerLink(
            peer=peer,
            round_trip_s=old[0] + WEIGHT * (round_trip_s - old[0]),
            bandwidth=old[1] + WEIGHT * (bandwidth - old[1]),
            samples=old[2] + 1,
            measured_at=at or datetime.now(UTC),
        )
        others = [each for each in self.measured if each.peer != peer]
        return self.model_copy(update={"measured": (*others[-(MAX_LINKS - 1) :], link)})


def _figures(link: PeerLink) -> tuple[float, float]:
    return link.round_trip_s, link.bandwidth
