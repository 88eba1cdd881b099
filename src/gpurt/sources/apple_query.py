"""From macOS's own tools and MLX to the table that :func:`gpurt.sources.apple.read_apple` understands.

None of the tools needs root. MLX opens the GPU, so call :func:`query_apple` in a probe's process; the tools alone,
:func:`query_apple_tools`, may be asked anywhere but on an event loop's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from gpurt.errors import ReasonCode
from gpurt.sources.apple_tools import ToolAnswer, run_tool
from gpurt.sources.table import Absence, as_mapping, load_package

SYSCTL_NAMES: Final = (
    "hw.memsize",
    "hw.model",
    "hw.ncpu",
    "hw.perflevel0.logicalcpu",
    "hw.perflevel1.logicalcpu",
    "iogpu.wired_limit_mb",
    "kern.hv_vmm_present",
    "kern.osproductversion",
    "machdep.cpu.brand_string",
    "sysctl.proc_translated",
)

TOOLS: Final[dict[str, tuple[tuple[str, ...], float]]] = {
    # sysctl ends with status 1 where it does not know one of the names, and answers for the others.
    "sysctl": (("/usr/sbin/sysctl", *SYSCTL_NAMES), 2.0),
    "ioreg": (("/usr/sbin/ioreg", "-a", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"), 3.0),
    "system_profiler": (("/usr/sbin/system_profiler", "-json", "SPDisplaysDataType"), 10.0),
}
"""Commands, and seconds until they are killed."""

_MLX_KEYS: Final = (
    "device_name",
    "architecture",
    "memory_size",
    "max_recommended_working_set_size",
    "max_buffer_length",
    "resource_limit",
)


class Run(Protocol):
    """:func:`gpurt.sources.apple_tools.run_tool`, or a stand-in."""

    def __call__(self, argv: Sequence[str], deadline_s: float, *, partial: bool = False) -> ToolAnswer: ...


def query_apple(run: Run = run_tool, mx: Any = None) -> dict[str, Any]:
    """Everything. Blocking, about a second; at most the sum of the deadlines and what MLX takes.

    Args:
        mx: default: the module ``mlx.core``.
    """
    return {**query_apple_tools(run), "mlx": query_mlx(mx)}


def query_apple_tools(run: Run = run_tool) -> dict[str, Any]:
    """What the tools say; a tool that fails leaves its reason, and the others answer all the same."""
    table: dict[str, Any] = {}
    for name, (argv, deadline_s) in TOOLS.items():
        answer = run(argv, deadline_s, partial=name == "sysctl")
        if answer.output is None:
            absence = answer.absence or Absence(ReasonCode.ERROR, f"{name} said nothing")
            table[name] = absence.as_table()
        else:
            table[name] = answer.output.decode(errors="replace")
    return table


def query_mlx(mx: Any = None) -> dict[str, Any]:
    """What MLX says of the GPU. Blocking. Raises nothing that MLX may raise.

    Args:
        mx: default: the module ``mlx.core``.
    """
    mx = load_package("mlx.core") if mx is None else mx
    if isinstance(mx, Absence):
        return mx.as_table()
    try:
        if not mx.metal.is_available():
            return {"available": False}
        # Before 0.30 the function was Metal's own.
        info: object = mx.device_info(mx.gpu) if hasattr(mx, "device_info") else mx.metal.device_info()
    except Exception as exc:  # MLX's errors share no base but this one
        return Absence(ReasonCode.ERROR, f"MLX cannot tell about the GPU: {exc}").as_table()
    told = as_mapping(info) or {}
    return {"available": True, **{key: told[key] for key in _MLX_KEYS if key in told}}
