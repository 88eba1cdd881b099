"""Whether predictions hold: time per token on simulated devices, and load time on real ones.

    python benchmarks/prediction.py [--tokens 20]
    python benchmarks/prediction.py --gpu [--gib 4] [--directory DIR] [--backend cuda]

Without ``--gpu``: clusters whose devices and links sleep by their own model. The planner gets what was measured on
them; its plan is run, and the time from token to token is compared with what it has predicted, for one batch at a time
(``latency_seconds``) and with as many batches under way as keep every stage busy (``bottleneck_seconds``).

With ``--gpu``: every device of the backend is calibrated, a checkpoint of so many GiB for each device is written,
placed and loaded by its plan, and the time is compared with :func:`gpurt.placement.predict_load`. The page cache holds
the file, which is what was calibrated. ``--backend cpu`` does the same where there is no GPU.

Exit code 1 when a prediction is further off than it may be: 10 % for tokens, 25 % for loads.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpurt.calibration import calibrate
from gpurt.factory import create_backend
from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    ModelSpec,
    Plan,
    Topology,
    Workload,
    device_from_gpu,
    predict_load,
)
from gpurt.testing.pipeline import Network, SimulatedCluster
from gpurt.testing.profiles import PROFILES, Profile
from gpurt.weights import load_safetensors

MIB, GIB = 1 << 20, 1 << 30
TOKENS_WITHIN, LOADS_WITHIN = 0.10, 0.25
WORKLOAD = Workload(context_tokens=2048)
LAYERS_PER_DEVICE = 8
LOADS = 5


def profile(key: str, mib: int, memory_gbps: float, tflops: float, link_gbps: float, latency_s: float) -> Profile:
    """A slow device, so that the host's own memory is fast enough to stand for its memory."""
    return replace(
        PROFILES["rtx-4090"],
        key=key,
        name=key,
        memory_bytes=mib * MIB,
        memory_bandwidth_gbps=memory_gbps,
        fp16_tflops=tflops,
        host_link_gbps=link_gbps,
        latency_s=latency_s,
        peer_link_gbps=None,
    )


FAST = profile("fast", 48, 0.4, 0.0125, 0.2, 0.0005)
MIDDLE = profile("middle", 48, 0.2, 0.005, 0.2, 0.0005)
SLOW = profile("slow", 96, 0.2, 0.002, 0.1, 0.001)

CLUSTERS = {
    "one node, two devices alike": ({"a": [FAST, FAST]}, Network(0.1, 0.001)),
    "three nodes, all unlike": ({"a": [FAST, FAST], "b": [MIDDLE], "c": [SLOW]}, Network(0.05, 0.002)),
    "three nodes, slow network": ({"a": [FAST], "b": [MIDDLE], "c": [SLOW]}, Network(0.002, 0.01)),
}


def model(mib: int, *, layers: int = 16) -> ModelSpec:
    """So many MiB in all layers, and arithmetic that the slow device waits for and the others do not."""
    each = mib * MIB // layers
    return ModelSpec.uniform(
        "prediction",
        layers=layers,
        size_bytes=each * layers,
        kv_bytes_per_token=each // 10 // WORKLOAD.context_tokens,
        flops_per_token=12.0 * each,
        activation_bytes_per_token=16384,
        embedding_bytes=each // 2,
        head_bytes=each // 2,
        head_flops_per_token=6.0 * each,
    )


async def tokens(count: int) -> bool:
    print(f"{'cluster':<30} {'objective':<11} {'stages':>6} {'predicted ms':>13} {'measured ms':>12} {'off':>8}")
    holds = True
    for name, (nodes, network) in CLUSTERS.items():
        total = sum(each.memory_bytes for profiles in nodes.values() for each in profiles) // MIB
        spec = model(int(total * 0.7))
        async with SimulatedCluster(nodes, network) as cluster:
            devices = await cluster.measure_devices()
            topology = await cluster.measure_links(devices)
            for objective in ("latency", "throughput"):
                plan = await ConstraintSatisfactionPlacement().solve_placement_async(
                    spec, devices, topology, Constraints(workload=WORKLOAD), objective=objective
                )
                if objective == "latency":
                    predicted, in_flight = plan.predicted.latency_seconds, 1
                else:
                    predicted, in_flight = plan.predicted.bottleneck_seconds, 2 * len(plan.stages) + 1
                measured = await cluster.run(plan, spec, steps=count, in_flight=in_flight)
                off = predicted / measured - 1
                holds &= abs(off) <= TOKENS_WITHIN
                print(
                    f"{name:<30} {objective:<11} {len(plan.stages):>6} {predicted * 1e3:>13.2f} "
                    f"{measured * 1e3:>12.2f} {off:>+8.1%}",
                    flush=True,
                )
    return holds


