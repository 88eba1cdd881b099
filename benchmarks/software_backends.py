"""``gpurt bench`` for every backend that this machine can run, in software where it has no such device.

Metal, DirectML and TFLite choose software devices when told so in code only. Here their names mean MLX, ONNX Runtime
and LiteRT on the processor; every other name means what it always does. Each backend is measured in a process of its
own: these libraries bring different builds of LLVM, which do not always bear each other.

    python benchmarks/software_backends.py [--quick] [--json] [--backend NAME]… [TOPIC]…
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence

from gpurt import factory
from gpurt.backends.directml_backend import DirectMLBackend
from gpurt.backends.metal_backend import MetalBackend
from gpurt.backends.tflite_gpu_backend import TFLiteGPUBackend
from gpurt.benchmarks import DEVICE_TOPICS, start
from gpurt.benchmarks.report import show
from gpurt.benchmarks.runner import measure
from gpurt.errors import GPUError

BACKENDS = ("cpu", "vulkan", "opencl", "metal", "directml", "tflite")
TOPICS = ("start", "wire", "loop")


def main() -> int:
    """Exit codes as those of ``gpurt bench``; of several backends the highest."""
    factory.register("metal", lambda: MetalBackend(device="cpu"), replace=True)
    factory.register("directml", lambda: DirectMLBackend(device_type="cpu"), replace=True)
    factory.register("tflite", lambda: TFLiteGPUBackend(accelerator="cpu"), replace=True)
    if sys.argv[1:2] == ["start"] and len(sys.argv) == 5:  # as gpurt.benchmarks.start is run
        start.main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"default: {' '.join(TOPICS)}")
    parser.add_argument("--backend", action="append", metavar="NAME", help=f"default: {' '.join(BACKENDS)}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout: backends and their results")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    topics: list[str] = args.topics or list(TOPICS)
    if unknown := set(topics) - set(DEVICE_TOPICS):
        parser.error(f"no topics of a device: {' '.join(sorted(unknown))}; choose from {' '.join(DEVICE_TOPICS)}")
    backends: list[str] = args.backend or list(BACKENDS)
    if args.one:
        return one(backends[0], topics, quick=args.quick, as_json=args.json)
    return every(backends, topics, quick=args.quick, as_json=args.json)


def one(backend: str, topics: Sequence[str], *, quick: bool, as_json: bool) -> int:
    try:
        results = asyncio.run(measure(topics, quick=quick, device_id=backend, start_program=(__file__, "start")))
    except GPUError as exc:
        print(f"{backend}: {' '.join(str(exc).split())}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(results.as_json(), ensure_ascii=False))
    else:
        show(results, None)
    for topic, error in results.failed.items():
        print(f"{backend}: {topic} failed: {' '.join(error.split())}", file=sys.stderr)
    return 1 if results.failed else 0


def every(backends: Sequence[str], topics: Sequence[str], *, quick: bool, as_json: bool) -> int:
    worst, records = 0, {}
    for backend in backends:
        words = [sys.executable, __file__, "--one", "--backend", backend]
        words += [option for option, given in (("--quick", quick), ("--json", as_json)) if given]
        child = subprocess.run([*words, *topics], stdout=subprocess.PIPE if as_json else None, text=True, check=False)
        worst = max(worst, child.returncode if child.returncode >= 0 else 1)
        if as_json and child.stdout:
            records[backend] = json.loads(child.stdout)
    if as_json:
        print(json.dumps(records, indent=2, ensure_ascii=False))
    return worst


if __name__ == "__main__":
    sys.exit(main())
