"""What placement says in the names of its records, said in the options that the user typed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from gpurt.errors import GPUError
from gpurt.placement.errors import InvalidPlacementInput

if TYPE_CHECKING:
    from gpurt.placement.infeasibility import InfeasibilityReport
    from gpurt.placement.replica_report import ReplicaReport

OPTIONS: Final = {
    "workload.context_tokens": "--context",
    "workload.batch": "--batch",
    "workload.prefill_tokens": "--prefill",
    "exclude_devices": "--exclude",
    "exclude_nodes": "--exclude",
    "require_devices": "--require",
    "require_nodes": "--require",
    "pins": "--pin",
    "min_stages": "--min-stages",
    "max_stages": "--max-stages",
    "min_nodes": "--min-nodes",
    "max_nodes": "--max-nodes",
    "domain_limits": "--spread",
    "max_link_seconds": "--max-link-ms",
    "tensor_parallel_max": "--tensor-parallel",
    "same_backend": "--same-backend",
    "replicas": "--replicas",
    "replica_domain": "--replica-domain",
    "time_budget": "--time",
    "seed": "--seed",
    "quantisation": "--quantisation",
    "dtype": "--dtype",
}
"""Fields of :class:`gpurt.placement.Constraints` and arguments, and the options that they come from."""
_NAMES: Final = re.compile(rf"\b({'|'.join(name for name in OPTIONS if '_' in name and '.' not in name)})\b")
_SECONDS: Final = re.compile(r"\bmax_link_seconds ([\d.e+-]*\d)")
_FIGURES: Final = re.compile(r"[\d,.]*\d (?:[KMGT]iB|bytes)|\d[\d,]* of \d[\d,]*")


@contextmanager
def in_options(args: argparse.Namespace) -> Generator[None]:
    """What is wrong with a rule inside is wrong with the option that said it.

    Raises:
        GPUError: in place of the error about a field that is an option's.
    """
    try:
        yield
    except InvalidPlacementInput as error:
        option = _option(args, error.field) if error.path is None else None
        if option is None:
            raise
        raise GPUError(f"{option}: {in_words_of_options(error.message)}", hint=error.hint) from error


def in_words_of_options(text: str) -> str:
    text = _SECONDS.sub(lambda match: f"--max-link-ms {float(match[1]) * 1000:g}", text)
    return _NAMES.sub(lambda match: OPTIONS[match[1]], text)


def refusal_lines(report: InfeasibilityReport | ReplicaReport) -> Sequence[str]:
    """What a report explains; lines that only repeat the figures of the first one are left out."""
    first, *others = in_words_of_options(report.explain()).splitlines()
    said = set(_FIGURES.findall(first))

    def repeats(line: str) -> bool:
        figures = set(_FIGURES.findall(line))
        return bool(figures) and figures <= said and not line.startswith(" ")

    return [first, *(line for line in others if not repeats(line))]


def _option(args: argparse.Namespace, field: str) -> str | None:
    """The option behind a field, for a pin or a limit with what it says; None where there is none."""
    path = field.removeprefix("constraints.")
    if (option := OPTIONS.get(path)) is not None:
        return option
    name, _, rest = path.partition(".")
    number = rest.partition(".")[0]
    if name == "pins" and number.isdecimal():
        start, end, names = args.pin[int(number)]
        layers = str(start) if end - start == 1 else f"{start}-{end - 1}"
        return f"--pin {layers}={','.join(names)}"
    if name == "domain_limits" and number.isdecimal():
        domain, most = args.spread[int(number)]
        return f"--spread {domain}={most}"
    return OPTIONS.get(name)
