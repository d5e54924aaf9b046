"""A trace on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import pyarrow as pa

from tracekit.trace import layout
from tracekit.trace.folder import Folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tracekit.trace.folder import AnyPath


@final
class LocalFolder(Folder):
    """A folder on this machine: files are fsynced and renamed, and read by memory mapping."""

    refusals = (OSError,)
    advice = "tracekit validate lists what is wrong"

    path: Path

    def __init__(self, path: Path) -> None:
        super().__init__(path, scratch=path)

    def shards(self) -> list[AnyPath]:
        """Return the folders in ``shards/``: one that is there is whole."""
        return sorted((self.path / layout.SHARDS).glob("[0-9]*"))

    def _open(self, path: AnyPath) -> Any:
        """Map a file into memory."""
        return pa.memory_map(str(path))

    def fetch(self, name: str) -> Path:
        """Return where it is."""
        return self.path / name

    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    def add(self, name: str, write: Callable[[Path], object]) -> dict[str, Any]:
        """Write a file aside, fsync it and rename it."""
        with self._written(name, write) as path:
            layout.sync_file(path)
            entry = layout.entry(path)
            path.replace(self.path / name)
        layout.sync_folder(self.path)
        return entry

    def remove(self, name: str) -> None:
        """Unlink it."""
        (self.path / name).unlink(missing_ok=True)

    def add_shard(self, built: Path, number: int) -> None:
        """Fsync every file, then rename the folder."""
        for path in built.iterdir():
            layout.sync_file(path)
        layout.sync_folder(built)
        target = self.path / layout.SHARDS / f"{number:05d}"
        target.parent.mkdir(exist_ok=True)
        built.rename(target)
        layout.sync_folder(target.parent)

    def drop_shards(self) -> None:
        """Rename the folder of shards away at once, so that none is ever half deleted."""
        shards = self.path / layout.SHARDS
        if shards.exists():
            self.open_path.mkdir(exist_ok=True)
            shards.rename(self.open_path / "dropped")
            layout.sync_folder(self.path)
            self.clean()
