"""A JSON object read in small steps, so that other threads get the interpreter between them.

``json.loads`` of a large header is one call that keeps the GIL, and freeing what it made is another: 0.1 s or more for
100,000 tensors, in which an event loop beside it stands still. Here no call of the library sees more than a window of
the text; what fits one is left to it, larger objects and arrays are walked.

A document is up to 100 MB of anything. With a :class:`Form`, what no header and no index of a checkpoint has is refused
as soon as it is longer than a window, since built it would be up to thirty times as large, and one call would free it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Final

from gpurt.runtime.elements import MOST_EXTENTS
from gpurt.weights.errors import WeightsError, shown
from gpurt.weights.quiet import drop

BLOCK_BYTES: Final = 256 << 10
"""Decoded at a time: about 0.1 ms."""
WHOLE_CHARACTERS: Final = 64 << 10
"""A value up to here is one call of the library, about 1 ms at most. Real entries have some hundred."""
DEEPEST: Final = 100
"""Values larger than that inside each other; a header has two levels in all."""
SINGLY: Final = 4096
"""Elements of a large array that are read one by one before it is tried again with many."""
SETS: Final = 64
"""That the names of one object are kept in."""
MOST_MEMBERS: Final = 1_000_000
"""Of one large object with a form. A dictionary grows in one call, which takes 10 ms for so many; the largest
checkpoints have 100,000 tensors."""
LONGEST_STRING: Final = 16 << 20
"""Characters of a string that is kept. To join 100 million is one call of 40 ms; the longest notes, previews of
pictures, have a million."""
EXPONENT: Final = 3
"""Characters that a number may need behind its end to go on: ``e-1``."""

_LARGER: Final = object()
_BLANKS: Final = " \t\n\r"
_BLANK = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r'"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*')
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
# The most of a string that can be decoded apart: not half a pair of surrogates, of which the rest may come.
_CHUNK = re.compile(
    r'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[\s\S]{6})))*+"
)
# A surrogate with its other half, which parsed apart would stay two characters that no text can hold; or any others.
_ESCAPED = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?"
    r'|(?:\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\["\\/bfnrt])+'
)
_LONGEST_ESCAPE: Final = 12


@dataclass(frozen=True, slots=True)
class Form:
    """What a document may have that is larger than a window.

    One member, ``table``, may be an object of many members, each a short value or a longer string. Others are refused
    when they are larger, or, with ``skip``, read and given as None. No name is longer than a window.
    """

    table: str
    skip: bool = False


class _Room(Enum):
    """What a value may be that is larger than a window."""

    ANYTHING = auto()
    TABLE = auto()
    STRING = auto()
    NAME = auto()
    SKIPPED = auto()


class ObjectReader:
    """Reads the one object that ``document`` is.

    Args:
        path: for messages, as is ``what``, which names the document: ``header``.
        form: None allows everything.
    """

    def __init__(self, document: bytes, path: str, what: str, form: Form | None = None) -> None:
        self._document = memoryview(document)
        self._path = path
        self._what = what
        self._form = form
        self._member: str | None = None
        """Whose value is being read."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        # Functions that know no reader: methods of this one would keep it, and the document, until a full collection.
        self._decoder = json.JSONDecoder(
            object_pairs_hook=partial(_unique, path, what), parse_constant=partial(_refuse, path, what)
        )
        self._trouble = ("", 0)
        """Why the last attempt failed, and where in the window."""
        self._read = 0
        self._text = ""
        self._at = 0
        self._before = 0
        """Characters before the window."""

    def members(self) -> Iterator[tuple[str, Any]]:
        """Every member of the object in its order.

        Raises:
            WeightsError: as soon as it is seen that this is not one JSON object with different keys.
        """
        try:
            mark = self._next()
            if not mark:
                raise self._not_json("it is empty")
            if mark != "{":
                value = self._value(0, _Room.SKIPPED)
                raise WeightsError(f"the {self._what} is not a JSON object but {shown(value)}", path=self._path)
            yield from self._members(0, _Room.ANYTHING)
            if self._next():
                raise self._not_json("something follows the object")
        finally:
            # An error has this frame in its traceback, and whoever keeps it need not keep the document.
            self._document, self._text = memoryview(b""), ""

    # Containers

    def _room(self, name: str, depth: int, room: _Room) -> _Room:
        """For the value of a member of an object that has ``room``."""
        if depth or self._form is None:
            return _Room.STRING if room is _Room.TABLE else room
        if name == self._form.table:
            return _Room.TABLE
        return _Room.SKIPPED if self._form.skip else _Room.STRING

    def _members(self, depth: int, room: _Room) -> Iterator[tuple[str, Any]]:
        self._at += 1
        if self._next() == "}":
            self._at += 1
            return
        # Many sets, since one of a million names grows, and goes, in one call.
        seen: list[set[str]] = [set() for _ in range(SETS)]
        count = 0
        try:
            while True:
                self._member = name = self._name()
                names = seen[hash(name) % SETS]
                if name in names:
                    raise _twice(self._path, self._what, name)
                names.add(name)
                count += 1
                if self._form is not None and count > MOST_MEMBERS:
                    raise self._too_large(f"has more than {MOST_MEMBERS:,} names in one object")
                yield name, self._value(depth + 1, self._room(name, depth, room))
                mark = self._next()
                if mark not in ("}", ","):
                    raise self._not_json("a comma or the object's end is missing")
                self._at += 1
                if mark == "}":
                    return
                self._next()
        finally:
            while seen:
                seen.pop()

    def _elements(self, depth: int, room: _Room) -> Iterator[Any]:
        self._at += 1
        if self._next() == "]":
            self._at += 1
            return
        singly = 0
        while True:
            if singly <= 0:
                singly = 0 if (many := self._many()) else SINGLY
                yield from many
            singly -= 1
            yield self._value(depth + 1, room)
            mark = self._next()
            if mark not in ("]", ","):
                raise self._not_json("a comma or the array's end is missing")
            self._at += 1
            if mark == "]":
                return
            self._next()

    def _many(self) -> list[Any]:
        """The elements up to a comma far behind, if that comma stands between two: numbers are millions."""
        if len(self._text) - self._at < WHOLE_CHARACTERS:
            self._fill(WHOLE_CHARACTERS)
        cut = self._text.rfind(",", self._at, self._at + WHOLE_CHARACTERS)
        if cut < 0:
            return []
        try:
            many = self._decoder.decode(f"[{self._text[self._at : cut]}]")
        except (ValueError, RecursionError):  # a comma inside something, or no JSON: seen one by one
            return []
        self._at = cut + 1
        self._next()
        return many

    def _name(self) -> str:
        """The name of a member; its value is next."""
        match = _NAME.match(self._text, self._at)
        if match is not None and match.end() < len(self._text):
            self._at = match.end()
            self._check_name(match.end(1) - match.start(1))
            return match[1]
        if self._next() != '"':
            raise self._not_json("a name in double quotes is missing")
        name: str = self._value(0, _Room.NAME)
        self._check_name(len(name))
        if self._next() != ":":
            raise self._not_json("a colon is missing")
        self._at += 1
        self._next()
        return name

    def _check_name(self, length: int) -> None:
        if self._form is not None and length > WHOLE_CHARACTERS:
            raise self._too_large(f"has a name of more than {WHOLE_CHARACTERS:,} characters")

    # Values

    def _value(self, depth: int, room: _Room) -> Any:
        """The value that begins here, by the library if it lies in the window."""
        if depth > DEEPEST:
            raise self._nested()
        value = self._attempt()
        if value is _LARGER and not self._ended and len(self._text) - self._at < WHOLE_CHARACTERS:
            self._fill(WHOLE_CHARACTERS)
            value = self._attempt()
        if value is not _LARGER:
            return value
        mark = self._text[self._at : self._at + 1]
        if self._ended or mark not in ("{", "[", '"'):
            raise self._not_json(*self._trouble)
        if mark == '"':
            return self._long_string(room)
        if room is _Room.SKIPPED:
            for _ in self._members(depth, room) if mark == "{" else self._elements(depth, room):
                pass
            return None
        if room in (_Room.STRING, _Room.NAME) or (room is _Room.TABLE and mark == "["):
            raise self._too_large_value()
        if mark == "[":
            return list(self._elements(depth, room))
        result: dict[str, Any] = {}
        try:
            for name, each in self._members(depth, room):
                result[name] = each
        except WeightsError:
            drop(result)
            raise
        return result

    def _attempt(self) -> Any:
        """What the library finds here, or that it may be larger than the window and what is wrong if it is not."""
        try:
            value, end = self._decoder.raw_decode(self._text, self._at)
        except WeightsError:
            raise
        except json.JSONDecodeError as exc:
            self._trouble = exc.msg, exc.pos
            return _LARGER
        except RecursionError as exc:
            raise self._nested() from exc
        except ValueError as exc:  # a number of more digits than Python converts
            self._trouble = str(exc), self._at
            return _LARGER
        if end + EXPONENT > len(self._text) and not self._ended:  # a number may go on
            self._trouble = "a number without an end", self._at
            return _LARGER
        self._at = end
        return value

    def _long_string(self, room: _Room) -> str | None:
        self._at += 1
        keep = room is not _Room.SKIPPED
        parts: list[str] = []
        length = 0
        while True:
            if len(self._text) - self._at < _LONGEST_ESCAPE:
                self._fill(_LONGEST_ESCAPE)
            mark = self._text[self._at : self._at + 1]
            if mark == '"':
                self._at += 1
                return "".join(parts) if keep else None
            match = _CHUNK.match(self._text, self._at, self._at + WHOLE_CHARACTERS)
            if match is None or not match[0]:
                match = (_ESCAPED if mark == "\\" else _PLAIN).match(self._text, self._at)
            if match is None:
                raise self._not_json("a string without an end" if not mark else "a string with an invalid character")
            part = match[0]
            self._at = match.end()
            if not keep:
                continue
            if "\\" in part:
                part = json.loads(f'"{part}"')
            length += len(part)
            if length > LONGEST_STRING:
                raise self._too_large(f"has a string of more than {LONGEST_STRING:,} characters")
            if room is _Room.NAME:
                self._check_name(length)
            parts.append(part)

    # The window

    @property
    def _ended(self) -> bool:
        """The window reaches to the end of the document."""
        return self._read == len(self._document)

    def _next(self) -> str:
        """Skip blanks; what is there then, or "" at the end."""
        while True:
            mark = self._text[self._at : self._at + 1]
            if mark and mark not in _BLANKS:
                return mark
            match = _BLANK.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at == len(self._text):
                if self._ended:
                    return ""
                self._fill(1)

    def _fill(self, least: int) -> None:
        """Have ``least`` characters in front, or all that there are."""
        while len(self._text) - self._at < least and not self._ended:
            block = self._document[self._read : self._read + BLOCK_BYTES]
            start = self._read - len(self._utf8.getstate()[0])
            self._read += len(block)
            try:
                decoded = self._utf8.decode(block, self._ended)
            except UnicodeDecodeError as exc:
                raise WeightsError(
                    f"the {self._what} is not JSON: byte {start + exc.start:,} is not UTF-8", path=self._path
                ) from exc
            self._before += self._at
            self._text = self._text[self._at :] + decoded
            self._at = 0

    # Errors

    def _too_large(self, why: str) -> WeightsError:
        return WeightsError(f"the {self._what} {why}", path=self._path, hint="no checkpoint has such a thing")

    def _too_large_value(self) -> WeightsError:
        return WeightsError(
            f"its entry in the {self._what} takes more than {WHOLE_CHARACTERS:,} characters; "
            f"with {MOST_EXTENTS} extents of 64 bits it has less than 2,000",
            path=self._path,
            tensor=self._member,
        )

    def _nested(self) -> WeightsError:
        return WeightsError(f"the {self._what} is nested too deeply", path=self._path)

    def _not_json(self, why: str, at: int | None = None) -> WeightsError:
        position = self._before + (self._at if at is None else at)
        return WeightsError(f"the {self._what} is not JSON: {why} (character {position:,})", path=self._path)


def _unique(path: str, what: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _twice(path, what, next(key for key, _ in pairs if key in seen or seen.add(key)))
    return result


def _refuse(path: str, what: str, constant: str) -> Any:
    raise WeightsError(f"the {what} is not JSON: {constant} is no JSON value", path=path)


def _twice(path: str, what: str, name: str) -> WeightsError:
    return WeightsError(f"the {what} has the key {shown(name)} twice", path=path)
