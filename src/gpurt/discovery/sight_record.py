"""What the families of :mod:`gpurt.discovery.sight` have in common: where they look, and how they say what they saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpurt.discovery.line import ProbeLine, Sighting
from gpurt.errors import BackendUnavailable, GPUError, ReasonCode
from gpurt.sources.host_identity import host_fingerprint
from gpurt.sources.recorded import check_lists, read_recorded_json
from gpurt.sources.sysfs import Skipped
from gpurt.sources.table import Absence
from gpurt.types import DeviceIdentity, DeviceKind, DeviceState, GPUDevice

SOFTWARE_REASON: Final = "software adapter: used only when asked for"


@dataclass(frozen=True, slots=True)
class View:
    """Where to look."""

    environ: Mapping[str, str]
    root: Path = Path("/")
    tables: Path | None = None

    def table(self, source: str, ask: Callable[[], object]) -> object:
        """The recorded answer of a source, or, where nothing is recorded at all, what ``ask`` says."""
        if self.tables is None:
            return ask()
        name = f"{source}.json"
        try:
            # The recording, in which tables may be links, is the directory above.
            return read_table(self.tables.parent, str(Path(self.tables.name) / name))
        except FileNotFoundError:
            return Absence(ReasonCode.NO_LIBRARY, f"the recording has no {name}").as_table()
        except GPUError as exc:
            return Absence(ReasonCode.ERROR, exc.message).as_table()


def read_table(directory: Path, name: str) -> object:
    """A recorded table below ``directory``. Blocking.

    Raises:
        FileNotFoundError: there is no such table.
        GPUError: it cannot be read, or lists more devices than any host has.
    """
    content = read_recorded_json(directory, name)
    check_lists(content, directory / name)
    return content


def sighted_device(
    *,
    device_id: str,
    name: str | None,
    vendor: str | None,
    backend: str,
    source: str,
    identity: DeviceIdentity,
    root: Path,
    kind: DeviceKind = DeviceKind.GPU,
    architecture: str | None = None,
    memory_bytes: int | None = None,
    memory_available: int | None = None,
    compute_units: int | None = None,
    clock_rate_mhz: int | None = None,
    bandwidth_gbps: float | None = None,
    driver_version: str | None = None,
    state: DeviceState = DeviceState.HEALTHY,
    state_reason: str | None = None,
    unified_memory: bool = False,
    memory_usable_bytes: int | None = None,
    memory_usable_source: str | None = None,
    numa_node: int | None = None,
) -> GPUDevice:
    """The record of a device that ``source`` shows and nobody has opened."""
    software = kind is DeviceKind.SOFTWARE
    return GPUDevice(
        device_id=device_id,
        name=name or f"{vendor or 'unknown'} device",
        vendor=vendor or "unknown",
        backend=backend,
        compute_capability=architecture,
        # A device of 0 bytes is a source that does not know; none of its memory being free is an answer.
        memory_bytes=memory_bytes or None,
        memory_available=memory_available if memory_bytes else None,
        compute_units=compute_units,
        tensor_core_count=None,
        max_threads_per_block=None,
        clock_rate_mhz=clock_rate_mhz,
        bandwidth_gbps=bandwidth_gbps,
        support_level="experimental",
        driver_version=driver_version,
        backend_name=source,
        identity=identity,
        kind=kind,
        state=state,
        state_reason=SOFTWARE_REASON if software else state_reason,
        usable=False,
        unified_memory=unified_memory,
        memory_usable_bytes=memory_usable_bytes,
        memory_usable_source=memory_usable_source,
        memory_pool_id=f"host:{host_fingerprint(root)}" if unified_memory else None,
        numa_node=numa_node,
        backends=(backend,),
    )


def sighted_line(
    devices: Sequence[GPUDevice],
    *,
    about: Mapping[str, Sighting] | None = None,
    notes: Iterable[str] = (),
    none: Absence | None = None,
    signature: str | None = None,
) -> ProbeLine:
    """What was seen.

    Args:
        notes: what people should know besides.
        none: why there is no device, or why none of them can be used.
    """
    said = "; ".join(notes)
    if none is not None:
        text = "; ".join(filter(None, (none.message, said)))
        return ProbeLine(
            stage="sighted", devices=tuple(devices), about=dict(about or {}), reason=none.reason, message=text
        )
    return ProbeLine(
        stage="sighted", devices=tuple(devices), about=dict(about or {}), message=said, signature=signature
    )


def failure_line(exc: Exception) -> ProbeLine:
    """Nothing was seen, because of an exception."""
    if isinstance(exc, BackendUnavailable):
        return ProbeLine(stage="sighted", reason=exc.reason, message=exc.message, hint=exc.hint)
    return ProbeLine(stage="sighted", reason=ReasonCode.ERROR, message=f"{type(exc).__name__}: {exc}")


def skipped_notes(skipped: Iterable[Skipped]) -> list[str]:
    """What might have been a device, and why it is not listed as one."""
    return [f"{each.where}: {each.why}" for each in skipped]


def doing(what: str) -> ProbeLine:
    """What comes next, for the report if it crashes or hangs."""
    return ProbeLine(stage="doing", message=what)
