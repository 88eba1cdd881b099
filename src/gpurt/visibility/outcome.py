"""What the variables of one vendor say about its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Outcome:
    """The fields are those of :class:`gpurt.visibility.Visibility`."""

    visible: tuple[str, ...] = ()
    hidden: Mapping[str, str] = field(default_factory=dict[str, str])
    uncertain: Mapping[str, str] = field(default_factory=dict[str, str])
    order: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    hidden_from: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    warnings: tuple[str, ...] = ()

    def joined(self, other: Outcome) -> Outcome:
        """Both together; they speak of different devices or different interfaces."""
        return Outcome(
            visible=self.visible + other.visible,
            hidden={**self.hidden, **other.hidden},
            uncertain={**self.uncertain, **other.uncertain},
            order={**self.order, **other.order},
            hidden_from={**self.hidden_from, **other.hidden_from},
            warnings=self.warnings + other.warnings,
        )
