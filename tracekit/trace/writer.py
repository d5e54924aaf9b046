"""Write a trace: the manifest first, then whole shards, resumable by the same command."""

from __future__ import annotations

import errno
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from filelock import FileLock, Timeout

from tracekit.errors import InputError, TraceError
from tracekit.trace import layout
from tracekit.trace.manifest import differences, read_manifest
from tracekit.trace.open_folder import open_folder
from tracekit.trace.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

    from tracekit.trace.folder import AnyPath, Folder

SHARD_BYTES = 128 << 20
"""A shard closes at the end of the sequence that brings it to this size."""

SHARD_SEQUENCES = 64
"""A shard closes after so many sequences at the latest."""

SHARD_SECONDS = 60.0
"""A shard closes at the end of the first sequence after so long: no more is lost by a power cut."""


class TraceWriter:
    """A trace being written; a context manager that holds the lock of its folder.

    However it is left, the sequences that ended are kept and the one that was open is dropped; only
    a shard that cannot be written is dropped with all that it holds. Calls come from one thread at
    a time.

    Parameters
    ----------
    path
        Folder of the trace, or a URL of fsspec (``s3://bucket/trace``): new, empty, or a trace of
        the same settings to go on with. The lock of a remote folder keeps the recorders of this
        machine apart, not those of others.
    manifest
        Content of ``trace.json``; of an existing trace its ``settings`` and ``model`` must agree.
    overwrite
        Delete what is there and start anew.

    Attributes
    ----------
    finished
        Ids of the sequences that have ended, in this run and before.
    parting
        After leaving: one clause that says what happened to the open shard; empty if there never
        was one.

    Raises
    ------
    InputError
        If the folder holds something else, is in use, or its settings differ (they are named).
    UsageError
        If nothing that is installed speaks the URL's protocol.
    """

    def __init__(
        self, path: str | AnyPath, manifest: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        self._folder = open_folder(path)
        self.path = self._folder.path
        self.manifest = dict(manifest)
        self.finished: set[str] = set()
        self.parting = ""
        self._overwrite = overwrite
        self._lock = FileLock(self._folder.scratch / layout.LOCK, timeout=0)
        self._shard: Shard | None = None
        self._opened = 0.0
        self._number = 0

    def __enter__(self) -> Self:
        """Lock the folder, and start a trace or find what an earlier run finished."""
        _refuse_foreign(self._folder)
        with disk_errors(self.path):
            self._folder.scratch.mkdir(parents=True, exist_ok=True)
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
        """Close the open shard, or drop it if it is damaged or holds no sequence that ended."""
        try:
            self._part()
        except Exception:
            # What went wrong first is what the caller must hear; ``parting`` tells the rest.
            if error is None:
                raise
        finally:
            self._lock.release()

    @property
    def shard(self) -> Shard:
        """The open shard; opened when first used."""
        if self._shard is None:
            self._shard = Shard(self._folder, self._number)
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
        """Close the open shard, or drop it if no sequence ended in it or it cannot be written."""
        shard = self.shard
        if not shard.num_sequences:
            self._drop("it held no finished sequence")
            return
        try:
            shard.close()
        except Exception:
            self._drop("it could not be written")
            raise
        self._shard = None
        self._number += 1
        count = f"{shard.num_sequences} sequence{'s' * (shard.num_sequences > 1)}"
        self.parting = f"the open shard with {count} was finished"

    def has_file(self, name: str) -> bool:
        """Whether a file that all sequences share is there, whole."""
        return name in self._constants and self._folder.exists(self.path / name)

    def add_file(self, name: str, write: Callable[[Path], object]) -> None:
        """Add a file that all sequences share, whole or not at all.

        Parameters
        ----------
        name
            Of the file: ``vocab.parquet``, ``weights.safetensors``.
        write
            Writes it, given a local path.
        """
        entry = self._folder.add(name, write)
        self.update_manifest(constants=self._constants | {name: entry})

    def update_manifest(self, **entries: Any) -> None:
        """Add entries to ``trace.json``."""
        self.manifest.update(entries)
        self._folder.add(layout.MANIFEST, lambda path: layout.dump_json(path, self.manifest))

    @property
    def _constants(self) -> dict[str, Any]:
        """Size and SHA-256 of what all sequences share, by name."""
        return dict(self.manifest.get("constants", {}))

    def _part(self) -> None:
        """Finish or drop the open shard."""
        if self._shard is not None and self._shard.is_damaged:
            self._drop("it could not be written")
        elif self._shard is not None:
            self.close_shard()

    def _drop(self, why: str) -> None:
        """Drop the open shard."""
        shard, self._shard = self.shard, None
        shard.discard()
        self.parting = f"the open shard was dropped, {why}"

    def _start(self) -> None:
        self._folder.clean()
        if self._overwrite:
            self._folder.drop_shards()
        # What holds no sequence yet ties nobody to its settings.
        if shards := self._folder.shards():
            self._resume(shards)
            return
        self.update_manifest()
        for name in (layout.VOCABULARY, layout.WEIGHTS):
            self._folder.remove(name)

    def _resume(self, shards: list[AnyPath]) -> None:
        there = read_manifest(self._folder)
        if differing := differences(there, self.manifest):
            msg = (
                f"{self.path} was recorded with other settings ({'; '.join(differing)}); "
                "repeat them, choose another -o, or pass --overwrite."
            )
            raise InputError(msg)
        self.manifest = there
        for shard in shards:
            try:
                ids = self._folder.read_table(shard / layout.LISTING, columns=["sequence_id"])
            except TraceError as error:
                msg = (
                    f"{shard} has no readable {layout.LISTING} ({type(error.__cause__).__name__}); "
                    "restore it, or delete the shard's folder to record its sequences again."
                )
                raise TraceError(msg) from error
            self.finished.update(ids["sequence_id"].to_pylist())
            self._number = int(shard.name) + 1


@contextmanager
def disk_errors(path: str | AnyPath) -> Iterator[None]:
    """Turn what a disk or its permissions refuse into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        msg = f"cannot write {error.filename or path}: {what}; what was finished before is kept."
        raise InputError(msg) from error


def _refuse_foreign(folder: Folder) -> None:
    """Raise if the folder is a file or holds something that is no trace."""
    path = folder.path
    with folder.explained(path):
        if path.exists() and not path.is_dir():
            msg = f"{path} is a file; give -o a folder."
            raise InputError(msg)
        # Hidden files are nobody's work: our lock, and what a run left that was killed at once.
        names = {name for name in folder.names() if not name.startswith(".")}
        if names and layout.MANIFEST not in names:
            msg = f"{path} holds something that is no trace; give -o a new or empty folder."
            raise TraceError(msg)
