"""A file that a newer gpurt may have written: what of it this version can read, and how a change leaves the rest.

A newer minor version adds sections, fields, words and records. What this one does not know is not its own to drop:
unknown sections and fields are read over, a record that it cannot read is left out of what is returned, and both stay
in the file as they are whatever is written beside them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, cast

from pydantic import BaseModel, ValidationError

Path: TypeAlias = tuple[str | int, ...]
Records: TypeAlias = Mapping[tuple[str, ...], Callable[[Any], object]]
"""Where a document has records, ``*`` standing for every name or place, and by what a record is known again: a function
of the record as JSON values. A part that is no record is its field."""

MAX_NOTED: Final = 1000
ANY: Final = "*"
DEEPEST: Final = 50
_MISSING: Final = object()

_log = logging.getLogger("gpurt.registry")
_noted: set[tuple[str, Path, str]] = set()
"""What the log has already: a file is read again and again."""


class Unreadable(Exception):
    """Not even without the parts that are not understood is it a document."""


class Reading:
    """A document as this version understands it.

    Args:
        data: the whole, as JSON values.
        records: where the model has records; a member that is a document of the same records is in ``nested``.
        source: names the file in the log.

    Raises:
        Unreadable: there is nothing of ``model`` in it.
    """

    def __init__(
        self, model: type[BaseModel], data: Mapping[str, Any], records: Records, nested: str, source: str
    ) -> None:
        self._records = {**records, **{(nested, *place): key for place, key in records.items()}}
        self._nested = nested
        self._source = source
        self._left_out: set[Path] = set()
        self._places: dict[Path, list[int]] = {}
        """Of each list, which of its elements are read."""
        names = {field.alias or name for name, field in model.model_fields.items()}
        self._known = {name: value for name, value in data.items() if name in names}
        self._data = data
        self.value = self._read(model)

    def _read(self, model: type[BaseModel]) -> Any:
        plain = False
        while True:
            self._places.clear()
            text = json.dumps(self._without_left_out(self._known, ()))
            try:
                # JSON mode: a tuple may come as a list, but "1" is no integer.
                return model.model_validate_json(text, strict=True)
            except ValidationError as exc:
                errors = exc.errors(include_url=False, include_input=False, include_context=False)
                if any(not error["loc"] for error in errors):
                    if plain:
                        raise Unreadable(str(exc)) from exc
                    self._known, plain = _plain(self._known), True
                    continue
                before = len(self._left_out)
                for error in errors:
                    path = self._original(error["loc"])
                    self._note(path if error["type"] == "extra_forbidden" else self._unit(path), error["msg"])
                if len(self._left_out) == before:
                    raise Unreadable(str(exc)) from exc

    def _note(self, path: Path, why: str) -> None:
        self._left_out.add(path)
        line = (self._source, path, why)
        if line in _noted:
            return
        if len(_noted) >= MAX_NOTED:
            _noted.clear()
        _noted.add(line)
        _log.info("%s of %s is ignored, and kept as it is: %s", ".".join(map(str, path)), self._source, why)

    def _unit(self, path: Path) -> Path:
        """The record that ``path`` leads into, or else the field."""
        lengths = [
            len(place) for place in self._records if len(place) <= len(path) and _fits(place, path[: len(place)])
        ]
        whole = [len(path) for place in self._records if len(place) > len(path) and _fits(place[: len(path)], path)]
        field = 2 if path[0] == self._nested and len(path) > 1 else 1
        return path[: max([*lengths, *whole, field])]

    def _without_left_out(self, value: Any, path: Path) -> Any:
        if not any(left_out[: len(path)] == path for left_out in self._left_out):
            return value
        if isinstance(value, dict):
            return {
                name: self._without_left_out(each, (*path, name))
                for name, each in cast("dict[str, Any]", value).items()
                if (*path, name) not in self._left_out
            }
        if isinstance(value, list):
            elements = cast("list[Any]", value)
            read = [at for at in range(len(elements)) if (*path, at) not in self._left_out]
            self._places[path] = read
            return [self._without_left_out(elements[at], (*path, at)) for at in read]
        return cast("object", value)

    def _original(self, where: Path) -> Path:
        """A place in what was validated as one in the file, whose lists may be longer."""
        path: Path = ()
        for step in where:
            places = self._places.get(path)
            path = (*path, places[step] if places is not None and isinstance(step, int) else step)
        return path

    # Writing

    def changed(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        """The file's content with what differs between ``old`` and ``new``, two values of the model as JSON values.

        What is the same in both stays as the file has it, word by word. Of a record that is replaced the unknown
        fields stay. Records that were left out come after those that were read.
        """
        return self._merged(self._data, old, new, ())

    def _merged(self, raw: Any, old: Any, new: Any, path: Path) -> Any:
        if old == new and type(old) is type(new):
            return raw
        if isinstance(raw, dict) and isinstance(new, Mapping):
            before = cast("Mapping[str, Any]", old if isinstance(old, Mapping) else {})
            return self._merged_object(cast("dict[str, Any]", raw), before, cast("Mapping[str, Any]", new), path)
        if isinstance(raw, list) and isinstance(new, list):
            key = next((key for place, key in self._records.items() if _fits(place, (*path, ANY))), None)
            if key is not None:
                read = cast("list[Any]", old if isinstance(old, list) else [])
                return self._merged_list(cast("list[Any]", raw), read, cast("list[Any]", new), key, path)
        return cast("object", new)

    def _merged_object(
        self, raw: dict[str, Any], old: Mapping[str, Any], new: Mapping[str, Any], path: Path
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in raw.items():
            if name in new:
                result[name] = self._merged(value, old.get(name, _MISSING), new[name], (*path, name))
            elif name not in old:
                result[name] = value
        for name, value in new.items():
            # What was not written is what this version takes for it.
            if name not in raw and (name not in old or old[name] != value):
                result[name] = value
        return result

    def _merged_list(
        self, raw: list[Any], old: list[Any], new: list[Any], key: Callable[[Any], object], path: Path
    ) -> list[Any]:
        read = self._places.get(path, list(range(len(raw))))
        by_key: dict[str, list[tuple[int, Any]]] = {}
        for at, record in zip(read, old, strict=False):
            by_key.setdefault(json.dumps(key(record)), []).append((at, record))
        result: list[Any] = []
        for record in new:
            same = by_key.get(json.dumps(key(record)))
            if same:
                at, before = same.pop(0)
                result.append(self._merged(raw[at], before, record, (*path, at)))
            else:
                result.append(record)
        return result + [raw[at] for at in range(len(raw)) if (*path, at) in self._left_out]


def _plain(value: Any, depth: int = 0) -> Any:
    """What the validator reads as JSON, which is less than Python does: no half of a surrogate pair, no deep nesting.
    What this version knows is not so deep."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if depth > DEEPEST:
        return None
    if isinstance(value, dict):
        return {_plain(name): _plain(each, depth + 1) for name, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(each, depth + 1) for each in cast("list[Any]", value)]
    return value


def _fits(place: tuple[str, ...], path: Path) -> bool:
    return len(place) == len(path) and all(name in (ANY, step) for name, step in zip(place, path, strict=True))
