"""``gpurt place``: a plan as a table, bars and sentences, from every kind of model and cluster that it reads."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpurt.cli import observing, place_inputs
from gpurt.cli.main import main
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.master import MasterConfig
from gpurt.cluster.records import ClusterSnapshot, DeviceRecord, NodeRecord, NodeState
from gpurt.cluster.state import encode_snapshot
from gpurt.errors import GPUError
from gpurt.placement import (
    Constraints,
    InvalidPlacementInput,
    LinkTable,
    ModelSpec,
    Plan,
    Topology,
    Workload,
    validate_plan,
)
from gpurt.placement.inventory import Inventory, inventory_of
from gpurt.placement.synthetic import model_for, synthetic_cluster
from gpurt.registry.records import Link as MeasuredLink
from gpurt.registry.records import LinkType
from gpurt.types import DeviceKind, DeviceState
from tests.cluster.support import HOST_A, device, snapshot

pytestmark = pytest.mark.wide

GIB = 1 << 30
CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


class Files:
    """A model and a cluster in a folder, and the command on them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        devices, topology = synthetic_cluster("home", 8, 2)
        left_out = {"n9/d0": "lost: fell off the bus"}
        self.inventory = Inventory(devices=devices, topology=topology, left_out=left_out)
        self.model = model_for(devices, 32, 0.7, tensor_parallel=(1, 2))
        self.cluster_file, self.model_file = folder / "cluster.json", folder / "model.json"
        self.model_file.write_text(self.model.model_dump_json())
        self.keep()

    def keep(self, **changes: Any) -> None:
        self.inventory = self.inventory.model_copy(update=changes)
        self.cluster_file.write_text(self.inventory.model_dump_json())

    def place(self, *options: str) -> tuple[int, str]:
        code = main(["place", str(self.model_file), "--cluster", str(self.cluster_file), *options])
        told = self.capsys.readouterr()
        return code, told.out or told.err


@pytest.fixture
def files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Files:
    return Files(tmp_path, capsys)


def test_json_is_the_plan_and_the_plan_is_valid(files: Files) -> None:
    code, said = files.place("--json", "--context", "1000", "--batch", "2", "--prefill", "4", "--seed", "3")
    assert code == 0
    plan = Plan.model_validate_json(said)
    rules = Constraints(workload=Workload(context_tokens=1000, batch=2, prefill_tokens=4))
    validate_plan(files.model, files.inventory.devices, files.inventory.topology, rules, plan)
    assert plan.seed == 3


def test_table_bars_and_totals(files: Files) -> None:
    code, said = files.place()
    assert code == 0
    plan = Plan.model_validate_json(files.place("--json")[1])
    assert said.startswith(f"synthetic: 32 layers in {len(plan.stages)} stages on {len(plan.devices)} devices")
    assert re.search(r"^│ 1 .*│ n\d+ +│ 0-\d+ \(\d+\) +│ +[\d.]+ GiB │", said, re.MULTILINE)
    bars = re.findall(r"^(\S+) +#+\+*\**\.*-* [\d.]+ GiB / ", said, re.MULTILINE)
    assert bars == list(plan.devices)
    assert re.search(r" per token: .* compute, .* memory, .* links, .* fixed\n", said)
    assert re.search(r"optimal: latency .*, no plan is below .*, gap 0\.0\d%\nsolved in .* by .*, seed 0", said)
    assert "~" in said, "links within a node are those of a class"
    links = files.inventory.topology.dense(files.inventory.devices)
    names = tuple(each.id for each in files.inventory.devices)
    table = LinkTable(names=names, latency_seconds=links.latency, bandwidth=links.bandwidth)
    files.keep(topology=Topology(table=table))
    assert "~" not in files.place()[1], "everything in this cluster is told"


def test_estimated_and_simulated_are_marked(files: Files) -> None:
    guessed = tuple(
        each.model_copy(update={"estimated": frozenset({"memory_bandwidth"})}) for each in files.inventory.devices
    )
    files.keep(devices=guessed, topology=Topology(), simulated=frozenset({each.id for each in guessed}))
    _, said = files.place()
    stages = [line for line in said.splitlines() if re.match(r"│ \d", line)]
    assert stages
    assert all(line.count("~") == 2 for line in stages)
    assert said.count("simulated") == 1, "said once where it is so of all"
    assert "all devices are simulated" in said
    some = frozenset({files.inventory.devices[0].id})
    files.keep(simulated=some)
    _, said = files.place("--require", next(iter(some)))
    assert "all devices are simulated" not in said
    assert "(simulated)" in said
    assert re.search(r"^~.* per token", said, re.MULTILINE)
    assert "~ not measured" in said


