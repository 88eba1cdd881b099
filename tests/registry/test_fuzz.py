"""Any bytes in the place of the registry: a document or none, never an error, and no device that was not written."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurt.discovery.registry import RegistryDocument, RegistryFile
from tests.discovery.records import device

EXAMPLES = pytest.mark.parametrize("examples", [1000, pytest.param(100_000, marks=pytest.mark.slow)])

WHOLE = json.dumps(
    RegistryDocument(devices=(device(0), device(1)), verified=("k",), backend_name="cuda").model_dump(
        mode="json", by_alias=True
    )
).encode()

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from([*json.loads(WHOLE), "later"])


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """A whole file with some of its fields, or some of a device's, replaced by anything."""
    document = json.loads(WHOLE)
    for key in draw(st.lists(keys, max_size=3)):
        document[key] = draw(values)
    if isinstance(document.get("devices"), list) and document["devices"] and isinstance(document["devices"][0], dict):
        first = document["devices"][0]
        for key in draw(st.lists(st.sampled_from([*sorted(first), "later"]), max_size=2)):
            first[key] = draw(values)
    return json.dumps(document).encode()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A whole file, cut or overwritten somewhere."""
    start = draw(st.integers(0, len(WHOLE)))
    middle = draw(st.binary(max_size=6))
    end = draw(st.integers(start, len(WHOLE)))
    return WHOLE[:start] + middle + (WHOLE[end:] if draw(st.booleans()) else b"")


@EXAMPLES
def test_any_bytes(examples: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = RegistryFile(Path(folder, "registry.json"))

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(st.binary(max_size=64) | damaged() | changed())
        def run(raw: bytes) -> None:
            for left in Path(folder).iterdir():
                left.unlink()
            file.path.write_bytes(raw)
            document = file.load()
            if document is None:
                return
            written = json.loads(raw)
            told = written.get("devices", [])
            ids = [each.get("device_id") for each in told if isinstance(each, dict)] if isinstance(told, list) else []
            for shown in document.devices:  # in their order, each written there
                assert shown.device_id in ids
                del ids[: ids.index(shown.device_id) + 1]

        run()
