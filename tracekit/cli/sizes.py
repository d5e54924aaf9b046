"""Sizes of memory and lengths of text as people write them: 80GiB, 24GB, 64k tokens."""

from __future__ import annotations

import math
import re

from tracekit.errors import UsageError

MOST_BYTES = 10**24
"""The largest size that is read: a million million terabytes."""

_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
"""Units of memory, upper and lower case alike: GB is 1000 to the third, GiB 1024 to the third."""

_TOKENS = {"": 1, "k": 2**10, "m": 2**20}
"""Contexts are sold by the 1024: 64k is 65 536 tokens."""

_WRITTEN = re.compile(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_LETTERS = {"k": "kB or KiB", "m": "MB or MiB", "g": "GB or GiB", "t": "TB or TiB"}


def parse_size(text: str) -> float:
    """Return the bytes of a size such as ``80GiB``, ``24GB``, ``512MiB`` or ``1e9``.

    Raises
    ------
    UsageError
        If it is no size above 0 and at most ``MOST_BYTES``, or its unit does not tell 1000 from 1024.
    """
    number, unit = _split(text)
    if unit in _LETTERS:
        msg = f"the size {text!r} is not clear: write {_LETTERS[unit]}, 1000 or 1024 to a step."
        raise UsageError(msg)
    size = number * _BYTES.get(unit, math.nan)
    if not 0 < size <= MOST_BYTES:
        msg = (
            f"{text!r} is no size above 0 and at most {MOST_BYTES:.0e} bytes such as 80GiB, 24GB, "
            "512MiB or 1e9."
        )
        raise UsageError(msg)
    return size


def parse_tokens(text: str) -> int:
    """Return the tokens of a length such as ``64k`` (65 536), ``1M`` (1 048 576) or ``8192``.

    Raises
    ------
    UsageError
        If it is no whole number of tokens above 0 and at most ``memory.MOST_TOKENS``.
    """
    from tracekit.measure.memory import MOST_TOKENS

    number, unit = _split(text)
    tokens = number * _TOKENS.get(unit, math.nan)
    if not 1 <= tokens <= MOST_TOKENS or tokens != int(tokens):
        msg = (
            f"{text!r} is no whole number of tokens above 0 and at most {MOST_TOKENS:,} such as 8192, "
            "64k or 1M."
        )
        raise UsageError(msg)
    return int(tokens)


def size_text(num_bytes: float) -> str:
    """Return bytes in both kinds of units, which differ by 7 % at a gigabyte: 21.5 GB (20 GiB)."""
    return f"{_in_steps(num_bytes, 1000, ' kMGTPE', '')} ({gib_text(num_bytes)})"


def gib_text(num_bytes: float) -> str:
    """Return bytes in steps of 1024: ``20 GiB``."""
    return _in_steps(num_bytes, 1024, " KMGTPE", "i")


def _split(text: str) -> tuple[float, str]:
    """Return the number of a text and its unit in lower case; NaN where it is neither."""
    found = _WRITTEN.fullmatch(text)
    return (math.nan, "") if found is None else (float(found[1]), found[2].lower())


def _in_steps(num_bytes: float, step: int, prefixes: str, mark: str) -> str:
    value, power = float(num_bytes), 0
    # 999.9 would be written as 1e+03.
    while value >= 999.5 and power < len(prefixes) - 1:
        value, power = value / step, power + 1
    unit = f"{prefixes[power]}{mark}B" if power else "B"
    return f"{value:.3g} {unit}"
