"""``tracekit doctor``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

PACKAGES = (
    "tracekit",
    "torch",
    "transformers",
    "numpy",
    "pandas",
    "pyarrow",
    "matplotlib",
    "typer",
)
ROOM_BYTES = 2 << 30
"""Free disk below which doctor complains: a converted model and a trace need about so much."""


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.")
    ] = False,
) -> None:
    """Check this machine: versions, device, built-in model, cache folder, disk."""
    import platform
    import shutil
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    import torch

    from tracekit.cli.output import emit
    from tracekit.errors import InputError
    from tracekit.model.builtin import BUILTIN_MODELS, find_builtin
    from tracekit.model.convert import cache_folder

    data: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    problems: list[str] = []
    for name in PACKAGES:
        try:
            data[name] = version(name)
        except PackageNotFoundError:
            data[name] = None
            problems.append(f"{name} is not installed: pip install {name}")
    cuda = torch.cuda.is_available()
    data["device"] = torch.cuda.get_device_name() if cuda else "CPU"
    data["threads"] = torch.get_num_threads()
    for name in sorted(BUILTIN_MODELS):
        try:
            data[f"model {name}"] = str(find_builtin(name))
        except InputError as error:
            data[f"model {name}"] = None
            problems.append(str(error))
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    data["cache"] = str(folder)
    data["free_here_bytes"] = shutil.disk_usage(Path.cwd()).free
    data["free_cache_bytes"] = free
    for where, size in (("here", data["free_here_bytes"]), (str(folder), free)):
        if size < ROOM_BYTES:
            problems.append(f"only {size / 1e9:.1f} GB are free in {where}")
    lines = [f"{name:24} {value}" for name, value in data.items()]
    lines += [f"problem: {problem}" for problem in problems] or ["no problems found"]
    emit(data | {"problems": problems}, "\n".join(lines), as_json=as_json)
    if problems:
        msg = f"{len(problems)} problems found, listed above."
        raise InputError(msg)
