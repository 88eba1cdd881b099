"""Soak: hundreds of thousands of random operations over one backend, many at once, some cancelled, all checked.

::

    python -m gpurt.testing.soak --steps 1000000 --backend cuda --limit 33554432

Every step allocates, frees, writes, reads or copies; one in ten is cancelled at a random moment, in one of asyncio's
or anyio's ways. What comes back is compared with a model. At the end everything is freed, and ledger, driver, process
and device must show that nothing is left. Exit code 0: nothing was wrong; 1: something was, and the first of it is
told; 2: the backend could not be opened.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Final

from gpurt.errors import GPUError
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.soak_run import Soak, SoakResult

DEFAULT_LIMIT: Final = 32 << 20
"""Bytes per device: so few that allocations are refused now and then."""


def create(name: str, limit_bytes: int) -> DriverBackend:
    """A backend with a limit per device, and with a pool."""
    match name:
        case "cuda":
            from gpurt.backends.cuda_backend import CUDABackend

            return CUDABackend(memory_limit=limit_bytes)
        case "cpu":
            from gpurt.backends.cpu_backend import CPUDriver

            return DriverBackend(CPUDriver(devices=2), memory_limit=limit_bytes)
        case "simulated":
            from gpurt.testing.simulated import create_simulated

            # The simulation suggests no pool, and has memory enough for one.
            return create_simulated("h100x2", memory_limit=limit_bytes, pool_bytes=limit_bytes // 2)
        case _:
            raise ValueError(f"no backend {name!r} to soak")


async def soak(name: str, steps: int, *, seed: int = 0, limit_bytes: int = DEFAULT_LIMIT) -> SoakResult:
    """Open a backend, soak it, close it.

    Raises:
        BackendUnavailable: with reason code and install hint.
    """
    async with create(name, limit_bytes) as backend:
        return await Soak(backend, seed=seed).run(steps)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gpurt.testing.soak", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--backend", choices=("cuda", "cpu", "simulated"), default="simulated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=int, default=DEFAULT_LIMIT, metavar="BYTES", help="memory per device (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="the result as a JSON object on stdout")
    args = parser.parse_args(arguments)
    if args.steps < 1 or args.limit < 1:
        parser.error("--steps and --limit must be positive")
    try:
        result = asyncio.run(soak(args.backend, args.steps, seed=args.seed, limit_bytes=args.limit))
    except GPUError as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    sys.stdout.write((json.dumps(result.document(), indent=2) if args.json else result.line()) + "\n")
    return 0 if result.problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
