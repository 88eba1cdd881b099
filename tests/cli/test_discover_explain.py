"""``--explain``: a sentence for everything, and what to do about it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

import gpurt
from gpurt.cli.cluster_table import size as cluster_size
from gpurt.discover import main
from gpurt.discovery.assemble import assemble
from gpurt.discovery.report import memory, render, size_text
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.wire import Failure, ProbeOutcome
from gpurt.doctor.explain import explain
from gpurt.doctor.explanation import Explanation
from gpurt.doctor.render import render_explanations
from gpurt.doctor.variables import KNOWN, unknown_variables
from gpurt.errors import ReasonCode
from gpurt.recording.place import Place
from gpurt.types import DeviceKind, DeviceState
from tests.discovery.records import GIB, UUIDS, absent, cpu, device, ok, result


def explained(found: DiscoveryResult, environ: dict[str, str] | None = None, **how: Any) -> tuple[Explanation, ...]:
    return explain(found, environ or {}, how.pop("platform", "linux"), **how)


def of(explanations: Sequence[Explanation], topic: str, subject: str | None = None) -> Explanation:
    found = [each for each in explanations if each.topic == topic and subject in (None, each.subject)]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("reason", list(ReasonCode))
def test_every_reason_of_a_backend_has_a_sentence_and_a_remedy(reason: ReasonCode) -> None:
    report = absent("cuda", message="libcuda said 999").model_copy(update={"reason": reason, "hint": None})
    sentence = of(explained(result(cpu(), reports=[report])), "backend")
    assert "libcuda said 999" in sentence.text
    assert sentence.text.endswith(".")
    assert sentence.todo
    assert sentence.status != "usable"


@pytest.mark.parametrize("reason", list(ReasonCode))
def test_every_reason_of_a_device_has_a_sentence_and_a_remedy(reason: ReasonCode) -> None:
    card = device(0, usable=False, state_reason=f"{reason}: it said so")
    sentence = of(explained(result(card)), "device")
    assert "cuda:0" in sentence.text
    assert "NVIDIA H100" in sentence.text
    assert UUIDS[0] in sentence.text
    assert "it said so" in sentence.text
    assert sentence.todo


@pytest.mark.parametrize("state", [state for state in DeviceState if state is not DeviceState.HEALTHY])
def test_every_state_that_is_not_healthy_is_said(state: DeviceState) -> None:
    sentence = of(explained(result(device(0, state=state, usable=False, state_reason="Xid 79"))), "device")
    assert sentence.status == state.value
    assert "Xid 79" in sentence.text
    assert sentence.todo


def test_nothing_is_left_unexplained_where_no_reason_was_told() -> None:
    found = explained(result(device(0, usable=False), device(1, state=DeviceState.SUSPECT, state_reason=None)))
    for each in (of(found, "device", "cuda:0"), of(found, "device", "cuda:1")):
        assert "None" not in each.text
        assert each.todo


def test_a_usable_device_is_said_to_be_so_with_what_is_odd_about_it() -> None:
    odd = device(0, known="none", simulated=True, backends=("cuda", "vulkan"))
    sentence = of(explained(result(odd)), "device")
    assert (sentence.status, sentence.todo) == ("usable", None)
    for note in ("simulated", "no identity of its own", "cuda, vulkan all show it"):
        assert note in sentence.text
    software = device(
        1, kind=DeviceKind.SOFTWARE, usable=False, state_reason="software adapter: used only when asked for"
    )
    assert "no hardware" in of(explained(result(software)), "device").text


def test_nobody_is_sent_in_a_circle_by_a_program_that_looks_like_a_device() -> None:
    """Mesa's llvmpipe, seen through the Python package ``vulkan``, which gpurt cannot drive."""
    pipe = device(
        0,
        backend="vulkan",
        known="none",
        name="llvmpipe",
        kind=DeviceKind.SOFTWARE,
        usable=False,
        state_reason="software adapter: used only when asked for",
        memory_usable_bytes=None,
        memory_usable_source="unknown: free memory is not told",
    )
    outcome = ProbeOutcome(
        sighted=(pipe,),
        sighting_failure=Failure(ReasonCode.NO_DEVICE, "Vulkan shows software adapters alone: llvmpipe"),
        failure=Failure(ReasonCode.NO_LIBRARY, "the Python package vulkan is not installed"),
    )
    answer = assemble("vulkan", outcome, environ={}, platform="linux")
    found = explained(result(*answer.devices, cpu(), reports=[answer.report, ok("cpu")]))
    backend, sentence = of(found, "backend", "vulkan"), of(found, "device", "vulkan:0")
    assert backend.status == "no hardware"
    assert "no such device" not in backend.text
    assert "all the same" not in backend.text
    assert "seated" not in (backend.todo or "")
    assert "seated" not in (answer.report.hint or "")
    assert "name its backend" not in (sentence.todo or "")
    assert "is not installed" in sentence.text
    assert "unknown (unknown" not in of(found, "memory", "vulkan:0").text
    table = [part.plain for part in render(result(*answer.devices)) if isinstance(part, Text)]
    assert table == ["vulkan:0: no_library: software adapter, and the Python package vulkan is not installed"]
    driven = device(0, backend="opencl", kind=DeviceKind.SOFTWARE, usable=False)
    assert "GPURT_BACKEND=opencl" in (of(explained(result(driven)), "device").todo or "")


