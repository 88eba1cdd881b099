"""What NVML, CUDA and the environment say, as one answer."""

from __future__ import annotations

from typing import Any

import pytest

from gpurt.discovery.assemble import BackendAnswer, assemble, is_conclusive
from gpurt.discovery.gate import gate
from gpurt.discovery.wire import Failure, ProbeOutcome
from gpurt.errors import ReasonCode
from gpurt.remedies import remedy
from gpurt.sources.pci import has_pci_vendor
from gpurt.types import DeviceKind, DeviceState, GPUDevice
from tests.discovery.records import UUIDS, device

CVD = "CUDA_VISIBLE_DEVICES"


def seen(n: int, **fields: Any) -> GPUDevice:
    return device(n, **({"device_id": f"nvml:{n}", "backend_name": "nvml", "usable": False} | fields))


def answer(environ: dict[str, str] | None = None, on_bus: bool | None = None, **outcome: Any) -> BackendAnswer:
    return assemble("cuda", ProbeOutcome(**outcome), environ=environ or {}, platform="linux", on_bus=on_bus)


NO_CUPY = Failure(ReasonCode.NO_LIBRARY, "CuPy is not installed", "pip install cupy-cuda12x")


def test_a_card_of_both_is_one_record() -> None:
    given = answer(sighted=(seen(0), seen(1)), verified=(device(1, device_id="cuda:0"), device(0, device_id="cuda:1")))
    assert [d.device_id for d in given.devices] == ["cuda:0", "cuda:1"]
    assert given.report.status == "ok"
    assert given.report.device_ids == ("cuda:0", "cuda:1")


def test_nvml_completes_what_cuda_does_not_tell() -> None:
    given = answer(sighted=(seen(0),), verified=(device(0, known="pci", driver_version=None),))
    (card,) = given.devices
    assert card.driver_version == "590.48.01"
    assert card.stable_id == UUIDS[0]


def test_a_card_that_nvml_calls_lost_is_not_usable_although_cuda_lists_it() -> None:
    lost = seen(0, state=DeviceState.LOST, state_reason="GPU is lost")
    (card,) = answer(sighted=(lost,), verified=(device(0),)).devices
    assert not card.usable
    assert card.state is DeviceState.LOST


@pytest.mark.parametrize("by_name", [False, True])
def test_a_software_device_is_used_by_name_alone(by_name: bool) -> None:
    pipe = device(0, backend="vulkan", kind=DeviceKind.SOFTWARE, name="llvmpipe", device_id="vulkan:0")
    told = assemble("vulkan", ProbeOutcome(verified=(pipe,)), environ={}, platform="linux", by_name=by_name)
    assert [each.usable for each in told.devices] == [by_name]
    if by_name:
        assert (told.report.status, told.report.message) == ("ok", "1 device")
    else:
        assert told.devices[0].state_reason == "software adapter: used only when asked for"
        assert "GPURT_BACKEND=vulkan" in (told.report.hint or "")


def test_without_cupy_cards_are_listed_with_the_reason() -> None:
    given = answer(sighted=(seen(0), seen(1)), failure=NO_CUPY)
    assert [d.usable for d in given.devices] == [False, False]
    assert all((d.state_reason or "").startswith("no_library") for d in given.devices)
    assert all(d.state is DeviceState.HEALTHY for d in given.devices)
    assert given.report.reason is ReasonCode.NO_LIBRARY
    assert "cupy-cuda12x" in (given.report.hint or "")


@pytest.mark.parametrize("reason", [ReasonCode.NO_DRIVER, ReasonCode.DRIVER_MISMATCH, ReasonCode.NO_PERMISSION])
def test_the_drivers_trouble_comes_before_the_librarys(reason: ReasonCode) -> None:
    given = answer(sighting_failure=Failure(reason, "NVML says so", "do this"), failure=NO_CUPY)
    assert given.report.reason is reason
    assert "NVML says so" in given.report.message
    assert "CuPy" in given.report.message
    assert given.report.hint == "do this; pip install cupy-cuda12x"


