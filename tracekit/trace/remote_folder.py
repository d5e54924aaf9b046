"""A trace in a store that fsspec reaches."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import weakref
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from tracekit.errors import InputError, TracekitError
from tracekit.trace import layout
from tracekit.trace.folder import Folder, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from upath import UPath

    from tracekit.trace.folder import AnyPath


@final
class RemoteFolder(Folder):
    """A folder in a store that fsspec reaches.

    A shard is built on this machine and uploaded, ``sequences.parquet`` last: one without it does
    not exist. The lock lies on this machine too: it keeps its recorders apart, not those of
    other machines.
    """

    # The packages behind fsspec raise errors of their own: no credentials, no route, time-outs.
    refusals = (Exception,)
    advice = "check the address, the network and the credentials"
    doubt = ", or its store does not answer"

    path: UPath

    def __init__(self, path: UPath) -> None:
        key = hashlib.sha256(str(path).rstrip("/").encode()).hexdigest()[:16]
        place = Path(tempfile.gettempdir()) / f"tracekit-{os.getuid()}"
        super().__init__(path, scratch=place / key)

    def names(self) -> set[str]:
        """Return the first parts of all names below; stores know no folders, only such names."""
        files = (file.removeprefix(self.path.path) for file in self._find(self.path))
        parts = (file.strip("/").split("/")[0] for file in files)
        # S3's console marks an empty folder by an object of the folder's own name.
        return {part for part in parts if part}

    def shards(self) -> list[AnyPath]:
        """Return the folders in ``shards/`` that have a listing."""
        shards = self.path / layout.SHARDS
        return [shards / name for name, files in self._found().items() if layout.LISTING in files]

    def _open(self, path: AnyPath) -> Any:
        """Open a file that reads what it is asked for: Parquet readers know what they want."""
        return self.path.fs.open(str(path), "rb", cache_type="none")

    def fetch(self, name: str) -> Path:
        """Download it, once."""
        target = self._downloads / name
        if not target.exists():
            with self.explained(self.path / name):
                part = target.with_suffix(".part")
                self.path.fs.get_file(str(self.path / name), str(part))
                part.rename(target)
        return target

    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        with self.explained(self.path):
            found = self.path.fs.find(str(self.path), detail=True)
            return sum(int(one["size"]) for one in found.values())

    def add(self, name: str, write: Callable[[Path], object]) -> dict[str, Any]:
        """Write a file on this machine and upload it."""
        with self._written(name, write) as path:
            self._upload(path, self.path / name)
            return layout.entry(path)

    def remove(self, name: str) -> None:
        """Delete the object."""
        with self._reached(self.path / name):
            if self.path.fs.exists(str(self.path / name)):
                self.path.fs.rm_file(str(self.path / name))

    def add_shard(self, built: Path, number: int) -> None:
        """Upload every file, the listing last."""
        target = self.path / layout.SHARDS / f"{number:05d}"
        for path in sorted(built.iterdir(), key=lambda path: (path.name == layout.LISTING, path)):
            self._upload(path, target / path.name)
        # Renamed first: a shard that is half deleted must not be taken for one to upload.
        shutil.rmtree(built.rename(built.with_suffix(".done")), ignore_errors=True)

    def drop_shards(self) -> None:
        """Delete all listings, then the shards that are none any more."""
        with self._reached(self.path):
            for shard in self.shards():
                self.path.fs.rm_file(str(shard / layout.LISTING))
        self.clean()

    def clean(self) -> None:
        """Delete what an earlier run left on this machine, and shards without a listing."""
        super().clean()
        with self._reached(self.path):
            for shard, files in self._found().items():
                for name in () if layout.LISTING in files else files:
                    self.path.fs.rm_file(str(self.path / layout.SHARDS / shard / name))

    @cached_property
    def _downloads(self) -> Path:
        """A local folder that lasts as long as this object."""
        folder = tempfile.mkdtemp(prefix="tracekit-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def _found(self) -> dict[str, list[str]]:
        """Return the names of the files that are there, by the name of their shard, in order."""
        shards = self.path / layout.SHARDS
        found: dict[str, list[str]] = {}
        for file in self._find(shards):
            *_, shard, name = file.split("/")
            if shard.isdigit() and name:
                found.setdefault(shard, []).append(name)
        return found

    def _find(self, path: UPath) -> list[str]:
        """Return the names of all files below, in order."""
        with self.explained(path):
            self.path.fs.invalidate_cache()  # other processes write there too
            try:
                return sorted(self.path.fs.find(str(path)))
            except FileNotFoundError:
                return []  # not even a bucket

    def _upload(self, path: Path, target: AnyPath) -> None:
        # A file opened for writing would keep its first half if the rest fails: never open one.
        with self._reached(target):
            self.path.fs.put_file(str(path), str(target))

    @contextmanager
    def _reached(self, path: AnyPath) -> Iterator[None]:
        """Turn what the store refuses into one sentence."""
        try:
            yield
        except TracekitError:
            raise
        except Exception as error:
            msg = (
                f"cannot write {path}: {first_line(error)}; {self.advice}; what was finished "
                "before is kept."
            )
            raise InputError(msg) from error