def test_what_hides_a_device_and_the_command_that_shows_it() -> None:
    hidden = device(
        0,
        usable=False,
        state_reason="hidden_by_environment: CUDA_VISIBLE_DEVICES does not name it",
        backend_name="nvml",
    )
    environ = {"CUDA_VISIBLE_DEVICES": UUIDS[1]}
    found = explained(result(hidden, device(1)), environ)
    sentence = of(found, "device", "cuda:0")
    assert sentence.status == "hidden"
    assert sentence.todo == f"unset CUDA_VISIBLE_DEVICES, or add {UUIDS[0]} to it"
    variable = of(found, "visibility", "CUDA_VISIBLE_DEVICES")
    assert "hides cuda:0 and leaves cuda:1" in variable.text
    assert variable.todo == "to see all devices: unset CUDA_VISIBLE_DEVICES"
    on_windows = explained(result(hidden, device(1)), environ, platform="win32")
    assert "set CUDA_VISIBLE_DEVICES=" in (of(on_windows, "device", "cuda:0").todo or "")


def test_each_variable_by_itself_and_all_together() -> None:
    cards = [device(n, backend="rocm", vendor="amd") for n in range(4)]
    environ = {"ROCR_VISIBLE_DEVICES": "0,3", "HIP_VISIBLE_DEVICES": "1", "GPURT_BACKEND": "rocm"}
    found = explained(result(*cards), environ)
    assert "leaves rocm:0, rocm:3" in of(found, "visibility", "ROCR_VISIBLE_DEVICES").text
    assert "leaves rocm:1" in of(found, "visibility", "HIP_VISIBLE_DEVICES").text
    assert "leave rocm:3." in of(found, "visibility", "environment").text, "HIP counts what ROCR leaves"
    assert "'rocm'" in of(found, "visibility", "GPURT_BACKEND").text


def test_a_variable_that_orders_says_how_devices_are_counted() -> None:
    found = explained(result(device(0), device(1)), {"CUDA_VISIBLE_DEVICES": "1,0"})
    text = of(found, "visibility", "CUDA_VISIBLE_DEVICES").text
    assert "hides nothing here" in text
    assert "cuda:1 as 0, cuda:0 as 1" in text


def test_a_warning_about_a_value_is_told() -> None:
    found = explained(result(device(0), device(1)), {"CUDA_VISIBLE_DEVICES": "0,0"})
    sentence = of(found, "visibility", "CUDA_VISIBLE_DEVICES")
    assert sentence.status == "hides"
    assert "no device" in sentence.text
    assert "twice" in sentence.text or "duplicate" in sentence.text.lower()


