"""The error tree: bases, fields, text, pickling."""

from __future__ import annotations

import pickle

import pytest

from gpurt import errors
from gpurt.errors import (
    BackendUnavailable,
    CompileFailed,
    DeviceLost,
    DeviceUnresponsive,
    GPUError,
    OutOfMemory,
    ReasonCode,
)

BUILT_INS = {
    "DeviceNotFound": LookupError,
    "InvalidHandle": ValueError,
    "HandleInUse": BufferError,
    "OutOfRange": ValueError,
    "OutOfMemory": MemoryError,
    "Unsupported": NotImplementedError,
}
TREE = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, GPUError)]


def _make(cls: type[GPUError]) -> GPUError:
    extra = {"requested_bytes": 10, "free_bytes": 3} if cls is OutOfMemory else {}
    return cls(
        "it broke",
        backend="cuda",
        device_id="cuda:1",
        operation="allocate(10 B)",
        code=700,
        hint="try again",
        **extra,
    )


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_every_error_is_a_runtime_error_and_pickles(cls: type[GPUError]) -> None:
    error = _make(cls)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, BUILT_INS.get(cls.__name__, RuntimeError))
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is cls
    assert twin.fields() == error.fields()
    assert str(twin) == str(error)


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_text_says_where_what_and_what_to_do(cls: type[GPUError]) -> None:
    text = str(_make(cls))
    for part in ("cuda:1", "allocate(10 B)", "it broke", "700", "try again"):
        assert part in text


def test_the_tree_is_drawn_in_the_docstring() -> None:
    for cls in TREE:
        assert cls.__name__ in (errors.__doc__ or "")


def test_unresponsive_is_a_kind_of_lost() -> None:
    assert issubclass(DeviceUnresponsive, DeviceLost)


def test_numbers_of_out_of_memory_survive() -> None:
    error = OutOfMemory("no", requested_bytes=9, free_bytes=4, total_bytes=8, limit_bytes=5, pooled_bytes=0)
    twin = pickle.loads(pickle.dumps(error))
    numbers = (twin.requested_bytes, twin.free_bytes, twin.total_bytes, twin.limit_bytes, twin.pooled_bytes)
    assert numbers == (9, 4, 8, 5, 0)
    assert OutOfMemory("no", requested_bytes=9).free_bytes is None


def test_log_of_a_compiler_is_kept_and_shown() -> None:
    log = "kernel.c:3: error: 'n' undeclared\n1 error"
    error = CompileFailed("the compiler refuses the source", log=log, device_id="cpu:0", hint="declare it")
    assert str(error) == f"cpu:0: the compiler refuses the source (declare it)\n{log}"
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.log, str(twin)) == (log, str(error))
    assert str(CompileFailed("no compiler answered")) == "no compiler answered"


def test_unavailable_hints_at_the_installation() -> None:
    error = BackendUnavailable("no CuPy", reason=ReasonCode.NO_LIBRARY, install_hint="pip install 'gpurt[cuda12]'")
    assert error.hint == "pip install 'gpurt[cuda12]'"
    assert "gpurt[cuda12]" in str(error)
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.reason, twin.install_hint) == (error.reason, error.install_hint)
    assert BackendUnavailable("?").reason is ReasonCode.ERROR


def test_reason_codes_are_their_text() -> None:
    assert f"{ReasonCode.NO_DRIVER}" == "no_driver"
    assert ReasonCode("timeout") is ReasonCode.TIMEOUT
