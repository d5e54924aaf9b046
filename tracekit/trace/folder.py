"""Where a trace lives, and how a file of it, or a shard of files, becomes visible: whole or not.

What readers need of a local and a remote folder is the same, since ``upath.UPath`` has the methods
of ``pathlib.Path``.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from tracekit.errors import TraceError, TracekitError
from tracekit.trace import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from upath import UPath

    AnyPath: TypeAlias = Path | UPath


class Folder(ABC):
    """Where a trace lives; nothing need be there yet.

    Parameters
    ----------
    path
        Its folder; a ``upath.UPath`` where it is remote.
    scratch
        A folder of this machine for the lock and for what is being written.
    """

    refusals: ClassVar[tuple[type[Exception], ...]]
    """What reading may raise because of the place, and not of tracekit."""

    advice: ClassVar[str]
    """What to do then."""

    doubt: ClassVar[str] = ""
    """What else it may mean that a file is not there."""

    def __init__(self, path: AnyPath, scratch: Path) -> None:
        self.path = path
        self.scratch = scratch

    @property
    def open_path(self) -> Path:
        """Local folder of what is being written; what is in it belongs to no trace."""
        return self.scratch / layout.OPEN

    @contextmanager
    def explained(self, path: AnyPath) -> Iterator[None]:
        """Turn what reading a file meets into one sentence; that it is missing is for the caller.

        Raises
        ------
        TraceError
            In place of ``refusals`` and of what is no Parquet.
        """
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, TracekitError):
            raise
        except (pa.ArrowInvalid, *self.refusals) as error:
            msg = f"{path} cannot be read ({first_line(error)}); {self.advice}."
            raise TraceError(msg) from error

    def exists(self, path: AnyPath) -> bool:
        """Whether a file is there."""
        with self.explained(path):
            return path.exists()

    def names(self) -> set[str]:
        """Return the names of the files and folders that are there."""
        return {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()

    def parquet(self, path: AnyPath) -> pq.ParquetFile:
        """Return an open Parquet file."""
        with self._opened(path) as source:
            return pq.ParquetFile(source, pre_buffer=True)

    def read_table(
        self,
        path: AnyPath,
        *,
        columns: Sequence[str] | None = None,
        filters: list[tuple[str, str, str]] | None = None,
    ) -> pa.Table:
        """Return a Parquet file's rows."""
        names = None if columns is None else list(columns)
        with self._opened(path) as source, source:
            return pq.read_table(source, columns=names, filters=filters)

    @abstractmethod
    def shards(self) -> list[AnyPath]:
        """Return the folders of the closed shards, in order."""

    @abstractmethod
    def fetch(self, name: str) -> Path:
        """Return a local path of one of the trace's own files, for readers that know no other."""

    @abstractmethod
    def num_bytes(self) -> int:
        """Return the bytes of all files of the trace."""

    @abstractmethod
    def add(self, name: str, write: Callable[[Path], object]) -> dict[str, Any]:
        """Add or replace one file, whole or not at all; return its size and SHA-256.

        Parameters
        ----------
        name
            Of the file, in the trace's folder.
        write
            Writes it, given a local path.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete one file, if it is there."""

    @abstractmethod
    def add_shard(self, built: Path, number: int) -> None:
        """Move a shard out of ``open_path`` into the trace, whole or not at all."""

    @abstractmethod
    def drop_shards(self) -> None:
        """Delete all shards."""

    def clean(self) -> None:
        """Delete what an earlier run left half written."""
        shutil.rmtree(self.open_path, ignore_errors=True)

    @abstractmethod
    def _open(self, path: AnyPath) -> Any:
        """Return an open file, as pyarrow reads one."""

    @contextmanager
    def _opened(self, path: AnyPath) -> Iterator[Any]:
        """Give an open file, or say in one sentence why not."""
        try:
            with self.explained(path):
                yield self._open(path)
        except FileNotFoundError as error:
            msg = f"{path} is missing; the trace is damaged, tracekit validate lists what is wrong."
            raise TraceError(msg) from error

    @contextmanager
    def _written(self, name: str, write: Callable[[Path], object]) -> Iterator[Path]:
        """Give the local path of a file that was written aside; it is gone afterwards."""
        self.open_path.mkdir(parents=True, exist_ok=True)
        path = self.open_path / name
        try:
            write(path)
            yield path
        finally:
            path.unlink(missing_ok=True)


def first_line(error: Exception) -> str:
    """Return what an error says, without its further lines."""
    return (str(error).splitlines() or [type(error).__name__])[0]
