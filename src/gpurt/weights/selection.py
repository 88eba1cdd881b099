"""Which tensors, and where to: names, prefixes, layers. Pure.

An entry ``"model.layers.3"`` or ``"model.layers.3."`` means the tensor of that name and everything below it, and
never ``model.layers.31``. The entry ``""`` means every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from gpurt.weights.errors import WeightsError, shown
from gpurt.weights.quiet import slices

Placement = str | Mapping[str, str] | Callable[[str], str]
"""A device id for all, device ids by entry (the longest that matches decides), or a function of the name."""

Only = Collection[str] | Callable[[str], bool]
"""Entries, or a function of the name."""


def select(names: Iterable[str], only: Only | None, path: str) -> list[str]:
    """The names that ``only`` asks for, in their order; None asks for all.

    Raises:
        WeightsError: an entry that no tensor matches (a misspelt layer must not become a missing one).
    """
    names = list(names)
    if only is None:
        return names
    if callable(only):
        return [name for name in names if only(name)]
    entries = [only] if isinstance(only, str) else list(only)
    found: set[str] = set()
    chosen: list[str] = []
    wanted = {_stem(entry): entry for entry in entries}
    lengths = _lengths(wanted)
    for name in names:
        hits = [wanted[stem] for stem in _stems(name, lengths) if stem in wanted]
        if hits:
            chosen.append(name)
            found.update(hits)
    for entry in wanted.values():
        if entry not in found:
            raise WeightsError(f"nothing is named {shown(entry)} or lies below it", path=path, hint=_known(names))
    return chosen


def place(names: Iterable[str], placement: Placement, path: str) -> dict[str, str]:
    """Tensor name → device id.

    Raises:
        WeightsError: no device is given for a tensor, or what is given is not a name.
    """
    if isinstance(placement, str):
        everything: dict[str, str] = {}
        for part in slices(names):
            everything.update(dict.fromkeys(part, placement))
        return everything
    result: dict[str, str] = {}
    devices = {} if callable(placement) else {_stem(entry): device for entry, device in placement.items()}
    lengths = _lengths(devices)
    for name in names:
        device: object
        if callable(placement):
            device = placement(name)
        else:
            device = next((devices[stem] for stem in _stems(name, lengths) if stem in devices), None)
        if not isinstance(device, str):
            raise WeightsError(
                "the placement gives no device for it" if device is None else f"{shown(device)} is no device id",
                path=path,
                tensor=name,
                hint='the entry "" stands for every other tensor' if isinstance(placement, Mapping) else None,
            )
        result[name] = device
    return result


def _stem(entry: str) -> str:
    return entry.removesuffix(".")


def _lengths(stems: Iterable[str]) -> list[int]:
    return sorted({len(stem) for stem in stems}, reverse=True)


def _stems(name: str, lengths: Iterable[int]) -> list[str]:
    """The name and what lies above it, as far as it has one of ``lengths``, the longest first: ``a.b``, ``a``, and
    ``""`` for all. Only those, since a name from a file may have thousands of dots."""
    return [name[:cut] for cut in lengths if cut == len(name) or not cut or name[cut : cut + 1] == "."]


def _known(names: list[str]) -> str:
    shown_names = ", ".join(shown(name) for name in names[:3])
    return f"there are {len(names):,} tensors" + (f", such as {shown_names}" if names else "")
