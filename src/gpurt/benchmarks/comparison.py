"""This run beside an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError

from gpurt.benchmarks.measurement import Measurement
from gpurt.benchmarks.runner import Results
from gpurt.errors import GPUError

TOLERANCE: Final = 0.25
"""A smaller change is none: on shared machines host memory alone moves by 20 to 30 % from run to run."""

Verdict = Literal["better", "worse", "same", "new", "missing"]


@dataclass(frozen=True, slots=True)
class Change:
    """One row in both runs, or in one of them."""

    topic: str
    name: str
    unit: str
    old: float | None
    new: float | None
    ratio: float | None
    """New over old; None where one is missing or the old figure is 0."""
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    path: str
    changes: tuple[Change, ...]
    differences: tuple[str, ...]
    """What else is different between the two runs, which may be all that the changes show."""

    def of(self, row: Measurement) -> Change:
        return next(change for change in self.changes if (change.topic, change.name) == (row.topic, row.name))

    @property
    def missing(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "missing"]

    def as_json(self) -> dict[str, Any]:
        return {
            "file": self.path,
            "tolerance": TOLERANCE,
            "differences": list(self.differences),
            "rows": [asdict(change) for change in self.changes],
        }


class _Row(BaseModel):
    topic: str
    name: str
    unit: str
    ours: float = Field(ge=0, allow_inf_nan=False, strict=True)


class Record(BaseModel):
    """What ``gpurt bench --json`` printed, as far as it is compared."""

    version: Literal[1] = Field(alias="schema")
    measurements: list[_Row]
    machine: dict[str, Any] = {}
    device: dict[str, Any] | None = None
    loop: str | None = None
    quick: bool | None = None


_CONDITIONS: Final[dict[str, Callable[[Record], Any]]] = {
    "CPU": lambda record: record.machine.get("cpu"),
    "CPUs": lambda record: record.machine.get("cpus"),
    "device": lambda record: (record.device or {}).get("name"),
    "loop": lambda record: record.loop,
    "quick": lambda record: record.quick,
}


def read_record(path: str) -> Record:
    """
    Raises:
        GPUError: the file cannot be read, or holds something else.
    """
    try:
        return Record.model_validate_json(Path(path).read_bytes())
    except OSError as exc:
        raise GPUError(f"cannot read {path}: {exc.strerror or exc}") from exc
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise GPUError(
            f"{path} is not what `gpurt bench --json` prints: {where + ': ' if where else ''}{first['msg']}",
            hint="make one by: gpurt bench --json > FILE",
        ) from exc


def compare(path: str, old: Record, results: Results, record: Mapping[str, Any]) -> Comparison:
    """Every row of this run, and those of the old one that its topics no longer have.

    Args:
        old: what :func:`read_record` read at ``path``.
        record: this run as JSON, for the conditions.
    """
    before = {(row.topic, row.name): row for row in old.measurements}
    changes = [_change(before.pop((row.topic, row.name), None), row) for row in results.measurements]
    changes += [
        Change(row.topic, row.name, row.unit, row.ours, None, None, "missing")
        for row in before.values()
        if row.topic in results.names
    ]
    return Comparison(path, tuple(changes), tuple(_differences(old, Record.model_validate(record))))


def _change(old: _Row | None, new: Measurement) -> Change:
    if old is None or old.unit != new.unit:
        return Change(new.topic, new.name, new.unit, None, new.ours, None, "new")
    ratio = new.ours / old.ours if old.ours else None
    return Change(new.topic, new.name, new.unit, old.ours, new.ours, ratio, _verdict(old.ours, new))


def _verdict(old: float, new: Measurement) -> Verdict:
    smaller, larger = sorted((old, new.ours))
    if larger <= smaller * (1 + TOLERANCE):
        return "same"
    return "better" if (new.ours > old) is new.more_is_better else "worse"


def _differences(old: Record, new: Record) -> Iterable[str]:
    for name, pick in _CONDITIONS.items():
        before, after = pick(old), pick(new)
        if before != after:
            yield f"{name}: {before} before, {after} now"
