"""The options of ``gpurt place`` that are rules of the plan: workload and constraints."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Final

from gpurt.errors import GPUError
from gpurt.placement.constraints import Constraints, DomainLimit, Pin, Workload
from gpurt.placement.inventory import Inventory
from gpurt.placement.record import MOST_COUNT
from gpurt.placement.spec import ModelSpec
from gpurt.placement.words import listed
from gpurt.printable import quoted

USUAL_CONTEXT: Final = 4096
"""Tokens of context where nobody says how many, or as many as the model has if those are fewer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--context",
        metavar="TOKENS",
        type=natural,
        help=f"of each sequence, for the size of the cache; 0 counts none (default: {USUAL_CONTEXT}, or the model's)",
    )
    work.add_argument("--batch", metavar="N", type=_positive, default=1, help="sequences at once (default: 1)")
    work.add_argument(
        "--prefill",
        metavar="TOKENS",
        type=_positive,
        default=512,
        help="of a sequence processed at once at most, for the size of activations (default: %(default)s)",
    )
    rules = parser.add_argument_group("constraints", "NAME is a device (node/key) or a node, as the plan shows them")
    rules.add_argument("--exclude", metavar="NAME", action="append", default=[], help="use it not; may be repeated")
    rules.add_argument("--require", metavar="NAME", action="append", default=[], help="use it; may be repeated")
    rules.add_argument(
        "--pin",
        metavar="LAYERS=NAME[,NAME]",
        type=_pin,
        action="append",
        default=[],
        help="layers such as 0-7 on one of these; may be repeated",
    )
    rules.add_argument("--min-stages", metavar="N", type=_positive, default=1, help="stages at least (default: 1)")
    rules.add_argument("--max-stages", metavar="N", type=_positive, help="stages at most")
    rules.add_argument("--min-nodes", metavar="N", type=_positive, default=1, help="nodes at least (default: 1)")
    rules.add_argument("--max-nodes", metavar="N", type=_positive, help="nodes at most")
    rules.add_argument(
        "--spread",
        metavar="DOMAIN=N",
        type=_spread,
        action="append",
        default=[],
        help="at most N stages in one node, zone, or label such as power; may be repeated",
    )
    rules.add_argument(
        "--max-link-ms", metavar="MS", type=_milliseconds, help="no hand-over between stages takes longer"
    )
    rules.add_argument("--tensor-parallel", metavar="N", type=_positive, help="devices in one stage at most")
    rules.add_argument("--same-backend", action="store_true", help="all stages use one backend")
    rules.add_argument(
        "--replicas",
        metavar="N",
        type=_positive,
        default=1,
        help="whole pipelines, on devices of their own (default: 1)",
    )
    rules.add_argument(
        "--replica-domain", metavar="KIND", help="no two replicas in one node, zone, or label such as power"
    )


def check_model(args: argparse.Namespace, model: ModelSpec) -> None:
    """What can be told of the rules without any device.

    Raises:
        GPUError: layers are pinned that the model does not have.
    """
    for start, end, names in args.pin:
        if end > model.layer_count:
            layers = f"{start}-{end - 1}" if end - start > 1 else str(start)
            raise GPUError(
                f"--pin {quoted(f'{layers}={chr(44).join(names)}')}: the model has layers 0 to {model.layer_count - 1}"
            )


def constraints_of(args: argparse.Namespace, model: ModelSpec, inventory: Inventory) -> Constraints:
    """
    Raises:
        GPUError: a name is neither a device nor a node, or options contradict each other.
    """
    for least, most, what in ((args.min_stages, args.max_stages, "stages"), (args.min_nodes, args.max_nodes, "nodes")):
        if most is not None and most < least:
            raise GPUError(f"--max-{what} {most} is below --min-{what} {least}")
    if args.replica_domain is not None and args.replicas == 1:
        raise GPUError("--replica-domain says how replicas are kept apart", hint="say how many with --replicas")
    for option, domain in (
        *((f"--spread {domain}={most}", domain) for domain, most in args.spread),
        ("--replica-domain", args.replica_domain),
    ):
        if domain is not None and all(device.domain(domain) is None for device in inventory.devices):
            there = sorted({"node", "zone", *(label for device in inventory.devices for label in device.labels)})
            raise GPUError(f"{option}: no device has a label {quoted(domain)}", hint=f"there are {', '.join(there)}")
    context = args.context
    if context is None:
        context = min(USUAL_CONTEXT, model.context_tokens_max or USUAL_CONTEXT)
    ids, nodes = {device.id for device in inventory.devices}, {device.node for device in inventory.devices}

    def told(names: Sequence[str], option: str) -> tuple[frozenset[str], frozenset[str]]:
        for name in names:
            if name not in ids | nodes:
                raise GPUError(
                    f"{option}: there is no device or node {quoted(name)} that may be used",
                    hint=f"devices: {listed(sorted(ids), 8)}",
                )
        return frozenset(names) & ids, frozenset(names) & (nodes - ids)

    # What cannot be used anyway is excluded already.
    out = told([name for name in args.exclude if name not in inventory.left_out], "--exclude")
    needed = told(args.require, "--require")
    pins: list[Pin] = []
    for start, end, names in args.pin:
        on, at = told(names, "--pin")
        pins.append(Pin(start=start, end=end, devices=on, nodes=at))
    return Constraints(
        workload=Workload(context_tokens=context, batch=args.batch, prefill_tokens=args.prefill),
        pins=tuple(pins),
        exclude_devices=out[0],
        exclude_nodes=out[1],
        require_devices=needed[0],
        require_nodes=needed[1],
        min_stages=args.min_stages,
        max_stages=args.max_stages,
        min_nodes=args.min_nodes,
        max_nodes=args.max_nodes,
        domain_limits=tuple(DomainLimit(domain=domain, stages=most) for domain, most in args.spread),
        max_link_seconds=args.max_link_ms and args.max_link_ms / 1000,
        tensor_parallel_max=args.tensor_parallel,
        same_backend=args.same_backend,
        replicas=args.replicas,
        replica_domain=args.replica_domain,
    )


def natural(text: str) -> int:
    """A number that placement can count to."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number of 0 or more")
    # By its digits: Python itself refuses to read very long numbers.
    if len(text.lstrip("0")) > len(str(MOST_COUNT)) or int(text) > MOST_COUNT:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is more than {MOST_COUNT:,}")
    return int(text)


def _positive(text: str) -> int:
    number = natural(text)
    if number == 0:
        raise argparse.ArgumentTypeError("it must be 1 or more")
    return number


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a positive number of milliseconds")
    return value


def _pin(text: str) -> tuple[int, int, tuple[str, ...]]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?=(.+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{quoted(text)} does not have the form 0-7=NAME")
    first, last = natural(match[1]), natural(match[2] or match[1])
    if last < first:
        raise argparse.ArgumentTypeError(f"layers {first} to {last} are none")
    return first, last + 1, tuple(match[3].split(","))


def _spread(text: str) -> tuple[str, int]:
    domain, _, most = text.partition("=")
    if not domain or not most:
        raise argparse.ArgumentTypeError(f"{quoted(text)} does not have the form node=1")
    return domain, _positive(most)
