"""DXGI's COM interfaces and the kernel's adapter calls by ctypes. No package needed.

Slots, structures and identifiers as in dxgi.h, dxgi1_4.h, dxgi1_6.h and d3dkmthk.h of the Windows SDK. Proved against
tables of functions laid out like those interfaces; not yet run on Windows itself.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Mapping
from ctypes import POINTER, Structure, byref, c_int32, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, Final, Protocol

from gpurt.sources.dxgi_calls import DESCRIBED, DxgiCalls, DxgiError

# WINFUNCTYPE exists on Windows only, and differs from CFUNCTYPE on 32-bit x86 only.
_FUNCTION: Final[Any] = getattr(ctypes, "WINFUNCTYPE", ctypes.CFUNCTYPE)

DXGI_ERROR_NOT_FOUND: Final = 0x887A0002

# Position in the interface's table of functions, counted from IUnknown on.
QUERY_INTERFACE, RELEASE = 0, 2
FACTORY_ENUM_ADAPTERS1, FACTORY_ENUM_BY_PREFERENCE = 12, 29
ADAPTER_CHECK_INTERFACE_SUPPORT, ADAPTER_GET_DESC1, ADAPTER_QUERY_VIDEO_MEMORY_INFO = 9, 10, 14

KMTQAITYPE_ADAPTERADDRESS: Final = 6


class Guid(Structure):
    _fields_ = [("octets", ctypes.c_uint8 * 16)]


def guid(text: str) -> Guid:
    """An interface's identifier."""
    return Guid((ctypes.c_uint8 * 16)(*uuid.UUID(text).bytes_le))


IID_FACTORY1: Final = guid("770aae78-f26f-4dba-a829-253c83d1b387")
IID_FACTORY6: Final = guid("c1b6694f-ff09-44a9-b03c-77900a0a1d17")
IID_ADAPTER1: Final = guid("29038f61-3839-4626-91fd-086879011a05")
IID_ADAPTER3: Final = guid("645967a4-1392-4310-a798-8053ce3e93fd")
IID_DEVICE: Final = guid("54ec77fa-1377-44e6-8c32-88fd5f44c84c")


class Luid(Structure):
    _fields_ = [("low", c_uint32), ("high", c_int32)]


class AdapterDesc1(Structure):
    """DXGI_ADAPTER_DESC1. ``name`` is UTF-16: wide characters of ctypes have 32 bits outside Windows."""

    _fields_ = [
        ("name", c_uint16 * 128),
        ("vendor_id", c_uint32),
        ("device_id", c_uint32),
        ("subsystem_id", c_uint32),
        ("revision", c_uint32),
        ("dedicated_video_bytes", c_size_t),
        ("dedicated_system_bytes", c_size_t),
        ("shared_system_bytes", c_size_t),
        ("luid", Luid),
        ("flags", c_uint32),
    ]


class VideoMemoryInfo(Structure):
    """DXGI_QUERY_VIDEO_MEMORY_INFO"""

    _fields_ = [
        ("budget", c_uint64),
        ("usage", c_uint64),
        ("available_for_reservation", c_uint64),
        ("reservation", c_uint64),
    ]


class OpenAdapterFromLuid(Structure):
    """D3DKMT_OPENADAPTERFROMLUID"""

    _fields_ = [("luid", Luid), ("adapter", c_uint32)]


class QueryAdapterInfo(Structure):
    """D3DKMT_QUERYADAPTERINFO"""

    _fields_ = [("adapter", c_uint32), ("type", c_uint32), ("data", c_void_p), ("size", c_uint32)]


class AdapterAddress(Structure):
    """D3DKMT_ADAPTERADDRESS"""

    _fields_ = [("bus", c_uint32), ("device", c_uint32), ("function", c_uint32)]


class KernelLibrary(Protocol):
    """``gdi32.dll``."""

    @property
    def D3DKMTOpenAdapterFromLuid(self) -> Any: ...
    @property
    def D3DKMTQueryAdapterInfo(self) -> Any: ...
    @property
    def D3DKMTCloseAdapter(self) -> Any: ...


