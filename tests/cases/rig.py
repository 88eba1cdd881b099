"""Machines for the cases: what a probe's child would have said, and whole services over it."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections.abc import AsyncIterator, Callable, Mapping, Set
from contextlib import asynccontextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from gpurt.cluster.epoch import Epoch
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.view import MasterView
from gpurt.discovery.conversation import Sighted
from gpurt.discovery.line import ProbeLine
from gpurt.discovery.probe import ChildProber
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.sight import sight
from gpurt.discovery.wire import ProbeOutcome, Transcript
from gpurt.errors import ReasonCode
from gpurt.recording.replay import Recording
from gpurt.types import GPUDevice
from tests.cluster.support import HOST_A, until
from tests.discovery.records import cpu

MIB, GIB = 1 << 20, 1 << 30
NO_CUPY = ProbeLine(
    stage="failed", reason=ReasonCode.NO_LIBRARY, message="CuPy is not installed", hint="pip install cupy-cuda12x"
)


def uuid(n: int) -> str:
    return f"GPU-{n:08x}-0000-1111-2222-333333333333"


def card(n: int, name: str = "NVIDIA H100 80GB HBM3", mib: int = 81559, **fields: Any) -> dict[str, Any]:
    """Card ``n`` of a machine as NVML tells it."""
    known: dict[str, Any] = {
        "name": name, "uuid": uuid(n), "pci_address": f"00000000:{n + 1:02x}:00.0", "memory_total_bytes": mib * MIB,
        "memory_free_bytes": mib * MIB, "memory_used_bytes": 0, "compute_capability": "9.0",
    }  # fmt: skip
    return known | fields


def look(
    name: str, folder: Path, *, root: Path | None = None, environ: Mapping[str, str] | None = None, **tables: Any
) -> ProbeLine:
    """What a probe of backend ``name`` sees on a machine of these recorded tables and this tree of files."""
    recorded = folder / "tables"
    recorded.mkdir(exist_ok=True)
    for source, table in tables.items():
        (recorded / f"{source}.json").write_text(json.dumps(table))
    line = sight(name, environ=environ or {}, root=root or folder, tables=recorded)
    assert line is not None
    return line


def replay(
    folder: Path, *backends: str, platform: str = "linux", environ: Mapping[str, str] | None = None, **tables: Any
) -> DiscoveryResult:
    """What discovery says of a recorded machine: these tables and variables, the files below ``folder / "root"``."""
    recorded = folder / "tables"
    recorded.mkdir(exist_ok=True)
    for source, table in tables.items():
        (recorded / f"{source}.json").write_text(json.dumps(table))
    meta = {"schema": 1, "recorded_at": "2026-11-28T00:00:00+00:00", "platform": platform, "backends": backends}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "environ.json").write_text(json.dumps(environ or {}))
    return asyncio.run(Recording(folder).discover())


def cards(folder: Path, *rows: Mapping[str, Any]) -> ProbeLine:
    """What NVML shows of a machine with these cards."""
    return look("cuda", folder, nvml={"driver_version": "590.48.01", "devices": rows})


def verified(*devices: GPUDevice) -> ProbeLine:
    """The same cards as CUDA shows them, in its order: by their place on the bus alone."""
    found: list[GPUDevice] = []
    for ordinal, device in enumerate(devices):
        assert device.identity is not None
        identity = device.identity.model_copy(update={"uuid": None, "key": f"pci:{device.identity.pci_address}"})
        update = {"device_id": f"cuda:{ordinal}", "backend_name": "cupy", "usable": True, "identity": identity}
        found.append(device.model_copy(update=update))
    return ProbeLine(stage="verified", devices=tuple(found))


def outcome(*lines: ProbeLine) -> ProbeOutcome:
    """What the parent makes of a child's lines."""
    transcript = Transcript()
    for line in lines:
        transcript.add(line)
    return transcript.outcome(0.0)


def working(folder: Path, *numbers: int) -> ProbeOutcome:
    """A machine whose cards of these numbers are counted in this order and pass."""
    seen = cards(folder, *map(card, numbers))
    return outcome(seen, verified(*seen.devices))


