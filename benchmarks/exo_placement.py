"""How long exo's question to the solver takes: full meshes of equally fast nodes, filled to 30, 60 and 90 %.

    python benchmarks/exo_placement.py [--nodes 4,8,16] [--seeds 8]

One line per number of nodes: median and greatest time of the clock and of the processor; the bound at 16 is 50 ms.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from gpurt.integrations.exo.answer import ExoPlacementRefused
from gpurt.integrations.exo.inputs import ExoModel, ExoNode, ExoRequest
from gpurt.integrations.exo.placement import place

LAYERS = 80


def question(count: int, fill: float, seed: int) -> ExoRequest:
    rng = random.Random(seed)
    nodes = tuple(ExoNode(f"n{n}", rng.randint(8 << 30, 128 << 30), frozenset({"MlxMetal"})) for n in range(count))
    edges = frozenset((a.id, b.id) for a in nodes for b in nodes if a is not b)
    size = int(sum(node.available_bytes for node in nodes) * fill)
    return ExoRequest(ExoModel("model", size, LAYERS), nodes, edges)


def measure(request: ExoRequest) -> tuple[float, float]:
    """Milliseconds of the clock and of the processor."""
    begun, used = time.perf_counter(), time.process_time()
    try:
        place(request)
    except ExoPlacementRefused as error:
        if error.constraint != "memory":
            raise
    return (time.perf_counter() - begun) * 1e3, (time.process_time() - used) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="4,8,16")
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    measure(question(4, 0.5, 0))
    for count in map(int, options.nodes.split(",")):
        taken = [measure(question(count, fill, seed)) for fill in (0.3, 0.6, 0.9) for seed in range(options.seeds)]
        clock, processor = ([pair[place] for pair in taken] for place in (0, 1))
        print(
            f"{count:3} nodes: clock {statistics.median(clock):4.0f} ms, at most {max(clock):4.0f}; "
            f"processor {statistics.median(processor):4.0f} ms, at most {max(processor):4.0f}"
        )


if __name__ == "__main__":
    main()
