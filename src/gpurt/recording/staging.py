"""A directory that is there when it is complete, and not before."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path

from gpurt.errors import GPUError


class Staging:
    """A place to write what will be ``directory``. Blocking; from any thread.

    Only its owner may look into it, for what is written may name a host and its devices. Beside ``directory``, so that
    it takes its name in one step; within it where it is there already and empty, for it may be a mounted one.

    Attributes:
        directory: as it was given.
        place: where to write.

    Raises:
        GPUError: there is something at ``directory`` already, or it cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._given_up = False
        self._mounted = directory.is_dir() and not any(directory.iterdir())
        if os.path.lexists(directory) and not self._mounted:
            raise _taken(directory)
        parent = directory if self._mounted else directory.absolute().parent
        try:
            self.place = Path(tempfile.mkdtemp(prefix=".gpurt-record-", dir=parent))  # of mode 0700
        except OSError as exc:
            raise GPUError(
                f"{directory} cannot be made: {exc.strerror}", hint="name a new directory in one of yours"
            ) from exc

    def publish(self) -> None:
        """What was written is ``directory`` from now on.

        Raises:
            GPUError: somebody else has put something there meanwhile, or nobody wants it any more.
            OSError: it cannot be renamed.
        """
        with self._lock:
            if self._given_up:
                raise GPUError(f"{self.directory} is not written: the recording was given up")
            if not self._mounted:
                if os.path.lexists(self.directory):
                    raise _taken(self.directory)
                os.rename(self.place, self.directory)
                return
            if any(path != self.directory / self.place.name for path in self.directory.iterdir()):
                raise _taken(self.directory)
            for path in sorted(self.place.iterdir()):
                os.rename(path, self.directory / path.name)
            self.place.rmdir()

    def clear(self) -> None:
        """Remove what was written and not published. A writer that is still at it finds no place to write in."""
        with self._lock:
            self._given_up = True
            # The name goes first, so that a writer cannot put back what was removed.
            gone = self.place.with_name(f"{self.place.name}-gone")
            with contextlib.suppress(OSError):
                os.rename(self.place, gone)
                shutil.rmtree(gone)


def _taken(directory: Path) -> GPUError:
    return GPUError(f"there is something at {directory} already", hint="name a new directory, or remove it first")
