"""The ctypes layer against tables of functions that are laid out as DXGI's interfaces are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int32, c_uint32, c_void_p
from typing import Any

import pytest

from gpurt.sources import dxgi_com as com
from gpurt.sources.dxgi import read_dxgi
from gpurt.sources.dxgi_calls import DxgiError, query_dxgi

NOT_FOUND = ctypes.c_int32(com.DXGI_ERROR_NOT_FOUND).value
E_NOINTERFACE = ctypes.c_int32(0x80004002).value
GIB = 1 << 30


class Server:
    """COM objects in memory: an object is a pointer to a table of 32 functions; untouched slots fail the test."""

    def __init__(self) -> None:
        self.references: dict[int, int] = {}
        self.keep: list[Any] = []
        self.trespasses: list[int] = []

    def make(self, interfaces: tuple[com.Guid, ...], **slots: tuple[int, Any, Callable[..., int]]) -> int:
        table = (c_void_p * 32)()
        word = (c_void_p * 1)()
        this = ctypes.addressof(word)

        def query(_: int, wanted: Any, out: Any) -> int:
            if not any(bytes(wanted[0].octets) == bytes(known.octets) for known in interfaces):
                return E_NOINTERFACE
            self.references[this] += 1
            out[0] = this
            return 0

        def release(_: int) -> int:
            self.references[this] -= 1
            return self.references[this]

        def trespass(slot: int) -> Callable[..., int]:
            return lambda _: self.trespasses.append(slot) or -1

        functions: dict[int, Any] = {slot: ctypes.CFUNCTYPE(c_int32, c_void_p)(trespass(slot)) for slot in range(32)}
        types = (ctypes.POINTER(com.Guid), ctypes.POINTER(c_void_p))
        functions[0] = ctypes.CFUNCTYPE(c_int32, c_void_p, *types)(query)
        functions[2] = ctypes.CFUNCTYPE(c_uint32, c_void_p)(release)
        for slot, slot_types, function in slots.values():
            functions[slot] = ctypes.CFUNCTYPE(c_int32, c_void_p, *slot_types)(function)
        for slot, function in functions.items():
            table[slot] = ctypes.cast(function, c_void_p).value
        word[0] = ctypes.addressof(table)
        self.keep += [table, word, functions]
        self.references[this] = 1
        return this


class Gdi:
    """The kernel's three calls over one adapter."""

    def __init__(self, luid: int) -> None:
        self.luid, self.open = luid, 0
        one = ctypes.CFUNCTYPE(c_int32, c_void_p)
        self.D3DKMTOpenAdapterFromLuid = one(self._opened)
        self.D3DKMTQueryAdapterInfo = one(self._asked)
        self.D3DKMTCloseAdapter = one(self._closed)

    def _opened(self, address: int) -> int:
        request = com.OpenAdapterFromLuid.from_address(address)
        if request.luid.low != self.luid:
            return ctypes.c_int32(0xC000000D).value  # STATUS_INVALID_PARAMETER
        request.adapter = 0x40000040
        self.open += 1
        return 0

    def _asked(self, address: int) -> int:
        request = com.QueryAdapterInfo.from_address(address)
        assert (request.adapter, request.type, request.size) == (0x40000040, 6, 12)
        answer = com.AdapterAddress.from_address(request.data)
        answer.bus, answer.device, answer.function = 0x41, 3, 1
        return 0

    def _closed(self, address: int) -> int:
        assert c_uint32.from_address(address).value == 0x40000040
        self.open -= 1
        return 0


