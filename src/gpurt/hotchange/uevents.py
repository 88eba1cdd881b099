"""The kernel's own word on devices: uevents, read from a netlink socket (Linux).

The format is that of ``kobject_uevent_env`` in the kernel: ``ACTION@DEVPATH``, then ``KEY=value`` texts, each ended by
a zero byte. Only what the kernel itself sends is believed (port 0): others may write to the group as well.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

_log = logging.getLogger("gpurt.hotchange")

_NETLINK_KOBJECT_UEVENT: Final = 15
_KERNEL_GROUP: Final = 1
"""udev repeats every event in group 2, after its rules."""
_MAX_BYTES: Final = 8192
"""The kernel's own buffer is 2 KiB."""
_PER_TURN: Final = 64
"""Messages read in one turn of the event loop, which a storm of them must not stop."""

_SUBSYSTEMS: Final = frozenset({"drm", "nvidia", "kfd", "accel"})
_MODULES: Final = frozenset({"nvidia", "amdgpu", "i915", "xe", "nouveau"})
_PCI_BASES: Final = frozenset({0x03, 0x12})
"""Base classes of PCI devices that can be ours: display controllers and processing accelerators."""


@dataclass(frozen=True, slots=True)
class Uevent:
    action: str
    path: str
    """Below ``/sys``."""
    values: Mapping[str, str]

    @property
    def subsystem(self) -> str:
        return self.values.get("SUBSYSTEM", "")


def parse_uevent(message: bytes) -> Uevent | None:
    """The event in a message, or None for what is none: udev's own format, or garbage."""
    head, *texts = message.decode(errors="replace").split("\0")
    action, at, path = head.partition("@")
    if not at or not path.startswith("/") or not action.isalpha():
        return None
    pairs = (text.partition("=") for text in texts)
    return Uevent(action, path, {key: value for key, equals, value in pairs if equals})


def concerns_devices(event: Uevent) -> bool:
    """Whether there may be another device, or another driver, after this event.

    A monitor that is plugged in is none (``HOTPLUG=1`` of a graphics card), and neither is a network card.
    """
    if event.subsystem == "module":
        return event.path.rpartition("/")[2] in _MODULES
    if event.subsystem == "pci":
        try:
            return int(event.values.get("PCI_CLASS", ""), 16) >> 16 in _PCI_BASES
        except ValueError:
            return False
    if event.subsystem not in _SUBSYSTEMS:
        return False
    return not (event.action == "change" and event.values.get("HOTPLUG") == "1")


class UeventSocket:
    """Listens on the running event loop from the constructor to ``close``.

    Args:
        on_change: called on the loop for every event that concerns devices, and when the kernel dropped some.

    Raises:
        OSError: not allowed here, or another operating system.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        family = getattr(socket, "AF_NETLINK", None)
        if family is None:
            raise OSError(errno.EAFNOSUPPORT, "this system has no netlink sockets")
        flags = socket.SOCK_RAW | getattr(socket, "SOCK_CLOEXEC", 0) | getattr(socket, "SOCK_NONBLOCK", 0)
        self._socket = socket.socket(family, flags, _NETLINK_KOBJECT_UEVENT)
        # For whoever loses its event loop before it could close.
        self._finalizer = weakref.finalize(self, self._socket.close)
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        try:
            self._socket.bind((0, _KERNEL_GROUP))
            self._loop.add_reader(self._socket.fileno(), self._read)
        except (OSError, NotImplementedError) as exc:
            self._socket.close()
            raise OSError(getattr(exc, "errno", None) or errno.ENOSYS, f"no uevents here: {exc}") from exc

    def close(self) -> None:
        """Idempotent."""
        if self._finalizer.alive:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
            self._finalizer()

    def _read(self) -> None:
        news = False
        for _ in range(_PER_TURN):
            try:
                message, sender = self._socket.recvfrom(_MAX_BYTES)
            except BlockingIOError:
                break
            except OSError as exc:
                if exc.errno == errno.ENOBUFS:
                    news = True  # some were dropped, and nobody knows which
                    continue
                _log.warning("uevents can be read no more, device nodes are compared instead: %s", exc)
                self.close()
                break
            event = parse_uevent(message) if sender[0] == 0 else None
            news = news or (event is not None and concerns_devices(event))
        if news:
            self._on_change()