class Said:
    """Stands in for child processes: the outcome of each backend's probe, which a test may change."""

    def __init__(self, **outcomes: ProbeOutcome) -> None:
        self.outcomes = {"toy": ProbeOutcome(verified=(cpu(backend="toy"),)), **outcomes}
        self.probes: list[str] = []

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
        self.probes.append(name)
        return self.outcomes[name]

    def service(self, path: Path, environ: Mapping[str, str] | None = None, **options: Any) -> GPUDiscoveryService:
        given: dict[str, Any] = {"backends": ["cuda", "toy"], "environ": environ or {}, "interval": 0.01, **options}
        return GPUDiscoveryService(path, prober=self, **given)

    async def discover(self, path: Path, environ: Mapping[str, str] | None = None, **options: Any) -> DiscoveryResult:
        async with self.service(path, environ, **options) as service:
            return await service.discover_all_devices()


class CountingProber(ChildProber):
    """Real children, counted."""

    def __init__(self) -> None:
        super().__init__()
        self.probes: list[str] = []

    async def probe(self, name: str, **options: Any) -> ProbeOutcome:
        self.probes.append(name)
        return await super().probe(name, **options)


class Binding(types.ModuleType):
    """A ``pynvml`` of tables: each card is a mapping of function name (without ``nvmlDeviceGet``) to what the
    function returns, or to the code that it fails with."""

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"NVML code {value}")
            self.value = value

    def __init__(self, *cards: Mapping[str, Any], memory_v2: bool = True) -> None:
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)
        self.cards = cards
        if memory_v2:
            self.nvmlMemory_v2 = 0x02000028

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str:
        return "590.48.01"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Mapping[str, Any]:
        return self.cards[index]

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> Mapping[str, Any]:
        return next(card for card in self.cards if card["PciInfo"].busId.lower() == address.decode().lower())

    def nvmlDeviceGetMemoryInfo(self, card: Mapping[str, Any], version: int | None = None) -> Any:
        if version is not None and not hasattr(self, "nvmlMemory_v2"):
            raise TypeError("nvmlDeviceGetMemoryInfo() takes 1 positional argument but 2 were given")
        return self._answer(card, "MemoryInfo" if version is not None else "MemoryInfo_v1", "MemoryInfo")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        return lambda card, *args: self._answer(card, name.removeprefix("nvmlDeviceGet"))

    def _answer(self, card: Mapping[str, Any], *names: str) -> Any:
        answer = next((card[name] for name in names if name in card), self.NVMLError(3))
        if isinstance(answer, Exception):
            raise answer
        return answer


def fails(code: int) -> Exception:
    return Binding.NVMLError(code)


def memory(total: int, reserved: int, used: int, free: int | None = None) -> Any:
    """In MiB."""
    left = total - reserved - used if free is None else free
    return types.SimpleNamespace(total=total * MIB, reserved=reserved * MIB, used=used * MIB, free=left * MIB)


def row(name: str, pci: str, capability: tuple[int, int], n: int = 1, **answers: Any) -> dict[str, Any]:
    """One card of a table; what is not given is not supported."""
    return {
        "Name": name, "UUID": uuid(n), "PciInfo": types.SimpleNamespace(busId=pci),
        "CudaComputeCapability": capability, **answers,
    }  # fmt: skip


def rates(gpu: int) -> Any:
    return types.SimpleNamespace(gpu=gpu, memory=0)


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[MasterView, NodePublisher, Callable[[], Any]]]:
    """A master's view, one node's publisher, and a wait until the view has all that was published."""
    bus = InProcessBus("test")
    node, master, view = InProcessEngine(bus), InProcessEngine(bus), MasterView()
    await node.start()
    await master.start()
    publisher = NodePublisher(node, "n1", host=HOST_A, epoch=Epoch.new(1))
    ready = asyncio.Event()
    task = asyncio.create_task(ClusterObserver(master, view).run(ready.set))
    await ready.wait()

    async def settled() -> None:
        def same() -> bool:
            record = view.node("n1")
            return record is not None and (record.epoch, record.seq) == (str(publisher.epoch), publisher.position.seq)

        await until(same, "the last event")

    try:
        yield view, publisher, settled
    finally:
        task.cancel()
        await asyncio.wait({task})
        await node.close()
        await master.close()


def installed(monkeypatch: Any, binding: types.ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", binding)