def test_variables_without_devices_and_none_at_all() -> None:
    assert of(explained(result(cpu())), "visibility").status == "nothing hidden"
    assert of(explained(result(cpu()), {"CUDA_VISIBLE_DEVICES": ""}), "visibility").status == "no effect"
    container = of(explained(result(cpu()), {"NVIDIA_VISIBLE_DEVICES": "void"}), "visibility")
    assert "container runtime" in container.text
    assert container.todo is not None
    assert of(explained(result(cpu()), {"NVIDIA_VISIBLE_DEVICES": "all"}), "visibility").todo is None


def memory_of(environ: dict[str, str] | None = None, **fields: Any) -> Explanation:
    record = {"memory_usable_bytes": 70 * GIB, "memory_usable_source": "driver"} | fields
    return of(explained(result(device(0, **record)), environ), "memory", "cuda:0")


def test_memory_with_its_source_limit_and_reserve() -> None:
    plain = memory_of()
    assert "cuda:0 has 70.0 GiB of its 80.0 GiB of memory to use" in plain.text
    assert "no limit is set (GPURT_MEMORY_LIMIT)" in plain.text
    assert "a reserve of 512 MiB (the default, GPURT_MEMORY_RESERVE sets it) is kept free" in plain.text
    assert "not taken off" in memory_of(memory_usable_bytes=79 * GIB).text
    limited = memory_of({"GPURT_MEMORY_LIMIT": "20GiB"}, memory_usable_bytes=20 * GIB, memory_usable_source="limit")
    assert limited.status == "limited"
    assert "the limit of 20.0 GiB (GPURT_MEMORY_LIMIT) is in force" in limited.text
    assert "GPURT_MEMORY_LIMIT=20GiB" in (limited.todo or "")
    assert "not applied here" in memory_of({"GPURT_MEMORY_LIMIT": "20GiB"}).text
    group = memory_of(memory_usable_source="cgroup")
    assert "control group" in group.text
    assert "--memory" in (group.todo or "")


def test_memory_that_nobody_tells_is_unknown_and_not_0() -> None:
    for sentence in (
        memory_of(memory_bytes=None, memory_usable_bytes=None),
        memory_of(memory_usable_bytes=None, memory_usable_source="unknown: free memory is not told"),
        memory_of(memory_usable_bytes=None, memory_usable_source=None, memory_available=None),
    ):
        assert sentence.status == "unknown"
        assert " 0.0 GiB" not in sentence.text
        assert "None" not in sentence.text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "unknown"),
        (0, "0 bytes"),
        (1, "1 byte"),
        (20, "20 bytes"),
        (1536, "1.5 KiB"),
        (512 << 20, "512 MiB"),
        (GIB, "1.0 GiB"),
        (80 * GIB, "80.0 GiB"),
    ],
)
def test_a_size_has_a_unit_that_fits(nbytes: int | None, text: str) -> None:
    assert size_text(nbytes) == text
    assert cluster_size(nbytes) == text.replace("unknown", "?")


def test_a_limit_of_a_few_bytes_is_seen_for_what_it_is() -> None:
    sentence = memory_of({"GPURT_MEMORY_LIMIT": "20"}, memory_usable_bytes=20, memory_usable_source="limit")
    assert "has 20 bytes of its 80.0 GiB" in sentence.text
    assert "the limit of 20 bytes" in sentence.text


