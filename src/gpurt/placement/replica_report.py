"""Why there are not as many replicas as were asked for, and what would help."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpurt.placement.infeasibility import Relaxation
from gpurt.placement.record import PlacementRecord
from gpurt.placement.words import counted, size_words


class ReplicaReport(PlacementRecord):
    """What :class:`~gpurt.placement.InfeasiblePlacement` carries where one pipeline has a plan and several have not."""

    model: str
    constraint: Literal["replicas"] = "replicas"
    message: str
    """One sentence with figures."""
    replicas: int = Field(ge=2)
    """Asked for."""
    most_replicas: int = Field(ge=1)
    """So many have plans; there may be plans for more of them, but never for ``replicas``."""
    domain: str | None
    """Of what no two replicas may use the same one; None: devices."""
    parts: int = Field(ge=0)
    """Domains, devices, and devices that share their memory, of which each serves one replica at most."""
    need_bytes: int = Field(ge=0)
    """Weights and cache of all replicas."""
    usable_bytes: int = Field(ge=0)
    """Of all devices that may be used, after reserve and overhead, shared memory counted once."""
    short_bytes: int = Field(ge=0)
    relaxations: tuple[Relaxation, ...]
    """Each alone is enough: see :func:`gpurt.placement.apply_relaxation`."""
    without_domain: bool
    """There are plans for all replicas where they may share a ``domain``."""
    complete: bool
    """Every kind of change was tried to the end; else time was short."""

    def explain(self) -> str:
        """Lines for people: what cannot be, how much is missing, and what would help."""
        lines = [f"No plan for {self.model}: {self.message}."]
        short = f": {size_words(self.short_bytes)} short." if self.short_bytes else "."
        lines.append(
            f"{counted(self.replicas, 'replica')} take {size_words(self.need_bytes)}, and "
            f"{size_words(self.usable_bytes)} are usable{short}"
        )
        lines.append("Any one of these changes makes it possible:")
        lines.append(f"  - place {counted(self.most_replicas, 'replica')} instead of {self.replicas:,}")
        if self.without_domain:
            lines.append(f"  - let replicas share a {self.domain}")
        lines += [f"  - {change.change}" + ("" if change.minimal else " (less may do)") for change in self.relaxations]
        if not self.complete:
            lines.append("Not every change was tried: time was short.")
        return "\n".join(lines)
