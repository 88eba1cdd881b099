"""Which CuPy is installed, and whether it is the one for the vendor that is asked for."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, Final

from gpurt.backends.cupy.runtime import ROCM_LIBRARIES_HINT, import_runtime
from gpurt.errors import BackendUnavailable, ReasonCode

_ROCM_LIBRARY: Final = re.compile(r"\blib(?:amdhip|hip|roc)[\w-]*\.so[.\d]*|\bamdhip64\w*\.dll", re.IGNORECASE)
_CUPY: Final = re.compile(r"(?:amd[-_])?cupy(?:[-_](?:cuda|rocm)[-_\w]*)?", re.IGNORECASE)
"""Names of the distributions that bring the package ``cupy``; ``amd-cupy`` is AMD's own build."""


def load_runtime(backend: str, *, hip: bool, install_hint: str) -> Any:
    """Import CuPy's runtime module. Blocking.

    Raises:
        BackendUnavailable: ``no_library``: not installed, installed twice, not loadable, or built for the other vendor.
    """

    def refused(text: str, hint: str) -> BackendUnavailable:
        return BackendUnavailable(text, backend=backend, reason=ReasonCode.NO_LIBRARY, install_hint=hint)

    wanted, other = ("ROCm", "CUDA") if hip else ("CUDA", "ROCm")
    if importlib.util.find_spec("cupy") is None and importlib.util.find_spec("cupy_backends") is None:
        raise refused(f"CuPy for {wanted} is not installed", install_hint)
    wheels = installed_wheels()
    anew = f"pip uninstall -y {' '.join(wheels) or 'cupy'}, then {install_hint}"
    if len(wheels) > 1:
        # Removing one of them takes files of the other with it, so all have to go.
        raise refused(f"{' and '.join(wheels)} are installed over each other: they share the package cupy", anew)
    built_for_other = f"the installed CuPy is built for {other}, not for {wanted}"
    try:
        runtime = import_runtime()
    except Exception as exc:
        said = _said(exc)
        missing = _ROCM_LIBRARY.search(str(exc))
        if missing is None:
            raise refused(f"CuPy is installed and cannot be loaded: {said}", install_hint) from exc
        if not hip:
            raise refused(f"{built_for_other}, and cannot be loaded: {said}", anew) from exc
        text = f"CuPy for ROCm is installed, and ROCm's {missing[0]} cannot be loaded: {said}"
        raise refused(text, ROCM_LIBRARIES_HINT) from exc
    if bool(runtime.is_hip) != hip:
        raise refused(built_for_other, anew)
    return runtime


def installed_wheels() -> tuple[str, ...]:
    """Names of the distributions whose files are where ``import cupy`` finds its package, sorted. Blocking.

    Only these are in each other's way: a second CuPy in another directory of ``sys.path`` is merely hidden.
    """
    spec = importlib.util.find_spec("cupy") or importlib.util.find_spec("cupy_backends")
    places = {Path(place).parent for place in (spec.submodule_search_locations if spec else None) or ()}
    # By file name first: to parse what every distribution says of itself takes 0.3 ms each.
    records = (record for place in places for record in place.glob("*cupy*-info"))
    names = (Distribution.at(record).metadata["Name"] for record in records)
    return tuple(sorted({name for name in names if name and _CUPY.fullmatch(name)}))


def said_first(trouble: BackendUnavailable, exc: BackendUnavailable) -> BackendUnavailable:
    """``exc``, CuPy's refusal, after what the system has against its devices: without a driver no library helps."""
    # Of a vendor that has nothing here, nothing is missing.
    absent = trouble.reason is ReasonCode.NO_DEVICE
    return BackendUnavailable(
        f"{trouble.message}; {exc.message}",
        reason=trouble.reason,
        backend=exc.backend,
        install_hint=None if absent else exc.install_hint,
        hint=trouble.hint if absent else "; ".join(filter(None, (trouble.hint, exc.hint))),
    )


def _said(exc: Exception) -> str:
    """The line that matters: ``import cupy`` puts what happened below a banner of advice."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip("= ")]
    if "Original error:" in lines[:-1]:
        return lines[lines.index("Original error:") + 1]
    return f"{type(exc).__name__}: {lines[0] if lines else ''}"
