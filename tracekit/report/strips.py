"""What policies leave of one sequence: strips of one pixel a token under a strip of entropy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd

from tracekit.report.figures.figure import Figure
from tracekit.report.figures.pixels import pixels, scale
from tracekit.report.formats import count, number, percent
from tracekit.report.readable import label
from tracekit.report.tables import Column, HtmlTable, build, text_column

if TYPE_CHECKING:
    from tracekit.report.sections.tokens_shown import Left, ShownSequence

MOST_STRIPS = 8


@dataclass(frozen=True)
class Strip:
    """One row of pixels.

    Parameters
    ----------
    name, told, alt
        What it is, its number, and both in words with what lies where.
    png
        The row.
    point_frac
        Where the eviction point is, of the whole length; None for none.
    """

    name: str
    told: str
    alt: str
    png: bytes
    point_frac: float | None = None


@dataclass(frozen=True, kw_only=True)
class Strips(Figure):
    """Kept entries of several policies, aligned token by token.

    Parameters
    ----------
    sequence
        What is shown.
    left
        Policies.
    """

    kind: ClassVar[str] = "strips"
    ending: ClassVar[str] = "png"
    sequence: ShownSequence
    left: tuple[Left, ...]

    @property
    def num_tokens(self) -> int:
        """Pixels of a strip."""
        return len(self.sequence.rows)

    @property
    def most_nats(self) -> float:
        """Entropy of the brightest pixel; 1 where all is certain."""
        return float(self.sequence.rows["entropy_nats"].max()) or 1.0

    @property
    def content(self) -> bytes:
        """All strips in one picture, entropy on top, one pixel a token."""
        return pixels(np.stack([self._entropy_T, *(one.held_T for one in self.left)]))

    @property
    def numbers(self) -> HtmlTable:
        """What is left of each part of the sequence; the CSV file has it token by token."""
        columns = (
            text_column("policy"),
            Column("asked to keep", percent),
            Column("eviction begins after tokens", count),
            Column("held at the end", percent),
            Column("of entries before that", percent),
            Column("of later ones", percent),
            text_column("flags"),
            text_column("full text"),
        )
        rows = [
            [
                one.policy.family,
                one.policy.asked,
                one.point,
                one.share,
                *_before_and_after(one),
                one.flags or "none",
                one.policy.name,
            ]
            for one in self.left
        ]
        caption = (
            f"Share of cache entries held when the last token of {self.sequence.sequence_id} is "
            "read; level local, n\u00a0=\u00a01 sequence, no interval"
        )
        return build(f"{self.name}-numbers", caption, columns, rows)

    @cached_property
    def strips(self) -> tuple[Strip, ...]:
        """Entropy, then the policies."""
        mean = number(float(self.sequence.rows["entropy_nats"].mean()))
        entropy = Strip(
            "entropy",
            f"mean {mean} nats",
            f"Entropy by token, mean {mean} nats",
            pixels(self._entropy_T[None]),
        )
        return (entropy, *map(self._strip, self.left))

    @property
    def legend_png(self) -> bytes:
        """The colours, low to high."""
        return scale()

    @property
    def _entropy_T(self) -> np.ndarray:
        return self.sequence.rows["entropy_nats"].to_numpy(dtype=float) / self.most_nats

    def _strip(self, one: Left) -> Strip:
        before, after = map(percent, _before_and_after(one))
        name = one.policy.family
        return Strip(
            name,
            f"{percent(one.share)} held" + (f", {one.flags}" if one.flags else ""),
            f"{name} holds {percent(one.share)}: of entries before the eviction point {before}, of "
            f"later ones {after}",
            pixels(one.held_T[None]),
            min(1.0, one.point / self.num_tokens),
        )


def kept_strips(name: str, sequence: ShownSequence) -> Strips:
    """Return the strips of the policies with the smallest error, at most ``MOST_STRIPS``.

    Parameters
    ----------
    name
        Stem of its files and ids.
    sequence
        With at least one policy.
    """
    left = sequence.left[:MOST_STRIPS]
    rows = sequence.rows
    shares = ", ".join(f"{one.policy.family} {percent(one.share)}" for one in left)
    rest = len(sequence.left) - len(left)
    more = f" {rest} more policies are in the list of the text above." if rest else ""
    if any(one.flags for one in left):
        more += (
            " Clipped: the budget was smaller than what the policy protects, and won; clamped: larger "
            "than what the cache held; idle: nothing was evicted."
        )
    columns = {one.policy.name: one.held_T for one in left}
    return Strips(
        name=name,
        alt=f"Entries of {sequence.sequence_id} that are left at the end: {shares}.",
        caption=(
            "A pixel is a token, its colour the part of the KV heads of all layers that hold its "
            "cache entry when the last token is read: dark for none, bright for all. The policies "
            "are those with the smallest error at level local over all sequences, best on top, each "
            "at the kept fraction nearest to 25\u00a0%; the line is the eviction point. Entries "
            "that came after it are counted as well, so that more is held than was asked for. "
            f"Level local, n\u00a0=\u00a01 sequence.{more}"
        ),
        table=pd.DataFrame(
            {
                "position": rows["position"],
                "token": [label(text) for text in rows["text"]],
                "entropy_nats": rows["entropy_nats"],
                **columns,
            }
        ),
        sequence=sequence,
        left=left,
    )


def _before_and_after(one: Left) -> tuple[float, float]:
    """Return the mean parts held before and after the eviction point; NaN where there is nothing."""
    return _mean(one.held_T[: one.point]), _mean(one.held_T[one.point :])


def _mean(parts: np.ndarray) -> float:
    there = parts[~np.isnan(parts)]
    return float(there.mean()) if len(there) else float("nan")
