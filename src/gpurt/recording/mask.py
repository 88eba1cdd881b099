"""Names and numbers that tell whose machine it is, replaced by pseudonyms: the same value by the same one, everywhere.

So it can still be followed which record became which, and nobody learns which host, user or card it was. Masked are
UUIDs in every spelling (``GPU-…``, without dashes, a prefix of one in ``CUDA_VISIBLE_DEVICES``), AMD's unique ids,
serial numbers, names of host and user in every case, home directories, directories of users elsewhere, machine ids,
IP, hardware and e-mail addresses, domains. PCI addresses, names of products and versions stay: they are what a report
is about. Of a path outside the system's own directories the first part stays, and the second has a pseudonym.

A number is replaced where its name says that it is an identifier, and by text where it is no identifier in digits. A
name of a user or host that is a short number (user 1000) stays: it tells nobody anything, and is everywhere.

What discovery decides must not change. A host may be called ``memory`` and a user ``max``, which are words of files
that discovery reads, and ``0::/`` is a line of such a file and looks like an address. So in files only identifiers are
replaced, which nothing else looks like, and names where a path has them, in the file and in the directory alike; and
values that are words of ours stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from gpurt.recording import mask_forms as forms
from gpurt.recording.mask_words import PUBLIC_PARTS, is_ours
from gpurt.recording.secrets_found import Secrets, is_secret

_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class Masker(Secrets):
    """Pseudonyms of one document or recording.

    Give it everything first (:meth:`learn`), then let it replace.
    """

    def mask(self, value: Any, key: str | None = None) -> Any:
        """The JSON value with every known secret replaced, names of objects included.

        Args:
            key: its name in the object that holds it. Values that are words of ours keep their words.
        """
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {self.key(str(name)): self.mask(item, str(name)) for name, item in items}
        if isinstance(value, list | tuple):
            return [self.mask(item, key) for item in cast("list[Any]", value)]
        if isinstance(value, str):
            if is_secret(key) and value.strip() in self.short:
                return self.short[value.strip()]
            return self.ids(value) if is_ours(key) else self.text(value)
        if isinstance(value, int) and not isinstance(value, bool):
            other = self.numbers.get(str(value))
            if other is not None:
                return int(other)
            return self._serial(str(value), value) if is_secret(key) else value
        return value

    def text(self, text: str) -> str:
        """``text`` with every known secret replaced."""
        return self._pattern(names=True).sub(self._replacement, text)

    def ids(self, text: str) -> str:
        """``text`` with known identifiers replaced, and names left."""
        return self._pattern(names=False).sub(self._replacement, text)

    def file(self, text: str) -> str:
        """What a file of the system has in it: identifiers are replaced, names where somebody has logged in, and
        serial numbers where it says that they are."""
        text = forms.SERIAL_LINE.sub(lambda match: match["name"] + self.mask(match["serial"], "serial"), text)
        return forms.LOGIN.sub(lambda match: self._named(match[0]), self.ids(text))

    def group(self, path: str) -> str:
        """The path of a control group, or of its directory: the same for both, so that one is found by the other."""
        parts = self.ids(path).split("/")
        return "/".join(part if PUBLIC_PARTS.issuperset(part.split(",")) else self._named(part) for part in parts)

    def name(self, name: str) -> str:
        """The name of a file of the system, with known identifiers replaced and words left: those are the kernel's."""
        return self.ids(name)

    def key(self, name: str) -> str:
        """The name of a value in an object. One that has a secret in it besides other words (``gpu_alice``) is a
        document's own, and no secret."""
        if _IDENTIFIER.fullmatch(name) and name.casefold() not in self.words:
            return self.ids(name)
        return self.text(name)

    def _pattern(self, *, names: bool) -> re.Pattern[str]:
        pattern = self.patterns.get(names)
        if pattern is None:
            parts = {"prefix": forms.UUID_PREFIX, "uuid": forms.UUID, "udid": forms.UDID, "octets": forms.OCTETS}
            found = [f"(?P<{name}>{form.pattern})" for name, form in parts.items()]
            if names:
                if self.paths:
                    found.append(rf"(?P<path>(?:(?<![\w./~-])|(?<=file://))(?:{_any(self.paths)})(?![\w.-]))")
                if self.words:
                    found.append(rf"(?i:(?P<word>(?<![^\W_])(?:{_any(self.words)})(?![^\W_])))")
                if self.domains:
                    found.append(rf"(?i:(?P<member>(?<![\w.-])[a-z0-9-]+\.(?:{_any(self.domains)})(?![\w-])))")
                found.append(f"(?P<dotted>{forms.DOTTED_MAC.pattern})")
            if self.numbers:
                found.append(rf"(?P<number>(?<!\d)(?:{_any(self.numbers)})(?!\d))")
            found.append(f"(?P<hex>{forms.HEX.pattern})")
            pattern = self.patterns[names] = re.compile("|".join(found))
        return pattern

    def _replacement(self, match: re.Match[str]) -> str:
        text = match[0]
        match match.lastgroup:
            case "prefix":
                return match["brand"] + self._started(match["start"])
            case "path":
                return self.paths[text]
            case "word":
                return self.words.get(text.casefold(), "masked")
            case "member":
                host, _, domain = text.partition(".")
                self.word("host", host)
                return f"{self.words.get(host.casefold(), host)}.{self.words[domain.casefold()]}"
            case "number":
                return self.numbers[text]
            case _:
                return _spelled(self.digits.get(re.sub("[^0-9a-f]", "", text.lower())), text)

    def _named(self, text: str) -> str:
        """``text`` with names replaced, which has its identifiers replaced already."""
        if not self.words:
            return text
        pattern = rf"(?i)(?<![^\W_])(?:{_any(self.words)})(?![^\W_])"
        return re.sub(pattern, lambda match: self.words.get(match[0].casefold(), "masked"), text)

    def _serial(self, text: str, otherwise: Any) -> Any:
        return self.short.get(text) or self.words.get(text) or self.digits.get(text, otherwise)

    def _started(self, text: str) -> str:
        """A UUID behind its brand, or a beginning of one, as visibility variables may have it."""
        digits = text.replace("-", "").lower()
        other = self.digits.get(digits)
        if other is None and len(digits) < 32 and (len(digits) > 1 or digits in self.starts):
            other = next((other for known, other in self.digits.items() if known.startswith(digits)), None)
            if other is None and digits in self.starts:
                taken = (*self.digits.values(), *filter(None, self.starts.values()))
                other = self.starts[digits] = self.starts[digits] or self.new.start(len(digits), taken)
        return _spelled(other, text)


def _any(known: Iterable[str]) -> str:
    return "|".join(re.escape(each) for each in sorted(known, key=len, reverse=True))


def _spelled(digits: str | None, text: str) -> str:
    """``digits`` with the separators of ``text``."""
    if digits is None:
        return text
    rest = iter(digits)
    return "".join(next(rest) if character.isalnum() else character for character in text)


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
    return Masker(hosts=[socket.gethostname()], users=users, homes=[Path.home()])