class ComObject:
    """An interface pointer that we own a reference to. For one thread; ``close`` gives the reference back once."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def call(self, name: str, slot: int, types: tuple[Any, ...], *args: Any, missing: bool = False) -> bool:
        """Calls a function of the interface. False where it says DXGI_ERROR_NOT_FOUND and ``missing`` allows that.

        Raises:
            DxgiError: any other failure.
        """
        code: int = _function(self._pointer, slot, c_int32, *types)(self._pointer, *args)
        if code >= 0:
            return True
        if missing and code & 0xFFFFFFFF == DXGI_ERROR_NOT_FOUND:
            return False
        raise DxgiError(name, code)

    def cast(self, interface: Guid) -> ComObject:
        """The same object under another interface, to be closed by itself."""
        other = c_void_p()
        types = (POINTER(Guid), POINTER(c_void_p))
        self.call("QueryInterface", QUERY_INTERFACE, types, byref(interface), byref(other))
        return ComObject(_pointer(other, "QueryInterface"))

    def close(self) -> None:
        if self._pointer:
            pointer, self._pointer = self._pointer, 0
            _function(pointer, RELEASE, c_uint32)(pointer)


class ComAdapter:
    """:class:`gpurt.sources.dxgi_calls.DxgiAdapterCalls` over an ``IDXGIAdapter1``."""

    def __init__(self, adapter: ComObject, kernel: KernelLibrary) -> None:
        self._adapter, self._kernel = adapter, kernel

    def description(self) -> Mapping[str, int | str]:
        desc = self._desc()
        name = bytes(desc.name).decode("utf-16-le", "replace").split("\0", 1)[0]
        numbers = {field: getattr(desc, field) for field in DESCRIBED if field not in ("name", "luid")}
        return {"name": name, "luid": f"{desc.luid.high & 0xFFFFFFFF:08x}{desc.luid.low:08x}", **numbers}

    def memory(self, group: int) -> tuple[int, int]:
        info = VideoMemoryInfo()
        types = (c_uint32, c_uint32, POINTER(VideoMemoryInfo))
        adapter3 = self._adapter.cast(IID_ADAPTER3)
        try:
            # Node 0: linked adapters show as one with several nodes, which no present driver does.
            adapter3.call("QueryVideoMemoryInfo", ADAPTER_QUERY_VIDEO_MEMORY_INFO, types, 0, group, byref(info))
        finally:
            adapter3.close()
        return info.budget, info.usage

    def pci_location(self) -> tuple[int, int, int]:
        opened = OpenAdapterFromLuid(luid=self._desc().luid)
        _checked("D3DKMTOpenAdapterFromLuid", self._kernel.D3DKMTOpenAdapterFromLuid, byref(opened))
        try:
            address = AdapterAddress()
            query = QueryAdapterInfo(
                opened.adapter,
                KMTQAITYPE_ADAPTERADDRESS,
                ctypes.cast(ctypes.pointer(address), c_void_p),
                ctypes.sizeof(address),
            )
            _checked("D3DKMTQueryAdapterInfo", self._kernel.D3DKMTQueryAdapterInfo, byref(query))
        finally:
            # Nothing can be done about a handle that does not close.
            self._kernel.D3DKMTCloseAdapter(byref(c_uint32(opened.adapter)))
        return address.bus, address.device, address.function

    def driver_version(self) -> str:
        version = ctypes.c_int64()
        types = (POINTER(Guid), POINTER(ctypes.c_int64))
        self._adapter.call(
            "CheckInterfaceSupport", ADAPTER_CHECK_INTERFACE_SUPPORT, types, byref(IID_DEVICE), byref(version)
        )
        return ".".join(str(version.value >> shift & 0xFFFF) for shift in (48, 32, 16, 0))

    def close(self) -> None:
        self._adapter.close()

    def _desc(self) -> AdapterDesc1:
        desc = AdapterDesc1()
        self._adapter.call("GetDesc1", ADAPTER_GET_DESC1, (POINTER(AdapterDesc1),), byref(desc))
        return desc


class ComFactory:
    """:class:`gpurt.sources.dxgi_calls.DxgiCalls` over an ``IDXGIFactory1``, which it takes over."""

    size_bits: int = ctypes.sizeof(c_size_t) * 8

    def __init__(self, factory: ComObject, kernel: KernelLibrary) -> None:
        self._factory, self._kernel = factory, kernel

    def adapter(self, index: int) -> ComAdapter | None:
        found = c_void_p()
        types = (c_uint32, POINTER(c_void_p))
        if not self._factory.call("EnumAdapters1", FACTORY_ENUM_ADAPTERS1, types, index, byref(found), missing=True):
            return None
        return ComAdapter(ComObject(_pointer(found, "EnumAdapters1")), self._kernel)

    def preferred(self, index: int, preference: int) -> ComAdapter | None:
        found = c_void_p()
        types = (c_uint32, c_uint32, POINTER(Guid), POINTER(c_void_p))
        name, args = "EnumAdapterByGpuPreference", (index, preference, byref(IID_ADAPTER1), byref(found))
        factory6 = self._factory.cast(IID_FACTORY6)
        try:
            if not factory6.call(name, FACTORY_ENUM_BY_PREFERENCE, types, *args, missing=True):
                return None
        finally:
            factory6.close()
        return ComAdapter(ComObject(_pointer(found, name)), self._kernel)

    def close(self) -> None:
        self._factory.close()


def open_dxgi() -> DxgiCalls:
    """DXGI of this computer. Windows only.

    Raises:
        OSError: no such library. AttributeError: a library without these functions. DxgiError: no factory.
    """
    load: Any = getattr(ctypes, "WinDLL")  # noqa: B009 - exists on Windows only
    create = load("dxgi.dll").CreateDXGIFactory1
    create.argtypes, create.restype = (POINTER(Guid), POINTER(c_void_p)), c_int32
    kernel = load("gdi32.dll")
    for name in ("D3DKMTOpenAdapterFromLuid", "D3DKMTQueryAdapterInfo", "D3DKMTCloseAdapter"):
        getattr(kernel, name).argtypes, getattr(kernel, name).restype = (c_void_p,), c_int32
    factory = c_void_p()
    _checked("CreateDXGIFactory1", create, byref(IID_FACTORY1), byref(factory))
    return ComFactory(ComObject(_pointer(factory, "CreateDXGIFactory1")), kernel)


def _function(pointer: int, slot: int, result: Any, *types: Any) -> Any:
    """Function ``slot`` of the object's table, whose address is the object's first word."""
    table = c_void_p.from_address(pointer).value or 0
    address = c_void_p.from_address(table + slot * ctypes.sizeof(c_void_p)).value or 0
    return _FUNCTION(result, c_void_p, *types)(address)


def _pointer(found: c_void_p, name: str) -> int:
    if not found.value:
        raise DxgiError(name, 0x80004003)  # E_POINTER: success without an object
    return found.value


def _checked(name: str, function: Any, *args: Any) -> None:
    code: int = function(*args)
    if code < 0:
        raise DxgiError(name, code)