def test_explain_says_what_is_left_out_what_limits_and_what_would_help(files: Files) -> None:
    code, said = files.place("--explain", "--exclude", "n0000")
    assert code == 0
    why = said.partition("why:")[2]
    assert "- left out, n9/d0: lost: fell off the bus" in why
    assert re.search(r"- left out, n0000/d0.*: excluded by the constraints", why)
    assert re.search(r"- not used, .*: it is proved that no plan with them is better", why)
    assert re.search(r"- full, not one layer more fits: n\d+/d\d of stage \d \(", why)
    assert re.search(r"- of \S+ m?s for a token: \d+% reading weights and cache", why)
    assert re.search(r"- twice the free memory on every device would give .* instead of .*, \d+% less", why)


def test_no_plan_is_exit_code_one_with_reasons(files: Files) -> None:
    code, said = files.place("--max-stages", "1", "--exclude", "n0000")
    assert code == 1
    assert said.startswith("No plan for synthetic: ")
    assert re.search(r"^Left out, .*n0000.* is excluded: n0000/d0", said, re.MULTILINE)
    assert "Any one of these changes makes it possible:" in said
    assert "Not usable at all, n9/d0: lost: fell off the bus." in said
    code, said = files.place("--max-stages", "1", "--json")
    assert code == 1
    told = json.loads(said.splitlines()[-1])
    assert told["constraint"] == told["report"]["constraint"] == "max_stages"
    assert told["report"]["relaxations"]
    assert said.startswith('{"status":"infeasible","constraint":"max_stages"')


def test_every_rule_reaches_the_plan(files: Files) -> None:
    first, second = files.inventory.devices[0].id, files.inventory.devices[3].id
    options = ["--require", first, "--pin", f"30-31={second}", "--max-stages", "6", "--tensor-parallel", "1"]
    options += ["--min-stages", "4", "--spread", "node=1", "--max-link-ms", "50", "--min-nodes", "2"]
    code, said = files.place(*options, "--objective", "balanced", "--json")
    assert code == 0, said
    plan = Plan.model_validate_json(said)
    assert first in plan.devices
    assert {30, 31} <= set(plan.layers_of(second))
    assert 4 <= len(plan.stages) <= 6
    assert all(stage.tensor_parallel == 1 for stage in plan.stages)
    assert len({stage.node for stage in plan.stages}) == len(plan.stages)
    assert plan.objective == "balanced"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--require", "n77"], "--require: there is no device or node 'n77'"),
        (["--pin", "0-99=n0000"], "--pin '0-99=n0000': the model has layers 0 to 31"),
        (["--min-stages", "3", "--max-stages", "2"], "gpurt place: --max-stages 2 is below --min-stages 3"),
        (["--min-nodes", "3", "--max-nodes", "2"], "gpurt place: --max-nodes 2 is below --min-nodes 3"),
        (["--spread", "rack=1"], "--spread rack=1: no device has a label 'rack' (there are node, power, zone)"),
        (["--replicas", "2", "--replica-domain", "powr"], "--replica-domain: no device has a label 'powr'"),
        (["--replica-domain", "node"], "--replica-domain says how replicas are kept apart (say how many"),
        (["--require", "n0000", "--exclude", "n0000"], "gpurt place: --require: 'n0000' is excluded as well"),
        (["--batch", "2147483647", "--context", "2147483647"], "gpurt place: --context: the model takes"),
        (["--pin", "0-1=n0000/d0", "--pin", "2=n0001", "--pin", "3=n0000/d0"], "gpurt place: --pin 3=n0000/d0: cyclic"),
        (["--quantisation", "q4_k_m"], "a model specification has its own"),
    ],
)
def test_wrong_rules_are_exit_code_two(files: Files, options: list[str], said: str) -> None:
    code, told = files.place(*options)
    assert code == 2
    assert said in told


@pytest.mark.parametrize(
    "option",
    [
        "--batch 0", "--pin x", "--pin 3-1=a", "--spread node", "--context -1", "--max-link-ms nan", "--explain",
        "--seed -1", "--replicas 0", "--bogus", "--time x", f"--batch {'9' * 400}", f"--context {'9' * 400}",
        f"--max-stages {'9' * 400}", f"--pin 0-{'9' * 400}=a",
    ],
)  # fmt: skip
def test_usage_errors_are_one_line_with_the_option(files: Files, option: str) -> None:
    with pytest.raises(SystemExit) as caught:
        files.place("--json", *option.split())
    assert caught.value.code == 2
    (line,) = files.capsys.readouterr().err.splitlines()
    assert line.startswith("gpurt place: ")
    assert option.split()[0] in line
    assert line.endswith("(see gpurt place --help)")
    assert len(line) < 600


