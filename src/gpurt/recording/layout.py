"""What lies where in a recording, and its description.

::

    meta.json       when, by which gpurt, on which platform; which backends were asked
    environ.json    allow-listed variables (gpurt.recording.environment)
    root/           the files of /sys, /proc, /dev and /etc that readers read, as plain files
    nodes.json      device nodes: path, mode, owner, and whether the recorded process might open them
    tables/         answers of libraries: nvml.json, vulkan.json, … (gpurt.discovery.sight.TABLES)
    drivers.json    what each backend's own driver said, which nobody can be asked again

All but ``meta.json`` may be missing: what is not there was not recorded, and is said to be so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpurt.errors import GPUError
from gpurt.platforms import Platform
from gpurt.sources.recorded import read_recorded_json

ROOT: Final = "root"
TABLES: Final = "tables"
META: Final = "meta.json"
ENVIRON: Final = "environ.json"
NODES: Final = "nodes.json"
DRIVERS: Final = "drivers.json"

SCHEMA_VERSION: Final = 1
_MAX_BACKENDS: Final = 64


class Meta(BaseModel):
    """``meta.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = Field(default=SCHEMA_VERSION, alias="schema")
    recorded_at: str
    """ISO 8601, UTC."""
    platform: Platform
    gpurt: str | None = None
    python: str | None = None
    kernel: str | None = None
    container: str | None = None
    """Which sort of container it was recorded in."""
    backends: tuple[str, ...] | None = Field(default=None, max_length=_MAX_BACKENDS)
    """In the order in which they were asked; None: those of the platform."""
    masked: bool = False
    host: str | None = None
    """Fingerprint of the host (:func:`gpurt.sources.host_identity.host_fingerprint`), which the files, without the
    machine id, no longer give; None where it is masked."""
    note: str = ""
    """Where a recording comes from that was made by hand."""


def read_meta(directory: Path) -> Meta:
    """The description of the recording in ``directory``.

    Raises:
        GPUError: it is no recording, or of a newer gpurt.
    """
    content = read_json(directory, META)
    if content is None:
        raise GPUError(
            f"{directory} is not a recording: it has no {META}",
            hint="make one with: python -m gpurt.discover --record DIR",
        )
    try:
        meta = Meta.model_validate(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise GPUError(f"{directory / META} cannot be understood: {where}: {first['msg']}") from exc
    if meta.schema_version > SCHEMA_VERSION:
        raise GPUError(
            f"{directory} has schema {meta.schema_version}, this gpurt knows {SCHEMA_VERSION}", hint="upgrade gpurt"
        )
    return meta


def read_environ(directory: Path) -> dict[str, str]:
    """The recorded variables; none where they were not recorded.

    Raises:
        GPUError: the file cannot be understood.
    """
    content = read_json(directory, ENVIRON) or {}
    return {name: value for name, value in content.items() if isinstance(value, str)}


def read_json(directory: Path, name: str) -> dict[str, Any] | None:
    """The object in one file of a recording; None where there is no such file.

    Raises:
        GPUError: the file cannot be read, or is no JSON object.
    """
    try:
        content = read_recorded_json(directory, name)
    except FileNotFoundError:
        return None
    if not isinstance(content, dict):
        raise GPUError(f"{directory / name} is not a JSON object", hint="record again, or repair the file")
    return cast("dict[str, Any]", content)
