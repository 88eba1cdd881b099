"""What docs/placement.md says: its example is read and placed on, and its tables name what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gpurt.cli.main import main
from gpurt.placement import Inventory, PlacementDevice, Plan, Topology
from gpurt.placement.replica_search import EVERY
from gpurt.placement.topology import DEFAULT_CLASSES, Locality

DOCS = Path(__file__).parent.parent.parent / "docs"
TEXT = (DOCS / "placement.md").read_text(encoding="utf-8")
CONFIG = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000, "torch_dtype": "bfloat16",
}  # fmt: skip


def example() -> str:
    (found,) = re.findall(r"^```json inventory\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return found


def test_a_model_is_placed_on_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.json").write_text(example())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    given = ["place", str(tmp_path / "config.json"), "--cluster", str(tmp_path / "cluster.json")]
    assert main([*given, "--json"]) == 0
    plan = Plan.model_validate_json(capsys.readouterr().out)
    assert plan.layer_count == 80
    assert len(plan.stages) > 1, "more than one box is needed"
    assert not any(hop.estimated for hop in plan.hops), "the links of the file are those of the plan"
    assert main([*given, "--explain"]) == 0
    assert "left out, box-2/cuda:0: lost: fell off the bus" in capsys.readouterr().out


def test_the_example_is_all_used() -> None:
    inventory = Inventory.model_validate_json(example())
    assert {each.domain("power") for each in inventory.devices} == {"x", None}
    links = inventory.topology.dense(inventory.devices)
    assert not links.estimated.any()
    assert inventory.left_out
    assert Inventory.model_validate_json(inventory.model_dump_json()) == inventory


def test_the_tables_name_every_field() -> None:
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in TEXT.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in row}
    assert set(PlacementDevice.model_fields) <= named
    assert set(Topology.model_fields) <= named
    for name, field in PlacementDevice.model_fields.items():
        line = next(line for line in TEXT.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1])
        assert field.is_required() == (not line.split("|")[2].strip()), name


def test_figures_of_the_text() -> None:
    node, zone, wide = (DEFAULT_CLASSES[each] for each in (Locality.NODE, Locality.ZONE, Locality.WIDE))
    assert (node.latency_seconds, node.bandwidth) == (10e-6, 12e9)
    assert (zone.latency_seconds, zone.bandwidth) == (200e-6, 1.1e9)
    assert (wide.latency_seconds, wide.bandwidth) == (20e-3, 30e6)
    assert "10 µs and 12 GB/s within a node, 200 µs and 1.1 GB/s within a zone, 20 ms and 30 MB/s between" in TEXT
    assert f"up to {EVERY} ways to divide the devices are all solved" in TEXT


def test_the_readme_leads_here() -> None:
    assert "docs/placement.md" in (DOCS.parent / "README.md").read_text(encoding="utf-8")
