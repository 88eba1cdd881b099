"""``gpurt place MODEL``: which device gets which layers, how good that is, and why.

Exit code: 0 with a plan, 1 where there is none that keeps every rule, 2 for wrong input.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gpurt.cli import observing, place_inputs, place_rules, place_words
from gpurt.cli.running import run_command

if TYPE_CHECKING:
    from gpurt.placement import Constraints, InfeasiblePlacement, ModelSpec, Plan, ReplicatedPlan
    from gpurt.placement.inventory import Inventory

EXIT_PLAN, EXIT_NO_PLAN = 0, 1
TIME_S: Final = 5.0
_WHAT_IF_S: Final = 1.0
_LEAST_WHAT_IF_S: Final = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpurt.cli.worker import seconds

    parser.add_argument(
        "model",
        metavar="MODEL",
        help="config.json of Hugging Face, .safetensors or its index, .gguf, a folder of them, or a ModelSpec as JSON",
    )
    parser.add_argument(
        "--cluster",
        metavar="live|FILE",
        help="the devices of a running cluster, or of a file (default: those of this machine)",
    )
    parser.add_argument("--save-cluster", metavar="FILE", help="write the devices to a file for --cluster")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--explain", action="store_true", help="also why, what limits, and what would help")
    shown.add_argument("--json", action="store_true", help="the plan, or why there is none, as one JSON line on stdout")
    parser.add_argument(
        "--objective",
        choices=("latency", "throughput", "balanced"),
        default="latency",
        help="least time for a token, most tokens a second, or the sum of both times (default: %(default)s)",
    )
    parser.add_argument(
        "--time", metavar="S", type=seconds, default=TIME_S, help="seconds to search at most (default: %(default)s)"
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=place_rules.natural,
        default=0,
        help="of the search: the same one gives the same plan, where the time is enough (default: %(default)s)",
    )
    parser.add_argument("--quantisation", metavar="NAME", help="of the weights, in place of the config.json's: q4_k_m")
    parser.add_argument("--dtype", metavar="NAME", help="of computation, in place of the config.json's: bfloat16")
    parser.add_argument("--config", metavar="FILE", help="the config.json of safetensors that have none beside them")
    parser.add_argument("--registry", metavar="PATH", help="of this machine (default: in the user's state directory)")
    place_rules.add_arguments(parser)
    parser.add_argument(
        "--cluster-name", metavar="NAME", help="of the live cluster (default: default, or the certificate's)"
    )
    observing.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """
    Raises:
        GPUError: the model or the cluster cannot be read or reached, or options contradict each other.
        PlacementTimeout: neither a plan nor a proof that there is none in the time.
    """
    with place_words.in_options(args):
        model = place_inputs.read_model(
            args.model, quantisation=args.quantisation, dtype=args.dtype, config=args.config
        )
    place_rules.check_model(args, model)
    if args.cluster in (None, place_inputs.LIVE):
        inventory = run_command(place_inputs.inventory_for(args))
    else:
        inventory = place_inputs.read_inventory(args.cluster)
    if args.save_cluster is not None:
        place_inputs.save_inventory(args.save_cluster, inventory)
    with place_words.in_options(args):
        constraints = place_rules.constraints_of(args, model, inventory)
        return _Placed(args, model, inventory, constraints).show()


class _Placed:
    """One run of the command, once everything is read."""

    def __init__(
        self, args: argparse.Namespace, model: ModelSpec, inventory: Inventory, constraints: Constraints
    ) -> None:
        self.args = args
        self.model = model
        self.inventory = inventory
        self.constraints = constraints
        self.deadline = time.monotonic() + args.time

    def show(self) -> int:
        from gpurt.placement import InfeasiblePlacement

        try:
            found = run_command(self._solve())
        except InfeasiblePlacement as error:
            self._show_infeasible(error)
            return EXIT_NO_PLAN
        if self.args.json:
            _write(found.model_dump_json())
        else:
            self._show(found)
        return EXIT_PLAN

    async def _solve(self) -> Plan | ReplicatedPlan:
        from gpurt.placement import ConstraintSatisfactionPlacement, solve_replicas_async

        one = ConstraintSatisfactionPlacement().solve_placement_async
        solve = one if self.constraints.replicas == 1 else solve_replicas_async
        # On a thread, so that Ctrl-C is heard while a solver computes.
        return await solve(
            self.model,
            self.inventory.devices,
            self.inventory.topology,
            self.constraints,
            objective=self.args.objective,
            time_budget=self.args.time,
            seed=self.args.seed,
        )

    def _show(self, found: Plan | ReplicatedPlan) -> None:
        from rich.text import Text

        from gpurt.cli.discovered import make_console
        from gpurt.cli.place_picture import render, render_lines, render_replicas
        from gpurt.placement import Plan

        console = make_console()
        one = isinstance(found, Plan)
        drawn = (
            render(found, self.inventory, console.width)
            if one
            else render_replicas(found, self.inventory, console.width)
        )
        for part in drawn:
            console.print(part, soft_wrap=isinstance(part, Text))
        if self.args.explain:
            why = self._explanation(found) if one else self._explanation_of_replicas(found)
            for line in render_lines(("", "why:", *(f"- {text}" for text in why))):
                console.print(line, soft_wrap=True)
        sys.stdout.flush()

    def _explanation(self, plan: Plan) -> Sequence[str]:
        from gpurt.placement.explanation import explain_plan
        from gpurt.placement.what_if import what_ifs

        devices, topology = self.inventory.devices, self.inventory.topology
        # Within the time that was given for all: where the plan has taken it, no change is tried.
        left = self.deadline - time.monotonic()
        found = what_ifs(
            self.model,
            devices,
            topology,
            self.constraints,
            plan,
            time_budget=max(_LEAST_WHAT_IF_S, min(_WHAT_IF_S, left / 3)),
            cancelled=lambda: time.monotonic() >= self.deadline,
        )
        return explain_plan(
            self.model, devices, self.constraints, plan, left_out=self.inventory.left_out, what_ifs=found
        )

    def _explanation_of_replicas(self, found: ReplicatedPlan) -> Sequence[str]:
        from gpurt.placement import explain_replicas

        devices, left_out = self.inventory.devices, self.inventory.left_out
        return explain_replicas(self.model, devices, self.constraints, found, left_out=left_out)

    def _show_infeasible(self, error: InfeasiblePlacement) -> None:
        from gpurt.cli.discovered import make_console
        from gpurt.cli.place_picture import render_lines

        if self.args.json:
            report = error.report and error.report.model_dump(mode="json")
            told = {"status": "infeasible", "constraint": error.constraint, "message": error.message, "report": report}
            _write(json.dumps(told, ensure_ascii=False, separators=(",", ":")))  # as the plan is written
            return
        console = make_console()
        left_out = [f"Not usable at all, {name}: {reason}." for name, reason in self.inventory.left_out.items()]
        why = [error.message] if error.report is None else place_words.refusal_lines(error.report)
        for line in render_lines((*why, *left_out)):
            console.print(line, soft_wrap=True)
        sys.stdout.flush()


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
