"""Write a trace: the manifest first, then whole shards, resumable by the same command."""

from __future__ import annotations

import errno
import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from tracekit.errors import InputError, TraceError
from tracekit.trace import layout
from tracekit.trace.manifest import differences, read_manifest
from tracekit.trace.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

SHARD_BYTES = 128 << 20
"""A shard closes at the end of the sequence that brings it to this size."""

SHARD_SEQUENCES = 64
"""A shard closes after so many sequences at the latest."""

SHARD_SECONDS = 60.0
"""A shard closes at the end of the first sequence after so long: no more is lost by a power cut."""


class TraceWriter:
    """A trace folder being written; a context manager that holds the folder's lock.

    Leaving it normally, or by Ctrl-C between sequences, closes the open shard; leaving it by any
    other exception keeps the sequences that ended and drops the one that was open.

    Parameters
    ----------
    path
        Folder of the trace: new, empty, or a trace of the same settings to go on with.
    manifest
        Content of ``trace.json``; of an existing trace its ``settings`` and ``model`` must agree.
    overwrite
        Delete what is there and start anew.

    Raises
    ------
    InputError
        If the folder holds something else, is in use, or its settings differ (they are named).
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.path = path
        self.manifest = dict(manifest)
        self._overwrite = overwrite
        self._lock = FileLock(path / layout.LOCK, timeout=0)
        self._shard: Shard | None = None
        self._opened = 0.0
        self._number = 0
        self.finished: set[str] = set()

    def __enter__(self) -> Self:
        """Lock the folder, and start a trace or find what an earlier run finished."""
        _refuse_foreign(self.path)
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
            except Timeout:
                msg = f"another recorder is writing {self.path}; wait for it or choose another -o."
                raise InputError(msg) from None
            try:
                self._start()
            except BaseException:
                self._lock.release()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the open shard; after a disk error drop it, the closed ones stay."""
        try:
            if self._shard is not None and isinstance(error, OSError):
                self._shard.discard()
            elif self._shard is not None:
                self.close_shard()
        finally:
            self._shard = None
            self._lock.release()

    @property
    def shard(self) -> Shard:
        """The open shard; opened when first used."""
        if self._shard is None:
            self._shard = Shard(self.path, self._number)
            self._opened = time.monotonic()
        return self._shard

    def end_sequence(self, columns: Mapping[str, Any]) -> None:
        """Enter a finished sequence, and close the shard if it is large enough."""
        self.shard.end_sequence(columns)
        self.finished.add(columns["sequence_id"])
        if (
            self.shard.num_bytes >= SHARD_BYTES
            or self.shard.num_sequences >= SHARD_SEQUENCES
            or time.monotonic() - self._opened >= SHARD_SECONDS
        ):
            self.close_shard()

    def close_shard(self) -> None:
        """Close the open shard, or drop it if no sequence ended in it."""
        shard, self._shard = self.shard, None
        if shard.num_sequences:
            shard.close()
            self._number += 1
        else:
            shard.discard()

    def update_manifest(self, **entries: Any) -> None:
        """Add entries to ``trace.json``."""
        self.manifest.update(entries)
        layout.write_json(self.path / layout.MANIFEST, self.manifest)

    def _start(self) -> None:
        manifest = self.path / layout.MANIFEST
        shutil.rmtree(self.path / layout.OPEN, ignore_errors=True)
        if self._overwrite:
            shutil.rmtree(self.path / layout.SHARDS, ignore_errors=True)
            manifest.unlink(missing_ok=True)
        # What holds no sequence yet ties nobody to its settings.
        if manifest.exists() and any((self.path / layout.SHARDS).glob("[0-9]*")):
            self._resume()
        else:
            for name in (layout.VOCABULARY, layout.WEIGHTS):
                (self.path / name).unlink(missing_ok=True)
            layout.write_json(manifest, self.manifest)

    def _resume(self) -> None:
        there = read_manifest(self.path)
        if differing := differences(there, self.manifest):
            msg = (
                f"{self.path} was recorded with other settings ({'; '.join(differing)}); "
                "repeat them, choose another -o, or pass --overwrite."
            )
            raise InputError(msg)
        # A larger limit goes on: the sequences that are there do not depend on it.
        self.manifest = there | {"settings": dict(self.manifest["settings"])}
        for shard in sorted((self.path / layout.SHARDS).glob("[0-9]*")):
            try:
                ids = pq.read_table(shard / "sequences.parquet", columns=["sequence_id"])
            except (OSError, pa.ArrowInvalid) as error:
                msg = (
                    f"{shard} has no readable sequences.parquet ({type(error).__name__}); restore "
                    "it, or delete the shard's folder to record its sequences again."
                )
                raise TraceError(msg) from error
            self.finished.update(ids["sequence_id"].to_pylist())
            self._number = int(shard.name) + 1


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what a disk or its permissions refuse into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        msg = f"cannot write {error.filename or path}: {what}; what was finished before is kept."
        raise InputError(msg) from error


def _refuse_foreign(path: Path) -> None:
    """Raise if the folder is a file or holds something that is no trace."""
    if path.exists() and not path.is_dir():
        msg = f"{path} is a file; give -o a folder."
        raise InputError(msg)
    known = {layout.LOCK, layout.OPEN}
    if (
        path.exists()
        and not (path / layout.MANIFEST).exists()
        and any(entry.name not in known for entry in path.iterdir())
    ):
        msg = f"{path} holds something that is no trace; give -o a new or empty folder."
        raise TraceError(msg)
