"""Stores that remote traces are tested on: fsspec's memory, and an S3 server in this process."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


def memory_url(name: str) -> str:
    """Return the URL of an empty folder in memory."""
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    url = f"memory://{name}"
    if files.exists(url):
        files.rm(url, recursive=True)
    return url


@contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run an S3 server on the loopback, and give the URL of a bucket."""
    server_class = pytest.importorskip("moto.server").ThreadedMotoServer
    s3fs = pytest.importorskip("s3fs")
    server = server_class(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "eu-west-1",
    }.items():
        patch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("traces", region_name="eu-west-1")
    try:
        yield "s3://traces"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


def files_of(url: str) -> Any:
    """Return the file system behind a URL."""
    upath = pytest.importorskip("upath")
    return upath.UPath(url).fs
