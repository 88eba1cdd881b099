"""Discovery over a recording: the same answer as on its machine, and nothing of this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpurt.discovery.assemble import BackendAnswer, assemble
from gpurt.discovery.budget import MemoryBudget
from gpurt.discovery.merge import merge
from gpurt.discovery.result import DiscoveryResult, summarize
from gpurt.discovery.wire import ProbeOutcome
from gpurt.errors import GPUError, ReasonCode
from gpurt.platforms import PLATFORM_BACKEND_PRIORITY
from gpurt.recording.layout import ROOT, Meta
from gpurt.recording.place import Place, os_release
from gpurt.recording.prober import FixtureProber
from gpurt.runtime.lane import off_loop
from gpurt.settings import canonical_name
from gpurt.sources.host_identity import host_fingerprint
from gpurt.sources.pci import BACKEND_VENDORS, has_pci_vendor
from gpurt.types import DeviceKind, GPUDevice
from gpurt.usable_memory import MemorySettings, with_usable_memory


class Recording:
    """A recording and how it is looked at.

    Reads the description when it is made; blocking.

    Attributes:
        meta: its description.
        root: its file tree.
        environ: its variables.
        place: where it was made.

    Raises:
        GPUError: ``directory`` is no recording, or a file of it cannot be understood.
    """

    def __init__(self, directory: Path) -> None:
        self._prober = FixtureProber(directory)
        self.directory = directory
        self.root = directory / ROOT
        self.meta: Meta = self._prober.meta
        self.environ = self._prober.environ
        # Without this file the readers would ask this machine for its memory.
        self._tells_memory = (self.root / "proc/meminfo").is_file()
        self.place = Place(os_release(self.root).get("id"), self.meta.container)

    @property
    def label(self) -> str:
        """Where and when, for people."""
        return f"{self.directory}, {self.meta.recorded_at}"

    async def discover(self, backends: list[str] | None = None) -> DiscoveryResult:
        """The devices of the recorded machine. No registry is read or written.

        Args:
            backends: only these, instead of those that were asked then.

        Raises:
            GPUError: the recording has no answer of a backend that is asked for.
        """
        names = self.meta.backends or PLATFORM_BACKEND_PRIORITY[self.meta.platform]
        if backends is not None:
            wanted = list(map(canonical_name, backends))
            missing = next((name for name in wanted if name not in names), None)
            if missing is not None:
                raise GPUError(
                    f"the recording has nothing of backend {missing!r}", hint=f"choose one of {', '.join(names)}"
                )
            names = tuple(wanted)
        outcomes = {name: await self._prober.probe(name) for name in names}
        nvidia = any(device.vendor == "nvidia" for outcome in outcomes.values() for device in outcome.sighted)
        answers = {name: await self._answer(name, outcome, nvidia) for name, outcome in outcomes.items()}
        merged = merge(
            [answer.devices for answer in answers.values()],
            priority=tuple(answers),
            hidden=frozenset[str]().union(*(answer.hidden for answer in answers.values())),
        )
        if self._tells_memory:
            merged = await MemoryBudget(self.root).apply(merged, self.environ)
        else:
            settings = MemorySettings.from_environ(self.environ)
            merged = tuple(_with_own_memory(device, settings) for device in merged)
        result = summarize(merged, [answer.report for answer in answers.values()])
        update: dict[str, Any] = {"timestamp": self.meta.recorded_at}
        if any(report.reason is ReasonCode.NOT_RECORDED for report in result.reports):
            # Nobody failed, and nobody knows what else there was.
            update["discovery_status"] = "partial"
        return await off_loop("recording", lambda: self._of_host(result.model_copy(update=update)))

    def _of_host(self, result: DiscoveryResult) -> DiscoveryResult:
        """With the identity that the host had, where that is told: its files give another."""
        if self.meta.host is None or not (self.root / "etc/machine-id").is_file():
            return result
        text = result.model_dump_json().replace(f"host:{host_fingerprint(self.root)}", f"host:{self.meta.host}")
        return DiscoveryResult.model_validate_json(text)

    async def _answer(self, name: str, outcome: ProbeOutcome, nvidia_present: bool) -> BackendAnswer:
        on_bus, vendor = None, BACKEND_VENDORS.get(name)
        if outcome.failure is not None and vendor is not None:
            on_bus = await off_loop("pci", lambda: has_pci_vendor(self.root, vendor))
        return assemble(
            name,
            outcome,
            environ=self.environ,
            platform=self.meta.platform,
            on_bus=on_bus,
            nvidia_present=nvidia_present,
        )


def _with_own_memory(device: GPUDevice, settings: MemorySettings) -> GPUDevice:
    """A device of a host whose memory was not recorded: only what is the device's own can be told."""
    if device.simulated or device.unified_memory or device.kind in (DeviceKind.CPU, DeviceKind.SOFTWARE):
        return device
    return with_usable_memory(device, settings)