def test_an_amount_for_a_device_that_is_not_here() -> None:
    environ = {"GPURT_MEMORY_LIMIT": "cuda:7=3GiB", "GPURT_MEMORY_RESERVE": "cuda=1GiB,rocm=2GiB"}
    found = explained(result(device(0, memory_usable_bytes=70 * GIB)), environ)
    limit, reserve = of(found, "memory", "GPURT_MEMORY_LIMIT"), of(found, "memory", "GPURT_MEMORY_RESERVE")
    assert "sets a limit of 3.0 GiB for cuda:7, which is not here" in limit.text
    assert "cuda:0" in (limit.todo or "")
    assert "a reserve of 2.0 GiB for rocm, which is not here" in reserve.text
    assert "no limit is set for it" in of(found, "memory", "cuda:0").text
    named = explained(result(device(0)), {"GPURT_MEMORY_LIMIT": f"{UUIDS[0]}=3GiB,cuda=1GiB,CUDA:0=2GiB"})
    assert not [each for each in named if each.subject == "GPURT_MEMORY_LIMIT"]


def test_a_reserve_that_was_asked_for_decides() -> None:
    sentence = memory_of({"GPURT_MEMORY_RESERVE": "50GiB"}, memory_usable_bytes=29 * GIB)
    assert sentence.status == "limited"
    assert "decided by the reserve of 50.0 GiB that was asked for (GPURT_MEMORY_RESERVE)" in sentence.text
    assert "unset GPURT_MEMORY_RESERVE=50GiB" in (sentence.todo or "")
    nothing = memory_of({"GPURT_MEMORY_RESERVE": "900GiB"}, memory_usable_bytes=0)
    assert "has 0 bytes of its" in nothing.text
    assert nothing.status == "limited"


@pytest.mark.parametrize("figures", [{"memory_usable_bytes": 70 * GIB}, {"memory_usable_bytes": None}])
@pytest.mark.parametrize(
    "state", [DeviceState.SUSPECT, DeviceState.LOST, DeviceState.UNRESPONSIVE, DeviceState.REMOVED]
)
def test_what_a_device_had_that_does_not_answer_now(state: DeviceState, figures: dict[str, Any]) -> None:
    gone = device(0, state=state, usable=False, memory_usable_source="driver", **figures)
    sentence = of(explained(result(gone)), "memory", "cuda:0")
    assert sentence.status == "unknown"
    assert "to use, decided by" not in sentence.text
    assert ("when it last answered, 70.0 GiB" in sentence.text) == (figures["memory_usable_bytes"] is not None)
    assert memory(gone) == "unknown / 80.0 GiB", "the table says the same"


def test_memory_of_a_device_that_cannot_be_used() -> None:
    assert "cannot be used now, and would have 70.0 GiB" in memory_of(usable=False).text


@pytest.mark.parametrize("backends", [["cuda"], ["cuda", "cpu"]])
def test_a_look_up_that_found_nothing_says_whether_the_processor_was_asked(backends: list[str]) -> None:
    sentence = of(explained(result(reports=[absent(name) for name in backends])), "host", "discovery")
    assert sentence.status == "failed"
    assert ("not even the processor" in sentence.text) == ("cpu" in backends)
    assert ("the processor was not asked" in sentence.text) == ("cpu" not in backends)


def test_every_variable_of_ours_has_a_sentence() -> None:
    environ = {
        "GPURT_BACKEND": "cuda",
        "GPURT_FALLBACK": "0",
        "GPURT_THERMAL_LIMIT": "85",
        "GPURT_HEALTH_XIDS": "31=lost",
        "GPURT_PLUGINS": "off",
    }
    found = explained(result(device(0)), environ)
    for name, value in environ.items():
        assert repr(value) in of(found, "visibility", name).text
    assert "no third-party backend is loaded" in of(found, "visibility", "GPURT_PLUGINS").text
    loaded = of(explained(result(cpu()), {"GPURT_PLUGINS": "1"}), "visibility", "GPURT_PLUGINS")
    assert "third-party backends are loaded" in loaded.text


def test_a_variable_with_a_letter_missing_is_named_with_the_one_that_was_meant() -> None:
    environ = {"GPURT_MEMORY_LIMT": "secret", "GPURT_ACME_TOKEN": "secret", "PATH": "/bin"}
    found = explained(result(cpu()), environ)
    sentence = of(found, "visibility", "GPURT_MEMORY_LIMT")
    assert sentence.todo == "write GPURT_MEMORY_LIMIT"
    assert of(found, "visibility", "GPURT_ACME_TOKEN").todo is None
    assert "secret" not in "".join(each.text for each in found)
    assert unknown_variables(KNOWN) == {}