def test_a_device_that_is_left_out_may_be_excluded_too(files: Files) -> None:
    assert files.place("--exclude", "n9/d0")[0] == 0


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    saved, registry = tmp_path / "here.json", tmp_path / "registry.json"
    options = ["--save-cluster", str(saved), "--registry", str(registry), "--json"]
    assert main(["place", str(tmp_path / "config.json"), *options]) == 0
    plan = Plan.model_validate_json(capsys.readouterr().out)
    assert set(plan.devices) <= {each.id for each in Inventory.model_validate_json(saved.read_bytes()).devices}
    assert plan.workload.context_tokens == 2048, "the model has no more"
    assert main(["place", str(tmp_path), "--cluster", str(saved), "--json"]) == 0
    again = Plan.model_validate_json(capsys.readouterr().out)
    assert again.devices == plan.devices


# What it reads


def test_every_kind_of_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    by_config = place_inputs.read_model(str(tmp_path / "config.json"), quantisation="q4_0")
    assert (by_config.layer_count, by_config.quantisation) == (6, "q4_0")
    spec = tmp_path / "spec.json"
    spec.write_text(by_config.model_dump_json())
    assert place_inputs.read_model(str(spec)) == by_config
    for name in ("model.safetensors", "model.gguf"):
        (tmp_path / name).write_bytes(struct.pack("<Q", 0))
        with pytest.raises(GPUError):
            place_inputs.read_model(str(tmp_path / name))
        with pytest.raises(GPUError, match="are for a config"):
            place_inputs.read_model(str(tmp_path / name), dtype="float16")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "no JSON object"),
        ("{", "is not JSON"),
        (None, "cannot be read"),
        ('{"layers":' + "[" * 200_000, "too deep"),
    ],
    ids=["list", "cut", "none", "deep"],
)
def test_files_that_are_none(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    for read in (place_inputs.read_model, place_inputs.read_inventory):
        with pytest.raises(GPUError, match=said):
            read(str(file))


def test_a_wrong_inventory_names_its_field(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"devices": [{"id": "a", "node": "n", "usable_bytes": -1}]}))
    with pytest.raises(InvalidPlacementInput) as caught:
        place_inputs.read_inventory(str(file))
    assert caught.value.field == "devices.0.usable_bytes"
    assert str(caught.value).startswith(f"{file}: devices.0.usable_bytes: ")
    assert "in Inventory" not in str(caught.value)
    file.write_text(json.dumps({"devices": []}))
    with pytest.raises(InvalidPlacementInput) as caught:
        place_inputs.read_inventory(str(file))
    assert str(caught.value) == f"{file}: devices: there is no device"


def test_the_model_is_looked_at_before_the_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", str(tmp_path / "none.json"), "--cluster", str(tmp_path / "none-either.json")]) == 2
    assert "none.json' cannot be read" in capsys.readouterr().err


