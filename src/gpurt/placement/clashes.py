"""Rules that contradict each other whatever the devices hold: told at once, by their names.

What is found here is certain. What is not found here may contradict all the same, in ways that only counting or a
search shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.placement.constraints import Constraints, Pin
from gpurt.placement.field import Field, integers
from gpurt.placement.infeasibility import ConstraintKind
from gpurt.placement.number_rules import Rules
from gpurt.placement.rule_words import joined, limit_words, pin_words
from gpurt.placement.words import counted, listed

Kind = ConstraintKind


@dataclass(frozen=True, slots=True)
class Clash:
    kinds: frozenset[ConstraintKind]
    """Those of the rules that contradict each other; exclusions have none."""
    text: str
    """A sentence that names them."""
    lasting: bool = True
    """However much room there were, and however many devices: only other rules help."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Some device of ``places`` holds a stage in every plan."""

    kind: ConstraintKind
    text: str
    places: frozenset[int]


def first_clash(given: Constraints, field: Field, rules: Rules, kept: NDArray[np.intp], layers: int) -> Clash | None:
    """The first contradiction that is found; ``kept``: devices that may take part. All that is named is there."""
    if rules.lost:
        return None
    return next(_Clashes(given, field, rules, kept, layers).all(), None)


class _Clashes:
    def __init__(self, given: Constraints, field: Field, rules: Rules, kept: NDArray[np.intp], layers: int) -> None:
        self.given, self.field, self.rules, self.layers = given, field, rules, layers
        self.kept = kept
        self.inside = frozenset(integers(kept))
        self.largest = max(rules.sizes)
        """Devices that one stage may have."""

    def all(self) -> Iterator[Clash]:
        given = self.given
        yield from self._of_numbers()
        if given.min_stages > 1 or given.min_nodes > 1:
            yield from self._too_few_stages()
        if not (given.require_devices or given.require_nodes or given.pins):
            return
        wanted: list[_Wanted] = []
        for each, places in self._wanted():
            if not each.places:
                excluded, others = self._left_out(places)
                why = joined([*excluded, *others])
                yield Clash(frozenset({each.kind}), f"{each.text} cannot be kept: {why}", lasting=not others)
            wanted.append(each)
        yield from self._shared_memory()
        yield from self._pins_on_one_layer()
        yield from self._ranges()
        yield from self._minimums()
        yield from self._too_many(wanted)
        yield from self._backends(wanted)

    def _of_numbers(self) -> Iterator[Clash]:
        given, count = self.given, counted(self.layers, "layer")
        for kind, least in ((Kind.MIN_STAGES, given.min_stages), (Kind.MIN_NODES, given.min_nodes)):
            if least > self.layers:
                yield Clash(frozenset({kind}), f"{kind.value} is {least:,}, and the model has only {count}")
        if given.max_stages is not None and given.min_nodes > given.max_stages:
            text = f"min_nodes {given.min_nodes:,} takes as many stages, and max_stages allows {given.max_stages:,}"
            yield Clash(frozenset({Kind.MIN_NODES, Kind.MAX_STAGES}), text)

    def _too_few_stages(self) -> Iterator[Clash]:
        """A limit leaves fewer stages than there have to be; that a device makes one stage at most is no rule."""
        given, field = self.given, self.field
        name = "min_stages" if given.min_stages >= given.min_nodes else "min_nodes"
        least, kind = getattr(given, name), Kind(name)
        if given.max_nodes is not None:
            sizes = sorted(Counter(integers(field.node[self.kept])).values(), reverse=True)
            most = sum(sizes[: given.max_nodes])
            if most < least:
                text = f"{name} is {least:,}, and max_nodes {given.max_nodes:,} leaves {counted(most, 'device')}"
                yield Clash(frozenset({kind, Kind.MAX_NODES}), text, lasting=False)
        for limit, (numbers, stages) in zip(given.domain_limits, self.rules.domains, strict=True):
            inside = Counter(integers(numbers[self.kept]))
            most = inside.pop(-1, 0) + sum(min(stages, number) for number in inside.values())
            if most < least:
                text = f"{name} is {least:,}, and {limit_words(limit)} leaves {counted(most, 'stage')}"
                yield Clash(frozenset({kind, Kind.DOMAIN_LIMITS}), text, lasting=False)

    def _wanted(self) -> Iterator[tuple[_Wanted, Sequence[int]]]:
        """What has to hold a stage, and all devices that the rule names, also those that take no part."""
        given, field = self.given, self.field
        for name in sorted(given.require_devices):
            yield self._of(Kind.REQUIRE_DEVICES, f"requiring {name}", [field.place[name]])
        for name in sorted(given.require_nodes):
            yield self._of(Kind.REQUIRE_NODES, f"requiring {name}", self._on_node(name))
        for pin in given.pins:
            yield self._of(Kind.PINS, pin_words(pin), sorted(self._allowed(pin)))

    def _of(self, kind: ConstraintKind, text: str, places: Sequence[int]) -> tuple[_Wanted, Sequence[int]]:
        return _Wanted(kind, text, frozenset(places) & self.inside), places

    def _left_out(self, places: Sequence[int]) -> tuple[list[str], list[str]]:
        """Why these devices take no part: what is excluded, and what cannot compute."""
        given, devices = self.given, [self.field.devices[place] for place in places]
        names = {device.id for device in devices} & given.exclude_devices
        names |= {device.node for device in devices} & given.exclude_nodes
        others = [
            each.id for each in devices if each.id not in given.exclude_devices and each.node not in given.exclude_nodes
        ]
        excluded = [f"{listed(sorted(names))} {'is' if len(names) == 1 else 'are'} excluded"] if names else []
        return excluded, [f"{listed(others)} cannot run any layer"] if others else []

    def _shared_memory(self) -> Iterator[Clash]:
        for pool in self.field.pools:
            names = [name for place in pool if (name := self.field.devices[place].id) in self.given.require_devices]
            if len(names) > 1:
                text = f"requiring {joined(names)} cannot be kept: they share their memory, and one of them is used"
                yield Clash(frozenset({Kind.REQUIRE_DEVICES}), text)

    def _on_node(self, name: str) -> list[int]:
        return integers(np.flatnonzero(self.field.node == self.field.node_names[name]))

    def _allowed(self, pin: Pin) -> frozenset[int]:
        nodes = [self._on_node(name) for name in pin.nodes]
        return frozenset(self.field.place[name] for name in pin.devices).union(*nodes)

    def _pins_on_one_layer(self) -> Iterator[Clash]:
        pins = [(pin, self._allowed(pin) & self.inside) for pin in self.given.pins]
        for start in sorted({pin.start for pin, _ in pins}):
            here = [(pin, allowed) for pin, allowed in pins if pin.start <= start < pin.end]
            if self.inside.intersection(*(allowed for _, allowed in here)):
                continue
            pair = next(
                ([one, other] for one, first in here for other, second in here if first.isdisjoint(second)),
                [pin for pin, _ in here],
            )
            every = "both" if len(pair) == 2 else "all of them"
            text = f"{joined(map(pin_words, pair))} contradict each other: no device is in {every}"
            yield Clash(frozenset({Kind.PINS}), text)

    def _ranges(self) -> Iterator[Clash]:
        """A device has one range: it reaches over all that is pinned to the device alone, and no rule cuts it."""
        rules, given = self.rules, self.given
        pins = [(pin, self._allowed(pin) & self.inside) for pin in given.pins]
        for pin, allowed in pins:
            most = sum(int(rules.most[place]) for place in allowed)
            if most < pin.end - pin.start:
                names = listed([self.field.devices[place].id for place in sorted(allowed)])
                least = f"{names} may have {counted(most, 'layer')} at most"
                text = f"{pin_words(pin)} and stage_layers contradict each other: {least}"
                yield Clash(frozenset({Kind.PINS, Kind.STAGE_LAYERS}), text)
        alone = {next(iter(allowed)) for _, allowed in pins if len(allowed) == 1}
        for place in sorted(alone | set(integers(rules.required))):
            name = self.field.devices[place].id
            mine = [pin for pin, allowed in pins if len(allowed) == 1 and place in allowed]
            foreign = [pin for pin, allowed in pins if place not in allowed]
            if mine:
                start, end = min(pin.start for pin in mine), max(pin.end for pin in mine)
                cut = [pin for pin in foreign if pin.start < end and pin.end > start]
                if cut:
                    text = f"{joined(map(pin_words, [*mine, cut[0]]))} contradict each other: {name} has one range"
                    yield Clash(frozenset({Kind.PINS}), text)
                    continue
                if int(rules.most[place]) < end - start:
                    text = (
                        f"{joined(map(pin_words, mine))} and stage_layers contradict each other: {name} has one range"
                    )
                    yield Clash(frozenset({Kind.PINS, Kind.STAGE_LAYERS}), text)
                room = self._room(foreign, start, end)
            else:
                edges = sorted({0, *(pin.end for pin in foreign)})
                room = max((self._room(foreign, edge, edge) for edge in edges if edge < self.layers), default=0)
            least = int(rules.least[place])
            if room < least:
                what = f"the minimum of {counted(least, 'layer')} on {name}" if least > 1 else f"requiring {name}"
                kinds = {Kind.PINS, Kind.STAGE_LAYERS if least > 1 else Kind.REQUIRE_DEVICES}
                if not mine:
                    kinds.add(Kind.REQUIRE_DEVICES)
                text = f"{what} contradicts the pins: they leave it {counted(room, 'layer')}"
                yield Clash(frozenset(kinds), text if foreign else f"{what} is more than the model has")

    def _room(self, foreign: Sequence[Pin], start: int, end: int) -> int:
        """Layers around ``start`` to ``end`` that are not pinned to others."""
        before = max((pin.end for pin in foreign if pin.end <= start), default=0)
        if any(pin.start <= start < pin.end for pin in foreign):
            return 0
        after = min((pin.start for pin in foreign if pin.start >= end), default=self.layers)
        return after - before

    def _minimums(self) -> Iterator[Clash]:
        """Layers that required devices have to have, and one for each further stage."""
        given, rules = self.given, self.rules
        if not given.require_devices:
            return
        apart: dict[int, int] = {}
        """By device or, where several may make one stage, by their node and backend."""
        for place in integers(rules.required):
            key = place if self.largest == 1 else -1 - int(self.field.cell[place])
            apart[key] = max(apart.get(key, 0), int(rules.least[place]))
        least, count = sum(apart.values()), counted(self.layers, "layer")
        names = joined(sorted(given.require_devices))
        if least > self.layers:
            kinds = {Kind.REQUIRE_DEVICES, Kind.STAGE_LAYERS if least > len(apart) else Kind.REQUIRE_DEVICES}
            minimums = " with the minimum that stage_layers says" if least > len(apart) else ""
            text = f"requiring {names}{minimums} takes {least:,} layers, and the model has only {count}"
            yield Clash(frozenset(kinds), text)
        more = max(given.min_stages - len(apart), 0)
        if more and least + more > self.layers and least > len(apart):
            text = (
                f"requiring {names} with the minimum that stage_layers says leaves fewer layers than "
                f"min_stages {given.min_stages:,} needs"
            )
            yield Clash(frozenset({Kind.MIN_STAGES, Kind.STAGE_LAYERS, Kind.REQUIRE_DEVICES}), text)

    def _too_many(self, wanted: Sequence[_Wanted]) -> Iterator[Clash]:
        """More stages or nodes than a limit lets there be."""
        given, rules, node = self.given, self.rules, self.field.node
        if given.max_stages is not None:
            yield from self._beyond(wanted, given.max_stages, self._stages(wanted), "stage", Kind.MAX_STAGES)
        if given.max_nodes is not None:
            of = [frozenset(integers(node[sorted(each.places)])) for each in wanted]
            yield from self._beyond(wanted, given.max_nodes, _apart(of), "node", Kind.MAX_NODES)
        for limit, (numbers, most) in zip(given.domain_limits, rules.domains, strict=True):
            domains = [set(integers(numbers[sorted(each.places)])) for each in wanted]
            for name in sorted({next(iter(found)) for found in domains if len(found) == 1} - {-1}):
                inside = [each for each, found in zip(wanted, domains, strict=True) if found == {name}]
                yield from self._beyond(
                    inside, most, self._stages(inside), "stage", Kind.DOMAIN_LIMITS, limit_words(limit)
                )

    def _stages(self, wanted: Sequence[_Wanted]) -> list[int]:
        """Some of what is wanted that no two of share a stage."""
        cell = self.field.cell
        return _apart(
            [each.places if self.largest == 1 else frozenset(integers(cell[sorted(each.places)])) for each in wanted]
        )

    def _beyond(
        self,
        wanted: Sequence[_Wanted],
        most: int,
        chosen: Sequence[int],
        noun: str,
        kind: ConstraintKind,
        limit: str | None = None,
    ) -> Iterator[Clash]:
        if len(chosen) <= most:
            return
        rules = [wanted[place] for place in chosen][: most + 1]
        allowed = f"{kind.value} allows {most:,}" if limit is None else f"there may be {limit}"
        text = f"{_taking(rules)} {counted(len(rules), noun)}, and {allowed}"
        yield Clash(frozenset({kind, *(each.kind for each in rules)}), text)

    def _backends(self, wanted: Sequence[_Wanted]) -> Iterator[Clash]:
        if not self.given.same_backend:
            return
        of = [frozenset(self.field.devices[place].backend for place in each.places) for each in wanted]
        chosen = _apart(of)
        if len(chosen) > 1:
            rules = [wanted[place] for place in chosen[:2]]
            names = " and ".join(listed(sorted(of[place])) for place in chosen[:2])
            text = f"{_taking(rules)} {names}, and same_backend allows one backend"
            yield Clash(frozenset({Kind.SAME_BACKEND, *(each.kind for each in rules)}), text)


def _apart(sets: Sequence[frozenset[Any]]) -> list[int]:
    """Some of these that have nothing in common, the small ones first."""
    chosen: list[int] = []
    taken: set[Any] = set()
    for place in sorted(range(len(sets)), key=lambda place: len(sets[place])):
        if not taken & sets[place]:
            chosen.append(place)
            taken |= sets[place]
    return sorted(chosen)


def _taking(rules: Sequence[_Wanted]) -> str:
    """``requiring a and b and the pin of layer 3 to c take``."""
    names = [each.text.removeprefix("requiring ") for each in rules if each.kind is not Kind.PINS]
    parts = [f"requiring {joined(names)}"] if names else []
    parts += [each.text for each in rules if each.kind is Kind.PINS]
    return f"{joined(parts)} {'take' if len(parts) > 1 else 'takes'}"
