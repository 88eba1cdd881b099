"""Which backends are asked, where, and what the real child makes of plug-ins."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurt import plugins
from gpurt.discovery.in_place import InPlaceProber
from gpurt.discovery.probe import ChildProber, has_child_processes
from gpurt.discovery.survey import Survey, backend_names
from gpurt.errors import GPUError, ReasonCode
from gpurt.testing.faults import Fault, FaultyDriver
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver, create_simulated


@pytest.fixture
def toy() -> Iterator[FaultyDriver]:
    """A driver that this process has registered as backend ``toy``."""
    driver = FaultyDriver(SimulatedDriver(parse_simulation("h100x2")))
    plugins.register("toy", lambda: driver)
    yield driver
    plugins.unregister("toy")


class NoChildren:
    async def probe(self, name: str, **_: object) -> object:
        raise AssertionError(f"a child process for {name}")


async def test_names_are_the_platforms_with_plug_ins_before_the_cpu(toy: FaultyDriver) -> None:
    assert await backend_names("linux", {}) == ("cuda", "rocm", "vulkan", "toy", "cpu")
    assert await backend_names("ios", {}) == ("tflite", "toy", "cpu")
    with pytest.raises(GPUError, match="GPURT_PLUGINS"):
        await backend_names("linux", {"GPURT_PLUGINS": "perhaps"})


async def test_a_backend_named_by_the_environment_is_asked_first() -> None:
    names = await backend_names("linux", {"GPURT_BACKEND": "opencl"})
    assert names == ("opencl", "cuda", "rocm", "vulkan", "cpu")


async def test_what_this_process_has_registered_is_asked_here(toy: FaultyDriver) -> None:
    survey = Survey(NoChildren(), "linux")  # pyright: ignore[reportArgumentType]
    answers = await survey.ask({"toy": 10.0, "cpu": 10.0, "metal": 10.0}, {}, frozenset())
    assert list(answers) == ["toy", "cpu", "metal"]
    assert len(answers["toy"].devices) == 2
    assert answers["cpu"].report.status == "ok"
    assert answers["metal"].report.reason is ReasonCode.WRONG_PLATFORM
    assert [call.method for call in toy.calls][-1] == "close"
    assert {call.thread for call in toy.calls} != {threading.current_thread().name}


async def test_a_replaced_built_in_backend_is_asked_here_whatever_the_gate_says(toy: FaultyDriver) -> None:
    plugins.register("rocm", lambda: toy, replace=True)
    try:
        answers = await Survey(NoChildren(), "linux").ask({"rocm": 10.0}, {}, frozenset())  # pyright: ignore[reportArgumentType]
    finally:
        plugins.unregister("rocm")
    assert answers["rocm"].report.status == "ok"


async def test_without_child_processes_everything_is_asked_here() -> None:
    assert not has_child_processes("ios")
    answers = await Survey(NoChildren(), "ios").ask({"tflite": 10.0, "cpu": 10.0}, {}, frozenset())  # pyright: ignore[reportArgumentType]
    assert (answers["tflite"].report.status, answers["tflite"].devices) == ("unavailable", ())
    assert answers["cpu"].report.status == "ok"


async def test_a_hang_in_place_is_reported_and_not_doubled(toy: FaultyDriver) -> None:
    gate = threading.Event()
    toy.inject(Fault("open", gate=gate))
    prober = InPlaceProber()
    for _ in range(2):
        outcome = await prober.probe("toy", deadline=0.1)
        assert outcome.failure is not None
        assert outcome.failure.reason is ReasonCode.TIMEOUT
    assert len([call for call in toy.calls if call.method == "open"]) == 1
    gate.set()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("libfoo.so"), ReasonCode.NO_LIBRARY),
        (OSError("libfoo.so"), ReasonCode.ERROR),
        (AttributeError("foo"), ReasonCode.ERROR),
        (SystemExit(3), ReasonCode.CRASHED),
    ],
)
async def test_whatever_a_library_raises_is_an_answer(
    toy: FaultyDriver, error: BaseException, reason: ReasonCode
) -> None:
    def create() -> FaultyDriver:
        raise error

    plugins.register("toy", create, replace=True)
    outcome = await InPlaceProber().probe("toy", deadline=5.0)
    assert outcome.failure is not None
    assert outcome.failure.reason is reason


async def test_a_backend_that_has_no_driver_is_examined_through_its_methods() -> None:
    class Opaque(type(create_simulated("h100"))):
        driver = None

    plugins.register("opaque", lambda: Opaque(parse_simulation("h100x2")))
    try:
        outcome = await InPlaceProber().probe("opaque", deadline=10.0)
    finally:
        plugins.unregister("opaque")
    assert outcome.failure is None
    assert outcome.verified is not None
    assert len(outcome.verified) == 2


PLUGIN = """
import threading
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver
def create():
    return SimulatedDriver(parse_simulation("h100x2"))
"""


async def test_a_plug_in_of_this_process_path_is_found_by_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_plugin.py").write_text(PLUGIN)
    metadata = tmp_path / "toy_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[gpurt.backends]\ntoyplug = toy_plugin:create\n")
    monkeypatch.syspath_prepend(tmp_path)
    outcome = await ChildProber().probe("toyplug", deadline=20.0, environ=os.environ)
    assert outcome.failure is None
    assert outcome.verified is not None
    assert [device.simulated for device in outcome.verified] == [True, True]


async def test_the_child_finds_what_only_this_process_path_leads_to() -> None:
    # An interpreter without site-packages: gpurt and its dependencies are found as the parent found them.
    command = (sys.executable, "-S", "-P", "-m", "gpurt.discovery.probe_child", "cpu")
    outcome = await ChildProber(command=lambda name: command).probe("cpu", deadline=20.0, environ={})
    assert outcome.failure is None
    assert outcome.verified is not None
    assert outcome.verified[0].device_id == "cpu:0"