def test_a_crash_in_the_library_stage_keeps_the_cards() -> None:
    given = answer(sighted=(seen(0),), failure=Failure(ReasonCode.CRASHED, "SIGSEGV"))
    assert given.report.reason is ReasonCode.CRASHED
    assert [(d.usable, d.state) for d in given.devices] == [(False, DeviceState.SUSPECT)]


def test_a_hang_while_verifying_leaves_nothing_usable() -> None:
    given = answer(opened=(device(0), device(1)), failure=Failure(ReasonCode.TIMEOUT, "no answer"))
    assert given.report.status == "unavailable"
    assert [(d.usable, d.state) for d in given.devices] == [(False, DeviceState.UNRESPONSIVE)] * 2


@pytest.mark.parametrize("value", ["", "-1", "none"])
def test_hidden_by_the_environment_is_not_a_missing_driver(value: str) -> None:
    no_device = Failure(ReasonCode.NO_DEVICE, "cudaErrorNoDevice")
    given = answer({CVD: value}, sighted=(seen(0), seen(1)), failure=no_device)
    assert given.report.reason is ReasonCode.HIDDEN_BY_ENVIRONMENT
    assert CVD in (given.report.hint or "")
    assert not any(d.usable for d in given.devices)
    assert given.hidden == set(UUIDS[:2])


def test_the_card_that_cuda_does_not_show_is_hidden() -> None:
    given = answer({CVD: "1"}, sighted=(seen(0), seen(1)), verified=(device(1, device_id="cuda:0"),))
    assert given.report.status == "ok"
    assert given.hidden == {UUIDS[0]}
    assert [(d.device_id, d.usable) for d in given.devices] == [("cuda:0", True), ("nvml:0", False)]
    assert "hidden_by_environment" in (given.devices[1].state_reason or "")


