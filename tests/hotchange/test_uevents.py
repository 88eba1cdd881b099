"""The kernel's events: what is read from them, and what of them concerns anybody."""

from __future__ import annotations

import asyncio
import gc
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurt.hotchange.uevents import Uevent, UeventSocket, concerns_devices, parse_uevent


def message(action: str, path: str, **values: str) -> bytes:
    texts = [f"{action}@{path}", f"ACTION={action}", f"DEVPATH={path}", *(f"{k}={v}" for k, v in values.items())]
    return "\0".join(texts).encode() + b"\0"


def test_an_event_is_its_action_path_and_values() -> None:
    event = parse_uevent(message("add", "/devices/pci0000:00/0000:00:01.0/drm/card1", SUBSYSTEM="drm", SEQNUM="42"))
    assert event is not None
    assert (event.action, event.path, event.subsystem) == ("add", "/devices/pci0000:00/0000:00:01.0/drm/card1", "drm")
    assert event.values["SEQNUM"] == "42"


@pytest.mark.parametrize("raw", [b"", b"libudev\0\xfe\xed\xca\xfe", b"add", b"@/devices", b"add@relative", b"\0\0\0"])
def test_what_is_no_event_of_the_kernel(raw: bytes) -> None:
    assert parse_uevent(raw) is None


@given(st.binary(max_size=300))
def test_any_bytes_are_an_event_or_none(raw: bytes) -> None:
    event = parse_uevent(raw)
    assert event is None or isinstance(concerns_devices(event), bool)


@pytest.mark.parametrize(
    ("action", "path", "values", "concerns"),
    [
        ("add", "/devices/x/drm/card1", {"SUBSYSTEM": "drm"}, True),
        ("remove", "/devices/x/drm/renderD128", {"SUBSYSTEM": "drm"}, True),
        ("change", "/devices/x/drm/card1", {"SUBSYSTEM": "drm", "WEDGED": "bus-reset"}, True),
        ("change", "/devices/x/drm/card1", {"SUBSYSTEM": "drm", "HOTPLUG": "1"}, False),  # a monitor
        ("add", "/devices/virtual/kfd/kfd", {"SUBSYSTEM": "kfd"}, True),
        ("add", "/devices/x/accel/accel0", {"SUBSYSTEM": "accel"}, True),
        ("add", "/devices/x/nvidia0", {"SUBSYSTEM": "nvidia"}, True),
        ("bind", "/devices/pci/0000:01:00.0", {"SUBSYSTEM": "pci", "PCI_CLASS": "30200"}, True),
        ("add", "/devices/pci/0000:01:00.0", {"SUBSYSTEM": "pci", "PCI_CLASS": "120000"}, True),
        ("add", "/devices/pci/0000:02:00.0", {"SUBSYSTEM": "pci", "PCI_CLASS": "20000"}, False),  # a network card
        ("add", "/devices/pci/0000:02:00.0", {"SUBSYSTEM": "pci", "PCI_CLASS": "garbage"}, False),
        ("add", "/module/nvidia", {"SUBSYSTEM": "module"}, True),
        ("add", "/module/nvidia_uvm", {"SUBSYSTEM": "module"}, False),  # loaded by the first use of CUDA
        ("add", "/module/usbhid", {"SUBSYSTEM": "module"}, False),
        ("add", "/devices/x/block/sda", {"SUBSYSTEM": "block"}, False),
        ("add", "/devices/x", {}, False),
    ],
)
def test_what_concerns_devices(action: str, path: str, values: dict[str, str], concerns: bool) -> None:
    assert concerns_devices(Uevent(action, path, values)) is concerns


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not hasattr(socket, "AF_NETLINK"), reason="no netlink sockets here")
async def test_the_real_socket_opens_and_closes_without_a_trace() -> None:
    gc.collect()
    before = descriptors()
    for _ in range(20):
        try:
            listening = UeventSocket(lambda: None)
        except OSError as exc:
            pytest.skip(f"not allowed here: {exc}")
        listening.close()
        listening.close()
    assert descriptors() == before


@pytest.mark.skipif(not hasattr(socket, "AF_NETLINK"), reason="no netlink sockets here")
def test_a_loop_that_is_gone_takes_the_socket_with_it() -> None:
    gc.collect()
    before = descriptors()

    async def open_one() -> None:
        try:
            UeventSocket(lambda: None)
        except OSError as exc:
            pytest.skip(f"not allowed here: {exc}")

    asyncio.run(open_one())
    gc.collect()
    assert descriptors() == before


class FakeSocket:
    """A pair of datagram sockets in place of netlink: ``port`` is the sender's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, port: int = 0) -> None:
        self.ours, self.kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ours.setblocking(False)
        self.port = port
        self.error: OSError | None = None
        monkeypatch.setattr(socket, "AF_NETLINK", 16, raising=False)
        monkeypatch.setattr(socket, "socket", lambda *_: self)

    def bind(self, address: tuple[int, int]) -> None:
        assert address == (0, 1)

    def fileno(self) -> int:
        return self.ours.fileno()

    def close(self) -> None:
        self.ours.close()

    def recvfrom(self, size: int) -> tuple[bytes, tuple[int, int]]:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.ours.recv(size), (self.port, 1)


CARD = message("add", "/devices/x/drm/card1", SUBSYSTEM="drm")


async def heard(fake: FakeSocket, *messages: bytes) -> int:
    told: list[None] = []
    listening = UeventSocket(lambda: told.append(None))
    for each in messages:
        fake.kernel.send(each)
    await asyncio.sleep(0.01)
    listening.close()
    fake.kernel.close()
    return len(told)


async def test_many_events_in_one_turn_are_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await heard(FakeSocket(monkeypatch), CARD, message("add", "/block/sda", SUBSYSTEM="block"), CARD) == 1


async def test_nobody_but_the_kernel_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await heard(FakeSocket(monkeypatch, port=4711), CARD) == 0


async def test_events_that_the_kernel_dropped_are_a_reason_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    fake = FakeSocket(monkeypatch)
    fake.error = OSError(errno.ENOBUFS, "no buffer space")
    assert await heard(fake, message("add", "/block/sda", SUBSYSTEM="block")) == 1
