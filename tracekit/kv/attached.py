"""What a policy may be stacked with, after a ``+``: a transform, a selector, a tier."""

from __future__ import annotations

from typing import NamedTuple

from tracekit.errors import UsageError
from tracekit.kv.selector import SELECTORS
from tracekit.kv.tier import Tier
from tracekit.kv.transform import TRANSFORMS
from tracekit.registry import unknown

TIER = "tier"


class Attached(NamedTuple):
    """The field of ``Policy`` that a part goes into, and the part's class."""

    field: str
    part: type


def attached_names() -> list[str]:
    """Return the names of all parts that may follow a ``+``."""
    return sorted([*TRANSFORMS.names(), *SELECTORS.names(), TIER])


def attached_as(name: str) -> Attached:
    """Return the part of this name.

    Raises
    ------
    UsageError
        If there is none; the message lists what exists and the nearest name.
    """
    if name in TRANSFORMS.names():
        return Attached("transform", TRANSFORMS.get(name))
    if name in SELECTORS.names():
        return Attached("selector", SELECTORS.get(name))
    if name == TIER:
        return Attached("tier", Tier)
    raise UsageError(unknown("transform or selector", name, attached_names()))
