"""The cluster layer: nodes tell what they have, a master keeps the picture.

A node's side is :class:`NodePublisher` (or :func:`run_worker`, which does all of it), a master's side
:class:`ClusterObserver` with a :class:`MasterView` (or :func:`run_master`). Both speak over an engine:
:class:`ZenohEngine` between machines, :class:`InProcessEngine` inside one process.

The names are imported on first use, so that a worker without the ``cluster`` extra can still load what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpurt.cluster.assignment import Acknowledgement, Assignment, Refusal
    from gpurt.cluster.board import ReadingsBoard
    from gpurt.cluster.changes import Change, ChangeKind
    from gpurt.cluster.commands import request_drain
    from gpurt.cluster.commit_result import CommitResult, CommitStatus
    from gpurt.cluster.committer import PlacementCommitter, latest_version
    from gpurt.cluster.epoch import Epoch
    from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
    from gpurt.cluster.link_survey import SurveyResult, request_links, survey_links
    from gpurt.cluster.master import Master, MasterConfig, run_master
    from gpurt.cluster.node_assignments import NodeAssignments, ShardLoader
    from gpurt.cluster.observer import ClusterObserver
    from gpurt.cluster.publisher import NodePublisher
    from gpurt.cluster.readings import DeviceReadings
    from gpurt.cluster.records import ClusterSnapshot
    from gpurt.cluster.state import HostInfo, this_host
    from gpurt.cluster.topology import pairs_to_measure, topology_from_view
    from gpurt.cluster.view import MasterView
    from gpurt.cluster.worker import Worker, WorkerConfig, run_worker
    from gpurt.cluster.zenoh_engine import ZenohEngine

__all__ = [
    "Acknowledgement",
    "Assignment",
    "Change",
    "ChangeKind",
    "ClusterObserver",
    "ClusterSnapshot",
    "CommitResult",
    "CommitStatus",
    "DeviceReadings",
    "Epoch",
    "HostInfo",
    "InProcessBus",
    "InProcessEngine",
    "Master",
    "MasterConfig",
    "MasterView",
    "NodeAssignments",
    "NodePublisher",
    "PlacementCommitter",
    "ReadingsBoard",
    "Refusal",
    "ShardLoader",
    "SurveyResult",
    "Worker",
    "WorkerConfig",
    "ZenohEngine",
    "latest_version",
    "pairs_to_measure",
    "request_drain",
    "request_links",
    "run_master",
    "run_worker",
    "survey_links",
    "this_host",
    "topology_from_view",
]

_HOMES = {
    "assignment": ("Acknowledgement", "Assignment", "Refusal"),
    "board": ("ReadingsBoard",),
    "changes": ("Change", "ChangeKind"),
    "commands": ("request_drain",),
    "commit_result": ("CommitResult", "CommitStatus"),
    "committer": ("PlacementCommitter", "latest_version"),
    "epoch": ("Epoch",),
    "inprocess": ("InProcessBus", "InProcessEngine"),
    "link_survey": ("SurveyResult", "request_links", "survey_links"),
    "master": ("Master", "MasterConfig", "run_master"),
    "node_assignments": ("NodeAssignments", "ShardLoader"),
    "observer": ("ClusterObserver",),
    "publisher": ("NodePublisher",),
    "readings": ("DeviceReadings",),
    "records": ("ClusterSnapshot",),
    "state": ("HostInfo", "this_host"),
    "topology": ("pairs_to_measure", "topology_from_view"),
    "view": ("MasterView",),
    "worker": ("Worker", "WorkerConfig", "run_worker"),
    "zenoh_engine": ("ZenohEngine",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
