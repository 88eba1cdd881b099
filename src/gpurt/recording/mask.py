"""Names and numbers that tell whose machine it is, replaced by pseudonyms: the same value by the same one, everywhere.

So it can still be followed which record became which, and nobody learns which host, user or card it was. Masked are
UUIDs in every spelling (``GPU-…``, without dashes, a prefix of one in ``CUDA_VISIBLE_DEVICES``), AMD's unique ids,
serial numbers, names of host and user, home directories, machine ids, IP and hardware addresses. PCI addresses, names
of products and versions stay: they are what a report is about.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

_UUID: Final = re.compile(r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Fa-f])")
_BARE: Final = re.compile(r"(?<![0-9A-Fa-f])(?:[0-9A-Fa-f]{32}|[0-9A-Fa-f]{64})(?![0-9A-Fa-f])")
"""UUIDs without dashes, machine ids, and the ids of containers."""
_UNIQUE_ID: Final = re.compile(r"(?:(?<=GPU-)|(?<=host:))[0-9A-Fa-f]{16}(?![0-9A-Fa-f-])")
"""AMD's cards, and the fingerprint of a host."""
_HEX: Final = re.compile(r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{16,64}(?![0-9A-Fa-f])")
_UUID_PREFIX: Final = re.compile(r"(?<![0-9A-Za-z])((?:MIG-)?GPU-|MIG-)([0-9A-Fa-f][0-9A-Fa-f-]*)")
_KFD_ID: Final = re.compile(r"(?<=unique_id )[0-9]{4,20}\b")
_IPV4: Final = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w]|\.[0-9])")
_IPV6: Final = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:.])")
_MAC: Final = re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![\w:])")
_HOME: Final = re.compile(r"(?<=/home/)[^/\s\"':;,]+|(?<=/Users/)[^/\s\"':;,]+|(?<=\\Users\\)[^\\\s\"':;,]+")

_SECRET_KEYS: Final = frozenset({"serial", "serial_number", "machine_id", "unique_id"})
_PUBLIC_NAMES: Final = frozenset({"root", "localhost", "shared", "public", ""})
_PUBLIC_ADDRESSES: Final = frozenset({"127.0.0.1", "0.0.0.0", "::1", "::"})


