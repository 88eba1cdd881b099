"""``gpurt simulate``: the same seed does the same, and the master's view ends with what is true of the nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from gpurt.cli import simulate as command
from gpurt.cli.main import main
from gpurt.errors import GPUError
from gpurt.testing import cluster_simulation
from gpurt.testing.cluster_simulation import OnProgress, SimulationReport, simulate
from gpurt.testing.simulation_plan import (
    SimulatedFault,
    SimulationConfig,
    plan_freezes,
    plan_steps,
)
from tests.cluster.support import free_port

pytest.importorskip("zenoh")

QUICK = SimulationConfig(nodes=8, devices=2, seconds=2.0, churn=100.0, seed=7)
ALL_BUT_CLONES = tuple(fault for fault in SimulatedFault if fault is not SimulatedFault.CLONE)


def test_the_seed_decides_all_that_happens() -> None:
    config = SimulationConfig(nodes=100, seconds=5, seed=3)
    assert plan_steps(config) == plan_steps(config)
    assert plan_freezes(config) == plan_freezes(config)
    other = SimulationConfig(nodes=100, seconds=5, seed=4)
    assert plan_steps(config) != plan_steps(other)
    assert plan_freezes(config) != plan_freezes(other)


def test_a_fault_that_is_left_out_changes_no_other() -> None:
    without = SimulationConfig(nodes=100, seed=3, faults=(SimulatedFault.LOSS,))
    whole = SimulationConfig(nodes=100, seed=3)

    def losses(config: SimulationConfig) -> dict[str, list[object]]:
        wanted = (None, SimulatedFault.LOSS)
        return {name: [each for each in steps if each.fault in wanted] for name, steps in plan_steps(config).items()}

    assert losses(without) == losses(whole) == plan_steps(without)
    assert plan_freezes(without) == []


@pytest.mark.parametrize("nodes", [1, 2, 8, 100])
def test_every_fault_happens_and_no_clone_meets_a_restart(nodes: int) -> None:
    steps = plan_steps(SimulationConfig(nodes=nodes, seed=1)).values()
    faults = [{each.fault for each in planned} for planned in steps]
    assert not any({SimulatedFault.CLONE, SimulatedFault.RESTART} <= each for each in faults)
    there = set().union(*faults)
    assert there >= {SimulatedFault.LOSS, SimulatedFault.RESTART, SimulatedFault.CLOCK}
    assert (SimulatedFault.CLONE in there) == (nodes > 1)


def test_every_node_is_in_one_process() -> None:
    for nodes in (1, 2, 9, 1000):
        config = SimulationConfig(nodes=nodes)
        names = [name for process in range(config.processes) for name in config.names_in(process)]
        assert sorted(names) == list(config.names)


async def test_the_view_becomes_what_is_true_whatever_happens() -> None:
    report = await simulate(
        SimulationConfig(QUICK.nodes, QUICK.devices, QUICK.seconds, QUICK.churn, QUICK.seed, ALL_BUT_CLONES)
    )
    assert report.ok, report
    assert report.done == {"change": 200, "loss": 1, "restart": 1, "clock": 1, "stall": 1}
    assert report.events > 150
    assert report.resyncs["gap"] >= 1, "the loss was seen"
    assert report.resyncs["joined"] + report.resyncs.get("new_epoch", 0) > QUICK.nodes, "and so was the restart"
    assert report.memory_bytes > 0


@pytest.mark.slow
async def test_clones_too_and_the_truth_is_the_same_every_time() -> None:
    first, second = await simulate(QUICK), await simulate(QUICK)
    for report in (first, second):
        assert report.ok, report
        assert (report.done["clone"], report.seen["conflict"], report.seen["conflict_over"]) == (1, 1, 1)
    assert first.truth == second.truth


async def test_a_master_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(cluster_simulation.JudgedView):
        def apply_event(self, event: object) -> bool:
            return True

    monkeypatch.setattr(cluster_simulation, "JudgedView", Forgetful)
    monkeypatch.setattr(cluster_simulation, "CONVERGE_S", 0.3)
    report = await simulate(SimulationConfig(nodes=2, devices=1, seconds=0.2, churn=100, faults=()))
    assert not report.ok
    assert report.converged_s is None
    assert report.differences == ["n0000", "n0001"]


@pytest.mark.parametrize("right", [True, False])
def test_the_command_says_so(right: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    configs: list[SimulationConfig] = []

    async def told(config: SimulationConfig, *, on_progress: OnProgress | None = None) -> SimulationReport:
        assert on_progress is not None
        for done in range(3):
            on_progress("nodes join", done, 3)
        configs.append(config)
        return SimulationReport(config, converged_s=0.5 if right else None, conflicts_over_s=0.5)

    monkeypatch.setattr(cluster_simulation, "simulate", told)
    words = ["simulate", "--nodes", "5", "--devices", "3", "--seconds", "1", "--churn", "4", "--seed", "2"]
    assert main([*words, "--faults", "loss,clock", "--json"]) == (0 if right else 1)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["ok"] is right
    assert printed.err == "gpurt simulate: 5 nodes join, then 1 s of changes and faults\n", "where it is no terminal"
    assert configs == [SimulationConfig(5, 3, 1.0, 4.0, 2, (SimulatedFault.LOSS, SimulatedFault.CLOCK))]
    assert main([*words, "--faults", "none"]) == (0 if right else 1)
    assert ("0.50 s after the last step" if right else "NOT after") in capsys.readouterr().out
    assert configs[1].faults == ()


def test_nodes_end_with_who_started_them_even_where_there_is_no_hub() -> None:
    config = json.dumps(asdict(SimulationConfig(nodes=4, devices=1)))
    command = [sys.executable, "-m", "gpurt.testing.simulated_nodes", f"tcp/127.0.0.1:{free_port()}", "0", config]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(GPUError, match="0 nodes"):
        SimulationConfig(nodes=0)
    with pytest.raises(command.argparse.ArgumentTypeError, match="known are loss"):
        command._faults("fire")
