"""Making a recording of this machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform as host_platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurt.discovery.probe import ChildProber
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.platforms import current_platform
from gpurt.recording import layout
from gpurt.recording.answers import DriverAnswer, answers_of
from gpurt.recording.environment import allowed
from gpurt.recording.files import Files, make_stand_ins, read_files, write_files
from gpurt.recording.mask import Masker, host_masker
from gpurt.recording.nodes import Node, list_nodes
from gpurt.recording.place import container_of
from gpurt.recording.prober import KeepingProber
from gpurt.recording.staging import Staging
from gpurt.recording.tables import read_tables
from gpurt.runtime.lane import off_loop
from gpurt.sources.host_identity import host_fingerprint


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded."""

    directory: Path
    result: DiscoveryResult
    """As discovery gave it on this machine."""
    files: int
    left_out: Mapping[str, str]
    """Files that could not be copied, and why."""


async def record(
    directory: Path,
    *,
    environ: Mapping[str, str],
    backends: Sequence[str] | None = None,
    probe_timeout: float | None = None,
    mask: bool = False,
    root: Path = Path("/"),
) -> Recorded:
    """Discover the devices of this machine and write all that the answer rests on into ``directory``.

    Every driver is opened and every device checked, whatever the registry remembers; the registry is not touched. The
    directory is there when it is complete, and not before: whatever goes wrong, nothing half-written is left.

    Args:
        directory: must be new, or empty; its parent must be there.
        environ: the environment of the probes; of it only allow-listed variables are written.
        mask: replace UUIDs, serial numbers, names of host and user, home directories and addresses by pseudonyms. The
            machine id is replaced in any case; a recording that is not masked names the host's fingerprint, which
            is no secret, so that its devices have the identities of this machine.
        root: the file tree that is copied.

    Raises:
        GPUError: there is something in ``directory`` already, or it cannot be made.
        OSError: it cannot be written.
    """
    staging = await off_loop("recording", lambda: Staging(directory))
    try:
        return await _record(staging, environ, backends, probe_timeout, mask, root)
    finally:
        await off_loop("recording", staging.clear)


async def _record(
    staging: Staging,
    environ: Mapping[str, str],
    backends: Sequence[str] | None,
    probe_timeout: float | None,
    mask: bool,
    root: Path,
) -> Recorded:
    platform = current_platform(environ=environ)
    prober = KeepingProber(ChildProber())
    temporary = Path(await off_loop("recording", lambda: tempfile.mkdtemp(prefix="gpurt-record-")))
    try:
        async with GPUDiscoveryService(
            registry_path=temporary / "registry.json",
            backends=backends,
            probe_timeout=probe_timeout,
            environ=environ,
            prober=prober,
        ) as service:
            found = await service.discover_all_devices()
    finally:
        await off_loop("recording", lambda: shutil.rmtree(temporary, ignore_errors=True))
    # That registry is gone, and nobody is to look for it.
    result = found.model_copy(update={"registry": None, "persisted": False})
    answers = answers_of(prober.outcomes, result)
    tables = await read_tables([report.name for report in result.reports], environ, probe_timeout)

    def write() -> Recorded:
        files, nodes = read_files(root), list_nodes(root)
        meta = layout.Meta(
            schema=layout.SCHEMA_VERSION,
            recorded_at=result.timestamp,
            platform=platform,
            gpurt=_version(),
            python=host_platform.python_version(),
            kernel=f"{host_platform.system()} {host_platform.release()}",
            container=container_of(root),
            backends=tuple(report.name for report in result.reports),
            masked=mask,
            host=None if mask else host_fingerprint(root),
        )
        parts = _parts(meta, allowed(environ), nodes, answers, tables)
        masker = host_masker() if mask else None
        machine_id, replace = _other_host(root)
        if masker is not None:
            masker.learn(parts)
            for name, text in files.contents.items():
                masker.learn_file(text, name.rsplit("/", 1)[-1])
        _write(staging.place, parts, files, nodes, masker, replace)
        (staging.place / layout.ROOT / "etc").mkdir(parents=True, exist_ok=True)
        (staging.place / layout.ROOT / "etc/machine-id").write_text(f"{machine_id}\n")
        staging.publish()
        return Recorded(staging.directory, result, len(files.contents), files.left_out)

    def write_and_clear() -> Recorded:
        try:
            return write()
        finally:
            staging.clear()  # once more, after a caller who did not wait for this thread

    return await off_loop("recording", write_and_clear)


def _parts(
    meta: layout.Meta,
    environ: Mapping[str, str],
    nodes: Sequence[Node],
    answers: Mapping[str, DriverAnswer],
    tables: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """Content by file name."""
    return {
        layout.META: meta.model_dump(mode="json", by_alias=True),
        layout.ENVIRON: environ,
        layout.NODES: {"nodes": [node.model_dump(mode="json") for node in nodes]},
        layout.DRIVERS: {name: answer.model_dump(mode="json") for name, answer in answers.items()},
        **{f"{layout.TABLES}/{name}.json": table for name, table in tables.items()},
    }


def _write(
    directory: Path,
    parts: Mapping[str, Any],
    files: Files,
    nodes: tuple[Node, ...],
    masker: Masker | None,
    replace: tuple[str, str],
) -> None:
    (directory / layout.TABLES).mkdir(exist_ok=True)
    (directory / layout.ROOT).mkdir(exist_ok=True)
    for name, content in parts.items():
        text = json.dumps(content if masker is None else masker.mask(content), indent=1, allow_nan=False)
        if masker is not None:
            # The identity of the processor is made from the machine id.
            text = text.replace(masker.text(replace[0]), replace[1])
        (directory / name).write_text(f"{text}\n", encoding="utf-8")
    write_files(files, directory / layout.ROOT, masker)
    make_stand_ins(nodes, directory / layout.ROOT)


def _other_host(root: Path) -> tuple[str, tuple[str, str]]:
    """A machine id in place of the confidential one, and the keys of this host before and after."""
    ours = host_fingerprint(root)
    machine_id = hashlib.sha256(f"gpurt recording {ours}{os.urandom(8).hex()}".encode()).hexdigest()[:32]
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "etc").mkdir()
        (Path(temporary) / "etc/machine-id").write_text(machine_id)
        return machine_id, (f"host:{ours}", f"host:{host_fingerprint(Path(temporary))}")


def _version() -> str:
    from gpurt import __version__

    return __version__
