"""From a path or a URL to the folder that a trace lives in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.errors import UsageError
from tracekit.trace.local_folder import LocalFolder

if TYPE_CHECKING:
    from tracekit.trace.folder import AnyPath, Folder


def open_folder(where: str | AnyPath) -> Folder:
    """Return the folder at a path or a URL; nothing need be there.

    Parameters
    ----------
    where
        A path, a URL of fsspec (``s3://bucket/trace``, ``memory://trace``), or a ``UPath`` that
        carries options of its own.

    Raises
    ------
    UsageError
        If no installed package speaks the URL's protocol.
    """
    text = str(where).removeprefix("file://")
    if "://" not in text:
        return LocalFolder(Path(text))
    try:
        from upath import UPath

        from tracekit.trace.remote_folder import RemoteFolder

        path = UPath(where)
        path.fs.invalidate_cache()
    except (ImportError, ValueError) as error:
        protocol = str(where).partition("://")[0]
        msg = (
            f"{where} cannot be reached ({error}); install universal-pathlib and the fsspec "
            f"package for {protocol}://, or give a local folder."
        )
        raise UsageError(msg) from error
    return RemoteFolder(path)