def test_the_way_back_is_labelled_and_the_width_is_that_of_columns(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    _, said = files.place("--min-stages", "2")
    rows = [line for line in said.splitlines() if line[:1] in "┏┡│└"]
    assert rows
    assert max(map(len, rows)) <= 100
    assert sum(" back │" in line for line in rows) == 1
    assert "back: the way of a token from the last stage to the first" in said


async def test_nobody_at_a_nats_address_is_told_of_nats() -> None:
    error = observing._nobody("nats://127.0.0.1:4222", 5.0)
    assert "no NATS server with JetStream answers at nats://127.0.0.1:4222" in str(error)
    assert "nats-server -js" in str(error)
    assert "gpurt master" not in str(error)


def test_numbers_of_hundreds_of_digits_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = {"id": "n/a", "node": "n", "usable_bytes": 10**9, "memory_bandwidth": 1e9, "compute_flops": 1e9}
    files = {
        "model": {"name": "m", "layers": [{"weight_bytes": 10**400}]},
        "good": {"name": "m", "layers": [{"weight_bytes": 10}]},
        "cluster": {"devices": [{**device, "usable_bytes": 10**400}]},
        "there": {"devices": [device]},
    }
    for name, document in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    for model, cluster in (("model", "there"), ("good", "cluster")):
        given = ["place", str(tmp_path / f"{model}.json"), "--cluster", str(tmp_path / f"{cluster}.json")]
        assert main(given) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_inventory_survives_its_file() -> None:
    """Links that do not exist stay apart from links that nobody measured."""
    inf, nan = float("inf"), float("nan")
    devices, _ = synthetic_cluster("home", 2, 1)
    table = LinkTable(
        names=tuple(each.id for each in devices),
        latency_seconds=np.array([[0, inf], [nan, 0]]),
        bandwidth=np.array([[1, 2], [3, inf]]),
    )
    there = Inventory(devices=devices, topology=Topology(table=table))
    back = Inventory.model_validate_json(there.model_dump_json())
    assert back.devices == devices
    before, after = there.topology.dense(devices), back.topology.dense(devices)
    assert before.latency.tolist() == after.latency.tolist()
    assert after.latency[0, 1] == inf
    assert after.estimated[1, 0]


def test_devices_that_cannot_be_used_are_left_out_with_the_reason() -> None:
    fine = device("GPU-a", memory_usable_bytes=70 * GIB)
    lost = device("GPU-b", 1, state=DeviceState.LOST, state_reason="fell off the bus", usable=False)
    soft = device("GPU-c", 2, kind=DeviceKind.SOFTWARE)
    mute = device("GPU-d", 3, memory_bytes=None, memory_available=None)
    link = MeasuredLink(
        src="GPU-a", dst="GPU-e", src_device_id="cuda:0", dst_device_id="cuda:4", link_type=LinkType.NVLINK,
        bandwidth_gbps=300.0, latency_us=9.0, measured_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    other = device("GPU-e", 4, memory_usable_bytes=70 * GIB, simulated=True)
    found = inventory_of({("n", each.stable_id): each for each in (fine, lost, soft, mute, other)}, links=[link])
    assert [each.id for each in found.devices] == ["n/GPU-a", "n/GPU-e"]
    assert found.left_out == {
        "n/GPU-b": "lost: fell off the bus",
        "n/GPU-c": "it computes on the processor, which is listed itself",
        "n/GPU-d": "nobody tells how much memory it has",
    }
    assert found.simulated == {"n/GPU-e"}
    (one,) = found.topology.links
    assert (one.source, one.target, one.bandwidth, one.transport) == ("n/GPU-a", "n/GPU-e", 300e9, "nvlink")
    assert one.latency_seconds == pytest.approx(9e-6)


def test_a_snapshot_of_a_cluster_is_a_cluster_too(tmp_path: Path) -> None:
    record = DeviceRecord(device=device(memory_usable_bytes=70 * GIB), available=True)
    common = {"state_since": 0.0, "epoch": "1", "seq": 0, "host": HOST_A, "devices": {"GPU-a": record}}
    nodes = {
        "n1": NodeRecord(node="n1", state=NodeState.HEALTHY, **common),  # type: ignore[arg-type]
        "n2": NodeRecord(node="n2", state=NodeState.LOST, **common),  # type: ignore[arg-type]
        "n3": NodeRecord(node="n3", state=NodeState.HEALTHY, draining=True, **common),  # type: ignore[arg-type]
    }
    file = tmp_path / "snapshot.json"
    file.write_text(ClusterSnapshot(nodes=nodes).model_dump_json())
    found = place_inputs.read_inventory(str(file))
    assert [each.id for each in found.devices] == ["n1/GPU-a"]
    assert found.left_out == {"n2/GPU-a": "its node is lost", "n3/GPU-a": "its node is draining"}
    file.write_text(json.dumps({"nodes": {"n1": {}}}))
    with pytest.raises(GPUError, match="is no snapshot of a cluster: nodes"):
        place_inputs.read_inventory(str(file))


async def test_the_devices_of_a_live_cluster() -> None:
    bus = InProcessBus("test")
    config = MasterConfig("test", listen=False)
    with pytest.raises(GPUError, match="no node of cluster test has a device"):
        await place_inputs.live_inventory(config, engine=InProcessEngine(bus))
    nodes = [InProcessEngine(bus) for _ in range(2)]
    for number, engine in enumerate(nodes):
        await engine.start()
        card = device(f"GPU-{number}", memory_usable_bytes=70 * GIB)
        await engine.join(f"n{number}", encode_snapshot(snapshot(card, node=f"n{number}")))
    found = await place_inputs.live_inventory(config, engine=InProcessEngine(bus))
    for engine in nodes:
        await engine.close()
    assert [each.id for each in found.devices] == ["n0/GPU-0", "n1/GPU-1"]
    model = ModelSpec.uniform("m", layers=4, size_bytes=GIB)
    from gpurt.placement import ConstraintSatisfactionPlacement

    assert ConstraintSatisfactionPlacement().solve_placement(model, found.devices, found.topology).layer_count == 4
