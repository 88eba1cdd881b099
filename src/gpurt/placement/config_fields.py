"""A model's configuration, read field by field: every value is checked, and an error names its field."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard, cast

from gpurt.placement.arguments import check_path
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.weights.document import members
from gpurt.weights.errors import shown
from gpurt.weights.sources import Source

CONFIG_NAME: Final = "config.json"
LARGEST: Final = 1 << 31
"""No extent or count of a model is near it."""


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The configuration and what to call it: of a mapping, a file, or a folder with a ``config.json``. Blocks.

    A file is called by its stem, and a ``config.json``, as all are called, by its folder.

    Raises:
        InvalidPlacementInput: it is neither a mapping nor a path.
        WeightsError: the file cannot be read, is too large, or is not a JSON object.
    """
    if isinstance(source, Mapping):
        return source, "config"
    check_path(source, "source", also=" of a config.json or its folder, or what is in the file as a mapping")
    path = config_path(source)
    file = Source(path)
    try:
        document = file.document()
    finally:
        file.close()
    return dict(members(document, str(path), "configuration")), called(path, CONFIG_NAME)


def config_path(source: str | os.PathLike[str]) -> Path:
    """The file, or that of the folder."""
    path = Path(source)
    return path / CONFIG_NAME if path.is_dir() else path


def called(path: Path, *usual: str) -> str:
    """What a model is called by its file: the stem, or the folder where the file has one of the usual names."""
    if path.name in usual:
        return path.resolve().parent.name or "model"
    return path.name.partition(".safetensors")[0].removesuffix(".json") or "model"


class Fields:
    """Fields of one object of a configuration.

    Attributes:
        assumed: names of those that were not there and for which the family's usual value was taken.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "", usual: Mapping[str, Any] | None = None) -> None:
        self._values = values
        self._prefix = prefix
        self._usual = usual or {}
        self.assumed: list[str] = []

    def path(self, name: str) -> str:
        return self._prefix + name

    def wrong(self, name: str, message: str) -> InvalidPlacementInput:
        return InvalidPlacementInput(message, field=self.path(name))

    def get(self, name: str) -> Any:
        """Its value, or the family's usual one, which is noted, or None."""
        value = self._values.get(name)
        if value is None and name in self._usual:
            if self.path(name) not in self.assumed:
                self.assumed.append(self.path(name))
            return self._usual[name]
        return value

    def count(self, name: str, *others: str, default: int | None = None, least: int = 1) -> int:
        """An integer; the first of several names that is there. Without a default it must be there."""
        for known in (name, *others):
            value = self.get(known)
            if value is not None:
                if not is_count(value) or not least <= value <= LARGEST:
                    raise self.wrong(known, f"must be an integer from {least} to {LARGEST:,}, and is {shown(value)}")
                return value
        if default is None:
            raise self.wrong(name, "is missing, and nothing else tells it")
        return default

    def count_or_none(self, name: str, least: int = 1) -> int | None:
        return None if self.get(name) is None else self.count(name, least=least)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, and is {shown(value)}")
        return value

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, f"must be a text, and is {shown(value)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; none is an empty one."""
        value = self.items(name)
        if not all(isinstance(item, str) for item in value):
            raise self.wrong(name, f"must be a list of texts, and is {shown(value)}")
        return tuple(value)

    def counts(self, name: str) -> tuple[int, ...]:
        value = self.items(name)
        if not all(is_count(item) and 0 <= item <= LARGEST for item in value):
            raise self.wrong(name, f"must be a list of integers, and is {shown(value)}")
        return tuple(value)

    def items(self, name: str) -> list[Any]:
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise self.wrong(name, f"must be a list, and is {shown(value)}")
        return list(cast("list[Any]", value))

    def part(self, name: str) -> Fields | None:
        """The object of that name, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, f"must be an object, and is {shown(value)}")
        return Fields(cast("Mapping[str, Any]", value), f"{self.path(name)}.")

    def with_usual(self, usual: Mapping[str, Any]) -> Fields:
        """The same object, read with a family's usual values where it has none."""
        return Fields(self._values, self._prefix, usual)

    def named(self) -> Mapping[str, Any]:
        return self._values


def is_count(value: object) -> TypeGuard[int]:
    """An integer, which true is not."""
    return isinstance(value, int) and not isinstance(value, bool)
