"""Whether a plan is one at all, whatever it is for: every layer once, every device once, a way between all stages."""

from __future__ import annotations

from collections import Counter

from gpurt.placement.arguments import check_kind
from gpurt.placement.errors import InvalidPlan
from gpurt.placement.plan import Plan


def check_form(plan: Plan) -> None:
    """Raise :class:`InvalidPlan` for a plan that contradicts itself; model and devices are not asked.

    For whoever reads a plan that may come from a file or another program. Whether it keeps the rules and says the
    truth is :func:`gpurt.placement.validate_plan`'s question.
    """
    check_kind(plan, Plan, "plan")
    done = 0
    for number, stage in enumerate(plan.stages):
        where = f"stages.{number}"
        if stage.start != done or stage.end <= stage.start:
            raise InvalidPlan(
                f"layers {stage.start} to {stage.end} follow after layer {done}", rule="coverage", where=where
            )
        done = stage.end
    if done != plan.layer_count:
        last = f"stages.{len(plan.stages) - 1}"
        raise InvalidPlan(f"{done} of {plan.layer_count} layers are placed", rule="coverage", where=last)
    for name, times in Counter(plan.devices).items():
        if times > 1:
            raise InvalidPlan(f"it is used {times} times", rule="device", where=name)
    for number, stage in enumerate(plan.stages):
        if [held.device for held in stage.held] != list(stage.devices):
            raise InvalidPlan("bytes are not told for exactly its devices", rule="memory", where=f"stages.{number}")
    count = len(plan.stages)
    if len(plan.hops) != (count if count > 1 else 0):
        raise InvalidPlan(f"{len(plan.hops)} hops between {count} stages", rule="link", where="hops")
    for number, hop in enumerate(plan.hops):
        if (hop.source, hop.target) != (number, (number + 1) % count):
            raise InvalidPlan("it does not lead from its stage to the next one", rule="link", where=f"hops.{number}")