class Masker:
    """Pseudonyms of one document or recording.

    Give it everything first (:meth:`learn`), then let it replace: a value is only known to be a secret in one place,
    and must not stay readable in another.
    """

    def __init__(self, *, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self._digits: dict[str, str] = {}
        """Identifiers of hexadecimal digits, lower case without dashes → others."""
        self._words: dict[str, str] = {}
        """Other secrets, as they are written → pseudonyms."""
        self._counts: dict[str, int] = {}
        self._pattern: re.Pattern[str] | None = None
        for host in hosts:
            # "box.example.org" is in other places "box".
            short = host.partition(".")[0]
            self._word("host", short)
            if host not in self._words and short in self._words:
                self._words[host] = self._words[short]
        for user in users:
            self._word("user", user)

    def learn(self, value: Any, key: str | None = None) -> None:
        """Note the secrets in a JSON value; ``key`` is its name in the object that holds it."""
        if isinstance(value, Mapping):
            for name, item in cast("Mapping[Any, Any]", value).items():
                self._learn_text(str(name))
                self.learn(item, str(name))
        elif isinstance(value, list | tuple):
            for item in cast("list[Any]", value):
                self.learn(item, key)
        elif isinstance(value, str):
            if key in _SECRET_KEYS and value.strip():
                self._learn_secret(value.strip(), key)
            self._learn_text(value)
        elif key == "unique_id" and isinstance(value, int) and not isinstance(value, bool):
            self._number(value)

    def mask(self, value: Any) -> Any:
        """The JSON value with every known secret replaced, names of objects included."""
        if isinstance(value, Mapping):
            return {self.name(str(name)): self.mask(item) for name, item in cast("Mapping[Any, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [self.mask(item) for item in cast("list[Any]", value)]
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, int) and not isinstance(value, bool):
            other = self._words.get(str(value))
            return value if other is None else int(other)
        return value

    def text(self, text: str) -> str:
        """``text`` with every known secret replaced."""
        text = self._hex(text)
        if self._words:
            if self._pattern is None:
                longest_first = sorted(map(re.escape, self._words), key=len, reverse=True)
                self._pattern = re.compile(rf"(?<![0-9A-Za-z])(?:{'|'.join(longest_first)})(?![0-9A-Za-z])")
            text = self._pattern.sub(lambda match: self._words[match[0]], text)
        return text

    def name(self, name: str) -> str:
        """The name of a file, or of a value in an object, with known identifiers replaced and words left: a host may
        be called ``gpu``, and a document's own vocabulary is no secret."""
        return self._hex(name)

    # Finding

    def _learn_secret(self, value: str, key: str | None) -> None:
        if key == "unique_id" and value.isdecimal() and len(value) > 16:
            self._number(int(value))
        elif re.fullmatch(r"(?:0x)?[0-9A-Fa-f]{16}|[0-9A-Fa-f]{32}", value):
            self._id(value.removeprefix("0x"))
        else:
            self._word("serial", value)

    def _learn_text(self, text: str) -> None:
        for match in _UUID.finditer(text):
            self._id(match[0])
        for pattern in (_BARE, _UNIQUE_ID):
            for match in pattern.finditer(text):
                self._id(match[0])
        for match in _KFD_ID.finditer(text):
            self._number(int(match[0]))
        for match in _HOME.finditer(text):
            self._word("user", match[0])
        for match in _MAC.finditer(text):
            self._word("mac", match[0])
        for pattern in (_IPV4, _IPV6):
            for match in pattern.finditer(text):
                self._address(match[0])

    def _address(self, text: str) -> None:
        if text in _PUBLIC_ADDRESSES or text in self._words:
            return
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return  # a version, or a PCI address
        # Mask of a network, and times of day such as 12:30:45, which are no address but for their looks.
        if address.version == 6 and "::" not in text and text.count(":") != 7:
            return
        number = self._next("address")
        self._words[text] = f"192.0.2.{number % 256}" if address.version == 4 else f"2001:db8::{number:x}"
        self._pattern = None

    def _word(self, kind: str, value: str) -> None:
        if value.lower() in _PUBLIC_NAMES or value in self._words:
            return
        number = self._next(kind)
        self._words[value] = f"02:00:00:00:00:{number % 256:02x}" if kind == "mac" else f"{kind}-{number}"
        self._pattern = None

    def _number(self, value: int) -> None:
        """AMD's 64-bit unique id: decimal in one file, hexadecimal in another."""
        if value and str(value) not in self._words:
            self._words[str(value)] = str(int(self._id(f"{value:016x}"), 16))
            self._pattern = None

    def _id(self, text: str) -> str:
        digits = text.replace("-", "").lower()
        if digits not in self._digits and digits.strip("0"):
            number = self._next("id")
            # Two that differ, differ in their first digits already: variables may name a device by a prefix.
            unit = f"{number:02x}" if number < 255 else f"ff{number:06x}"
            self._digits[digits] = (unit * 32)[: len(digits)]
        return self._digits.get(digits, digits)

    def _next(self, kind: str) -> int:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return self._counts[kind]

    # Replacing

    def _hex(self, text: str) -> str:
        text = _UUID.sub(lambda match: self._replaced(match[0]), text)
        text = _UUID_PREFIX.sub(lambda match: match[1] + self._prefix(match[2]), text)
        return _HEX.sub(lambda match: self._replaced(match[0]), text)

    def _replaced(self, text: str) -> str:
        other = self._digits.get(text.replace("-", "").lower())
        if other is None:
            return text
        digits = iter(other)
        return "".join("-" if character == "-" else next(digits) for character in text)

    def _prefix(self, text: str) -> str:
        """A beginning of a UUID, as visibility variables may have it."""
        digits = text.replace("-", "").lower()
        if len(digits) >= 32 or any(other.startswith(digits) for other in self._digits.values()):
            return text  # whole, or one of ours already
        whole = next((known for known in self._digits if known.startswith(digits)), None)
        other = self._digits[whole] if whole is not None else "f" * len(digits)
        parts = iter(other)
        return "".join("-" if character == "-" else next(parts) for character in text)


def host_masker() -> Masker:
    """A masker that knows the names of this host and of its user. Reads the system; blocking."""
    import contextlib
    import getpass
    import os
    import socket
    from pathlib import Path

    users: list[str] = [os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")]
    with contextlib.suppress(OSError, KeyError):  # a container whose user id has no name
        users.append(getpass.getuser())
    home = Path.home()
    if home.name and len(home.parts) > 2:
        users.append(home.name)
    return Masker(hosts=[socket.gethostname()], users=users)
