"""A recorded machine: a tree of the kernel's files, tables of libraries, and a service that discovers it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.gate import gate
from gpurt.discovery.line import ProbeLine
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.sight import sight, steps
from gpurt.discovery.wire import Failure, ProbeOutcome, Transcript
from gpurt.errors import ReasonCode
from gpurt.types import BackendReport, GPUDevice

GIB = 1 << 30


class Machine:
    """Tests fill ``root`` and ``tables``; every library that is not recorded here is not installed there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.root, self.tables = folder / "root", folder / "tables"
        self.root.mkdir()
        self.tables.mkdir()
        self.environ: dict[str, str] = {}
        self.asked: list[str] = []
        """Backends that needed a probe."""
        self._monkeypatch = monkeypatch

    def record(self, source: str, table: object) -> None:
        (self.tables / f"{source}.json").write_text(json.dumps(table))

    def file(self, name: str, text: str = "") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def with_vulkan(self) -> None:
        """Its package is installed, and a driver, so that the gate lets Vulkan through."""
        self.file("usr/share/vulkan/icd.d/some_icd.json", "{}")
        self._monkeypatch.setattr(
            gate, "__kwdefaults__", {**gate.__kwdefaults__, "has_module": {"vulkan", "pynvml"}.__contains__}
        )

    def sight(self, name: str) -> ProbeLine:
        line = sight(name, environ=self.environ, root=self.root, tables=self.tables)
        assert line is not None
        return line

    async def discover(self, *backends: str, platform: str = "linux", probed: bool = True) -> DiscoveryResult:
        """A whole discovery; ``probed``: the gate lets the backends through for what it finds in the tree."""
        self._monkeypatch.setattr("gpurt.discovery.service.current_platform", lambda **_: platform)
        service = GPUDiscoveryService(
            self.folder / "registry.json",
            backends=[*backends, "cpu"],
            environ=self.environ,
            prober=_Prober(self, platform),
            root=self.root,
        )
        async with service:
            result = await service.discover_all_devices()
        assert self.asked == (list(backends) if probed else [])
        return result


class _Prober:
    """Looks where the child would, and opens what the child could open: nothing."""

    def __init__(self, machine: Machine, platform: str) -> None:
        self._machine, self._platform = machine, platform

    async def probe(
        self,
        name: str,
        *,
        deadline: float,
        environ: Mapping[str, str],
        verified: Set[str] = frozenset(),
        known: Set[str] = frozenset(),
        on_sighted: Any = None,
    ) -> ProbeOutcome:
        machine = self._machine
        machine.asked.append(name)
        transcript = Transcript()

        def look() -> None:
            for line in steps(name, environ=environ, root=machine.root, tables=machine.tables):
                transcript.add(ProbeLine.model_validate_json(line.model_dump_json()))
            transcript.fail(Failure(ReasonCode.NO_LIBRARY, "its package is not installed", "install it"))

        await asyncio.to_thread(look)
        return transcript.outcome(1.0)


def report_of(result: DiscoveryResult, name: str) -> BackendReport:
    return next(report for report in result.reports if report.name == name)


def gpus(result: DiscoveryResult) -> list[GPUDevice]:
    return [device for device in result.devices if device.backend != "cpu"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)
