"""What the conformance suites have shown, by backend and device: collected by pytest, kept as JSON, shown in README.

``pytest … --conformance-results docs/conformance.json`` adds what a run shows to the file;
``python -m tests.support.conformance_results`` writes README's table anew from it.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Generator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parent.parent.parent
RESULTS: Final = ROOT / "docs" / "conformance.json"
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- made by tests/support/conformance_results.py -->"
END: Final = "<!-- end -->"

_OPTION: Final = "--conformance-results"
_PROPERTY: Final = "gpurt_device"
_SYSTEMS: Final = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}

# Backend → its library, and the platforms on which it is tried.
ABOUT: Final[Mapping[str, tuple[str, str]]] = {
    "cpu": ("NumPy", "all"),
    "cuda": ("CuPy, nvidia-ml-py", "Linux, Windows"),
    "rocm": ("CuPy for ROCm", "Linux, Windows with a CuPy of one's own"),
    "vulkan": ("vulkan", "Linux; elsewhere by name"),
    "opencl": ("pyopencl", "all, by name"),
    "metal": ("MLX", "macOS"),
    "directml": ("onnxruntime-directml", "Windows"),
    "tflite": ("LiteRT", "Android, iOS; elsewhere by name"),
}


class Results:
    """Collects on the process that pytest was started as, also with workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: dict[tuple[str, str, str], dict[str, int]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not (report.when == "setup" and report.skipped):
            return
        for name, value in report.user_properties:
            if name == _PROPERTY:
                key: tuple[str, str, str] = tuple(value)  # type: ignore[assignment]
                counts = self.counts.setdefault(key, {"passed": 0, "failed": 0, "skipped": 0})
                counts[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        kept: list[dict[str, Any]] = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else []
        system = f"{_SYSTEMS.get(sys.platform, sys.platform)}, Python {platform.python_version()}"
        for (backend, device, kind), counts in self.counts.items():
            row = {"backend": backend, "device": device, "kind": kind, "system": system, **counts}
            row["date"] = datetime.now(UTC).date().isoformat()
            kept = [each for each in kept if (each["backend"], each["device"]) != (backend, device)]
            kept.append(row)
        kept.sort(key=lambda each: (list(ABOUT).index(each["backend"]), each["device"]))
        self.path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, type=Path, default=None, help="add what the conformance suites show to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption(_OPTION)
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(path))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    value = yield
    cls: Any = getattr(request.node, "cls", None)
    if fixturedef.argname == "backend" and getattr(cls, "gpurt_conformance", False):
        devices = getattr(value, "devices", ())
        if devices and devices[0].backend in ABOUT:
            device = devices[0]
            stand_in = getattr(cls, "stand_in", None)
            driver = (device.driver_version or "").partition(",")[0]
            name = stand_in or (f"{device.name} ({driver})" if driver else device.name)
            kind = "stand-in" if stand_in else str(device.kind)
            request.node.user_properties.append((_PROPERTY, (device.backend, name, kind)))
    return value


def table(results: list[dict[str, Any]]) -> str:
    """README's table of backends."""
    lines = [
        "| backend | library | platforms | conformance on software devices | on real hardware |",
        "|---|---|---|---|---|",
    ]
    for backend, (library, platforms) in ABOUT.items():
        rows = [each for each in results if each["backend"] == backend]
        hardware = [each for each in rows if each["kind"] not in ("software", "stand-in", "cpu")]
        if backend == "cpu":
            real = "the same, on any machine"
        else:
            real = "; ".join(map(_told, hardware)) or "unverified on hardware"
        software = "; ".join(_told(each) for each in rows if each not in hardware) or "none"
        lines.append(f"| `{backend}` | {library} | {platforms} | {software} | {real} |")
    return "\n".join(lines)


def _told(row: Mapping[str, Any]) -> str:
    # The kit skips what a device cannot do, such as views of memory that the host does not see.
    names = {"passed": "passed", "failed": "failed", "skipped": "do not apply"}
    counts = ", ".join(f"{row[key]:,} {name}" for key, name in names.items() if row[key])
    return f"{row['device']}: {counts} ({row['date']}, {row['system']})"


def readme_table(text: str) -> str:
    """What stands in README now."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    made = table(json.loads(RESULTS.read_text(encoding="utf-8")))
    README.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
