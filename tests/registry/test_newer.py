"""A file that a newer minor version may have written: what it has put there survives every writer of this one.

A whole file gets unknown sections, fields, words and records at random places. Then one writer changes it. What was put
in is still there, word by word; what the writer says is there as in a file without all that; nothing is put aside.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import copy
import importlib
import json
import logging
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpurt
from gpurt.backends.cupy.copy_tuning import CopyTuning
from gpurt.backends.cupy.tuning_file import TuningFile
from gpurt.calibration.keep import keep_calibrations
from gpurt.cluster.promises import InstancePromises, Promised, PromiseFile, Promises
from gpurt.discovery.memory import DiscoveryMemory
from gpurt.discovery.registry import Attempts, RegistryDocument, RegistryFile
from gpurt.discovery.remembered import Remembered
from gpurt.errors import ReasonCode
from gpurt.health.evidence import Evidence
from gpurt.links import keep_links
from gpurt.placement.version import PlanVersion
from gpurt.registry.file import JsonFile
from gpurt.registry.measured import MeasuredFile
from gpurt.registry.records import CalibrationRecord
from gpurt.types import DeviceSpeeds, DeviceState, GPUDevice
from tests.discovery.records import UUIDS, absent, device, ok, result
from tests.registry.test_measured import link, sim, simulated_link, tuning

SIMULATED = tuple(device(n, simulated=True, identity={"key": sim(n), "stable": True, "uuid": sim(n)}) for n in (0, 1))


def calibration(stable_id: str, **fields: Any) -> CalibrationRecord:
    return CalibrationRecord(
        device=stable_id,
        revision=1,
        speeds=DeviceSpeeds(backend="cuda", driver_version="590.48.01", measured_at="2026-11-28T04:00:00.000+00:00"),
        **fields,
    )


def bad(stable_id: str) -> dict[str, Any]:
    return {"boot_id": None, "devices": {stable_id: {"state": "lost", "reason": "xid: 79", "xids": [79]}}}


WHOLE: dict[str, Any] = RegistryDocument(
    epoch=7,
    backend_name="cuda",
    devices=(device(0), device(1)),
    reports=(ok("cuda"), absent("rocm", ReasonCode.TIMEOUT), absent("vulkan", ReasonCode.NO_LIBRARY)),
    verified=(f"{UUIDS[0]} cuda/cupy 590.48.01", f"{UUIDS[1]} cuda/cupy 590.48.01"),
    remembered={"cuda": (Remembered(signature="s", devices=(device(0),)),)},
    attempts={"rocm": Attempts(failures=2, retry_at=1.5e9)},
    tuning=(tuning(0), tuning(1)),
    calibration=(calibration(UUIDS[0]),),
    topology=(link(0, 1), link(1, 0)),
    health=bad(UUIDS[1]),
    simulated=RegistryDocument(
        devices=SIMULATED,
        reports=(ok("cuda"),),
        topology=(simulated_link(),),
        calibration=(calibration(sim(0), simulated=True),),
        health=bad(sim(1)),
    ),
).model_dump(mode="json", by_alias=True)
WHOLE["simulated"].pop("simulated")  # one level, as written files have


def promises(term: int) -> Promises:
    offer = Promised(version=PlanVersion(term=term, n=1), digest="d")
    return Promises(term=term, instances={"m": InstancePromises(offered=offer, activated=offer)})


PROMISED: dict[str, Any] = json.loads(
    json.dumps(
        {
            "schema": 1,
            "nodes": {name: promises(3).model_dump(mode="json") for name in ("lab/n1", "lab/n2")},
        }
    )
)

# Writers. Each changes its part and removes no record that is known, since its fields would go with it.


def discovery(
    write: Callable[[DiscoveryMemory, RegistryDocument], Awaitable[object]], *, simulated: bool = False
) -> Callable[[Path], None]:
    async def run(path: Path) -> None:
        file = RegistryFile(path)
        document = await asyncio.to_thread(file.load)
        assert document is not None
        part = document.simulated if simulated else document
        assert part is not None
        memory = DiscoveryMemory(file, given=(lambda: SIMULATED) if simulated else None)
        await memory.load()
        await write(memory, part)

    return lambda path: asyncio.run(run(path))


async def store(memory: DiscoveryMemory, document: RegistryDocument) -> None:
    faster = [each.model_copy(update={"clock_rate_mhz": 1}) for each in document.devices]
    assert await memory.store(result(*faster, reports=[ok("cuda")]))


async def save_health(memory: DiscoveryMemory, document: RegistryDocument) -> None:
    shown: list[GPUDevice] = list(document.devices)
    memory.health.changed(memory.health.monitor.observe(shown[0].stable_id, Evidence(DeviceState.LOST)))
    assert memory.health.unsaved
    await memory.save_health()


async def doubt(memory: DiscoveryMemory, document: RegistryDocument) -> None:
    memory.verified.add("GPU-x rocm/x 1")
    await memory.doubt(["rocm"])


def tune(path: Path) -> None:
    file, known = TuningFile(path), dict[int, CopyTuning]()
    file.open([device(2)], known, threads=2)
    known[0] = CopyTuning(2, None, None)
    file.note(0)
    file.close()


def change(path: Path) -> None:
    RegistryFile(path).update(lambda old: (old or RegistryDocument()).model_copy(update={"backend_name": "cpu"}))


def save(path: Path) -> None:
    file = RegistryFile(path)
    document = file.load()
    assert document is not None
    file.save(document.model_copy(update={"epoch": 9}))


def promise(path: Path) -> None:
    PromiseFile(path.with_name("registry.json"), "lab", "n1").keep(promises(4))


WRITERS: dict[str, Callable[[Path], object]] = {
    "RegistryFile.save": save,
    "RegistryFile.update": change,
    "RegistryFile.next_epoch": lambda path: RegistryFile(path).next_epoch(),
    "MeasuredFile.keep_tuning": lambda path: MeasuredFile(path).keep_tuning(tuning(0, write_min_bytes=1)),
    "MeasuredFile.keep_links": lambda path: MeasuredFile(path).keep_links(
        [link(0, 1, bandwidth_gbps=1.0), link(0, 2), simulated_link(latency_us=1.0)]
    ),
    "MeasuredFile.keep_calibrations": lambda path: MeasuredFile(path).keep_calibrations(
        [calibration(UUIDS[0]), calibration(UUIDS[2]), calibration(sim(0), simulated=True)]
    ),
    "DiscoveryMemory.store": discovery(store),
    "DiscoveryMemory.store simulated": discovery(store, simulated=True),
    "DiscoveryMemory.save_health": discovery(save_health),
    "DiscoveryMemory.save_health simulated": discovery(save_health, simulated=True),
    "DiscoveryMemory.doubt": discovery(doubt),
    "links.keep_links": lambda path: asyncio.run(keep_links([link(2, 1)], path)),
    "calibration.keep_calibrations": lambda path: asyncio.run(keep_calibrations([calibration(UUIDS[3])], path)),
    "TuningFile.note": tune,
    "PromiseFile.keep": promise,
}
READERS = {"load", "tunings", "links", "calibrations", "promises", "backup_path"}

# What is put in

LISTS = ("devices", "reports", "verified", "tuning", "calibration", "topology")
WORDS = ("status", "reason", "state", "kind", "link_type", "discovery_status")
BY_NAME = ("attempts", "nodes", "instances")

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def walked(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    yield path, value
    if isinstance(value, dict):
        for name, each in value.items():
            yield from walked(each, (*path, name))
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from walked(each, (*path, at))


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


Put = tuple[tuple[str | int, ...], Any]
"""A place, in which ``*`` stands for any in a list, and what has to be there."""


def general(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    return tuple("*" if isinstance(step, int) else step for step in path)


@st.composite
def newer(draw: st.DrawFn, whole: dict[str, Any], words: bool) -> tuple[dict[str, Any], list[Put]]:
    """``whole`` with unknown things in it, and what they are."""
    document = copy.deepcopy(whole)
    places = [(path, value) for path, value in walked(whole) if isinstance(value, (dict, list)) or path[-1] in WORDS]
    chosen = draw(st.lists(st.sampled_from(places), min_size=1, max_size=6, unique_by=lambda each: each[0]))
    fields: list[tuple[tuple[str | int, ...], str]] = []
    for n, (path, before) in enumerate(chosen):
        target = at(document, path)
        if isinstance(before, dict):
            each = draw(values | st.just({"deep": [[[]]] * 2, "": "\ud800"}))
            # In a section of named records this is a record, of unknown shape: an object might be one that is known.
            within = path[-1] if path else ""
            target[f"later {n}"] = [each] if within in BY_NAME else {"": each} if within == "remembered" else each
            fields.append((path, f"later {n}"))
        elif isinstance(before, list):
            if (path[-1] in LISTS and "remembered" not in path) or path[-2:-1] == ("remembered",):
                target.append({"later": n, "of unknown shape": draw(values)})
                fields.append((path, ""))
        elif words:
            at(document, path[:-1])[path[-1]] = f"word {n}"
            fields.append((path[:-1], str(path[-1])))
    put: list[Put] = []
    for path, name in fields:
        put.append(
            (
                (*general(path), name) if name else (*general(path), "*"),
                at(document, path)[name] if name else at(document, path)[-1],
            )
        )
    return document, put


def there(document: Any, put: Put) -> bool:
    """A list that had several appended to it has each, wherever it is."""
    place, value = put
    return any(general(path) == place and same(each, value) for path, each in walked(document))


def same(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other)


def known(path: Path) -> Any:
    """What this version reads, without times."""
    if path.name.endswith("promises.json"):
        return PromiseFile(path.with_name("registry.json"), "lab", "n1").load()
    document = RegistryFile(path).load()
    assert document is not None
    dumped = document.model_dump(mode="json", exclude={"saved_at", "timestamp"})
    for part in (dumped, dumped["simulated"]):
        part.pop("saved_at", None)
        part.pop("timestamp", None)
        for each in part["tuning"]:
            each["measured_at"] = ""
        part["attempts"] = {name: tried["failures"] for name, tried in part["attempts"].items()}
    return dumped


EXAMPLES = pytest.mark.parametrize(
    "examples", [5, pytest.param(300, marks=pytest.mark.wide), pytest.param(10_000, marks=pytest.mark.slow)]
)


@EXAMPLES
@pytest.mark.parametrize("words", [False, True], ids=["", "words"])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_newer_version_has_written_stays(writer: str, words: bool, examples: int) -> None:
    whole = PROMISED if writer == "PromiseFile.keep" else WHOLE
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "registry.promises.json" if whole is PROMISED else "registry.json")

        def write(content: dict[str, Any]) -> dict[str, Any]:
            for left in Path(folder).iterdir():
                left.unlink()
            path.write_text(json.dumps(content))
            WRITERS[writer](path)
            return json.loads(path.read_text())

        plain = write(whole)
        assert not same(plain, whole)
        expected = known(path)

        def written_here(place: tuple[str | int, ...]) -> bool:
            """The writer has a word of its own for it: it writes one of these records, at least."""
            record = place[:-1]
            before, after = ([each for path, each in walked(of) if general(path) == record] for of in (whole, plain))
            return place[-1] in WORDS and before != after

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(newer(whole, words))
        def run(given: tuple[dict[str, Any], list[Put]]) -> None:
            content, put = given
            written = write(content)
            for each in put:
                assert there(written, each) or written_here(each[0]), each
            assert not list(Path(folder).glob("*.corrupt-*"))
            if not words:
                k = known(path)
                if isinstance(k, dict) and k != expected:
                    print(
                        "DIFF",
                        writer,
                        [(x, str(k[x])[:150], str(expected[x])[:150]) for x in k if k[x] != expected[x]],
                        put,
                    )
                assert known(path) == expected

        run()


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b'"x"', b"null", b"{", b'{"schema": 1', b"\xff", b"[" * 100_000])
def test_only_what_is_no_object_is_put_aside(tmp_path: Path, content: bytes) -> None:
    for file in (RegistryFile(tmp_path / "registry.json"), PromiseFile(tmp_path / "registry.json", "lab", "n1")):
        file.path.write_bytes(content)
        assert file.load() is None
        assert file.quarantined is not None
        assert file.quarantined.read_bytes() == content


@pytest.mark.parametrize("writer", WRITERS)
def test_a_newer_schema_stays_untouched(tmp_path: Path, writer: str, caplog: pytest.LogCaptureFixture) -> None:
    if writer.startswith("DiscoveryMemory") or writer == "RegistryFile.save":
        pytest.skip("reads the file first, and finds nothing: `test_a_newer_schema_is_left_alone` has them")
    path = tmp_path / ("registry.promises.json" if writer == "PromiseFile.keep" else "registry.json")
    path.write_bytes(b'{"schema": 2, "devices": {"by": "then"}, "nodes": 7}')
    before = path.read_bytes()
    with contextlib.suppress(gpurt.GPUError):
        WRITERS[writer](path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if not each.name.endswith(".lock")] == [path.name]


def test_it_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "registry.json"
    content = copy.deepcopy(WHOLE)
    content["reports"][1]["reason"] = "moved to the cloud"
    content["reports"][2]["status"] = "dreaming"
    path.write_text(json.dumps(content))
    with caplog.at_level(logging.INFO, "gpurt.registry"):
        for _ in range(3):
            document = RegistryFile(path).load()
            assert document is not None
            assert [report.name for report in document.reports] == ["cuda"]
    assert [record.getMessage().partition(" is ignored")[0] for record in caplog.records] == [
        f"reports.1 of {path}",
        f"reports.2 of {path}",
    ]


# The list is whole


def _files() -> Iterator[type[JsonFile[Any]]]:
    for module in sorted(Path(gpurt.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef) and any("JsonFile[" in ast.unparse(base) for base in node.bases):
                name = ".".join(module.relative_to(Path(gpurt.__path__[0]).parent).with_suffix("").parts)
                yield getattr(importlib.import_module(name), node.name)


def test_every_writer_is_listed() -> None:
    """A new kind of file, a new method of one, and a new caller of `update` have to be added above."""
    found: set[str] = set()
    for file in _files():
        for name in vars(file):
            if name.islower() and not name.startswith("_") and name not in READERS:
                found.add(f"{file.__name__}.{name}")
    tree = ast.parse(Path(DiscoveryMemory.load.__code__.co_filename).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef) and "self._update(" in ast.unparse(node):
            found.add(f"DiscoveryMemory.{node.name}")
    callers: set[str] = set()
    source = Path(gpurt.__path__[0])
    for module in source.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                if node.func.attr in ("keep_tuning", "keep_links", "keep_calibrations") or called.endswith(
                    "file.update"
                ):
                    callers.add(module.relative_to(source).as_posix())
    assert found == {
        name for name in WRITERS if name.split(".")[0].endswith(("File", "Memory")) and " " not in name
    } - {"TuningFile.note"}
    assert callers == {
        "backends/cupy/tuning_file.py",
        "calibration/keep.py",
        "discovery/memory.py",
        "links/keep.py",
    }
