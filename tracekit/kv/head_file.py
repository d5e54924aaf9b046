"""Files with a number for each layer and KV head: JSON or TSV."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.errors import InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.spec import LayerSpec

Rows = list[tuple[str, list[Any]]]
"""Where a row stands, in words, and what is in it."""


def hash_of(file: str) -> str:
    """Return the SHA-256 of a file; empty if it cannot be read, which ``read_head_file`` tells."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def read_head_file(
    file: str, layers: Sequence[LayerSpec], *, least: float = -math.inf
) -> np.ndarray:
    """Return the numbers of a head file.

    Parameters
    ----------
    file
        Path. ``.json``: a list of rows, or an object from layer number to row. Anything else: a row
        a line, numbers apart by white space (DuoAttention's TSV), ``#`` before a comment. Rows are
        layers that hold keys, in order; columns are KV heads.
    layers
        Those layers.
    least
        What no number may be below.

    Returns
    -------
    ndarray
        float64 [X], all KV heads of all layers in order.

    Raises
    ------
    UsageError
        If no file is named.
    InputError
        If it cannot be read, is of another shape, or holds anything but finite numbers from
        ``least`` on.
    """
    if not file:
        msg = "file= is missing: name a JSON or TSV file with a number for each layer and KV head."
        raise UsageError(msg)
    rows = _rows(file, layers)
    if len(rows) != len(layers):
        msg = (
            f"head file {file} has {len(rows)} rows: write one for each of the {len(layers)} "
            "layers that hold keys."
        )
        raise InputError(msg)
    return np.concatenate(
        [_numbers(file, *row, layer, least) for row, layer in zip(rows, layers, strict=True)]
    )


def _rows(file: str, layers: Sequence[LayerSpec]) -> Rows:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"head file {file} cannot be read ({error}): give the path of a text file."
        raise InputError(msg) from error
    return _json_rows(file, text, layers) if file.endswith(".json") else _tsv_rows(text)


def _tsv_rows(text: str) -> Rows:
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return [(f"line {number}", line) for number, line in enumerate(lines, 1) if line]


def _json_rows(file: str, text: str, layers: Sequence[LayerSpec]) -> Rows:
    try:
        found = json.loads(text)
    except ValueError as error:
        msg = f"head file {file} is no JSON ({error}): write a list of rows, one a layer."
        raise InputError(msg) from error
    match found:
        case list():
            named = [(str(layer.index), row) for layer, row in zip(layers, found, strict=False)]
            named += [("beyond the last", row) for row in found[len(layers) :]]
        case dict():
            named = [(str(layer.index), found.pop(str(layer.index), None)) for layer in layers]
            named += list(found.items())
        case _:
            named = []
    for name, row in named:
        if not isinstance(row, list):
            msg = f"head file {file} has no list of numbers for layer {name}: write one a layer."
            raise InputError(msg)
    return [(f"layer {name}", row) for name, row in named]


def _numbers(file: str, where: str, row: list[Any], layer: LayerSpec, least: float) -> np.ndarray:
    """Return a row as numbers, one a KV head."""
    if len(row) != layer.num_kv_heads:
        is_query = len(row) == layer.num_heads
        hint = " (those are query heads: take the mean over each group)" if is_query else ""
        msg = (
            f"head file {file}, {where}, has {len(row)} numbers{hint}: write one for each of the "
            f"{layer.num_kv_heads} KV heads of layer {layer.index}."
        )
        raise InputError(msg)
    numbers = np.array([_number(one) for one in row])
    is_good = np.isfinite(numbers) & (numbers >= least)
    if not is_good.all():
        head, wanted = int(np.argmin(is_good)), "" if least == -math.inf else f" from {least:g} on"
        msg = (
            f"head file {file}, {where}, has {row[head]!r} for KV head {head} of layer "
            f"{layer.index}: write a finite number{wanted}."
        )
        raise InputError(msg)
    return numbers


def _number(value: Any) -> float:
    """Return NaN for what is no number."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
