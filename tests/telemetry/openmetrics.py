"""A strict reader of the OpenMetrics text format 1.0, written from its specification's grammar."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
_ESCAPED = r'(?:[^\n"\\]|\\["\\n])*'
_LABEL = rf'[a-zA-Z_][a-zA-Z0-9_]*="{_ESCAPED}"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{((?:{_LABEL})?(?:,{_LABEL})*)\}})? (-?(?:[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?))")
_DESCRIPTOR = re.compile(rf"# (TYPE|UNIT|HELP) ({_NAME}) ({_ESCAPED})")
_LABELS = re.compile(rf'([a-zA-Z_][a-zA-Z0-9_]*)="({_ESCAPED})"')
_SUFFIX = {"counter": "_total", "gauge": ""}


@dataclass
class MetricFamily:
    kind: str = "unknown"
    unit: str = ""
    help: str = ""
    samples: dict[frozenset[tuple[str, str]], float] = field(default_factory=dict)

    def value(self, **labels: str) -> float | None:
        return self.samples.get(frozenset(labels.items()))


def parse(text: str) -> dict[str, MetricFamily]:
    """Families by name. Raises ValueError for anything that the grammar does not have."""
    families: dict[str, MetricFamily] = {}
    current = ""
    lines = text.split("\n")
    if lines[-2:] != ["# EOF", ""]:
        raise ValueError("no end mark")
    for line in lines[:-2]:
        if match := _DESCRIPTOR.fullmatch(line):
            what, name, value = match.groups()
            if name != current:
                if name in families:
                    raise ValueError(f"{name} is interleaved with others")
                families[name], current = MetricFamily(), name
            family = families[name]
            if family.samples:
                raise ValueError(f"{what} of {name} after its samples")
            if what == "UNIT" and not name.endswith(f"_{value}"):
                raise ValueError(f"{name} does not end in its unit {value}")
            setattr(family, "kind" if what == "TYPE" else what.lower(), _unescaped(value))
        elif match := _SAMPLE.fullmatch(line):
            name, labels, value = match.groups()
            family = families[current]
            if name != current + _SUFFIX[family.kind]:
                raise ValueError(f"{name} does not belong to {current}")
            pairs = [(label, _unescaped(text)) for label, text in _LABELS.findall(labels or "")]
            key = frozenset(pairs)
            if len(dict(pairs)) != len(pairs) or key in family.samples:
                raise ValueError(f"{line} is there twice")
            family.samples[key] = float(value)
        else:
            raise ValueError(f"cannot read {line!r}")
    return families


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text)