def adapter(server: Server, luid: int = 0xD3A1, *, memory: bool = True) -> int:
    def describe(_: int, out: Any) -> int:
        desc = out[0]
        text = "Größe 4090".encode("utf-16-le")
        desc.name[: len(text) // 2] = [int.from_bytes(text[i : i + 2], "little") for i in range(0, len(text), 2)]
        desc.vendor_id, desc.device_id, desc.subsystem_id, desc.revision = 0x10DE, 0x2684, 0x16F3103C, 0xA1
        desc.dedicated_video_bytes, desc.shared_system_bytes = 25757220864, 16 * GIB
        desc.luid.low, desc.luid.high, desc.flags = luid, 1, 0
        return 0

    def info(_: int, node: int, group: int, out: Any) -> int:
        assert node == 0
        out[0].budget, out[0].usage = ((24 * GIB, GIB), (15 * GIB, 5))[group]
        return 0

    def version(_: int, interface: Any, out: Any) -> int:
        assert bytes(interface[0].octets) == bytes(com.IID_DEVICE.octets)
        out[0] = 32 << 48 | 15 << 16 | 9186
        return 0

    interfaces = (com.IID_ADAPTER1, com.IID_ADAPTER3) if memory else (com.IID_ADAPTER1,)
    return server.make(
        interfaces,
        desc=(10, (ctypes.POINTER(com.AdapterDesc1),), describe),
        info=(14, (c_uint32, c_uint32, ctypes.POINTER(com.VideoMemoryInfo)), info),
        version=(9, (ctypes.POINTER(com.Guid), ctypes.POINTER(ctypes.c_int64)), version),
    )


def factory(server: Server, adapters: list[int], *, preference: bool = True) -> int:
    def enumerate1(_: int, index: int, out: Any) -> int:
        if index >= len(adapters):
            return NOT_FOUND
        server.references[adapters[index]] += 1
        out[0] = adapters[index]
        return 0

    def by_preference(this: int, index: int, wanted: int, interface: Any, out: Any) -> int:
        assert (wanted, bytes(interface[0].octets)) == (2, bytes(com.IID_ADAPTER1.octets))
        return enumerate1(this, index, out)

    interfaces = (com.IID_FACTORY1, com.IID_FACTORY6) if preference else (com.IID_FACTORY1,)
    return server.make(
        interfaces,
        first=(12, (c_uint32, ctypes.POINTER(c_void_p)), enumerate1),
        second=(
            29,
            (c_uint32, c_uint32, ctypes.POINTER(com.Guid), ctypes.POINTER(c_void_p)),
            by_preference,
        ),
    )


def test_structures_have_the_sizes_of_the_headers() -> None:
    # 64-bit Windows; WCHAR[128], four UINT, three SIZE_T, LUID, UINT, padding.
    assert ctypes.sizeof(com.AdapterDesc1) == 312
    assert com.AdapterDesc1.luid.offset == 296
    assert ctypes.sizeof(com.VideoMemoryInfo) == 32
    assert ctypes.sizeof(com.OpenAdapterFromLuid) == 12
    assert (ctypes.sizeof(com.QueryAdapterInfo), com.QueryAdapterInfo.data.offset) == (24, 8)
    assert bytes(com.IID_FACTORY1.octets).hex() == "78ae0a776ff2ba4da829253c83d1b387"


def test_everything_by_its_slot_and_nothing_left_open() -> None:
    server, gdi = Server(), Gdi(0xD3A1)
    card = adapter(server)
    top = factory(server, [card])
    (found,) = read_dxgi(query_dxgi(lambda: com.ComFactory(com.ComObject(top), gdi))).adapters
    assert (found.name, found.vendor_id, found.device_id) == ("Größe 4090", 0x10DE, 0x2684)
    assert found.luid == "000000010000d3a1"
    assert (found.dedicated_video_bytes, found.shared_system_bytes) == (25757220864, 16 * GIB)
    assert (found.local_budget_bytes, found.non_local_usage_bytes) == (24 * GIB, 5)
    assert (found.pci_address, found.driver_version) == ("00000000:41:03.1", "32.0.15.9186")
    assert (found.index, found.high_performance_index) == (0, 0)
    assert found.unavailable == {}
    assert server.references == {card: 1, top: 0}  # the adapter's one is the server's own
    assert (server.trespasses, gdi.open) == ([], 0)


def test_older_windows_without_the_newer_interfaces() -> None:
    server, gdi = Server(), Gdi(0)
    top = factory(server, [adapter(server, memory=False)], preference=False)
    (found,) = read_dxgi(query_dxgi(lambda: com.ComFactory(com.ComObject(top), gdi))).adapters
    assert found.name == "Größe 4090"
    assert found.unavailable["local_budget_bytes"] == "unsupported"
    assert found.unavailable["high_performance_index"] == "unsupported"
    assert (found.pci_address, found.unavailable["pci_address"]) == (None, "error")
    assert server.references[top] == 0


def test_failures_have_their_codes() -> None:
    server = Server()
    found = com.ComObject(server.make(()))
    with pytest.raises(DxgiError, match="QueryInterface failed with 0x80004002"):
        found.cast(com.IID_ADAPTER3)
    found.close()
    found.close()
    assert list(server.references.values()) == [0]
