"""Copy tunings in the registry file, so that a host measures them once and not in every process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

from gpurt.backends.cupy import copy_tuning
from gpurt.backends.cupy.copy_tuning import REVISION, CopyTuning
from gpurt.registry.measured import MeasuredFile
from gpurt.registry.records import TuningRecord, utc_now
from gpurt.runtime.lane import Lane
from gpurt.types import GPUDevice

CLOSE_WAIT_S: Final = 1.0
"""A save takes milliseconds. One that waits for another process's lock is left to end, or not, by itself."""

log = logging.getLogger("gpurt.tuning")


class TuningFile:
    """What is known of one driver's devices beyond this process. Any thread.

    That the file cannot be used is said once and is no error: every process then measures for itself.

    Args:
        path: the registry file; None is the one in the user's state directory.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: Mapping[int, CopyTuning] = {}
        self._devices: Sequence[GPUDevice] = ()
        self._settled: dict[int, CopyTuning] = {}
        """What need not be written: it came from the file, is on its way there, or is not for it."""
        self._writers: list[Lane] = []
        self._warned = False

    def open(self, devices: Sequence[GPUDevice], known: dict[int, CopyTuning], threads: int) -> None:
        """Add to ``known``, by position in ``devices``, what was measured with a crew of ``threads``. Reads the file.

        What is in ``known`` stays: this process has measured it. Devices that have no stable identity, or do not tell
        their driver's version, are measured by every process.
        """
        kept = self._load(devices, threads)
        with self._lock:
            self._devices, self._known, self._settled = devices, known, dict(kept)
        for index, tuning in kept.items():
            known.setdefault(index, tuning)

    def skip(self, index: int, tuning: CopyTuning) -> None:
        """``tuning`` was given by a caller, and need not be kept."""
        self._settled[index] = tuning

    def note(self, index: int) -> None:
        """Write what is known of a device by now, if it is new. Returns at once: somebody waits for a copy, and the
        disk may be slow."""
        with self._lock:
            tuning = self._known.get(index)
            if tuning is None or index >= len(self._devices) or tuning == self._settled.get(index):
                return
            self._settled[index] = tuning
            device = self._devices[index]
            # Without a crew nothing was measured, for want of pinned memory: a matter of the moment.
            if not tuning.threads or not _can_be_kept(device):
                return
            writer = Lane("gpurt:tuning")
            try:
                writer.submit(self._write, device, tuning)
            except RuntimeError as exc:  # the process can have no more threads
                self._complain(exc)
                return
            writer.stop()
            self._writers.append(writer)

    def close(self) -> None:
        """Wait a moment for what is being written. ``open`` may follow again."""
        with self._lock:
            writers, self._writers = self._writers, []
            self._devices, self._known = (), {}
        deadline = time.monotonic() + CLOSE_WAIT_S
        if not all([writer.wait_stopped(max(0.0, deadline - time.monotonic())) for writer in writers]):
            log.warning("a copy tuning is still being written after %g s", CLOSE_WAIT_S)

    def _load(self, devices: Sequence[GPUDevice], threads: int) -> dict[int, CopyTuning]:
        records = {record.key: record for record in reversed(MeasuredFile(self._path).tunings())}
        found: dict[int, CopyTuning] = {}
        for index, device in enumerate(devices):
            record = records.get((device.stable_id, device.backend, threads))
            if record is None or not _can_be_kept(device):
                continue
            if (record.driver_version, record.revision) != (device.driver_version, REVISION):
                log.info("%s was measured with driver %s: to be done again", device.device_id, record.driver_version)
                continue
            sizes = record.write_min_bytes, record.read_min_bytes
            if not set(sizes) <= {None, *copy_tuning.SIZES}:
                log.info("what is kept of %s is ignored: %s are no sizes that are measured", device.device_id, sizes)
                continue
            found[index] = CopyTuning(threads, *sizes)
        return found

    def _write(self, device: GPUDevice, tuning: CopyTuning) -> None:
        try:
            record = TuningRecord(
                device=device.stable_id,
                backend=device.backend,
                driver_version=device.driver_version or "",
                threads=tuning.threads,
                revision=REVISION,
                write_min_bytes=tuning.write_min_bytes,
                read_min_bytes=tuning.read_min_bytes,
                measured_at=utc_now(),
            )
            MeasuredFile(self._path).keep_tuning(record)
        except Exception as exc:  # whatever it is, nobody waits for this thread
            self._complain(exc)

    def _complain(self, exc: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("copy tunings are not kept, so every process measures for itself: %s", exc)


def _can_be_kept(device: GPUDevice) -> bool:
    stable = device.identity is not None and device.identity.stable and not device.simulated
    return stable and bool(device.driver_version)
