"""Sentences for what the libraries below raise, and for weights that they would make up."""

from __future__ import annotations

from typing import Any

from tracekit.errors import ModelError

_LONGEST = 200
_NAMED = 3


def reason(error: Exception) -> str:
    """Return the class of an error and its first line, the end cut off where it grows long."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def refuse_missing(name: str, info: dict[str, Any]) -> None:
    """Refuse a model some of whose weights were not in its files; a tied head is not missing.

    Parameters
    ----------
    name
        Of the model, for the message.
    info
        What ``from_pretrained(..., output_loading_info=True)`` told.

    Raises
    ------
    ModelError
        Naming the first weights that are absent or of another shape.
    """
    absent = sorted(str(one) for key in ("missing_keys", "mismatched_keys") for one in info[key])
    if absent:
        more = f" and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
        msg = (
            f"the files of {name} lack {', '.join(absent[:_NAMED])}{more}: these weights would be "
            "random; use a whole checkpoint."
        )
        raise ModelError(msg)
