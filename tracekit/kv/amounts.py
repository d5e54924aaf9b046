"""Amounts of cache entries: a fraction of something, a number of tokens, or bytes of a cache."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

from tracekit.errors import UsageError

MOST_TOKENS = 2**28 - 1
"""Longest sequence: an engine's order of keys has 28 bits for the position."""


@dataclass(frozen=True)
class Amount(ABC):
    """An amount of entries, taken of a whole.

    Parameters
    ----------
    amount
        The number as written: a fraction, or tokens.
    """

    amount: float
    unit: ClassVar[str]

    @abstractmethod
    def of(self, whole: int) -> int:
        """Return the entries that this amount is of ``whole`` entries, rounded down."""

    @abstractmethod
    def share(self, whole: int) -> float:
        """Return the fraction that this amount is of ``whole`` entries, at most 1."""


@dataclass(frozen=True)
class Frac(Amount):
    """A fraction in (0, 1]; ``of`` is exact for the decimal as written: 0.29 of 100 is 29."""

    unit = ""

    def __post_init__(self) -> None:
        if not 0 < self.amount <= 1:
            msg = f"the fraction {self.amount} is not in (0, 1]."
            raise UsageError(msg)
        object.__setattr__(self, "amount", float(self.amount))

    def of(self, whole: int) -> int:
        """Return floor(amount * whole)."""
        return whole * self._exact.numerator // self._exact.denominator

    def share(self, whole: int) -> float:
        """Return the fraction itself."""
        del whole
        return self.amount

    @cached_property
    def _exact(self) -> Fraction:
        return Fraction(repr(self.amount))


@dataclass(frozen=True)
class Tokens(Amount):
    """A number of tokens, the same of any whole; it may be larger than the whole."""

    amount: int
    unit = "tok"

    def __post_init__(self) -> None:
        if self.amount < 0:
            msg = f"a number of tokens is not negative, unlike {self.amount}."
            raise UsageError(msg)
        if self.amount > MOST_TOKENS:
            msg = f"{self.amount} tokens are more than a sequence can have: at most {MOST_TOKENS}."
            raise UsageError(msg)

    def of(self, whole: int) -> int:
        """Return the number of tokens itself."""
        del whole
        return self.amount

    def share(self, whole: int) -> float:
        """Return min(1, amount / whole)."""
        return min(1.0, self.amount / whole)


@dataclass(frozen=True)
class Bytes(Amount):
    """Bytes of the whole cache; a cache says how many tokens a head that is (``Cache.tokens``)."""

    amount: int
    unit = "B"

    def of(self, whole: int) -> int:
        """Refuse: what a byte holds depends on the cache, not on the tokens seen."""
        raise UsageError(_BYTES_OF_WHAT)

    def share(self, whole: int) -> float:
        """Refuse, like ``of``."""
        raise UsageError(_BYTES_OF_WHAT)


_BYTES_OF_WHAT = "an amount in bytes is turned into tokens by the cache that it is a part of."

_UNITS = {"tok": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_KEPT = re.compile(r"(\d+(?:\.\d+)?)(tok|[kMG]?B|[KMG]iB)")


def parse_kept(text: str) -> Amount:
    """Return a kept amount: ``0.3`` and ``1`` are fractions, ``512tok`` tokens, ``64MiB`` bytes.

    Raises
    ------
    UsageError
        If the text is none of these, or out of range.
    """
    match = _KEPT.fullmatch(text)
    try:
        if match is None:
            return Frac(float(text))
        number = Fraction(match[1]) * _UNITS[match[2]]
        if number.denominator != 1:
            raise ValueError
    except ValueError as error:
        msg = (
            f"{text!r} is no amount: write a fraction such as 0.3, tokens such as 512tok, or bytes "
            "such as 64MiB."
        )
        raise UsageError(msg) from error
    if number < 1:
        msg = f"kept={text} leaves no entry: keep at least 1tok."
        raise UsageError(msg)
    return Tokens(int(number)) if match[2] == "tok" else Bytes(int(number))


def kept_text(kept: Amount) -> str:
    """Return what ``parse_kept`` reads back."""
    return f"{kept.amount!r}{kept.unit}"


def parse_part(text: str) -> Amount:
    """Return an amount of something longer: ``32`` is tokens, ``0.5`` and ``1.0`` are fractions.

    Raises
    ------
    UsageError
        If the text is neither, or out of range.
    """
    try:
        return Tokens(int(text))
    except ValueError:
        pass
    try:
        return Frac(float(text))
    except ValueError as error:
        msg = f"{text!r} is no amount: write tokens such as 32, or a fraction such as 0.5."
        raise UsageError(msg) from error


def part_text(part: Amount) -> str:
    """Return what ``parse_part`` reads back."""
    return repr(part.amount)