async def loads(backend_name: str | None, gib: float, directory: str | None) -> bool:
    async with await create_backend(backend_name) as backend:
        began = time.perf_counter()
        found = [each for each in await calibrate(backend, keep=False, busy=True, weights_directory=directory)]
        print(f"calibrated {len(found)} devices in {time.perf_counter() - began:.1f} s")
        for each in found:
            print(f"  {each.device.device_id} {each.device.name}: {each.speeds or each.failure}")
        devices = tuple(
            device_from_gpu(each.device, node="here", key=each.device.device_id, measured=each.speeds) for each in found
        )
        layers = LAYERS_PER_DEVICE * len(devices)
        spec = ModelSpec.uniform(
            "checkpoint", layers=layers, size_bytes=int(gib * GIB) * len(devices) // layers // 512 * 512 * layers
        )
        # Full devices but for a little, as a model that needs them all would: else one alone is the better plan.
        room = max(each.weight_bytes for each in spec.layers) * LAYERS_PER_DEVICE
        devices = tuple(
            each.model_copy(update={"usable_bytes": min(each.usable_bytes, room), "reserve_bytes": 0})
            for each in devices
        )
        plan = ConstraintSatisfactionPlacement().solve_placement(spec, devices, Topology())
        predicted = predict_load(plan, spec, devices)
        if predicted.seconds is None:
            print("how fast files load was not measured:", found)
            return False
        with tempfile.TemporaryDirectory(prefix="gpurt-prediction-", dir=directory) as folder:
            path = Path(folder, "model.safetensors")
            began = time.perf_counter()
            await asyncio.to_thread(write_checkpoint, path, spec)
            print(f"wrote {spec.weight_bytes / GIB:.2f} GiB in {time.perf_counter() - began:.1f} s")
            placement = {f"model.layers.{layer}": device_of(plan, layer) for layer in range(layers)}
            figures: list[float] = []
            for _ in range(LOADS):
                began = time.perf_counter()
                async with await load_safetensors(path, backend, placement) as weights:
                    for each in devices:
                        await backend.synchronize(each.id.partition("/")[2])
                    figures.append(time.perf_counter() - began)
                    assert weights.size_bytes == spec.weight_bytes
    measured = statistics.median(figures)
    off = predicted.seconds / measured - 1
    for each in predicted.devices:
        print(f"  {each.device}: {each.bytes / GIB:.2f} GiB, alone {each.seconds or 0:.3f} s")
    print(f"loads: {', '.join(f'{each:.3f}' for each in figures)} s")
    rate = spec.weight_bytes / measured / 1e9
    print(
        f"load time of {spec.weight_bytes / GIB:.2f} GiB to {len(plan.devices)} devices: predicted "
        f"{predicted.seconds:.3f} s, measured {measured:.3f} s ({rate:.1f} GB/s), {off:+.1%}"
    )
    return abs(off) <= LOADS_WITHIN


def device_of(plan: Plan, layer: int) -> str:
    stage = next(stage for stage in plan.stages if stage.start <= layer < stage.end)
    return stage.devices[0].partition("/")[2]


def write_checkpoint(path: Path, spec: ModelSpec) -> None:
    """One tensor of random bytes for each layer; the header is the format's: its length, then JSON."""
    import json

    header: dict[str, object] = {}
    end = 0
    for index, layer in enumerate(spec.layers):
        offsets = [end, end := end + layer.weight_bytes]
        header[f"model.layers.{index}.weight"] = {"dtype": "U8", "shape": [layer.weight_bytes], "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pattern = np.random.default_rng(0).integers(0, 256, 64 * MIB, np.uint8).tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for left in range(end, 0, -len(pattern)):
            file.write(pattern[:left])
        file.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--gpu", action="store_true", help="predict load times on real devices")
    parser.add_argument("--backend", help="of --gpu; default: the best of this machine")
    parser.add_argument("--gib", type=float, default=4.0, help="of weights for each device")
    parser.add_argument("--directory", help="where the checkpoint is written; default: that of temporary files")
    options = parser.parse_args()
    if options.gpu:
        holds = asyncio.run(loads(options.backend, options.gib, options.directory))
    else:
        holds = asyncio.run(tokens(options.tokens))
    print("holds" if holds else "does not hold")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
