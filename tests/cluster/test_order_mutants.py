"""Small wrong versions of what orders a node's words, and of what has commits finish: the random orders and the cases
of a commit find every one of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpurt
from tests.mutants.mutants import Mutant

SOURCE = Path(gpurt.__file__).parent
ROOT = Path(__file__).parents[2]
WALKS = "thousand_random or the_last_answer or counts_from_1"
DOUBLES = "two_live_processes"
COMMITS = "whatever_goes_wrong and not every_case"

MUTANTS = [
    Mutant(
        "a goodbye by its number alone, without its run",
        "cluster/view.py",
        "up = up and (epoch != goodbye.epoch or seq > goodbye.seq)",
        "up = up and seq > goodbye.seq",
        WALKS,
    ),
    Mutant(
        "a goodbye that no later word of its run ends, and no other run",
        "cluster/view.py",
        "up = up and (epoch != goodbye.epoch or seq > goodbye.seq)",
        "up = False",
        WALKS,
    ),
    Mutant(
        "a goodbye that is forgotten at once",
        "cluster/view.py",
        "        self._left[record.node] = Position(Epoch.parse(record.epoch), record.seq)\n",
        "",
        WALKS,
    ),
    Mutant(
        "the end of a token is the goodbye of whichever run is known",
        "cluster/view.py",
        "            self._enter_left(record)\n        elif",
        "            self._leave(record)\n        elif",
        WALKS,
    ),
    Mutant(
        "an answer to a question of before the token makes its run healthy",
        "cluster/observer.py",
        "if tokens != known.tokens and self._not_there(name):",
        "if False:",
        WALKS,
    ),
    Mutant(
        "the end of a token after another run's token is no end",
        "cluster/view.py",
        "        elif record.state is NodeState.HEALTHY or returning or",
        "        elif record.state is NodeState.HEALTHY or",
        WALKS,
    ),
    Mutant(
        "a node that has left before its first answer is lost",
        "cluster/view.py",
        "            return NodeState.LEFT\n        if self._hub_away",
        "        if self._hub_away",
        WALKS,
    ),
    Mutant(
        "events of a run that has ended make one question after the other",
        "cluster/sequence.py",
        "        ended, self._doubted = self._doubted - {position.epoch}, frozenset()",
        "        ended = frozenset[Epoch]()",
        WALKS,
    ),
    Mutant(
        "events of an earlier run's number are dropped before anybody knows who lives",
        "cluster/sequence.py",
        "            return self._keep(position, _Waiting(event, size), _another_run(older))",
        "            why = _another_run(older)\n"
        "            return self._ask(why) if older else self._keep(position, _Waiting(event, size), why)",
        WALKS,
    ),
    Mutant(
        "a node that refuses its part after the decision is not asked again",
        "cluster/committer.py",
        "            undone = [node for node, answer in activated.items() if not answer.accepted]\n",
        "            undone = result.unconfirmed\n",
        COMMITS,
    ),
    Mutant(
        "a node that follows is still named",
        "cluster/committer.py",
        "        known = decided.lacking.pop(node, None)\n",
        "        known = decided.lacking.get(node)\n",
        COMMITS,
    ),
    Mutant(
        "a node that holds nothing of the plan is not missed by observers",
        "cluster/plan_troubles.py",
        '            return f"{why}, and is draining" if record.draining else why\n',
        "            return None\n",
        COMMITS,
    ),
    Mutant(
        "what is wrong about plans is looked at when something else is due",
        "cluster/view.py",
        "            due.append(self._plans.due)\n",
        "            pass\n",
        COMMITS,
    ),
    Mutant(
        "of two live processes, who was believed keeps the name",
        "cluster/observer.py",
        "        kept = snapshots.pop(min(epoch for epoch in snapshots if held[epoch] >= longest - HELD_EQUAL_S))\n",
        "        record = self.view.node(name)\n"
        "        known = min(snapshots) if record is None else Epoch.parse(record.epoch)\n"
        "        kept = snapshots.pop(known if known in snapshots else min(snapshots))\n",
        DOUBLES,
    ),
    Mutant(
        "of two live processes, the newer run keeps the name",
        "cluster/observer.py",
        "        kept = snapshots.pop(min(epoch for epoch in snapshots if held[epoch] >= longest - HELD_EQUAL_S))\n",
        "        kept = snapshots.pop(max(snapshots))\n",
        DOUBLES,
    ),
    Mutant(
        "a name that was used twice stays so",
        "cluster/observer.py",
        "            self.view.end_conflict(name)\n",
        "            pass\n",
        DOUBLES,
    ),
    Mutant(
        "a plan that was called off is followed",
        "cluster/committer.py",
        "        if conflict is not None or not all(answer.accepted for answer in offered.values()):\n",
        "        if conflict is not None:\n",
        COMMITS,
    ),
    Mutant(
        "healthy without a token",
        "cluster/view.py",
        "        up = snapshot.node in self._up\n",
        "        up = True\n",
        WALKS,
    ),
]


def _run(package_parent: Path, where: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, pathlib, gpurt, pytest\n"
        f"assert pathlib.Path(gpurt.__file__).is_relative_to({str(package_parent)!r}), gpurt.__file__\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    files = ["tests/cluster/test_view_orders.py", "tests/cluster/test_commit_finishes.py"]
    arguments = [*files, "-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-n", "0"]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments, "--show-capture=no", "-m", "not slow", "-k", where],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package_parent), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _killed(mutant: Mutant, folder: Path) -> None:
    shutil.copytree(SOURCE, folder / "gpurt", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "gpurt" / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    result = _run(folder, mutant.where)
    assert result.returncode == 1, result.stdout[-3000:] + result.stderr[-1000:]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_still_applies(mutant: Mutant) -> None:
    assert (SOURCE / mutant.file).read_text().count(mutant.old) == 1


@pytest.mark.wide
def test_the_fault_of_old_is_found(tmp_path: Path) -> None:
    _killed(MUTANTS[0], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS[1:], ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    _killed(mutant, tmp_path)
