"""One look-up: which backends are asked, how long each may take, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gpurt.discovery.assemble import BackendAnswer
from gpurt.discovery.deadlines import USUAL_S, deadline_for
from gpurt.discovery.given import GivenBackend
from gpurt.discovery.memory import DiscoveryMemory
from gpurt.discovery.pace import Care
from gpurt.discovery.preview import Previews
from gpurt.discovery.survey import Survey, backend_names
from gpurt.errors import ReasonCode
from gpurt.hotchange.marks import read_marks
from gpurt.hotchange.nodes import is_on_bus, lost_nodes
from gpurt.platforms import Platform
from gpurt.runtime.lane import off_loop
from gpurt.settings import SelectionSettings
from gpurt.types import BackendReport

_OF_NODES: Final = frozenset({ReasonCode.ERROR, ReasonCode.NO_DRIVER, ReasonCode.NO_PERMISSION, ReasonCode.NO_DEVICE})
"""What drivers say when their device nodes cannot be opened."""


@dataclass(frozen=True, slots=True)
class Answers:
    """By backend, the preferred one first."""

    by_backend: Mapping[str, BackendAnswer]
    asked: frozenset[str]
    """Those that answered now; of the others it is the answer of before."""


@dataclass(frozen=True, slots=True)
class _Worked:
    """Of the last time when a backend worked."""

    nodes: frozenset[str]
    """Device nodes."""
    cards: frozenset[str]
    """PCI addresses."""


class Lookup:
    """Asks the backends of one service.

    Args:
        names: backends to ask; None is all of the platform.
        probe_timeout: seconds for each; None is what the backend needed before, with room.
        environ: the environment of the probes.
        root: where device nodes are found.
    """

    def __init__(
        self,
        survey: Survey,
        memory: DiscoveryMemory,
        previews: Previews,
        platform: Platform,
        *,
        given: GivenBackend | None,
        names: Sequence[str] | None,
        probe_timeout: float | None,
        environ: Callable[[], Mapping[str, str]],
        root: Path,
    ) -> None:
        self._survey, self._memory, self._previews = survey, memory, previews
        self._platform: Platform = platform
        self._given = given
        self._names = names
        self._probe_timeout = probe_timeout
        self._environ = environ
        self._root = root
        self._worked: dict[str, _Worked] = {}

    async def ask(self, care: Care, *, first: bool) -> Answers:
        """Ask; ``first``: nobody has been told anything yet, so a preview is wanted.

        Raises:
            GPUError: an environment variable has a value that is not allowed.
        """
        if self._given is None:
            return await self._ask_all(care, first=first)
        if first:
            self._previews.begin((self._given.name,), self._memory.stale())
        deadline = self._probe_timeout or USUAL_S
        answer = await self._given.ask(deadline, self._environ(), patient=care is Care.POLL)
        return Answers({self._given.name: answer}, frozenset({self._given.name}))

    async def _ask_all(self, care: Care, *, first: bool) -> Answers:
        memory = self._memory
        names = self._names or await backend_names(self._platform, self._environ())
        if first:
            self._previews.begin(names, memory.stale())
        marks = await self._survey.marks(names)
        if care is Care.VERIFY:
            await memory.doubt(names)
        waiting = {
            name: memory.answers[name]
            for name in names
            if care is Care.POLL and name in memory.answers and not memory.backoff.is_due(name, marks[name])
        }
        deadlines = {name: self._deadline(name) for name in names if name not in waiting}
        asked = await self._survey.ask(
            deadlines,
            self._environ(),
            frozenset(memory.verified),
            memory.known,
            self._previews,
            by_name=self._by_name(),
        )
        asked = await off_loop("nodes", lambda: self._explain(asked))
        memory.learn(asked, marks)
        return Answers({name: waiting.get(name) or asked[name] for name in names}, frozenset(asked))

    def _by_name(self) -> frozenset[str]:
        """Backends that somebody wants: the only one that this service asks, and what GPURT_BACKEND says."""
        chosen = SelectionSettings.from_environ(self._environ()).backend
        only = self._names if self._names is not None and len(self._names) == 1 else ()
        return frozenset(only) if chosen is None else frozenset((chosen, *only))

    def _explain(self, answers: Mapping[str, BackendAnswer]) -> dict[str, BackendAnswer]:
        """Answers of backends that worked, and fail because their device nodes were taken away, say so. Blocking."""
        nodes = read_marks(self._root).nodes
        explained: dict[str, BackendAnswer] = {}
        for name, answer in answers.items():
            if answer.report.status == "ok":
                identities = (device.identity for device in answer.devices)
                cards = {identity.pci_address for identity in identities if identity and identity.pci_address}
                self._worked[name] = _Worked(nodes, frozenset(cards))
            elif answer.report.reason in _OF_NODES and (lost := self._lost(name)):
                answer = replace(answer, report=_without_nodes(answer.report, lost))
            explained[name] = answer
        return explained

    def _lost(self, name: str) -> tuple[str, ...]:
        worked = self._worked.get(name)
        # Nodes of a card that was unplugged are gone, too, and it must be told as what it is.
        if worked is None or not any(is_on_bus(card, self._root) for card in worked.cards):
            return ()
        return lost_nodes(name, worked.nodes, self._root)

    def _deadline(self, name: str) -> float:
        if self._probe_timeout is not None:
            return self._probe_timeout
        known = self._memory.answers.get(name)
        return deadline_for(known.report if known else None)


def _without_nodes(report: BackendReport, lost: Sequence[str]) -> BackendReport:
    message = (
        f"{', '.join(lost)} could be opened before and cannot now, although the driver is loaded: this container has "
        f"lost its devices ({report.message})"
    )
    hint = "create the container again; on its host `systemctl daemon-reload` takes devices away from it"
    return report.model_copy(update={"reason": ReasonCode.NO_PERMISSION, "message": message, "hint": hint})