def test_without_cuda_a_number_is_not_guessed_to_be_a_card() -> None:
    # CUDA sorts by speed unless told otherwise: number 0 may be either of two different cards.
    cards = (seen(0, name="GTX 1660"), seen(1, name="RTX 3090"))
    assert answer({CVD: "0"}, sighted=cards, failure=NO_CUPY).hidden == frozenset()
    sorted_by_bus = {CVD: "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert answer(sorted_by_bus, sighted=cards, failure=NO_CUPY).hidden == {UUIDS[1]}
    assert answer({CVD: UUIDS[1][:12]}, sighted=cards, failure=NO_CUPY).hidden == {UUIDS[0]}


def test_a_lost_card_is_not_called_hidden_because_cuda_does_not_show_it() -> None:
    lost = seen(1, state=DeviceState.LOST, state_reason="GPU is lost")
    given = answer({CVD: "0,1"}, sighted=(seen(0), lost), verified=(device(0),))
    assert given.hidden == frozenset()
    assert [d.state_reason for d in given.devices] == [None, "GPU is lost"]


def test_what_cuda_leaves_out_by_numbers_that_nobody_else_can_read() -> None:
    cards = (seen(0, name="GTX 1660"), seen(1, name="RTX 3090"))
    given = answer({CVD: "0"}, sighted=cards, verified=(device(1, name="RTX 3090", device_id="cuda:0"),))
    assert given.hidden == {UUIDS[0]}


def test_one_process_has_one_partition_and_nothing_else() -> None:
    part = seen(0).identity
    assert part is not None
    parts = tuple(
        seen(0, device_id=f"nvml:0/{n}", identity=part.model_copy(update={"uuid": f"MIG-{n}", "partition": f"{n}/0",
                                                                       "key": f"MIG-{n}"}))
        for n in (1, 2)
    )  # fmt: skip
    mine = device(0, identity=parts[0].identity)
    given = answer(sighted=parts, verified=(mine,))
    assert given.report.status == "ok"
    assert "one MIG device" in given.report.message
    assert (given.devices[1].state_reason or "").startswith("another process can use it")


def vulkan(environ: dict[str, str], **outcome: Any) -> BackendAnswer:
    return assemble("vulkan", ProbeOutcome(**outcome), environ=environ, platform="linux")


def test_a_driver_that_knows_no_variables_shows_no_hidden_card_as_usable() -> None:
    cards = tuple(seen(n, backend="vulkan", backend_name="vulkan/NVIDIA", device_id=f"vulkan:{n}") for n in (0, 1))
    shown = tuple(device(n, backend="vulkan") for n in (0, 1))
    given = vulkan({CVD: UUIDS[1]}, sighted=cards, verified=shown)
    assert given.hidden == {UUIDS[0]}
    assert [d.usable for d in given.devices] == [False, True]
    assert (given.devices[0].state_reason or "").startswith(f"hidden_by_environment: {CVD}")
    assert given.report.message == "1 device"
    assert vulkan({CVD: ""}, sighted=cards, verified=shown).report.reason is ReasonCode.HIDDEN_BY_ENVIRONMENT


def test_a_device_without_identity_is_joined_by_its_number() -> None:
    pipe = {"backend": "vulkan", "known": "none", "name": "llvmpipe", "device_id": "vulkan:0"}
    given = vulkan(
        {},
        sighted=(device(0, **pipe, kind=DeviceKind.SOFTWARE, usable=False),),
        verified=(device(0, **pipe, kind=DeviceKind.SOFTWARE),),
    )
    assert [d.device_id for d in given.devices] == ["vulkan:0"]
    assert given.report.reason is ReasonCode.NO_DEVICE
    assert "software adapters alone: llvmpipe" in given.report.message


def test_a_note_of_the_source_reaches_people() -> None:
    given = answer(sighted=(seen(0),), note="nvml:0: rows were replaced", verified=(device(0),))
    assert given.report.message == "1 device; nvml:0: rows were replaced"


def test_a_value_that_hides_by_mistake_is_explained() -> None:
    given = answer({CVD: "0,0"}, sighted=(seen(0),), failure=Failure(ReasonCode.NO_DEVICE, "none"))
    assert "twice" in given.report.message


def test_the_bus_says_that_there_is_no_card_to_drive() -> None:
    no_driver = Failure(ReasonCode.NO_DRIVER, "libnvidia-ml not found")
    assert "PCI" in answer(on_bus=False, failure=no_driver).report.message
    assert "PCI" not in answer(on_bus=True, failure=no_driver).report.message
    assert "PCI" not in answer(on_bus=None, failure=no_driver).report.message


@pytest.mark.parametrize("reason", [ReasonCode.NO_DRIVER, ReasonCode.NO_LIBRARY])
@pytest.mark.parametrize("hint", [None, "install the NVIDIA driver"])
def test_nobody_without_a_card_is_told_to_install_its_driver(reason: ReasonCode, hint: str | None) -> None:
    report = answer(on_bus=False, failure=Failure(reason, "not found", hint)).report
    assert (report.hint or "").startswith("nothing, if this machine has no such device; else: ")
    assert (hint or remedy(reason, "cuda", "linux")) in (report.hint or "")
    there = answer(on_bus=True, failure=Failure(reason, "not found", hint)).report
    assert not (there.hint or "").startswith("nothing")
    shown = answer(on_bus=False, sighted=(seen(0),), failure=Failure(reason, "not found", hint)).report
    assert not (shown.hint or "").startswith("nothing"), "in a virtual machine the bus may be another"


def test_a_late_answer_without_a_card_is_no_driver_that_needs_a_reset() -> None:
    late = Failure(ReasonCode.TIMEOUT, "no answer within 0.001 s")
    without, there = (answer(on_bus=on_bus, failure=late).report.hint or "" for on_bus in (False, True))
    assert "reset" not in without
    assert "--timeout" in without
    assert "reset" in there
    assert "30 the first time" in there, "as --help says"


def test_nobody_asked_is_neither_healthy_nor_ill() -> None:
    given = answer(sighted=(seen(0), seen(1, state=DeviceState.LOST)), failure=Failure(ReasonCode.NOT_RECORDED, "no"))
    assert [d.state for d in given.devices] == [DeviceState.UNKNOWN, DeviceState.LOST]
    assert given.report.reason is ReasonCode.NOT_RECORDED


def test_a_driver_without_devices_is_no_device() -> None:
    assert answer(verified=()).report.reason is ReasonCode.NO_DEVICE


@pytest.mark.parametrize("reason", list(ReasonCode))
@pytest.mark.parametrize("backend", ["cuda", "rocm", "directml", "somebody_elses"])
def test_every_reason_has_a_remedy(reason: ReasonCode, backend: str) -> None:
    assert len(remedy(reason, backend, "linux")) > 10


def test_the_gate_rules_out_only_what_is_impossible(tmp_path: Any) -> None:
    def none(name: str) -> bool:
        return False

    def every(name: str) -> bool:
        return True

    def check(name: str, platform: str, has_module: Any = every) -> ReasonCode | None:
        failure = gate(name, platform=platform, root=tmp_path, has_module=has_module)
        return failure.reason if failure else None

    assert check("metal", "linux") is ReasonCode.WRONG_PLATFORM
    assert check("cuda", "darwin") is ReasonCode.WRONG_PLATFORM
    assert check("cuda", "linux") is None
    assert check("cuda", "linux", none) is ReasonCode.NO_LIBRARY
    assert check("somebody_elses", "linux", none) is None
    assert check("rocm", "linux") is None
    assert check("rocm", "linux", none) is ReasonCode.NO_LIBRARY
    assert check("vulkan", "linux", none) is ReasonCode.NO_LIBRARY
    assert check("vulkan", "linux") is ReasonCode.NO_DRIVER
    assert has_pci_vendor(tmp_path, "0x1002") is None
    vendor = tmp_path / "sys/bus/pci/devices/0000:01:00.0/vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x10de\n")
    assert check("rocm", "linux") is ReasonCode.NO_DEVICE
    with_card = gate("cuda", platform="linux", root=tmp_path, has_module=none)
    assert with_card is not None
    assert with_card.hint is None, "the remedy of the reason"
    vendor.write_text("0x8086\n")
    without = gate("cuda", platform="linux", root=tmp_path, has_module=none)
    assert without is not None
    assert (without.hint or "").startswith("nothing, if this machine has no such device; else: pip install")
    vendor.write_text("0x10de\n")
    assert has_pci_vendor(tmp_path, "0x10de") is True


