"""What ``gpurt place`` prints: marks, lines that fit, replicas, and refusals in the user's own words."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpurt.cli import observing
from gpurt.cli.main import main
from gpurt.cli.place_inputs import read_inventory
from gpurt.cluster.worker import DEFAULT_ENDPOINT
from gpurt.errors import GPUError
from gpurt.placement import (
    Constraints,
    Inventory,
    Link,
    ModelSpec,
    PlacementDevice,
    Plan,
    ReplicatedPlan,
    Topology,
    Workload,
    validate_replicas,
)

pytestmark = pytest.mark.wide

GIB = 1 << 30


def card(node: str, number: int, **fields: Any) -> PlacementDevice:
    values: dict[str, Any] = {
        "node": node, "backend": "cuda", "vendor": "nvidia", "usable_bytes": 8 * GIB, "reserve_bytes": GIB,
        "memory_bandwidth": 1e12, "compute_flops": 1e14, **fields,
    }  # fmt: skip
    return PlacementDevice(id=f"{node}/cuda:{number}", **values)


class Command:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.model = ModelSpec.uniform(
            "m", layers=16, size_bytes=4 * GIB, tensor_parallel=(1, 2), activation_bytes_per_token=8192
        )
        self.inventory = Inventory(devices=tuple(card(node, number) for node in ("a", "b") for number in (0, 1)))

    def place(self, *options: str) -> tuple[int, str]:
        model, cluster = self.folder / "model.json", self.folder / "cluster.json"
        model.write_text(self.model.model_dump_json())
        cluster.write_text(self.inventory.model_dump_json())
        code = main(["place", str(model), "--cluster", str(cluster), "--context", "0", *options])
        told = self.capsys.readouterr()
        return code, told.out or told.err


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def measured(*pairs: tuple[str, str]) -> Topology:
    links = [
        Link(source=one, target=other, latency_seconds=1e-6, bandwidth=1e11)
        for pair in pairs
        for one, other in (pair, pair[::-1])
    ]
    return Topology(links=tuple(links))


# Marks


def test_a_link_within_a_group_that_nobody_measured_is_marked(command: Command) -> None:
    command.inventory = command.inventory.model_copy(update={"devices": command.inventory.devices[:2]})
    _, said = command.place("--require", "a/cuda:0", "--require", "a/cuda:1", "--max-stages", "1")
    row = next(line for line in said.splitlines() if line.startswith("│ 1 "))
    assert re.search(r"│ +~[\d.]+ m?s │", row)
    assert re.search(r"^~.* per token: ", said, re.MULTILINE)
    assert "~ not measured" in said
    _, said = command.place("--require", "a/cuda:0", "--require", "a/cuda:1", "--max-stages", "1", "--explain")
    assert "not measured, links within 1 tensor-parallel group: assumed by where the devices are" in said.replace(
        "\n", " "
    )
    command.inventory = command.inventory.model_copy(update={"topology": measured(("a/cuda:0", "a/cuda:1"))})
    _, said = command.place("--require", "a/cuda:0", "--require", "a/cuda:1", "--max-stages", "1")
    assert "~" not in said


# Width


@pytest.mark.parametrize("columns", [80, 100, 132])
def test_table_and_bars_fit_the_columns(command: Command, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    long = "a-workstation-with-a-rather-long-name"
    devices = [
        card(f"{long}-{number}", 0, name="RTX 6000 Ada Generation", usable_bytes=3000 * GIB, reserve_bytes=300 * GIB)
        for number in range(3)
    ]
    command.inventory = Inventory(devices=tuple(devices), simulated=frozenset({devices[0].id}))
    command.model = ModelSpec.uniform("m", layers=125, size_bytes=7000 * GIB, kv_bytes_per_token=1 << 20)
    monkeypatch.setenv("COLUMNS", str(columns))
    code, said = command.place("--context", "4096")
    assert code == 0
    drawn = [line for line in said.splitlines() if line[:1] in "┏┃┡│└" or re.search(r" #+.* kept free", line)]
    assert len([line for line in drawn if " kept free" in line]) == 4, "three bars and what their letters mean"
    assert max(map(len, drawn)) <= columns
    assert "layers" in said, "no heading is broken"
    assert any("to next" in line and "weights" in line for line in drawn)
    rows = [line for line in drawn if re.match(r"│ \d", line)]
    assert [re.search(r"│ (\d+)-\d+ \(\d+\) ", row) is not None for row in rows] == [True] * 3
    assert "…" not in "".join(rows), "no figure is cut"


# Replicas


def test_replicas_as_json(command: Command) -> None:
    code, said = command.place("--replicas", "2", "--replica-domain", "node", "--json")
    assert code == 0
    found = ReplicatedPlan.model_validate_json(said)
    rules = Constraints(replicas=2, replica_domain="node", workload=Workload(prefill_tokens=512))
    validate_replicas(command.model, command.inventory.devices, command.inventory.topology, rules, found)


def test_replicas_as_a_picture(command: Command) -> None:
    code, said = command.place("--replicas", "2", "--explain", "--exclude", "b/cuda:1")
    assert code == 0
    assert said.startswith("m: 2 replicas on ")
    shown, _, why = said.partition("why:")
    parts = re.split(r"^replica \d: 16 layers in 1 stage on .*$", shown, flags=re.MULTILINE)
    assert len(parts) == 3
    for part in parts[1:]:
        assert "┃ stage ┃" in part
        assert " kept free" in part
        assert " per token: " in part
    assert re.search(r"^all replicas together, pipelines full: ~?[\d.]+ tokens a second$", shown, re.MULTILINE)
    assert re.search(r"^latency .*, no replicas are below .*, gap ", shown, re.MULTILINE)
    assert "- left out, b/cuda:1: excluded by the constraints" in why
    assert "- replica 1: of " in why
    assert "- replica 2: of " in why


def test_too_many_replicas_are_refused_with_a_report(command: Command) -> None:
    code, said = command.place("--replicas", "5")
    assert code == 1
    assert said.startswith("No plan for m: ")
    assert "place 4 replicas instead of 5" in said
    code, said = command.place("--replicas", "5", "--json")
    assert code == 1
    told = json.loads(said)
    assert told["constraint"] == told["report"]["constraint"] == "replicas"
    assert told["report"]["most_replicas"] == 4


# Refusals


def test_a_refusal_says_its_figures_once(command: Command) -> None:
    command.model = ModelSpec.uniform("m", layers=16, size_bytes=60 * GIB)
    code, said = command.place()
    assert code == 1
    assert said.count("GiB are needed") == 1
    assert said.count("of 16 layers find room") == 1
    assert "Any one of these changes makes it possible:" in said


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (["--min-stages", "9"], "--min-stages 9"),
        (["--max-stages", "1", "--min-nodes", "2"], "--min-nodes 2"),
        (["--max-link-ms", "0.0001", "--min-stages", "4"], "--min-stages"),
    ],
)
def test_a_refusal_names_options_and_no_fields(command: Command, options: list[str], option: str) -> None:
    code, said = command.place("--tensor-parallel", "1", *options)
    assert code == 1
    assert option in said
    assert not re.search(r"\b(min|max)_\w+", said)


# Files at the wrong place


def test_files_that_are_taken_for_another_kind_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, cluster = tmp_path / "config.json", tmp_path / "cluster.json"
    config.write_text(json.dumps({"model_type": "llama"}))
    cluster.write_text(Inventory(devices=(card("a", 0),)).model_dump_json())
    empty = tmp_path / "empty"
    empty.mkdir()
    for model, devices, said in (
        (cluster, cluster, f"is a file of devices and no model (give it as --cluster {cluster})"),
        (empty, cluster, "has neither a config.json nor safetensors"),
    ):
        assert main(["place", str(model), "--cluster", str(devices)]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(GPUError, match=r"is no file of devices: it has none \(docs/placement.md has the format\)"):
        read_inventory(str(config))


# The config.json of safetensors


def test_weights_without_a_config_beside_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "torch_dtype": "bfloat16",
        "max_position_embeddings": 512,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": [100, 64], "lm_head.weight": [100, 64], "model.norm.weight": [64]}
    for layer in range(2):
        for name, shape in {
            "self_attn.q_proj": [64, 64], "self_attn.k_proj": [32, 64], "self_attn.v_proj": [32, 64],
            "self_attn.o_proj": [64, 64], "mlp.gate_proj": [128, 64], "mlp.up_proj": [128, 64],
            "mlp.down_proj": [64, 128], "input_layernorm": [64], "post_attention_layernorm": [64],
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    weights, elsewhere = tmp_path / "model.safetensors", tmp_path / "elsewhere"
    weights.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text(json.dumps(config))
    (tmp_path / "cluster.json").write_text(Inventory(devices=(card("a", 0),)).model_dump_json())
    given = ["place", str(weights), "--cluster", str(tmp_path / "cluster.json"), "--json"]
    assert main([*given, "--config", str(elsewhere / "config.json")]) == 0
    plan = Plan.model_validate_json(capsys.readouterr().out)
    assert (plan.layer_count, plan.workload.context_tokens) == (2, 512)
    assert plan.stages[0].held[0].weights == end, "bytes are those of the weights' file"
    assert main([*given, "--config", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    assert main(["place", str(elsewhere), *given[2:], "--config", str(elsewhere / "config.json")]) == 2
    assert "--config is for safetensors" in capsys.readouterr().err


# What it imports


def test_a_file_of_devices_needs_no_cluster_engine(command: Command) -> None:
    command.place()
    code = (
        "import sys\nfrom gpurt.cli.main import main\n"
        f"code = main(['place', {str(command.folder / 'model.json')!r}, '--cluster', "
        f"{str(command.folder / 'cluster.json')!r}, '--json'])\n"
        "print(code, *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    code_told, *loaded = done.stdout.splitlines()[-1].split()
    assert code_told == "0"
    assert "gpurt.placement.solver" in loaded
    heavy = r"gpurt\.(cluster\.(worker|master|publisher|monitoring|\w*engine|nats\w*)|discovery)\b|(nats|zenoh|rich)\b"
    assert [name for name in loaded if re.match(heavy, name)] == []


def test_the_endpoint_that_help_tells_is_the_worker_s() -> None:
    assert observing.DEFAULT_ENDPOINT == DEFAULT_ENDPOINT
