"""Which of several equal devices takes which stage: the one that has most of it already.

Where movement has no price, the solver does not tell equal devices of a node from each other, and there are fewer of
them to think about. So what lies on them is looked at behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpurt.placement.holdings import Holdings
from gpurt.placement.plan import Stage


def at_home(stages: Sequence[Stage], alike: Sequence[Sequence[str]], holdings: Holdings) -> list[Stage]:
    """The same stages on devices that have to load least, one after the other. ``alike``: sets of equal devices.

    Only ``devices`` is right in what comes back, not what is held.
    """
    set_of = {name: number for number, names in enumerate(alike) for name in names}
    wanted = [Counter(set_of[name] for name in stage.devices) for stage in stages]
    chosen: list[dict[int, list[str]]] = [{} for _ in stages]
    for number, names in enumerate(alike):
        open_ = {place: count[number] for place, count in enumerate(wanted) if count[number]}
        missing = {name: holdings.missing([name]) for name in names} if open_ else {}
        # What a device has of a stage counts, not what it lacks: a long stage lacks more than a short one everywhere.
        pairs = sorted(
            (float(lacks[stage.start : stage.end].sum() - holdings.weights[stage.start : stage.end].sum()), place, name)
            for place, stage in enumerate(stages)
            if place in open_
            for name, lacks in missing.items()
        )
        taken: set[str] = set()
        for _, place, name in pairs:
            if open_[place] and name not in taken:
                taken.add(name)
                open_[place] -= 1
                chosen[place].setdefault(number, []).append(name)
    return [
        stage.model_copy(update={"devices": tuple(here[set_of[name]].pop(0) for name in stage.devices)})
        for stage, here in zip(stages, chosen, strict=True)
    ]
