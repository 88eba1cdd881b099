"""The shape of GPUBackend, and that every backend keeps it."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import pkgutil
import struct

import numpy as np
import pytest

import gpurt
from gpurt.backend import GPUBackend, byte_view
from gpurt.errors import GPUError, OutOfRange, Unsupported
from gpurt.testing.kit.base import load_factory
from gpurt.types import Kernel, MemoryHandle

ABSTRACT = {
    "initialize",
    "shutdown",
    "list_devices",
    "get_device",
    "allocate",
    "deallocate",
    "copy_to_device",
    "copy_from_device",
    "copy_device_to_device",
    "synchronize",
    "get_device_memory_info",
    "get_device_temperature",
    "get_device_power_usage",
    "get_device_clock_rate",
}


def _public(cls: type) -> dict[str, object]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


def _subclasses(cls: type[GPUBackend]) -> set[type[GPUBackend]]:
    found = set(cls.__subclasses__())
    return found.union(*(_subclasses(each) for each in found))


def _all_backends() -> list[type[GPUBackend]]:
    for package in ("gpurt.backends", "gpurt.testing"):
        path = importlib.import_module(package).__path__
        for module in pkgutil.iter_modules(path, f"{package}."):
            importlib.import_module(module.name)
    shipped = [cls for cls in _subclasses(GPUBackend) if cls.__module__.startswith("gpurt.")]
    return sorted(shipped, key=lambda cls: cls.__qualname__)


def test_exactly_the_fourteen_are_abstract() -> None:
    assert GPUBackend.__abstractmethods__ == ABSTRACT
    assert len(ABSTRACT) == 14


def test_cannot_be_instantiated() -> None:
    with pytest.raises(TypeError):
        GPUBackend()  # type: ignore[abstract]


@pytest.mark.parametrize("cls", [GPUBackend, *_all_backends()], ids=lambda cls: cls.__name__)
def test_every_public_method_is_a_coroutine_function(cls: type[GPUBackend]) -> None:
    for name in _public(GPUBackend):
        attribute = inspect.getattr_static(cls, name)
        if name in ("devices", "capabilities"):
            assert isinstance(attribute, property)
        elif name == "memory_scope":
            continue  # returns an async context manager
        elif name == "allocation":
            assert hasattr(attribute, "__wrapped__")
            assert inspect.isasyncgenfunction(attribute.__wrapped__)
        else:
            assert inspect.iscoroutinefunction(attribute), f"{cls.__name__}.{name}"


@pytest.mark.parametrize("cls", _all_backends(), ids=lambda cls: cls.__name__)
def test_signatures_are_those_of_the_contract(cls: type[GPUBackend]) -> None:
    for name, contract in _public(GPUBackend).items():
        if not inspect.isfunction(contract):
            continue
        ours = inspect.signature(contract).parameters.values()
        theirs = inspect.signature(getattr(cls, name)).parameters.values()
        assert [(p.name, p.default, p.kind) for p in theirs] == [(p.name, p.default, p.kind) for p in ours], name


def test_every_shipped_backend_was_found() -> None:
    assert {"CPUBackend", "CUDABackend", "SimulatedBackend", "DriverBackend"} <= {c.__name__ for c in _all_backends()}


def test_every_public_method_has_a_docstring() -> None:
    for name in _public(GPUBackend):
        assert inspect.getdoc(getattr(GPUBackend, name)), name


def test_constructing_binds_no_loop_and_starts_nothing() -> None:
    backend = load_factory("tests.support.backends:cpu")
    assert backend.devices == ()


class Minimal(GPUBackend):
    """Implements nothing but what the concrete methods are built on."""

    name = "minimal"

    def __init__(self) -> None:
        self.content = b""
        self.freed: list[MemoryHandle] = []

    async def initialize(self) -> None: ...
    async def shutdown(self, *, timeout: float | None = 10) -> None: ...
    async def list_devices(self):
        return ()

    async def get_device(self, device_id):
        return None

    async def allocate(self, device_id, size_bytes):
        return MemoryHandle(1, device_id, size_bytes, 1)

    async def deallocate(self, handle) -> None:
        self.freed.append(handle)

    async def copy_to_device(self, src, dst_handle, offset_bytes=0) -> None:
        self.content = bytes(src)

    async def copy_from_device(self, src_handle, offset_bytes=0, size_bytes=None):
        return self.content[offset_bytes : offset_bytes + size_bytes]

    async def copy_device_to_device(self, *args, **kwargs) -> None: ...
    async def synchronize(self, device_id) -> None: ...
    async def get_device_memory_info(self, device_id):
        raise NotImplementedError

    async def get_device_temperature(self, device_id):
        return None

    async def get_device_power_usage(self, device_id):
        return None

    async def get_device_clock_rate(self, device_id):
        return None


async def test_concrete_methods_work_on_the_fourteen_alone() -> None:
    async with Minimal() as backend:
        async with backend.allocation("minimal:0", 4) as handle:
            await backend.copy_to_device(b"abcd", handle)
            target = bytearray(3)
            assert await backend.copy_into(handle, target, 1) == 3
            assert target == b"bcd"
            with pytest.raises(OutOfRange):
                await backend.copy_into(handle, b"abc")
            with pytest.raises(NotImplementedError):
                await backend.view(handle)
            with pytest.raises(Unsupported):
                await backend.compile("minimal:0", "void f(void) {}", "f")
            with pytest.raises(Unsupported):
                await backend.launch(Kernel(1, "minimal:0", "f", 1), 1, 1)
            assert await backend.execute_kernel("f", 1, 1, [handle]) is False
            assert await backend.trim() == 0
        assert backend.freed == [handle]


def test_byte_view_of_elements_that_memoryview_cannot_cast() -> None:
    doubles = (ctypes.c_double * 2)(1.0, 2.0)
    view = byte_view(doubles, writable=True)
    assert (view.format, view.nbytes, bytes(view)) == ("B", 16, bytes(doubles))
    view[0:8] = struct.pack("d", 5.0)
    assert doubles[0] == 5.0
    records = np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")])
    assert bytes(byte_view(records)) == records.tobytes()
    with pytest.raises(OutOfRange, match="read-only"):
        byte_view(np.frombuffer(records.tobytes(), records.dtype), writable=True)


def test_byte_view_takes_any_contiguous_buffer() -> None:
    for buffer in (b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), np.frombuffer(b"abcd", np.uint16)):
        view = byte_view(buffer)
        assert (view.format, view.ndim, bytes(view)) == ("B", 1, b"abcd")
    assert byte_view(np.zeros((0, 3))).nbytes == 0
    assert byte_view(np.float32(1.5)).nbytes == 4
    target = bytearray(2)
    byte_view(target, writable=True)[:] = b"ok"
    assert target == b"ok"


@pytest.mark.parametrize(
    ("buffer", "writable"),
    [("text", False), (7, False), (None, False), (memoryview(b"abcd")[::2], False), (b"abcd", True)],
)
def test_byte_view_refuses(buffer: object, writable: bool) -> None:
    with pytest.raises(OutOfRange) as caught:
        byte_view(buffer, writable=writable)
    assert isinstance(caught.value, GPUError)
    assert caught.value.hint


def test_byte_view_of_a_refused_buffer_is_let_go() -> None:
    content = bytearray(8)
    with pytest.raises(OutOfRange):
        byte_view(memoryview(content)[::2])
    with pytest.raises(OutOfRange):
        byte_view(memoryview(content).toreadonly(), writable=True)
    content.append(1)


def test_package_is_typed() -> None:
    from importlib.resources import files

    assert files(gpurt).joinpath("py.typed").is_file()


@pytest.mark.parametrize(
    "buffer",
    [
        np.array([None, 1], dtype=object),
        np.zeros(2, dtype=[("i", "i8"), ("o", object)]),
        np.zeros(2, dtype=[("x", [("deep", object)]), ("i", "i8")]),
        (ctypes.py_object * 2)(None, None),
    ],
    ids=["array", "field", "nested field", "ctypes"],
)
def test_byte_view_refuses_addresses_of_objects(buffer: object) -> None:
    with pytest.raises(OutOfRange, match="Python objects"):
        byte_view(buffer)
    with pytest.raises(OutOfRange, match="Python objects"):
        byte_view(buffer, writable=True)


def test_byte_view_takes_fields_with_an_o_in_their_name() -> None:
    records = np.array([(1, 2.0)], dtype=[("O", "<i4"), ("xOx", "<f8")])
    assert bytes(byte_view(records)) == records.tobytes()
