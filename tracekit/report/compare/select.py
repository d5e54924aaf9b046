"""Which policies, schemes or rules a text means, and two of them as the sides of a comparison."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tracekit.errors import InputError, UsageError
from tracekit.report.compare.measures import KV, LAYERS, RECORDED, VOCAB
from tracekit.report.compare.names import AGAINST, listed, pieces, short_names
from tracekit.report.compare.side import NO_PLACE

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.compare.side import Side

_FIT = " fit="
"""Before how sizes were fitted that no decoder has: meant only by a text that says so."""


@dataclass(frozen=True)
class Selector:
    """Which policies, schemes or rules a text means: those that have all that it says.

    ``snapkv`` is SnapKV at every kept fraction and with any parameters, ``snapkv:kept=0.25`` at one;
    what a policy is stacked with must be named. A number after a last colon is the size of a set
    or the number of a layer: ``previous:1024``.
    """

    text: str

    @property
    def place(self) -> int | None:
        """The size or layer, if there is one."""
        found = re.search(r":(\d+)$", self.text)
        return int(found[1]) if found else None

    @property
    def name(self) -> str:
        """The text without a size or layer."""
        return re.sub(r":\d+$", "", self.text)

    def takes(self, name: str, place: int) -> bool:
        """Whether this text means a policy, scheme or rule at a size or layer."""
        if self.place not in (None, place) or (_FIT in name) != (_FIT in self.text):
            return False
        if name == self.name:
            return True
        asked, there = pieces(self.name), pieces(name)
        return len(asked) == len(there) and all(
            (one.sign, one.head) == (other.sign, other.head)
            and set(one.parameters) <= set(other.parameters)
            for one, other in zip(asked, there, strict=True)
        )


def only(side: Side, text: str) -> Side:
    """Return a side with the policies, schemes or rules that a text means, and nothing else.

    Raises
    ------
    InputError
        If it means none.
    """
    selector = Selector(text)
    frames = {
        question: _taken(frame, selector)
        for question, frame in side.frames.items()
        if question != RECORDED
    }
    if all(frame.empty for frame in frames.values()):
        there = {name for frame in side.frames.values() for name in frame["name"].unique()}
        names = short_names(there - {RECORDED}).values()
        msg = f"{side.folder} has no policy or scheme {text!r}; it has {listed(names)}."
        raise InputError(msg)
    return replace(side, frames=frames | {RECORDED: side.frames[RECORDED].iloc[:0]})


def as_pair(a: Side, b: Side, against: str, policy: str) -> tuple[Side, Side]:
    """Return two sides whose policies, of other names, are pairs.

    Where both texts mean one policy each, these are the pair; where they mean several kept
    fractions, those of the same target are.

    Parameters
    ----------
    a, b
        Sides that have these policies alone.
    against, policy
        Texts of the baseline, in A, and of what is new, in B.

    Raises
    ------
    InputError
        If there is no such pair.
    UsageError
        If a text means several policies of one kept fraction.
    """
    name = policy + AGAINST + against
    frames_a, frames_b = {}, {}
    for question in (KV, VOCAB, LAYERS):
        one, other = a.frames[question], b.frames[question]
        if one.empty or other.empty:
            frames_a[question], frames_b[question] = one.iloc[:0], other.iloc[:0]
            continue
        is_single = all(
            len(frame[["name", "place"]].drop_duplicates()) == 1 for frame in (one, other)
        )
        frames_a[question] = _renamed(one, name, against, question, is_single)
        frames_b[question] = _renamed(other, name, policy, question, is_single)
    if all(frame.empty for frame in frames_a.values()):
        msg = (
            f"{against!r} and {policy!r} are of different kinds: give two policies, or two schemes."
        )
        raise InputError(msg)
    return replace(a, frames=a.frames | frames_a), replace(b, frames=b.frames | frames_b)


def _taken(frame: pd.DataFrame, selector: Selector) -> pd.DataFrame:
    cells = frame[["name", "place"]].drop_duplicates()
    taken = {
        (name, place)
        for name, place in cells.itertuples(index=False)
        if selector.takes(name, int(place))
    }
    chosen = [one in taken for one in zip(frame["name"], frame["place"], strict=True)]
    return frame[np.array(chosen, dtype=bool)]


def _renamed(
    frame: pd.DataFrame, name: str, text: str, question: str, is_single: bool
) -> pd.DataFrame:
    """Return rows under the name of the pair, and of their target where there are several."""
    if is_single:
        return frame.assign(name=name, place=NO_PLACE)
    by_target = frame.groupby(["level", "place", "target"])["name"].agg(["nunique", "min", "max"])
    if (by_target["nunique"] > 1).any():
        twice = by_target[by_target["nunique"] > 1].iloc[0]
        short = short_names([twice["min"], twice["max"]])
        msg = f"{text!r} means {' and '.join(short.values())}: say more of it."
        raise UsageError(msg)
    if question != KV:
        return frame.assign(name=name)
    if len(frame[["name", "target"]].drop_duplicates()) > frame["name"].nunique():
        msg = f"{text!r} means several amounts that are no fractions: name one of them."
        raise UsageError(msg)
    return frame.assign(name=[f"{name}, kept={target:.4g}" for target in frame["target"]])
