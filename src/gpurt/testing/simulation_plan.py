"""What happens in a simulated cluster, and when: worked out from the seed alone, before anything runs."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpurt.errors import GPUError

MAX_PROCESSES: Final = 8
NODES_PER_PROCESS: Final = 125
"""One session of the bus each; more in one process take longer to start than the processes do."""
SHARE: Final = 20
"""Each fault befalls one node in so many, and one at least."""
FAULTY: Final = (0.1, 0.7)
"""Part of the run in which faults begin: changes come before, meanwhile, and after."""
FREEZE_S: Final = 3.0
"""Longer than the bus waits for a silent node."""
CLONE_S: Final = 2.0
SKEWS_S: Final = (-31_536_000.0, -3_600.0, 3_600.0, 31_536_000.0)
"""Steps of a wall clock: hours, as a wrong time zone is, and years, as an empty battery is."""


class SimulatedFault(StrEnum):
    LOSS = "loss"
    """Events that never reach the bus."""
    STALL = "stall"
    """The process of many nodes is frozen."""
    CLONE = "clone"
    """Another machine joins under the node's name for a while."""
    RESTART = "restart"
    """The node is gone without a goodbye, and starts again as a later run."""
    CLOCK = "clock"
    """The wall clock in the node's events is stepped."""


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """
    Args:
        churn: changes of devices a second, of the whole cluster.

    Raises:
        GPUError: a figure without meaning.
    """

    nodes: int = 1000
    devices: int = 8
    seconds: float = 20.0
    churn: float = 100.0
    seed: int = 0
    faults: tuple[SimulatedFault, ...] = tuple(SimulatedFault)

    def __post_init__(self) -> None:
        # A view holds 4,096 nodes, and a specification of devices as many as it may name.
        if not (1 <= self.nodes <= 4096 and 1 <= self.devices <= 1024 and self.seconds > 0 and self.churn >= 0):
            raise GPUError(
                f"cannot simulate {self.nodes} nodes of {self.devices} devices, {self.churn:g} changes a second, for "
                f"{self.seconds:g} s",
                hint="give 1 to 4096 nodes, 1 to 1024 devices, some time, and no negative churn",
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{number:04}" for number in range(self.nodes))

    @property
    def processes(self) -> int:
        """Those of the nodes; two at least, so that one can be frozen while the other goes on."""
        return min(self.nodes, MAX_PROCESSES, max(2, self.nodes // NODES_PER_PROCESS))

    def names_in(self, process: int) -> tuple[str, ...]:
        return self.names[process :: self.processes]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Something that one node does."""

    at_s: float
    """Since all nodes were there."""
    fault: SimulatedFault | None
    """None: a device changes."""
    value: float
    """Which change; events lost; seconds of the clone or of the clock's step."""


@dataclass(frozen=True, slots=True)
class Freeze:
    at_s: float
    process: int
    seconds: float


def plan_steps(config: SimulationConfig) -> dict[str, list[PlannedStep]]:
    """By node, in their order in time."""
    names = config.names
    steps: dict[str, list[PlannedStep]] = {name: [] for name in names}
    rng = random.Random(f"{config.seed}:churn")
    for _ in range(round(config.churn * config.seconds)):
        at = rng.uniform(0, config.seconds)
        steps[rng.choice(names)].append(PlannedStep(at, None, rng.getrandbits(32)))
    struck = {fault: _struck(config, fault) for fault in SimulatedFault if fault is not SimulatedFault.STALL}
    # A node that starts again while another process has its name is refused, and rightly so.
    struck[SimulatedFault.CLONE] -= struck[SimulatedFault.RESTART]
    for fault in config.faults:
        rng = random.Random(f"{config.seed}:{fault}:steps")
        for name in sorted(struck.get(fault, ())):
            steps[name].append(PlannedStep(_moment(config, rng), fault, _value(config, fault, rng)))
    return {name: sorted(planned, key=lambda step: step.at_s) for name, planned in steps.items()}


def plan_freezes(config: SimulationConfig) -> list[Freeze]:
    """One, of one process."""
    if SimulatedFault.STALL not in config.faults:
        return []
    rng = random.Random(f"{config.seed}:{SimulatedFault.STALL}")
    return [Freeze(_moment(config, rng), rng.randrange(config.processes), min(FREEZE_S, config.seconds / 4))]


def _struck(config: SimulationConfig, fault: SimulatedFault) -> set[str]:
    rng = random.Random(f"{config.seed}:{fault}")
    names: Collection[str] = config.names
    if fault is SimulatedFault.CLONE and config.nodes > 1:
        taken = _struck(config, SimulatedFault.RESTART)
        names = [name for name in names if name not in taken]
    return set(rng.sample(list(names), max(1, config.nodes // SHARE)))


def _moment(config: SimulationConfig, rng: random.Random) -> float:
    first, last = FAULTY
    return config.seconds * rng.uniform(first, last)


def _value(config: SimulationConfig, fault: SimulatedFault, rng: random.Random) -> float:
    match fault:
        case SimulatedFault.LOSS:
            return rng.randint(1, 3)
        case SimulatedFault.CLONE:
            return min(CLONE_S, config.seconds / 4)
        case SimulatedFault.CLOCK:
            return rng.choice(SKEWS_S)
        case _:
            return 0.0
