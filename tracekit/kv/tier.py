"""A slower tier below the cache: entries go there and come back when a selector wants them."""

from __future__ import annotations

from dataclasses import dataclass

from tracekit.kv.amounts import Amount, Frac


@dataclass(frozen=True)
class Tier:
    """A fast tier of limited size over a slow one that holds everything.

    Parameters
    ----------
    fast
        Entries that the fast tier holds in each head, of the tokens seen.
    """

    fast: Amount = Frac(0.25)
