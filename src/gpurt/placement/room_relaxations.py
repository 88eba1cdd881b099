"""Changes that give more room or ask for less: bytes, tokens, sequences, number formats, devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from gpurt.placement.changes import requantised, with_rules
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.feasibility import Feasibility, Problem
from gpurt.placement.field import integers
from gpurt.placement.ggml_types import GGML_TYPES
from gpurt.placement.infeasibility import MIB, Relaxation, RelaxationKind
from gpurt.placement.least import least_steps
from gpurt.placement.number_formats import DTYPE_BYTES
from gpurt.placement.words import counted, size_words

CONTEXT_STEP: Final = 256
"""Tokens."""
_FORMATS: Final = {
    kind.name: kind.bits_per_element
    for kind in sorted(GGML_TYPES.values(), key=lambda kind: -kind.bits_per_element)
    if kind.name in {"F16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"}
}
"""Bits per weight of common formats, scales included, the widest first."""


class RoomRelaxations:
    """``search``: what counting leaves open is searched."""

    def __init__(self, problem: Problem, feasibility: Feasibility, *, search: bool) -> None:
        self.problem, self.feasibility, self.search = problem, feasibility, search

    def all(self) -> Iterator[tuple[RelaxationKind, Callable[[], Relaxation | None]]]:
        """Each finds one relaxation, or none: the easiest come first."""
        yield RelaxationKind.QUANTISATION, self.quantisation
        yield RelaxationKind.CONTEXT_TOKENS, self.context
        yield RelaxationKind.BATCH, self.batch
        yield RelaxationKind.PREFILL_TOKENS, self.prefill
        for device in self.templates():
            yield RelaxationKind.ADD_DEVICES, lambda device=device: self.more_devices(device)
        yield RelaxationKind.ADD_DEVICE_OF_SIZE, self.device_of_size
        yield RelaxationKind.BYTES_PER_DEVICE, self.bytes_per_device

    def bytes_per_device(self) -> Relaxation | None:
        problem, feasibility = self.problem, self.feasibility
        layers, field = feasibility.layers(problem), feasibility.field(problem.devices)
        kept = feasibility.kept(problem)
        if not len(kept):
            return None
        # So much lets the smallest device hold everything.
        most = -(-max(0, layers.total - int(field.raw[kept].min())) // MIB)
        missing = max(0, layers.total - int(field.raw[kept].clip(0).sum())) // len(kept)
        least = least_steps(
            feasibility,
            lambda steps, search: feasibility.ask(problem, more_bytes=steps * MIB, search=search),
            most,
            search=self.search,
            guess=max(1, missing // MIB),
        )
        if least is None:
            return None
        more = least.steps * MIB
        return Relaxation(
            kind=RelaxationKind.BYTES_PER_DEVICE,
            change=f"give every device {size_words(more)} more ({least.steps:,} MiB)",
            amount=more,
            before=0,
            step=MIB,
            less=more - MIB if least.steps > 1 else None,
            minimal=least.minimal,
        )

    def context(self) -> Relaxation | None:
        tokens = self.problem.constraints.workload.context_tokens
        # The largest multiple of the step below what is asked for is one step down.
        return self._fewer(
            RelaxationKind.CONTEXT_TOKENS, "context_tokens", tokens, CONTEXT_STEP, "hold a context of {}", "token"
        )

    def prefill(self) -> Relaxation | None:
        tokens = self.problem.constraints.workload.prefill_tokens
        return self._fewer(
            RelaxationKind.PREFILL_TOKENS, "prefill_tokens", tokens, CONTEXT_STEP, "prefill in pieces of {}", "token"
        )

    def batch(self) -> Relaxation | None:
        batch = self.problem.constraints.workload.batch
        return self._fewer(RelaxationKind.BATCH, "batch", batch, 1, "run {} at once", "sequence")

    def _fewer(
        self, kind: RelaxationKind, field: str, before: int, step: int, words: str, noun: str
    ) -> Relaxation | None:
        top = (before - 1) // step
        problem, feasibility = self.problem, self.feasibility

        def ask(steps: int, search: bool) -> bool | None:
            work = problem.constraints.workload.model_copy(update={field: (top + 1 - steps) * step})
            return feasibility.ask(with_rules(problem, workload=work), search=search)

        # Most changes of this kind do nothing at all: ask for the greatest one first.
        if top < 1 or (ask(top, False) is False):
            return None
        least = least_steps(feasibility, ask, top, search=self.search)
        if least is None:
            return None
        amount = (top + 1 - least.steps) * step
        return Relaxation(
            kind=kind,
            change=f"{words.format(counted(amount, noun))} instead of {before:,}",
            amount=amount,
            before=before,
            step=step,
            less=amount + step if amount + step < before else None,
            minimal=least.minimal,
        )

    def quantisation(self) -> Relaxation | None:
        model = self.problem.model
        bits = bits_per_weight(model.weight_bytes, model.parameters, model.dtype, model.quantisation)
        if bits is None:
            return None
        formats = [(name, width) for name, width in _FORMATS.items() if width < bits * 0.99]

        def with_format(place: int) -> Problem:
            name, width = formats[place - 1]
            return self.problem._replace(model=requantised(model, width / bits, name))

        least = least_steps(
            self.feasibility,
            lambda place, search: self.feasibility.ask(with_format(place), search=search),
            len(formats),
            search=self.search,
        )
        if least is None:
            return None
        name, width = formats[least.steps - 1]
        return Relaxation(
            kind=RelaxationKind.QUANTISATION,
            change=f"store the weights as {name} ({width:.3g} bits each instead of {bits:.3g})",
            amount=width,
            before=bits,
            less=formats[least.steps - 2][1] if least.steps > 1 else None,
            names=(name,),
            minimal=least.minimal,
            estimated=True,
        )

    def templates(self) -> list[PlacementDevice]:
        """A device of the commonest kind, and the largest one, if that is another kind."""
        feasibility, problem = self.feasibility, self.problem
        field, kept = feasibility.field(problem.devices), feasibility.kept(problem)
        if not len(kept):
            return []
        kinds = [(device.name, device.backend) for device in (problem.devices[index] for index in integers(kept))]
        common = Counter(kinds).most_common(1)[0][0]
        alike = sorted(
            (index for index, kind in zip(integers(kept), kinds, strict=True) if kind == common),
            key=lambda index: int(field.raw[index]),
        )
        middle = problem.devices[alike[len(alike) // 2]]
        largest = problem.devices[int(kept[int(field.raw[kept].argmax())])]
        return [middle] if (largest.name, largest.backend) == common else [middle, largest]

    def more_devices(self, like: PlacementDevice) -> Relaxation | None:
        feasibility, problem = self.feasibility, self.problem
        least = least_steps(
            feasibility,
            lambda count, search: feasibility.ask(feasibility.with_devices(problem, like, count), search=search),
            problem.model.layer_count,
            search=self.search,
        )
        if least is None:
            return None
        room = size_words(like.budget_bytes)
        what = f"{like.name}, {room} usable" if like.name else f"{room} usable"
        return Relaxation(
            kind=RelaxationKind.ADD_DEVICES,
            change=f"add {counted(least.steps, 'device')} like {like.id} ({what})",
            amount=least.steps,
            before=0,
            step=1,
            less=least.steps - 1 if least.steps > 1 else None,
            device=like,
            minimal=least.minimal,
        )

    def device_of_size(self) -> Relaxation | None:
        """One more device, only as large as needed."""
        feasibility, problem = self.feasibility, self.problem
        found = self.templates()
        if not found:
            return None
        bare = found[0].model_copy(update={"usable_bytes": 0, "reserve_bytes": 0, "overhead_bytes": 0})
        wider = feasibility.with_devices(problem, bare, 1)
        only = np.zeros(len(wider.devices), dtype=np.int64)
        only[-1] = MIB

        least = least_steps(
            feasibility,
            lambda steps, search: feasibility.ask(wider, more_bytes=only * steps, search=search),
            -(-feasibility.layers(problem).total // MIB),
            search=self.search,
            guess=max(1, int(feasibility.layers(problem).need(1)[1]) // MIB),
        )
        if least is None:
            return None
        size = least.steps * MIB
        return Relaxation(
            kind=RelaxationKind.ADD_DEVICE_OF_SIZE,
            change=f"add 1 device with {size_words(size)} usable ({least.steps:,} MiB)",
            amount=size,
            step=MIB,
            less=size - MIB if least.steps > 1 else None,
            device=bare,
            minimal=least.minimal,
        )


def bits_per_weight(
    weight_bytes: int, parameters: int | None, dtype: str | None, quantisation: str | None
) -> float | None:
    """Of the weights as they are; None where nothing says it."""
    if parameters:
        return 8 * weight_bytes / parameters
    if quantisation is not None:
        return _FORMATS.get(quantisation.upper())
    if dtype is not None and dtype in DTYPE_BYTES:
        return 8.0 * DTYPE_BYTES[dtype]
    return None
