"""Probers of recordings: one that keeps what a real one says, one that gives the answers of a recording."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Set
from pathlib import Path

from gpurt.discovery.conversation import Sighted
from gpurt.discovery.line import ProbeLine
from gpurt.discovery.sight import TABLES as SOURCES
from gpurt.discovery.sight_record import read_table
from gpurt.discovery.survey import Prober
from gpurt.discovery.wire import Failure, ProbeOutcome, Transcript
from gpurt.errors import ReasonCode
from gpurt.recording.answers import NOT_RECORDED, DriverAnswer, RecordedFailure, check_devices, read_answers
from gpurt.recording.layout import DRIVERS, NODES, ROOT, TABLES, read_environ, read_json, read_meta
from gpurt.recording.nodes import read_nodes, with_recorded_access
from gpurt.recording.processor import recorded_processor
from gpurt.runtime.lane import off_loop
from gpurt.sources.recorded import check_tree


class KeepingProber:
    """Another prober, with a copy of what it answered."""

    def __init__(self, prober: Prober) -> None:
        self._prober = prober
        self.outcomes: dict[str, ProbeOutcome] = {}
        """The last of each backend."""

    async def probe(
        self,
        name: str,
        *,
        deadline: float,
        environ: Mapping[str, str],
        verified: Set[str] = frozenset(),
        known: Set[str] = frozenset(),
        on_sighted: Sighted | None = None,
    ) -> ProbeOutcome:
        """As the other's."""
        outcome = await self._prober.probe(
            name, deadline=deadline, environ=environ, verified=verified, known=known, on_sighted=on_sighted
        )
        self.outcomes[name] = outcome
        return outcome


class FixtureProber:
    """Answers from the recording in ``directory``. Asks nothing of this machine.

    What the system and its management libraries show is worked out anew, from their recorded files and tables; what
    a driver said is told again.

    Raises:
        GPUError: ``directory`` is no recording, or cannot be read. Blocking, as ``read_meta`` is.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.meta = read_meta(directory)
        # Before anything is looked for, so that what is wrong with a recording is not taken for its devices' state.
        check_tree(directory, ROOT)
        for table in SOURCES:
            with contextlib.suppress(FileNotFoundError):
                read_table(directory, f"{TABLES}/{table}.json")
        self.environ = read_environ(directory)
        self._answers = read_answers(read_json(directory, DRIVERS) or {})
        self._nodes = read_nodes(read_json(directory, NODES) or {})

    async def probe(
        self,
        name: str,
        *,
        deadline: float = 0.0,
        environ: Mapping[str, str] | None = None,
        verified: Set[str] = frozenset(),
        known: Set[str] = frozenset(),
        on_sighted: Sighted | None = None,
    ) -> ProbeOutcome:
        """As :meth:`gpurt.discovery.probe.ChildProber.probe`; of the arguments only ``environ`` matters, which is
        in place of the recorded one. There is nothing to wait for and nothing to verify."""
        variables = self.environ if environ is None else environ
        answer = self._answers.get(name)
        line: ProbeLine | None = None
        if answer is None or answer.sighted:
            line = await off_loop("recording", lambda: self._sight(name, variables))
        if on_sighted is not None and line is not None and line.devices:
            on_sighted(line.devices)
        if answer is None and name == "cpu":
            answer = await off_loop("recording", self._processor)
        if answer is None:
            answer = _nobody_asked(name)
        return _outcome(answer, line)

    def _sight(self, name: str, environ: Mapping[str, str]) -> ProbeLine | None:
        from gpurt.discovery.sight import sight

        root = self.directory / ROOT
        line = sight(name, environ=environ, root=root, tables=self.directory / TABLES)
        if line is None:
            return None
        check_devices(line.devices, "the recording")
        return with_recorded_access(line, root, self._nodes)

    def _processor(self) -> DriverAnswer | None:
        device = recorded_processor(self.directory / ROOT)
        return None if device is None else DriverAnswer(verified=(device,))


def _outcome(answer: DriverAnswer, line: ProbeLine | None) -> ProbeOutcome:
    """As if a probe had said both, one after the other."""
    transcript = Transcript()
    if line is not None:
        transcript.add(line)
    if answer.opened:
        transcript.add(ProbeLine(stage="opened", devices=answer.opened))
    if answer.failure is not None:
        transcript.add(ProbeLine(stage="failed", **answer.failure.model_dump()))
    elif answer.verified is not None:
        transcript.add(ProbeLine(stage="verified", devices=answer.verified))
    else:
        text = "the recording has neither devices nor a failure of this backend"
        transcript.fail(Failure(ReasonCode.ERROR, text))
    return transcript.outcome(answer.elapsed_ms)


def _nobody_asked(name: str) -> DriverAnswer:
    """Of a recording that was made by hand, from what management libraries show."""
    text = f"{NOT_RECORDED} of {name}'s own driver, only of what shows its devices"
    return DriverAnswer(failure=RecordedFailure(reason=ReasonCode.NOT_RECORDED, message=text))
