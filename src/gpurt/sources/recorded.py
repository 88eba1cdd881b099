"""Files of a recording, which come from anywhere: by mail, from a bug report, from somebody who means no good.

Only plain files below the recording are read, of a size that a recording may have, and only JSON that can be shown and
sent on.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, Final, cast

from gpurt.errors import GPUError
from gpurt.printable import printable

MAX_FILE_BYTES: Final = 32 << 20
MAX_ENTRIES: Final = 50_000
"""Files and directories of one file tree; one that is recorded has a fifth of that at most."""
MAX_VALUES: Final = 1_000_000
"""Values in one file."""
MAX_TEXT: Final = 1 << 17
"""Characters of one text: the longest environment variable that Linux passes on."""
MAX_DEVICES: Final = 1024

_AGAIN: Final = "record again, or repair the file"
_FLAGS: Final = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def read_recorded_json(directory: Path, name: str) -> object:
    """The content of one JSON file below ``directory``. Blocking, but never for long.

    Raises:
        FileNotFoundError: there is no such file.
        GPUError: it is no plain file below ``directory``, too large, or not JSON that could be written again.
    """
    path = directory / name
    raw = _read(directory, path)
    try:
        content: object = json.loads(
            raw.decode("utf-8-sig"), parse_constant=_no_number, parse_float=_finite, parse_int=_integer
        )
        _check(content)
    except (ValueError, RecursionError) as exc:
        raise GPUError(f"{path} cannot be read: {printable(str(exc))}", hint=_AGAIN) from exc
    return content


def check_tree(directory: Path, name: str) -> None:
    """Look at every file below ``directory / name``, without opening one. Blocking.

    Raises:
        GPUError: one is no plain file, leads out of ``directory``, or is larger than a file of a recording; or there
            are too many.
    """
    real = os.path.realpath(directory)
    top = directory / name
    if not os.path.lexists(top):
        return
    _check_entry(top, real)
    count = 0
    for place, directories, files in os.walk(top):
        for entry in (*directories, *files):
            count += 1
            if count > MAX_ENTRIES:
                raise GPUError(f"{top} has more than {MAX_ENTRIES} files", hint="record again")
            _check_entry(Path(place) / entry, real)


def _check_entry(path: Path, real: str) -> None:
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            _refuse_outside(path, os.path.realpath(path), real)
            try:
                status = path.stat()
            except FileNotFoundError:
                return  # /sys has links to what was not copied: their names are all that is read
    except OSError as exc:
        raise GPUError(f"{path} cannot be read: {exc.strerror or exc}", hint=_AGAIN) from exc
    if not stat.S_ISDIR(status.st_mode):
        _refuse_special(path, status)


def _read(directory: Path, path: Path) -> bytes:
    try:
        real = os.path.realpath(path)
        _refuse_outside(path, real, os.path.realpath(directory))
        _refuse_special(path, os.stat(real))  # to open a device may already do something
        descriptor = os.open(real, _FLAGS)
        with os.fdopen(descriptor, "rb") as file:
            _refuse_special(path, os.fstat(descriptor))
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise
    except NotADirectoryError as exc:
        raise FileNotFoundError(*exc.args) from exc
    except (OSError, ValueError) as exc:  # ValueError: a NUL in a name
        raise GPUError(f"{path} cannot be read: {getattr(exc, 'strerror', None) or exc}", hint=_AGAIN) from exc
    if len(raw) > MAX_FILE_BYTES:
        raise GPUError(f"{path} is larger than {MAX_FILE_BYTES} bytes", hint="record again")
    return raw


def _refuse_outside(path: Path, real: str, directory: str) -> None:
    if not Path(real).is_relative_to(directory):
        raise GPUError(f"{path} is a link out of the recording", hint="a recording has all of its files: record again")


def _refuse_special(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise GPUError(f"{path} is no plain file", hint="a recording has plain files only: record again")
    if status.st_size > MAX_FILE_BYTES:
        raise GPUError(f"{path} is larger than {MAX_FILE_BYTES} bytes", hint="record again")


def _check(content: object) -> None:
    """
    Raises:
        ValueError: there is too much, or text that cannot be written again.
    """
    waiting: list[object] = [content]
    count = 0
    while waiting:
        value = waiting.pop()
        count += 1
        if isinstance(value, str):
            if len(value) > MAX_TEXT:
                raise ValueError(f"a text has {len(value)} characters; at most {MAX_TEXT} are read")
            if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError("a text has half of a surrogate pair")
        elif isinstance(value, dict):
            for key, item in cast("dict[str, object]", value).items():
                waiting += (key, item)
        elif isinstance(value, list):
            waiting += cast("list[object]", value)
        if count + len(waiting) > MAX_VALUES:
            raise ValueError(f"there are more than {MAX_VALUES} values")


def check_lists(content: object, path: Path) -> None:
    """
    Raises:
        GPUError: a list of a table, of devices or of what they have, has more than :data:`MAX_DEVICES` entries.
    """
    waiting: list[object] = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += cast("dict[str, object]", value).values()
        elif isinstance(value, list):
            items = cast("list[object]", value)
            if len(items) > MAX_DEVICES:
                raise GPUError(f"{path} lists {len(items)} devices; at most {MAX_DEVICES} are read", hint=_AGAIN)
            waiting += items


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{printable(text, 40)} is more than a number can be")
    return value


def _integer(text: str) -> int:
    if len(text) > 40:
        raise ValueError(f"{printable(text, 40)} is more than a number can be")
    return int(text)
