"""Any table of answers that the driver may give: no exception escapes, no GPU is invented, none vanishes silently."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from gpurt.errors import BackendUnavailable, DeviceLost, DeviceNotFound
from gpurt.sources import nvml
from gpurt.sources.condition import DeviceCondition
from gpurt.types import DeviceState, Telemetry


class NVMLError(Exception):
    """As nvidia-ml-py's: with the driver's code in ``value``."""

    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


ULONGLONG, UINT, TEXT = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.text(max_size=12)
UINT |= st.sampled_from([0, 1, 2**31, 2**32 - 1])
ULONGLONG |= st.sampled_from([0, 2**64 - 1, 85520809984])
TEXT |= st.binary(max_size=12) | st.sampled_from(
    ["", "GPU-1a1a1a1a-0000-1111-2222-333333333333", "00000000:00:09.0", "[N/A]"]
)


def _struct(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(types.SimpleNamespace, **fields)


# What each call answers, by the C types of nvml.h.
CALLS: dict[str, st.SearchStrategy[Any]] = {
    "nvmlSystemGetDriverVersion": TEXT,
    "nvmlDeviceGetCount": st.integers(0, 4) | UINT,
    "nvmlDeviceGetHandleByIndex": st.builds(object),
    "nvmlDeviceGetHandleByPciBusId": st.builds(object),
    "nvmlDeviceGetName": TEXT,
    "nvmlDeviceGetUUID": TEXT,
    "nvmlDeviceGetPciInfo": _struct(busId=TEXT),
    "nvmlDeviceGetMemoryInfo": _struct(total=ULONGLONG, free=ULONGLONG, used=ULONGLONG, reserved=ULONGLONG),
    "nvmlDeviceGetCudaComputeCapability": st.tuples(UINT, UINT),
    "nvmlDeviceGetNumGpuCores": UINT,
    "nvmlDeviceGetMaxClockInfo": UINT,
    "nvmlDeviceGetClockInfo": UINT,
    "nvmlDeviceGetMemoryBusWidth": UINT,
    "nvmlDeviceGetRemappedRows": st.tuples(UINT, UINT, UINT, UINT),
    "nvmlDeviceGetMigMode": st.lists(UINT, min_size=2, max_size=2),
    "nvmlDeviceGetMaxMigDeviceCount": st.integers(0, 3) | UINT,
    "nvmlDeviceGetMigDeviceHandleByIndex": st.builds(object),
    "nvmlDeviceGetGpuInstanceId": UINT,
    "nvmlDeviceGetComputeInstanceId": UINT,
    "nvmlDeviceGetAttributes": _struct(multiprocessorCount=UINT),
    "nvmlDeviceGetTemperature": UINT,
    "nvmlDeviceGetPowerUsage": UINT,
    "nvmlDeviceGetUtilizationRates": _struct(gpu=UINT, memory=UINT),
    "nvmlDeviceGetEccMode": st.lists(UINT, min_size=2, max_size=2),
    "nvmlDeviceGetTotalEccErrors": ULONGLONG,
    "nvmlDeviceGetFieldValues": st.lists(
        _struct(nvmlReturn=st.sampled_from([0, 3, 999]), value=_struct(uiVal=UINT)), min_size=1, max_size=1
    ),
    "nvmlDeviceGetCurrentClocksEventReasons": ULONGLONG,
    "nvmlDeviceGetCurrentClocksThrottleReasons": ULONGLONG,
    "nvmlDeviceGetTemperatureThreshold": UINT,
    "nvmlDeviceGetCurrPcieLinkGeneration": UINT,
    "nvmlDeviceGetCurrPcieLinkWidth": UINT,
    "nvmlDeviceGetMaxPcieLinkGeneration": UINT,
    "nvmlDeviceGetMaxPcieLinkWidth": UINT,
    "nvmlDeviceGetComputeRunningProcesses_v3": st.lists(
        _struct(pid=UINT, usedGpuMemory=st.none() | ULONGLONG), max_size=3
    ),
}
CODES = st.sampled_from([1, 2, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 17, 18, 20, 21, 23, 25, 27, 28, 29, 999])
ERRORS = st.builds(NVMLError, CODES) | st.sampled_from([AttributeError("none"), TypeError("none"), OSError("none")])
WELL: dict[str, Any] = {
    "nvmlDeviceGetCount": 2, "nvmlDeviceGetHandleByIndex": object(), "nvmlDeviceGetHandleByPciBusId": object(),
    "nvmlDeviceGetName": "NVIDIA H100", "nvmlDeviceGetUUID": "GPU-1a1a1a1a-0000-1111-2222-333333333333",
    "nvmlDeviceGetTemperature": 41, "nvmlDeviceGetPowerUsage": 69850, "nvmlDeviceGetMigMode": [1, 1],
    "nvmlDeviceGetMaxMigDeviceCount": 2, "nvmlDeviceGetMigDeviceHandleByIndex": object(),
    "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=85520809984, free=85018542080, used=0, reserved=502267904),
}  # fmt: skip
"""A card that is well; each table changes some of it."""
TABLES = st.lists(
    st.one_of([st.tuples(st.just(name), answer | ERRORS) for name, answer in CALLS.items()]), max_size=12
).map(lambda changes: {**WELL, **dict(changes)})


class Binding(types.ModuleType):
    """``pynvml`` over a table; calls that are not in it are not in this driver."""

    def __init__(self, table: dict[str, Any]) -> None:
        super().__init__("pynvml")
        self.nvmlMemory_v2 = 0x02000028
        self.handles = 0
        for name in CALLS:
            setattr(self, name, self._call(name, table.get(name, NVMLError(13))))

    def _call(self, name: str, answer: Any) -> Any:
        def call(*args: Any) -> Any:
            self.handles += name == "nvmlDeviceGetHandleByIndex"
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...


def check_table(table: dict[str, Any]) -> None:
    binding = Binding(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", binding)
        with nvml.open_session() as session:
            with contextlib.suppress(BackendUnavailable):
                devices = session.devices()
                assert len(devices) == table["nvmlDeviceGetCount"] == binding.handles
                for index, device in enumerate(devices):
                    _check_device(index, device)
            for ask in (session.telemetry, session.condition, session.processes):
                with contextlib.suppress(DeviceLost, DeviceNotFound):
                    _check_answer(ask("0000:00:09.0"))


def _check_device(index: int, device: nvml.NvmlDevice) -> None:
    assert device.index == index
    assert device.state is DeviceState.HEALTHY or device.reason
    for name in ("memory_total_bytes", "memory_free_bytes", "memory_used_bytes", "max_clock_mhz", "core_count"):
        value = getattr(device, name)
        assert value is None or 0 <= value <= 2**62
        # A GPU without a handle says why as a whole.
        assert value is not None or name in device.unavailable or device.reason


def _check_answer(answer: Any) -> None:
    if isinstance(answer, Telemetry):
        values = answer.model_dump(exclude={"unavailable"})
    elif isinstance(answer, DeviceCondition):
        values = {field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)}
        del values["unavailable"]
    else:
        assert (answer.processes is None) == (answer.reason is not None)
        assert answer.used_bytes is None or answer.used_bytes >= 0
        return
    for name, value in values.items():
        assert (value is None) == (name in answer.unavailable), name


@pytest.mark.wide
@settings(max_examples=1000, deadline=None)
@given(TABLES)
def test_any_table(table: dict[str, Any]) -> None:
    check_table(table)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_any_table_at_length(part: int) -> None:
    """100,000 in parts of 5,000, each with numbers of its own, that several processes can share."""

    @seed(part)
    @settings(max_examples=5000, deadline=None, database=None)
    @given(TABLES)
    def run(table: dict[str, Any]) -> None:
        check_table(table)

    run()
