"""The files of one load: opened once, read, and watched for changes. Every method blocks; call them on one lane."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import cast

from gpurt.runtime.files import FileVersion, OpenedFile, brief_path
from gpurt.weights.document import MAX_DOCUMENT_BYTES
from gpurt.weights.errors import WeightsError, shown
from gpurt.weights.header import Header, TensorInfo, read_header
from gpurt.weights.index import parse_index
from gpurt.weights.plan import Gather
from gpurt.weights.quiet import drop, slices


class Source:
    """One open file. It stays open until the load is over, so that its inode number cannot be given to another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if "\0" in str(path):
            raise WeightsError("no file name has a NUL character", path=str(path))
        with reading(path):
            self._file = FileIO(path, "rb", opener=_open_without_waiting)
        try:
            with reading(path):
                status = os.fstat(self._file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise WeightsError("not a regular file", path=str(path))
                self._version = FileVersion.of(status)
        except BaseException:
            self._file.close()
            raise

    @property
    def opened(self) -> OpenedFile:
        """For somebody else to read from: the file that was checked, and no other that has its name by then."""
        return OpenedFile(str(self.path), self._version)

    def header(self) -> Header:
        """Read and check the header."""
        with reading(self.path):
            header = read_header(self._file, str(self.path))
        self.check_unchanged()
        return header

    def document(self) -> bytes:
        """The whole file, which is a small one."""
        if self._version.size > MAX_DOCUMENT_BYTES:
            raise WeightsError(
                f"{self._version.size:,} bytes are too many for an index; at most {MAX_DOCUMENT_BYTES:,}",
                path=str(self.path),
            )
        with reading(self.path):
            self._file.seek(0)
            return self._file.readall()

    def gather(self, gather: Gather) -> bytearray:
        """The runs of ``gather`` at their places, zeros between them."""
        result = bytearray(gather.size_bytes)
        target = memoryview(result)
        for run in gather.runs:
            at = run.block_offset - gather.block_offset
            self._read_into(run.file_offset, target[at : at + run.size_bytes])
        return result

    def check_unchanged(self) -> None:
        """Raise WeightsError unless the path still leads to the file as it was when it was opened."""
        with reading(self.path):
            now = (FileVersion.of(os.fstat(self._file.fileno())), FileVersion.of(os.stat(self.path)))
        for version in now:
            change = self._version.change(version)
            if change is not None:
                raise self.changed(change)

    def changed(self, change: str) -> WeightsError:
        """What to raise when the file is not any more what was checked."""
        return WeightsError(
            f"the file changed while it was read: {change}",
            path=str(self.path),
            hint="write to another name and rename it; then load again",
        )

    def close(self) -> None:
        self._file.close()

    def _read_into(self, offset: int, target: memoryview) -> None:
        done = 0
        with reading(self.path):
            self._file.seek(offset)
            while done < len(target):
                count = self._file.readinto(target[done:])
                if not count:
                    raise WeightsError(f"the file ended at byte {offset + done:,}", path=str(self.path))
                done += count


class Sources:
    """The file or the index and its shards. Closing is a call of its own, so that it can follow in the same lane
    whatever became of the calls before it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[Path, Source] = {}
        self._headers: dict[Path, Header] = {}
        self._shards: dict[str, Path] | None = None

    def names(self) -> list[str]:
        """Every tensor that there is. Of a sharded checkpoint only the index is read."""
        if self.path.suffix.lower() == ".json":
            index = self._source(self.path)
            self._shards = {}
            # One object for each file, since to compare paths takes long.
            paths: dict[str, Path] = {}
            same: dict[Path, Path] = {}
            shards = parse_index(index.document(), str(self.path))
            for name, shard in shards.items():
                if shard not in paths:
                    path = self.path.parent / shard
                    paths[shard] = same.setdefault(path, path)
                self._shards[name] = paths[shard]
            drop(shards)
            return list(self._shards)
        return [tensor.name for tensor in self._header(self.path).tensors]

    def tensors(self, names: Sequence[str]) -> list[tuple[Source, list[TensorInfo]]]:
        """The files that hold ``names``, opened and checked, each with those of them that it holds, in the order
        of their data. Other shards are not touched: they need not be on this machine."""
        if self._shards is None:
            header = self._header(self.path)
            if len(names) == len(header.tensors):  # all of them
                return [(self._source(self.path), list(header.tensors))]
            chosen: set[str] = set()
            for part in slices(names):
                chosen.update(part)
            tensors = [tensor for tensor in header.tensors if tensor.name in chosen]
            return [(self._source(self.path), tensors)]
        by_path: dict[Path, set[str]] = {}
        for name in names:
            by_path.setdefault(self._shards[name], set()).add(name)
        return [(self._source(path), self._of_shard(path, wanted, self._shards)) for path, wanted in by_path.items()]

    def check_unchanged(self) -> None:
        """Raise WeightsError unless every file is as it was when it was opened."""
        for source in self._open.values():
            source.check_unchanged()

    def close(self) -> None:
        """Also forgets what was in them."""
        for source in self._open.values():
            source.close()
        self._open.clear()
        tensors = [tensor for header in self._headers.values() for tensor in header.tensors]
        notes = [cast("dict[str, str]", header.metadata) for header in self._headers.values()]
        self._headers.clear()
        shards, self._shards = self._shards or {}, None
        for each in (tensors, shards, *notes):
            drop(each)

    def _of_shard(self, path: Path, wanted: set[str], shards: Mapping[str, Path]) -> list[TensorInfo]:
        result: list[TensorInfo] = []
        index = brief_path(str(self.path))
        for tensor in self._header(path).tensors:
            listed = shards.get(tensor.name, path)
            if listed is not path and listed != path:
                raise WeightsError(
                    f"it is in this file, and the index {index} says that it is in {shown(listed.name)}",
                    path=str(path),
                    tensor=tensor.name,
                    hint="index and files are of different versions; fetch the checkpoint again",
                )
            if tensor.name in wanted:
                result.append(tensor)
        missing = wanted.difference(tensor.name for tensor in result)
        if missing:
            raise WeightsError(
                f"it is not in this file, and the index {index} says that it is",
                path=str(path),
                tensor=min(missing),
                hint="index and files are of different versions; fetch the checkpoint again",
            )
        return result

    def _header(self, path: Path) -> Header:
        if path not in self._headers:
            self._headers[path] = self._source(path).header()
        return self._headers[path]

    def _source(self, path: Path) -> Source:
        if path not in self._open:
            self._open[path] = Source(path)
        return self._open[path]


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Failures of the file system as WeightsError."""
    try:
        yield
    except OSError as exc:
        hint = "is the path right, and is the checkpoint complete?" if isinstance(exc, FileNotFoundError) else None
        raise WeightsError(
            f"it cannot be read: {exc.strerror or type(exc).__name__}", path=str(path), hint=hint
        ) from exc


def _open_without_waiting(path: str, flags: int) -> int:
    # A named pipe would hold the lane until somebody writes to it.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
