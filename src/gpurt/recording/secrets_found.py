"""What masking has learnt: the secrets of one document or recording, and their pseudonyms."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any, Final, cast

from gpurt.recording import mask_forms as forms
from gpurt.recording.mask_words import PUBLIC_ADDRESSES, PUBLIC_NAMES, is_ours
from gpurt.recording.pseudonyms import Pseudonyms

_SECRET_KEY: Final = re.compile(r".*(?:serial|serialnumber|serialno|udid|machineid|uniqueid|assettag)")
_SHORTEST_SERIAL: Final = 4
"""What is shorter, or has no digit (``N/A``), stands for "none"."""
_SHORTEST_NUMBER: Final = 6
"""Digits of a name or serial number that are replaced wherever they are."""


def is_secret(key: str | None) -> bool:
    """Whether a value, or a file, of this name is a secret whatever it looks like."""
    return key is not None and bool(_SECRET_KEY.fullmatch(re.sub("[^a-z0-9]", "", key.lower())))


class Secrets:
    """Secrets by kind. Give them everything first: what is only known to be one in one place must not stay readable in
    another."""

    def __init__(self, *, hosts: Iterable[str] = (), users: Iterable[str] = (), homes: Iterable[PurePath] = ()) -> None:
        self.new = Pseudonyms()
        self.digits: dict[str, str] = {}
        """Identifiers of hexadecimal digits, lower case without dashes → others."""
        self.starts: dict[str, str] = {}
        """Beginnings of identifiers, as variables have them → others, for those that nothing else tells of."""
        self.numbers: dict[str, str] = {}
        """Identifiers in decimal → others."""
        self.short: dict[str, str] = {}
        """Serial numbers that are replaced under their own name only."""
        self.words: dict[str, str] = {}
        """Other secrets without regard to case → pseudonyms."""
        self.paths: dict[str, str] = {}
        """Beginnings of paths → others."""
        self._parts: dict[str, str] = {}
        """Names of directories → pseudonyms."""
        self.domains: set[str] = set()
        self._hosts: list[str] = []
        self.patterns: dict[bool, re.Pattern[str]] = {}
        for host in hosts:
            # "box.example.org" is in other places "box".
            short, _, domain = host.partition(".")
            self.word("host", short)
            if short.casefold() in self.words:
                self._hosts.append(short)
                if domain:
                    self.words[host.casefold()] = self.words[short.casefold()]
                    self._domain(domain)
        for user in users:
            self.word("user", user)
        for home in homes:
            if len(home.parts) > 1:
                self.word("user", home.name)
                self.paths[str(home)] = f"/home/{self.words.get(home.name.casefold()) or self.new.word('user')}"

    def learn(self, value: Any, key: str | None = None) -> None:
        """Note the secrets in a JSON value; ``key`` is its name in the object that holds it."""
        if isinstance(value, Mapping):
            for name, item in cast("Mapping[Any, Any]", value).items():
                self._learn_ids(str(name))
                self._learn_names(str(name), None)
                self.learn(item, str(name))
        elif isinstance(value, list | tuple):
            for item in cast("list[Any]", value):
                self.learn(item, key)
        elif isinstance(value, str):
            self.learn_file(value, key)
            if not is_ours(key):
                self._learn_names(value, key)
        elif is_secret(key) and isinstance(value, int) and not isinstance(value, bool):
            self._learn_secret(str(value), key)

    def learn_file(self, text: str, key: str | None = None) -> None:
        """Note the identifiers in a file of the system; ``key`` is its name. No address and no user is looked for."""
        if is_secret(key) and text.strip():
            self._learn_secret(text.strip(), key)
        if key is not None and key.endswith("VISIBLE_DEVICES"):
            for match in forms.UUID_PREFIX.finditer(text):
                self._start(match["start"])
        self._learn_ids(text)

    def _learn_secret(self, value: str, key: str | None) -> None:
        if is_secret(key) and key is not None and key.endswith("unique_id") and value.isdecimal() and len(value) > 16:
            self._number(int(value))
        elif re.fullmatch(r"(?:0x)?[0-9A-Fa-f]{16}|[0-9A-Fa-f]{32}|[0-9A-Fa-f]{40}", value):
            self._id(value.removeprefix("0x"))
        elif not value.strip("0") or not any(map(str.isdigit, value)):
            return
        elif len(value) < _SHORTEST_SERIAL or (value.isdecimal() and len(value) < _SHORTEST_NUMBER):
            self.short.setdefault(value, self.new.word("serial"))
        else:
            self.word("serial", value)

    def _learn_ids(self, text: str) -> None:
        for pattern in (forms.UUID, forms.UDID, forms.BARE, forms.UNIQUE_ID):
            for match in pattern.finditer(text):
                self._id(match[0])
        for match in forms.OCTETS.finditer(text):
            if len(match[0]) == 47:
                self._id(match[0])
        for match in forms.KFD_ID.finditer(text):
            self._number(int(match[1]))
        for match in forms.UUID_PREFIX.finditer(text):
            if len(match["start"].replace("-", "")) >= _SHORTEST_NUMBER:
                self._start(match["start"])
        for match in forms.SERIAL_LINE.finditer(text):
            self._learn_secret(match["serial"], "serial")

    def _learn_names(self, text: str, key: str | None) -> None:
        for user in forms.users_in(text):
            self.word("user", user)
        for pattern in (forms.OCTETS, forms.DOTTED_MAC):
            for match in pattern.finditer(text):
                self._hardware(match[0])
        for pattern in (forms.IPV4, forms.IPV6):
            for match in pattern.finditer(text):
                self._address(match[0])
        for match in forms.DASHED_IPV4.finditer(text):
            self._address(match[0].replace("-", "."))
        for host in self._hosts:
            for match in re.finditer(
                rf"(?i)(?<![^\W_]){re.escape(host)}\.((?:[a-z0-9-]+\.)+([a-z]{{2,}}))(?![\w-])", text
            ):
                if match[2].lower() not in forms.NO_DOMAIN:
                    self._add(match[0], self.words[host.casefold()])
                    self._domain(match[1])
        for match in forms.MAIL.finditer(text):
            if not all(part.casefold() in self.words for part in match[0].split("@")):
                self.word("email", match[0])
        for parts in forms.paths_in(text, variable=key is not None and key.isupper()):
            self._path(parts)

    def _address(self, text: str) -> None:
        if text in PUBLIC_ADDRESSES or text.casefold() in self.words or text.startswith("255."):
            return
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return  # a version, or a PCI address
        # Mask of a network, and times of day such as 12:30:45, which are no address but for their looks; so is what
        # C++ calls its functions, and the "0::" of a control group.
        groups = [group for group in text.split(":") if group]
        if address.version == 6 and (
            ("::" not in text and text.count(":") != 7) or len(groups) < 2 or not any(map(str.isdigit, text))
        ):
            return
        other = self.new.address(address.version)
        self._add(text, other)
        if address.version == 4:
            self._add(text.replace(".", "-"), other.replace(".", "-"))

    def _hardware(self, text: str) -> None:
        digits = re.sub("[^0-9a-f]", "", text.lower())
        if len(digits) != 12:
            self._id(digits)
        elif digits not in self.digits and digits.strip("0") and digits.strip("f"):
            self.digits[digits] = self.new.mac()

    def _domain(self, domain: str) -> None:
        # A single word (".lan") names no organisation.
        if "." in domain and domain.casefold() not in self.words:
            self.word("domain", domain)
            self.domains.add(domain.casefold())

    def _path(self, parts: list[str]) -> None:
        if not parts or parts[0] in forms.SYSTEM or forms.HOMES.fullmatch(parts[0]):
            return
        known, other = f"/{parts[0]}", f"/{parts[0]}"
        for part in parts[1 : 3 if parts[0] in forms.MOUNTS else 2]:
            pseudonym = part
            folded = part.casefold()
            if folded not in PUBLIC_NAMES and not forms.TECHNICAL.fullmatch(part):
                pseudonym = self.words.get(folded) or self._parts.setdefault(folded, "")
                if not pseudonym:
                    pseudonym = self._parts[folded] = self.new.word("dir")
            known, other = f"{known}/{part}", f"{other}/{pseudonym}"
            if pseudonym != part and known not in self.paths:
                self.paths[known] = other
                self.patterns.clear()

    def word(self, kind: str, value: str) -> None:
        """Note one name, unless it is one that tells nothing."""
        if len(value) < 2 or value.casefold() in PUBLIC_NAMES or value.casefold() in self.words:
            return
        if not (value.isdecimal() and len(value) < _SHORTEST_NUMBER):
            self._add(value, self.new.word(kind))

    def _add(self, value: str, other: str) -> None:
        self.words[value.casefold()] = other
        self.patterns.clear()

    def _number(self, value: int) -> None:
        """AMD's 64-bit unique id: decimal in one file, hexadecimal in another."""
        if value and str(value) not in self.numbers:
            self.numbers[str(value)] = str(int(self._id(f"{value:016x}"), 16))
            self.patterns.clear()

    def _id(self, text: str) -> str:
        digits = re.sub("[^0-9a-f]", "", text.lower())
        if digits not in self.digits and digits.strip("0"):
            self.digits[digits] = self.new.digits(len(digits))
        return self.digits.get(digits, digits)

    def _start(self, text: str) -> None:
        digits = text.replace("-", "").lower()
        if len(digits) < 32 and digits.strip("0") and digits not in self.digits:
            self.starts.setdefault(digits, "")
