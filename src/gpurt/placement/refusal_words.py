"""What cannot be kept, as one sentence."""

from __future__ import annotations

from typing import Final

from gpurt.placement.constraints import Constraints
from gpurt.placement.infeasibility import ConstraintKind, FilterReason, InfeasibilityReport, finding_room
from gpurt.placement.rule_words import joined, limit_words, pin_words
from gpurt.placement.words import counted, listed, size_words

Kind = ConstraintKind

_NUMBERS: Final = (Kind.TENSOR_PARALLEL_MAX, Kind.MAX_STAGES, Kind.MIN_STAGES, Kind.MAX_NODES, Kind.MIN_NODES)
_NO_ROOM: Final = (FilterReason.TOO_SMALL, FilterReason.NO_MEMORY)


def refusal_sentence(report: InfeasibilityReport, rules: Constraints) -> str:
    """For the constraint of a report, without a full stop."""
    kind = report.constraint
    if kind is Kind.DEVICES:
        many = len(report.filtered)
        return f"none of the {many:,} devices can take part" if many > 1 else "the only device cannot take part"
    if kind is Kind.LAYER:
        return (
            f"the largest layer takes {size_words(report.largest_layer_bytes)}, and the largest device has "
            f"{size_words(report.largest_device_bytes)}"
        )
    if kind is Kind.MEMORY:
        return (
            f"{size_words(report.need_bytes)} are needed and {size_words(report.usable_bytes)} usable, "
            f"{size_words(report.short_bytes)} short; {report.room()}"
        )
    if kind is Kind.LAYERS:
        return report.room()
    if kind is Kind.ENDS:
        return report.room() if report.unplaced else f"{_found(report)} beside the embedding and the head"
    if kind is Kind.CAPABILITY:
        return "some layers find no room on the devices that can compute them"
    if kind is Kind.LINKS:
        return f"no devices that all reach each other hold the whole model{_beside(kind, rules)}"
    if kind is Kind.MAX_LINK_SECONDS:
        limit = f"max_link_seconds {rules.max_link_seconds:g}"
        return f"no devices that hand over to each other within {limit} hold the whole model{_beside(kind, rules)}"
    return _of_rule(report, rules)


def _beside(kind: ConstraintKind, rules: Constraints) -> str:
    """That rules looked at before this one count, too: alone some devices may well hold the model."""
    before = list(Kind)[: list(Kind).index(kind)]
    plain = Constraints()
    given = any(getattr(rules, each.value, None) != getattr(plain, each.value, None) for each in before)
    return " under the other rules" if given else ""


def _found(report: InfeasibilityReport) -> str:
    return finding_room(report.placeable_layers, report.layers)


def _of_rule(report: InfeasibilityReport, rules: Constraints) -> str:
    kind = report.constraint
    if kind in _NUMBERS or kind is Kind.DOMAIN_LIMITS:
        limits = f"{kind.value} {getattr(rules, kind.value):,}" if kind in _NUMBERS else ""
        limits = limits or joined(map(limit_words, rules.domain_limits))
        if report.short_layers and not report.unplaced:
            return f"with {limits} only {_found(report)}"
        return f"{limits} cannot be kept"
    if kind in (Kind.REQUIRE_DEVICES, Kind.REQUIRE_NODES):
        names = sorted(rules.require_devices | rules.require_nodes)
        small = [
            each.device for each in report.filtered if each.reason in _NO_ROOM and each.device in rules.require_devices
        ]
        if small:
            are, have = ("is", "has") if len(small) == 1 else ("are", "have")
            return f"{listed(small)} {are} required, and {have} no room for one layer"
        return f"{listed(names)} cannot {'all ' if len(names) > 1 else ''}be used as required"
    if kind is Kind.PINS:
        if len(rules.pins) == 1:
            return f"{pin_words(rules.pins[0])} cannot be kept"
        return f"the {counted(len(rules.pins), 'pin')} cannot all be kept"
    if kind is Kind.SAME_BACKEND:
        return f"no devices of one backend hold the whole model{_beside(kind, rules)}"
    return f"what stage_layers says of {listed(sorted(entry.device for entry in rules.stage_layers))} cannot be kept"
