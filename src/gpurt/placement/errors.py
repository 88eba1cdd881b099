"""What can go wrong while a model is placed.

::

    GPUError
    └── PlacementError
        ├── InvalidPlacementInput   (ValueError)  a model, device, link or constraint that cannot be: .field
        ├── InfeasiblePlacement     no plan keeps every constraint: .constraint, .report
        ├── InvalidPlan             (ValueError)  a plan that breaks a rule: .rule, .where
        ├── PlacementCancelled      the solver was told to stop before it had a plan
        └── PlacementTimeout        (TimeoutError)  the time budget ended before there was a plan or a proof of none
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpurt.errors import GPUError
from gpurt.printable import shortened

if TYPE_CHECKING:
    from gpurt.placement.infeasibility import InfeasibilityReport
    from gpurt.placement.replica_report import ReplicaReport


class PlacementError(GPUError):
    """Root of the errors of placement."""


class InvalidPlacementInput(PlacementError, ValueError):
    """An input that no placement can have.

    Attributes:
        field: dotted path of the field that is wrong (``"layers.3.weight_bytes"``).
        path: the file that has it, or None.
        record: the kind of record that has it (``"Workload"``), where that is known.
    """

    _extra = ("field", "path", "record")

    def __init__(
        self, message: str, *, field: str, path: str | None = None, record: str | None = None, **context: Any
    ) -> None:
        super().__init__(message, **context)
        self.field = field
        self.path = path
        self.record = record

    def __str__(self) -> str:
        told = f"{self.field}: {super().__str__()}"
        if self.path is not None:
            return f"{shortened(self.path)}: {told}"
        return told if self.record is None else f"{told} (in {self.record})"


@contextmanager
def blamed_on(path: str | None) -> Generator[None]:
    """What is wrong with an input inside is wrong with that file, unless a file is named already or there is none."""
    try:
        yield
    except InvalidPlacementInput as error:
        if error.path is None:
            error.path = path
        raise


class InfeasiblePlacement(PlacementError):
    """No plan keeps every constraint, and that is certain.

    Attributes:
        constraint: which kind of constraint cannot be kept (``"memory"``, ``"layers"``, ``"max_stages"``, …).
        report: the figures, what is left out and why, and the smallest changes with which there is a plan; of replicas
            how many there are plans for. The solver always makes one.
    """

    _extra = ("constraint", "report")

    def __init__(
        self,
        message: str,
        *,
        constraint: str,
        report: InfeasibilityReport | ReplicaReport | None = None,
        **context: Any,
    ) -> None:
        super().__init__(message, **context)
        self.constraint = constraint
        self.report = report


class InvalidPlan(PlacementError, ValueError):
    """A plan that breaks a rule.

    Attributes:
        rule: which one (``"coverage"``, ``"memory"``, ``"device"``, ``"link"``, ``"pin"``, …).
        where: the device, stage or field concerned.
    """

    _extra = ("rule", "where")

    def __init__(self, message: str, *, rule: str, where: str, **context: Any) -> None:
        super().__init__(message, **context)
        self.rule = rule
        self.where = where

    def __str__(self) -> str:
        return f"{self.where}: {super().__str__()}"


class PlacementCancelled(PlacementError):
    """The solver was told to stop before it had any plan."""


class PlacementTimeout(PlacementError, TimeoutError):
    """The time budget ended before there was a plan, and nothing proves that there is none."""