def test_a_late_answer_of_the_processor_is_not_its_drivers_fault() -> None:
    hint = remedy(ReasonCode.TIMEOUT, "cpu", "linux")
    assert "--timeout" in hint
    assert "driver" not in hint
    assert "dmesg" in remedy(ReasonCode.TIMEOUT, "cuda", "linux")


def test_what_the_driver_asked_nvml_itself_is_said_once() -> None:
    nvml = Failure(ReasonCode.NO_DRIVER, "no libnvidia-ml", "install the driver")
    both = Failure(ReasonCode.NO_DRIVER, "no libnvidia-ml; no CuPy", "install the driver; install CuPy")
    report = assemble(
        "cuda", ProbeOutcome(sighting_failure=nvml, failure=both), environ={}, platform="linux", on_bus=None
    ).report
    assert (report.reason, report.message, report.hint) == (both.reason, both.message, both.hint)


def test_cards_of_which_the_bus_shows_none_are_gone() -> None:
    no_driver = Failure(ReasonCode.NO_DRIVER, "libnvidia-ml not found", "install the driver")
    assert is_conclusive(answer(failure=no_driver, on_bus=False).report)
    assert not is_conclusive(answer(failure=no_driver, on_bus=True).report)
    assert not is_conclusive(answer(failure=no_driver).report), "nobody knows what is on the bus"
    for reason in (ReasonCode.CRASHED, ReasonCode.TIMEOUT):
        assert not is_conclusive(answer(failure=Failure(reason, "signal 11", None), on_bus=False).report)
