"""What was verified is not opened again while nothing has changed: real probes over NVML's and CuPy's stand-ins."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.assemble import BackendAnswer, assemble
from gpurt.discovery.memory import DiscoveryMemory
from gpurt.discovery.probe import ChildProber
from gpurt.discovery.registry import RegistryDocument, RegistryFile
from gpurt.discovery.remembered import MAX_ANSWERS, Remembered, refreshed, worth_remembering
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.wire import Failure, ProbeOutcome
from gpurt.errors import ReasonCode
from gpurt.types import BackendReport, DeviceState, GPUDevice
from tests.discovery.cuda_rig import FakeCuPy
from tests.discovery.records import GIB, UUIDS, cpu, device
from tests.discovery.test_service import Host
from tests.support.nvml_stub import SOURCE, UUID_A, UUID_B, NvmlStub, nvml_stub

__all__ = ["nvml_stub"]


class Rig:
    """A machine of two cards, one registry, and a service of its own for each discovery, as processes have it."""

    def __init__(self, stub: NvmlStub, folder: Path) -> None:
        self.cupy = FakeCuPy(folder)
        self.registry = folder / "registry.json"
        self.scenario = "ok2"
        self.variables: dict[str, str] = {}
        self._stub = stub

    def environ(self) -> dict[str, str]:
        return self._stub.env(self.scenario) | {"PYTHONPATH": str(self.cupy.site)} | self.variables

    async def discover(self, **options: Any) -> DiscoveryResult:
        environ = self.environ()
        service = GPUDiscoveryService(self.registry, backends=["cuda"], probe_timeout=10.0, environ=environ)
        async with service:
            return await service.discover_all_devices(**options)

    @property
    def opened(self) -> int:
        return self.cupy.count("opened")

    @property
    def verified(self) -> int:
        return self.cupy.count("verified")

    def document(self) -> dict[str, Any]:
        return json.loads(self.registry.read_text())


@pytest.fixture
def rig(nvml_stub: NvmlStub, tmp_path: Path) -> Rig:
    return Rig(nvml_stub, tmp_path)


async def test_a_second_discovery_opens_nothing_and_says_the_same(rig: Rig) -> None:
    first = await rig.discover()
    assert [d.stable_id for d in first.devices] == [UUID_A, UUID_B]
    assert all(d.usable and d.backend_name == "cupy" for d in first.devices)
    assert (rig.cupy.count("loaded"), rig.opened, rig.verified) == (1, 1, 2)
    second = await rig.discover()
    assert second.devices == first.devices
    assert second.reports[0].model_copy(update={"elapsed_ms": 0.0}) == first.reports[0].model_copy(
        update={"elapsed_ms": 0.0}
    )
    assert (second.backend_name, second.discovery_status) == ("cuda", "complete")
    assert (rig.cupy.count("loaded"), rig.opened, rig.verified) == (1, 1, 2)
    await rig.discover()
    assert rig.cupy.count("loaded") == 1


async def test_one_service_opens_once_too(rig: Rig) -> None:
    async with GPUDiscoveryService(rig.registry, backends=["cuda"], environ=rig.environ()) as service:
        for _ in range(3):
            assert len((await service.discover_all_devices()).devices) == 2
    assert rig.opened == 1


async def test_verify_opens_everything_again(rig: Rig) -> None:
    await rig.discover()
    await rig.discover(verify=True)
    assert (rig.opened, rig.verified) == (2, 4)
    await rig.discover()
    assert rig.opened == 2


def upgrade_cupy(rig: Rig) -> None:
    rig.cupy.upgrade()


def upgrade_driver(rig: Rig) -> None:
    compiler = next(path for name in ("cc", "gcc", "clang") if (path := shutil.which(name)))
    folder = rig.cupy.site.parent / "nvml"
    folder.mkdir()
    source = folder / "nvml.c"
    source.write_text(SOURCE.read_text().replace('"590.48.01"', '"595.10.00"'))
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    rig._stub = NvmlStub(library)


@pytest.mark.parametrize("change", [upgrade_cupy, upgrade_driver])
async def test_what_the_answer_rests_on_changes(rig: Rig, change: Callable[[Rig], None]) -> None:
    await rig.discover()
    change(rig)
    result = await rig.discover()
    assert rig.opened == 2
    assert all(d.usable for d in result.devices)
    await rig.discover()
    assert rig.opened == 2


async def test_every_mask_has_its_own_answer(rig: Rig) -> None:
    for opened, mask in enumerate(("0", "1", "1,0"), start=1):
        rig.variables = {"CUDA_VISIBLE_DEVICES": mask}
        first = await rig.discover()
        assert rig.opened == opened
        assert (await rig.discover()).devices == first.devices
        assert rig.opened == opened
    rig.variables = {"CUDA_VISIBLE_DEVICES": "1"}
    (shown, hidden) = sorted((await rig.discover()).devices, key=lambda d: not d.usable)
    assert rig.opened == 3
    assert (shown.device_id, shown.stable_id, shown.usable) == ("cuda:0", UUID_B, True)
    assert (hidden.stable_id, hidden.usable) == (UUID_A, False)


async def test_a_mask_that_hides_all_costs_nobody_else_the_answer(rig: Rig) -> None:
    await rig.discover()
    rig.variables = {"CUDA_VISIBLE_DEVICES": ""}
    result = await rig.discover()
    assert result.reports[0].reason is ReasonCode.HIDDEN_BY_ENVIRONMENT
    rig.variables = {}
    opened = rig.opened
    assert all(d.usable for d in (await rig.discover()).devices)
    assert rig.opened == opened


@pytest.mark.parametrize("scenario", ["lost1", "remap1"])
async def test_a_card_that_is_not_well_is_asked_about_and_forgotten(rig: Rig, scenario: str) -> None:
    await rig.discover()
    rig.scenario = scenario
    ill = await rig.discover()
    assert rig.opened == 2
    assert not all(d.usable for d in ill.devices)
    assert not any(rig.document()["remembered"].values())
    rig.scenario = "ok2"
    well = await rig.discover()
    assert rig.opened == 3
    assert all(d.usable for d in well.devices)


async def test_a_card_that_is_gone_is_not_remembered(rig: Rig) -> None:
    await rig.discover()
    rig.scenario = "ok1"
    rig.variables = {"CUDA_VISIBLE_DEVICES": "0"}
    result = await rig.discover()
    assert rig.opened == 2
    assert [d.stable_id for d in result.devices if d.usable] == [UUID_A]


@pytest.mark.parametrize(("behaviour", "reason"), [("crash", ReasonCode.CRASHED), ("corrupt", None)])
async def test_a_check_that_fails_leaves_nothing(rig: Rig, behaviour: str, reason: ReasonCode | None) -> None:
    await rig.discover()
    rig.cupy.behave(behaviour)
    result = await rig.discover(verify=True)
    assert result.reports[0].reason is reason
    assert not any(d.usable for d in result.devices)
    assert not any(rig.document()["remembered"].values())
    again = await rig.discover()
    assert rig.opened == 3
    assert not any(d.usable for d in again.devices)
    rig.cupy.behave("")
    assert all(d.usable for d in (await rig.discover()).devices)
    assert (rig.opened, await rig.discover(), rig.opened)[::2] == (4, 4)


def test_a_check_that_is_killed_leaves_nothing(rig: Rig) -> None:
    command = [sys.executable, "-m", "gpurt.discover", "--json", "--backend", "cuda", "--registry", str(rig.registry)]
    subprocess.run(command, env=rig.environ(), check=True, capture_output=True)
    assert (rig.opened, rig.verified) == (1, 2)
    rig.cupy.behave("hang")
    with subprocess.Popen([*command, "--verify"], env=rig.environ(), stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 20
        while not rig.cupy.count("hanging"):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    rig.cupy.behave("")
    subprocess.run(command, env=rig.environ(), check=True, capture_output=True)
    # Not only opened: read back, too.
    assert (rig.opened, rig.verified) == (3, 4)
    subprocess.run(command, env=rig.environ(), check=True, capture_output=True)
    assert rig.opened == 3


async def test_an_entry_that_cannot_be_read_costs_only_itself(rig: Rig) -> None:
    before = await rig.discover()
    document = rig.document()
    document["remembered"]["cuda"][0]["devices"] = [{"device_id": 1}]
    document["epoch"] = 77
    rig.registry.write_text(json.dumps(document))
    after = await rig.discover()
    assert after.devices == before.devices
    assert rig.opened == 2
    assert rig.document()["epoch"] == 77
    assert not list(rig.registry.parent.glob("*.corrupt-*"))


ENTRY: dict[str, Any] = {"signature": "s", "devices": [device(0).model_dump(mode="json")]}


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ({"cuda": [ENTRY]}, {"cuda": 1}),
        ({"cuda": ["nonsense", ENTRY, 7, None]}, {"cuda": 1}),
        ({"cuda": [ENTRY | {"devices": []}]}, {"cuda": 0}),
        ({"cuda": [{"devices": ENTRY["devices"]}]}, {"cuda": 0}),
        ({"cuda": None, "cpu": {}, "toy": [ENTRY]}, {"toy": 1}),
        (None, {}),
        ([], {}),
        ("x", {}),
        ("absent", {}),
    ],
)
def test_a_file_of_another_shape_is_read(stored: Any, read: dict[str, int], tmp_path: Path) -> None:
    file = RegistryFile(tmp_path / "registry.json")
    file.save(RegistryDocument(devices=(device(0),)))
    document = json.loads(file.path.read_text())
    del document["remembered"]
    file.path.write_text(json.dumps(document if stored == "absent" else document | {"remembered": stored}))
    loaded = file.load()
    assert loaded is not None
    assert loaded.devices == (device(0),)
    assert {name: len(entries) for name, entries in loaded.remembered.items()} == read
    assert file.quarantined is None
    assert file.save(loaded) == file.load()


async def test_an_early_start_is_the_same_probe(rig: Rig) -> None:
    prober = ChildProber()
    environ = rig.environ()
    await prober.prepare("cuda", environ)
    outcome = await prober.probe("cuda", deadline=10.0, environ=environ)
    assert outcome.verified is not None
    assert outcome.signature is not None
    again = await prober.probe("cuda", deadline=10.0, environ=environ, known={outcome.signature})
    assert again.unchanged
    assert again.verified is None
    assert again.sighted == outcome.sighted
    assert rig.opened == 1


# Without processes


def outcome_of(*devices: GPUDevice, sighted: tuple[GPUDevice, ...] = (), **fields: Any) -> ProbeOutcome:
    return ProbeOutcome(**({"verified": devices, "sighted": sighted, "signature": "s"} | fields))


def seen(n: int, **fields: Any) -> GPUDevice:
    return device(n, device_id=f"nvml:{n}", backend_name="nvml", usable=False, **fields)


def kept(outcome: ProbeOutcome, environ: dict[str, str] | None = None) -> Remembered | None:
    answer = assemble("cuda", outcome, environ=environ or {}, platform="linux")
    return worth_remembering("cuda", outcome, answer)


def test_what_is_worth_remembering() -> None:
    both = (seen(0), seen(1))
    assert kept(outcome_of(device(0), device(1), sighted=both)) == Remembered(
        signature="s", devices=(device(0), device(1))
    )
    assert kept(outcome_of(device(1), sighted=both), {"CUDA_VISIBLE_DEVICES": UUIDS[1]}) is not None


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(outcome_of(sighted=(seen(0),)), id="nothing verified"),
        pytest.param(outcome_of(device(0), sighted=(seen(0),), signature=None), id="no signature"),
        pytest.param(outcome_of(device(0), sighted=(seen(0), seen(1))), id="a card that CUDA does not show"),
        pytest.param(outcome_of(device(0)), id="unknown to NVML"),
        pytest.param(outcome_of(device(0), sighted=(seen(0, memory_available=None),)), id="NVML tells no memory"),
        pytest.param(outcome_of(device(0, usable=False), sighted=(seen(0),)), id="not usable"),
        pytest.param(
            outcome_of(device(0, state_reason="not verified: no free memory"), sighted=(seen(0),)), id="not verified"
        ),
        pytest.param(outcome_of(device(0, simulated=True), sighted=(seen(0),)), id="simulated"),
        pytest.param(outcome_of(device(0), sighted=(seen(0, state=DeviceState.DEGRADED),)), id="degraded"),
        pytest.param(
            outcome_of(verified=None, failure=Failure(ReasonCode.TIMEOUT, "hung"), opened=(device(0),)), id="hung"
        ),
    ],
)
def test_what_is_not_worth_remembering(outcome: ProbeOutcome) -> None:
    assert kept(outcome) is None


def test_a_remembered_card_has_the_memory_of_now() -> None:
    old = device(0, memory_bytes=79 * GIB, memory_usable_bytes=70 * GIB, memory_usable_source="driver")
    now = refreshed("cuda", (old,), (seen(1), seen(0, memory_available=5 * GIB)))
    assert now is not None
    assert (now[0].memory_available, now[0].memory_usable_bytes) == (5 * GIB, 5 * GIB)
    assert now[0].device_id == "cuda:0"
    # NVML's figure contains the driver's own part.
    now = refreshed("cuda", (old,), (seen(0, memory_available=80 * GIB),))
    assert now is not None
    assert now[0].memory_available == 79 * GIB
    assert refreshed("cuda", (old,), (seen(1),)) is None


def test_a_remembered_processor_has_the_memory_of_now() -> None:
    (now,) = refreshed("cpu", (cpu(backend_name="numpy", memory_available=1),), ()) or ()
    assert now.memory_available is not None
    assert now.memory_available > 1 << 20
    assert refreshed("cpu", (cpu(backend_name="other"),), ()) is None


class Claims(Host):
    """A probe that says "unchanged" of whatever it likes."""

    claim = "s"

    async def probe(self, name: str, **options: Any) -> ProbeOutcome:
        await super().probe(name, **options)
        return ProbeOutcome(unchanged=True, signature=self.claim)


async def test_a_probe_that_finds_unchanged_what_nobody_knows_has_failed(tmp_path: Path) -> None:
    result = await Claims().service(tmp_path / "r.json").discover_all_devices()
    assert {report.reason for report in result.reports} == {ReasonCode.ERROR}
    assert result.devices == ()


def test_workers_of_one_host_do_not_drive_out_each_others_answers() -> None:
    memory = DiscoveryMemory(RegistryFile("unused"))

    def answer(signature: str) -> BackendAnswer:
        remember = Remembered(signature=signature, devices=(device(0),))
        return BackendAnswer(BackendReport(name="cuda", status="ok"), (device(0),), remember=remember)

    for n in range(MAX_ANSWERS + 3):
        memory.learn({"cuda": answer(f"s{n}")})
    assert [each.signature for each in memory.known["cuda"]] == [f"s{n}" for n in range(MAX_ANSWERS + 2, 2, -1)]
    memory.learn({"cuda": answer("s5")})
    assert [each.signature for each in memory.known["cuda"]][:2] == ["s5", f"s{MAX_ANSWERS + 2}"]


async def test_a_caller_that_wants_verification_does_not_share_a_look_up_without(tmp_path: Path) -> None:
    host = Host(device(0))
    host.gate = asyncio.Event()
    service = host.service(tmp_path / "r.json", backends=["cuda"])
    quick = asyncio.create_task(service.discover_all_devices())
    while not host.probes:
        await asyncio.sleep(0.001)
    careful = asyncio.create_task(service.discover_all_devices(verify=True))
    await asyncio.sleep(0)
    host.gate.set()
    await asyncio.gather(quick, careful)
    assert host.probes == ["cuda", "cuda"]
    assert host.verified[-1] == frozenset()


WITHOUT_IMPORTS = """
import asyncio, sys
from gpurt.discovery.service import GPUDiscoveryService
async def main():
    async with GPUDiscoveryService(sys.argv[1], backends=["cpu"]) as service:
        print((await service.discover_all_devices(verify=len(sys.argv) > 2)).devices[0].memory_usable_bytes)
asyncio.run(main())
heavy = ("numpy", "rich", "psutil", "gpurt.runtime.backend", "gpurt.backends.cpu_backend")
print(" ".join(name for name in heavy if name in sys.modules))
"""


def test_the_remembered_processor_needs_no_numpy(tmp_path: Path) -> None:
    def run(*arguments: str) -> list[str]:
        command = [sys.executable, "-c", WITHOUT_IMPORTS, str(tmp_path / "r.json"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        memory, heavy, *_ = done.stdout.split("\n")
        assert int(memory) > 1 << 20
        return heavy.split()

    assert "numpy" in run()
    assert run() == []
    assert "numpy" in run("verify")
