"""Tunings and topology in the registry file, beside what discovery keeps there."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.memory import DiscoveryMemory
from gpurt.discovery.registry import RegistryDocument, RegistryFile
from gpurt.links import keep_links, kept_links
from gpurt.registry import records
from gpurt.registry.file import RegistryTooNew
from gpurt.registry.measured import MeasuredFile
from gpurt.registry.records import Link, LinkType, TuningRecord
from tests.discovery.records import UUIDS, cpu, device, ok, result

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


def tuning(n: int = 0, **fields: Any) -> TuningRecord:
    known = {
        "device": UUIDS[n],
        "backend": "cuda",
        "driver_version": "590.48.01",
        "threads": 8,
        "revision": 1,
        "write_min_bytes": 16 * MIB,
        "read_min_bytes": None,
        "measured_at": "2026-11-28T04:00:00.000+00:00",
    }
    return TuningRecord.model_validate(known | fields)


def link(from_n: int = 0, to_n: int = 1, **fields: Any) -> Link:
    known = {
        "src": UUIDS[from_n],
        "dst": UUIDS[to_n],
        "src_device_id": f"cuda:{from_n}",
        "dst_device_id": f"cuda:{to_n}",
        "link_type": "nvlink",
        "wiring": "18 NVLinks",
        "peer_access": True,
        "bandwidth_gbps": 391.5,
        "latency_us": 52.25,
        "bytes_measured": 128 * MIB,
        "measured_at": "2026-11-28T04:00:00.000+00:00",
    }
    return Link.model_validate(known | fields)


def sim(n: int) -> str:
    return f"sim:0:h100:{n}"


def simulated_link(**fields: Any) -> Link:
    return link(**({"src": sim(0), "dst": sim(1), "simulated": True} | fields))


def stored(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# Round trips


def test_what_is_kept_is_there_again(path: Path) -> None:
    file = MeasuredFile(path)
    assert file.tunings() == file.links() == ()
    file.keep_tuning(tuning())
    file.keep_links([link(), link(1, 0, bandwidth_gbps=None, latency_us=None, failure="lost")])
    again = MeasuredFile(path)
    assert again.tunings() == (tuning(),)
    assert again.links() == (link(), link(1, 0, bandwidth_gbps=None, latency_us=None, failure="lost"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert stored(path)["schema"] == 1


def test_the_last_measurement_of_each_pair_counts(path: Path) -> None:
    file = MeasuredFile(path)
    file.keep_links([link(0, 1), link(1, 0)])
    file.keep_links([link(0, 1, bandwidth_gbps=37.0), link(0, 2)])
    assert file.links() == (link(0, 1, bandwidth_gbps=37.0), link(0, 2), link(1, 0))


def test_a_tuning_replaces_that_of_an_older_driver_and_no_other_crew_s(path: Path) -> None:
    file = MeasuredFile(path)
    others = [tuning(threads=2), tuning(1), tuning(backend="rocm")]
    for record in [*others, tuning(), tuning(driver_version="600.1", revision=2)]:
        file.keep_tuning(record)
    assert file.tunings() == (tuning(driver_version="600.1", revision=2), *reversed(others))


def test_the_file_does_not_grow_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_TUNINGS", 3)
    monkeypatch.setattr(records, "MAX_LINKS", 2)
    file = MeasuredFile(path)
    for threads in range(1, 6):
        file.keep_tuning(tuning(threads=threads))
    file.keep_links([link(0, n) for n in (1, 2, 3)])
    file.keep_links([link(0, 4)])
    assert [record.threads for record in file.tunings()] == [5, 4, 3]
    assert [each.dst for each in file.links()] == [UUIDS[4], UUIDS[1]]


def test_simulated_links_are_never_beside_real_ones(path: Path) -> None:
    file = MeasuredFile(path)
    file.keep_links([simulated_link(), link()])
    assert file.links() == (link(), simulated_link())
    assert len(stored(path)["topology"]) == len(stored(path)["simulated"]["topology"]) == 1
    document = RegistryFile(path).load()
    assert document is not None
    assert document.topology == (link(),)
    assert document.simulated is not None
    assert document.simulated.topology == (simulated_link(),)


def test_no_figure_is_none_and_never_zero() -> None:
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="bandwidth_gbps"):
            link(bandwidth_gbps=wrong)


# Beside discovery


def test_measurements_leave_everything_else_as_it_is(path: Path) -> None:
    RegistryFile(path).save(RegistryDocument(devices=(device(0), cpu()), reports=(ok("cuda"),), epoch=7))
    before = stored(path) | {"of a newer peer": {"x": [1]}}
    path.write_text(json.dumps(before))
    MeasuredFile(path).keep_tuning(tuning())
    MeasuredFile(path).keep_links([link(), simulated_link()])
    after = stored(path)
    changed = {"tuning", "topology", "simulated", "saved_at"}
    assert {key: after[key] for key in after.keys() - changed} == {key: before[key] for key in before.keys() - changed}


async def test_a_discovery_leaves_measurements_as_they_are(path: Path) -> None:
    def measured() -> tuple[Any, ...]:
        return MeasuredFile(path).tunings(), MeasuredFile(path).links()

    memory = DiscoveryMemory(RegistryFile(path))
    await memory.load()
    await asyncio.to_thread(MeasuredFile(path).keep_tuning, tuning())
    await keep_links([link(), link(0, 2), simulated_link()], path)
    before = await asyncio.to_thread(measured)
    assert before == ((tuning(),), (link(), link(0, 2), simulated_link()))
    assert await memory.store(result(device(0), device(1)))
    assert await memory.store(result(device(0), device(1)))
    memory.verified.add("GPU-x cuda/cupy 590")
    await memory.doubt(["cuda"])
    await asyncio.to_thread(RegistryFile(path).next_epoch)
    assert await asyncio.to_thread(measured) == before


async def test_simulated_services_keep_their_links(path: Path) -> None:
    devices = tuple(device(n, simulated=True, identity={"key": sim(n), "stable": True, "uuid": sim(n)}) for n in (0, 1))
    memory = DiscoveryMemory(RegistryFile(path), given=lambda: devices)
    await memory.load()
    await keep_links([simulated_link(), link()], path)
    assert memory.topology(devices) == ()
    assert await memory.store(result(*devices))
    assert memory.topology(devices) == (simulated_link(),)
    assert await kept_links(path) == (link(), simulated_link())


async def test_topology_is_that_of_the_devices_that_are_there(path: Path) -> None:
    await keep_links([link(0, 1), link(1, 0), link(0, 2), simulated_link()], path)
    memory = DiscoveryMemory(RegistryFile(path))
    await memory.load()  # no discovery has ever been written there
    assert memory.remembered is None
    assert memory.topology([device(0), device(1)]) == (link(0, 1), link(1, 0))
    assert memory.topology([device(1), device(2)]) == ()


# Rubbish


GOOD_TUNING = tuning().model_dump(mode="json")
GOOD_LINK = link().model_dump(mode="json")


@pytest.mark.parametrize(
    ("section", "entry"),
    [
        pytest.param("tuning", entry, id=f"tuning {name}")
        for name, entry in {
            "no object": 7,
            "empty": {},
            "text": GOOD_TUNING | {"threads": "8"},
            "truth": GOOD_TUNING | {"threads": True},
            "no thread": GOOD_TUNING | {"threads": 0},
            "negative": GOOD_TUNING | {"write_min_bytes": -1},
            "fraction": GOOD_TUNING | {"read_min_bytes": 1.5},
            "field missing": {key: value for key, value in GOOD_TUNING.items() if key != "read_min_bytes"},
            "nobody's": GOOD_TUNING | {"device": ""},
        }.items()
    ]
    + [
        pytest.param("topology", entry, id=f"topology {name}")
        for name, entry in {
            "no object": None,
            "zero": GOOD_LINK | {"bandwidth_gbps": 0},
            "infinite": GOOD_LINK | {"latency_us": float("inf")},
            "negative": GOOD_LINK | {"bytes_measured": -5},
            "no end": {key: value for key, value in GOOD_LINK.items() if key != "dst"},
        }.items()
    ],
)
def test_a_malformed_entry_is_ignored_and_said(
    path: Path, section: str, entry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    RegistryFile(path).save(RegistryDocument(reports=(ok("cuda"),), tuning=(tuning(1),), topology=(link(1, 0),)))
    data = stored(path)
    data[section].insert(0, entry)
    path.write_text(json.dumps(data))
    with caplog.at_level(logging.INFO, "gpurt.registry"):
        file = MeasuredFile(path)
        assert (file.tunings(), file.links()) == ((tuning(1),), (link(1, 0),))
        assert "is ignored" in caplog.text
        document = RegistryFile(path).load()
    assert document is not None
    assert document.reports
    assert (document.tuning, document.topology) == ((tuning(1),), (link(1, 0),))
    assert file.quarantined is None
    file.keep_tuning(tuning())
    file.keep_links([link()])
    assert (file.tunings(), file.links()) == ((tuning(), tuning(1)), (link(), link(1, 0)))


@pytest.mark.parametrize("rubbish", [3, "x", {"a": 1}, None])
def test_sections_of_the_wrong_type_count_as_empty(path: Path, rubbish: Any) -> None:
    path.write_text(json.dumps({"schema": 1, "tuning": rubbish, "topology": rubbish, "simulated": rubbish}))
    file = MeasuredFile(path)
    assert file.tunings() == file.links() == ()
    file.keep_tuning(tuning())
    file.keep_links([link(), simulated_link()])
    assert (file.tunings(), file.links()) == ((tuning(),), (link(), simulated_link()))
    assert RegistryFile(path).load() is not None


def test_a_link_of_a_kind_from_the_future_is_kept_as_unknown(path: Path) -> None:
    path.write_text(json.dumps({"schema": 1, "topology": [GOOD_LINK | {"link_type": "cxl", "lanes": 16}]}))
    (loaded,) = MeasuredFile(path).links()
    assert loaded == link(link_type=LinkType.UNKNOWN)


def test_a_newer_registry_is_left_alone(path: Path) -> None:
    newer = b'{"schema": 2, "tuning": "differently"}'
    path.write_bytes(newer)
    file = MeasuredFile(path)
    assert file.tunings() == file.links() == ()
    with pytest.raises(RegistryTooNew, match="schema 2"):
        file.keep_tuning(tuning())
    with pytest.raises(RegistryTooNew):
        file.keep_links([link()])
    assert path.read_bytes() == newer


def test_a_corrupt_registry_stays_until_somebody_writes(path: Path) -> None:
    file = MeasuredFile(path)
    file.keep_tuning(tuning())
    file.keep_tuning(tuning(1))
    broken = path.read_bytes()[:-20]
    path.write_bytes(broken)
    assert file.tunings() == (tuning(),)  # of the last good copy
    assert path.read_bytes() == broken
    file.keep_tuning(tuning(2))
    assert file.quarantined is not None
    assert file.quarantined.read_bytes() == broken
    assert file.tunings() == (tuning(2), tuning())


async def test_discovery_still_hears_of_a_corrupt_registry(path: Path) -> None:
    def prepare() -> None:
        RegistryFile(path).save(RegistryDocument(reports=(ok("cuda"),)))
        path.write_bytes(b"{broken")
        assert MeasuredFile(path).tunings() == ()

    await asyncio.to_thread(prepare)
    memory = DiscoveryMemory(RegistryFile(path))
    await memory.load()
    assert (memory.recovered_from or "").startswith("recovered: the registry was corrupt")


def test_nothing_to_keep_writes_nothing(path: Path) -> None:
    MeasuredFile(path).keep_links([])
    assert not path.exists()


# Several processes

WRITER = """
import sys
from gpurt.discovery.registry import RegistryDocument, RegistryFile
from gpurt.registry.measured import MeasuredFile
from tests.discovery.records import device, ok
from tests.registry.test_measured import link, tuning
path, what, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
for n in range(1, count + 1):
    if what == "discovery":
        document = RegistryDocument(devices=(device(0),), reports=(ok("cuda"),))
        RegistryFile(path).update(lambda old: (old or document).model_copy(update={"epoch": n}))
    elif what == "links":
        MeasuredFile(path).keep_links([link(src=f"a{n}")])
    else:
        MeasuredFile(path).keep_tuning(tuning(threads=n, device=what))
"""


def test_no_process_undoes_what_another_wrote(path: Path) -> None:
    root = str(Path(__file__).parents[2])
    count = 40
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), what, str(count)], cwd=root, env=os.environ | {"PYTHONPATH": root}
        )
        for what in ("discovery", "links", "left", "right")
    ]
    assert [child.wait(60) for child in children] == [0] * 4
    file = MeasuredFile(path)
    assert {(record.device, record.threads) for record in file.tunings()} == {
        (who, n) for who in ("left", "right") for n in range(1, count + 1)
    }
    assert {each.src for each in file.links()} == {f"a{n}" for n in range(1, count + 1)}
    document = RegistryFile(path).load()
    assert document is not None
    assert document.epoch == count
    assert file.quarantined is None
