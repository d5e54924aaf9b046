"""``trace.json``: read it, and compare two of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tracekit.errors import TraceError
from tracekit.schema import SCHEMA_VERSION
from tracekit.trace import layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracekit.trace.folder import Folder


def read_manifest(folder: Folder) -> dict[str, Any]:
    """Return the content of a trace's ``trace.json``.

    Raises
    ------
    TraceError
        If there is none, it is damaged, or another version of the schema wrote it.
    """
    file = folder.path / layout.MANIFEST
    try:
        with folder.explained(file):
            text = file.read_bytes()
        data = json.loads(text)
    except FileNotFoundError:
        msg = (
            f"{folder.path} is no trace: it has no {layout.MANIFEST}{folder.doubt}; record one with "
            "tracekit record."
        )
        raise TraceError(msg) from None
    except (NotADirectoryError, UnicodeDecodeError) as error:
        msg = f"{file} cannot be read: {error}; give the folder of a trace."
        raise TraceError(msg) from None
    except json.JSONDecodeError as error:
        msg = f"{file} is damaged at line {error.lineno}, column {error.colno}: {error.msg}."
        raise TraceError(msg) from None
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        version = data.get("schema_version") if isinstance(data, dict) else None
        msg = f"{file} has schema version {version}, this tracekit reads {SCHEMA_VERSION}."
        raise TraceError(msg)
    return data


def differences(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return what keeps a run from going on with a trace: ``seed is 1, was 0``."""
    found = []
    for key in ("settings", "model"):
        ours, theirs = _plain(wanted[key]), _plain(there[key])
        found += [
            f"{name} is {_short(ours.get(name))}, was {_short(theirs.get(name))}"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
    return found


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what JSON makes of the data, so that tuples equal lists."""
    plain: dict[str, Any] = json.loads(json.dumps(data))
    return plain


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