def test_all_variables_of_ours_are_known() -> None:
    source = Path(gpurt.__file__).parent
    text = "".join(file.read_text() for file in source.rglob("*.py"))
    assert set(re.findall(r"\bGPURT_[A-Z]+(?:_[A-Z]+)*\b", text)) == set(KNOWN)


def test_a_limit_that_cannot_be_read_is_said_once() -> None:
    found = explained(result(device(0)), {"GPURT_MEMORY_LIMIT": "lots"})
    sentence = of(found, "memory", "GPURT_MEMORY_LIMIT")
    assert "'lots'" in sentence.text
    assert "20GiB" in (sentence.todo or "")


def test_devices_that_share_memory_are_said_to() -> None:
    gpu = device(0, unified_memory=True, memory_pool_id="host:1", memory_usable_bytes=GIB)
    found = explained(result(gpu, cpu(memory_pool_id="host:1")))
    assert "cuda:0, cpu:0 share one memory" in of(found, "memory", "host:1").text


def test_the_command_of_this_system_but_none_in_a_container() -> None:
    report = absent("cuda", message="no libnvidia-ml").model_copy(update={"reason": ReasonCode.NO_DRIVER})
    found = result(cpu(), reports=[report])
    here = of(explained(found, place=Place("ubuntu")), "backend").todo or ""
    assert here.endswith("here: sudo ubuntu-drivers install")
    inside = of(explained(found, place=Place("ubuntu", "docker")), "backend").todo or ""
    assert "ubuntu-drivers" not in inside


def test_backends_that_work_say_what_they_show() -> None:
    report = ok("cuda").model_copy(update={"device_ids": ("cuda:0",), "elapsed_ms": 12.4, "message": "1 device; odd"})
    sentence = of(explained(result(device(0), reports=[report])), "backend")
    assert sentence.text == "cuda works and shows cuda:0, but: odd; that took 12 ms."


def test_the_look_up_itself_is_explained() -> None:
    found = result(device(0)).model_copy(update={"registry": "/r.json", "persisted": False})
    texts = " ".join(each.text for each in explained(found) if each.topic == "host")
    assert "complete" in texts
    assert "/r.json does NOT hold this result" in texts
    stale = result(device(0)).model_copy(update={"discovery_status": "preview", "pending": ("rocm",)})
    assert "rocm" in " ".join(each.text for each in explained(stale) if each.topic == "host")


def test_text_for_people_has_a_heading_for_each_topic_and_no_control_characters() -> None:
    nasty = device(0, name="\x1b[31mH100\n", usable=False, state_reason="error: \x07")
    lines = [line.plain for line in render_explanations(explained(result(nasty)))]
    assert [line for line in lines if not line.startswith(" ")] == [
        "Backends:",
        "Devices:",
        "Memory:",
        "What hides or orders devices:",
        "How this was found out:",
    ]
    assert all(line.isprintable() for line in lines)
    assert any(line.startswith("      to do: ") for line in lines)


def test_the_command_prints_them_as_text_and_as_json(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    registry = str(tmp_path / "r.json")
    assert main(["--backend", "cpu", "--explain", "--registry", registry]) == 1
    text = capsys.readouterr().out
    for part in ("Backends:", "cpu works and shows cpu:0", "Memory:", "What hides or orders devices:", registry):
        assert part in text
    assert main(["--backend", "cpu", "--explain", "--json", "--registry", registry]) == 1
    document = json.loads(capsys.readouterr().out)
    keys = {"topic", "subject", "status", "text", "todo"}
    assert document["explanations"]
    assert all(each.keys() == keys for each in document["explanations"])
    assert main(["--backend", "cpu", "--json", "--registry", registry]) == 1
    assert "explanations" not in json.loads(capsys.readouterr().out)
