"""The text of a shown sequence as a block: a span a token, and the numbers that the script reads."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tracekit.report.blocks import Block
from tracekit.report.formats import count, number, percent
from tracekit.report.readable import SPACE, label, readable
from tracekit.simulate.shown import SPECIAL

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from tracekit.report.sections.tokens_shown import Left, Missed, ShownSequence

EDGES_NATS = (0.05, 0.25, 0.7, 1.5, 3.0)
"""Edges between the classes of entropy and surprisal: nearly certain tokens first."""

LEAST_PROB = 0.02
"""Candidates below it are not named, the most likely one apart."""

_NO_NUMBER = 255
_MARKS = np.array([".", "x", "-"])


@dataclass(frozen=True, kw_only=True)
class Views(Block):
    """What the text of all shown sequences is coloured by, with the meaning of the colours.

    Parameters
    ----------
    policies, schemes
        Names of the choices, in the order of ``ShownSequence.left`` and ``missed``.
    """

    kind: ClassVar[str] = "views"
    policies: tuple[str, ...]
    schemes: tuple[str, ...]

    @property
    def edges(self) -> str:
        """Edges between classes in hundredths of a nat, as the script reads them."""
        return " ".join(str(round(100 * edge)) for edge in EDGES_NATS)

    @property
    def nats(self) -> tuple[tuple[str, str], ...]:
        """Class and label of each class of entropy or surprisal, low to high."""
        edges = [f"{edge:g}" for edge in EDGES_NATS]
        labels = [f"below {edges[0]}"]
        labels += [f"{low} to {high}" for low, high in itertools.pairwise(edges)]
        labels.append(f"{edges[-1]} and more")
        return tuple((f"e{place}", text) for place, text in enumerate(labels))


@dataclass(frozen=True, kw_only=True)
class TokenText(Block):
    """The tokens of one sequence, classed by entropy, and all that is known of them as JSON.

    Parameters
    ----------
    sequence
        What is shown.
    policies, schemes
        Names of the choices of ``Views``: a sequence may lack some.
    """

    kind: ClassVar[str] = "tokens"
    sequence: ShownSequence
    policies: tuple[str, ...]
    schemes: tuple[str, ...]

    @property
    def summary(self) -> str:
        """What the sequence is, in a line."""
        rows, one = self.sequence.rows, self.sequence
        what = f"{one.domain}, " if one.domain else ""
        cut = f", the first {count(len(rows))} shown" if len(rows) < one.num_tokens else ""
        return (
            f"{what}{count(one.num_tokens)} tokens{cut}, {count(rows['is_generated'].sum())} "
            f"generated, mean entropy {number(rows['entropy_nats'].mean())} nats"
        )

    @property
    def tokens(self) -> Iterator[tuple[str, str]]:
        """Classes and text of each token."""
        texts = _read(self.sequence.rows["text"], readable)
        hundredths_T = _hundredths(self.sequence.rows["entropy_nats"])
        edges = [round(100 * edge) for edge in EDGES_NATS]
        places = np.searchsorted(edges, hundredths_T, side="right")
        looks = np.where(np.isnan(hundredths_T), "q", np.array([f"e{n}" for n in range(6)])[places])
        is_made = self.sequence.rows["is_generated"].to_numpy(dtype=bool)
        begins = is_made & ~np.concatenate([[False], is_made[:-1]])
        for text, look, made, begin in zip(texts, looks, is_made, begins, strict=True):
            marks = (" s" if is_special(text) else "") + (" g" if made else "")
            yield f"{look}{marks}{' b' if begin else ''}", text

    @cached_property
    def json(self) -> str:
        """What the script reads, in characters that end no element: see ``script.js``."""
        rows = self.sequence.rows
        texts, likely = _likely(rows)
        left = {one.policy.family: one for one in self.sequence.left}
        missed = {one.scheme.family: one for one in self.sequence.missed}
        data = {
            "entropy": _numbers(_hundredths(rows["entropy_nats"])),
            "surprisal": _numbers(_hundredths(rows["surprisal_nats"])),
            "rank": _numbers(rows["rank"].to_numpy(dtype=float)),
            "texts": texts,
            "likely": likely,
            "held": [_held(left.get(name)) for name in self.policies],
            "missed": [_missed(missed.get(name)) for name in self.schemes],
        }
        written = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
        for char in "<>&":
            written = written.replace(char, f"\\u{ord(char):04x}")
        return written


def is_special(text: str) -> bool:
    """Return whether a shown text is that of a special token."""
    return text.startswith(SPECIAL[0]) and text.endswith(SPECIAL[1])


def _read(texts: pd.Series[Any], read: Any) -> list[str]:
    """Return all texts read; each different one is looked at once."""
    known = {text: read(text) for text in dict.fromkeys(texts)}
    return [known[text] for text in texts]


def _hundredths(values: pd.Series[Any]) -> np.ndarray:
    hundredths: np.ndarray = np.rint(100 * values.to_numpy(dtype=float))
    return hundredths


def _numbers(values: np.ndarray) -> list[int | None]:
    return [None if np.isnan(value) else int(value) for value in values.tolist()]


def _likely(rows: pd.DataFrame) -> tuple[list[str], list[list[int]]]:
    """Return all candidates' texts, and for each token their numbers and probabilities in turn.

    Probabilities are in thousandths; less than a certain one is at most 999.
    """
    places: dict[str, int] = {}
    likely: list[list[int]] = []
    for texts, probs in zip(rows["top_texts"], rows["top_probs"], strict=True):
        flat: list[int] = []
        for text, prob in zip(texts, probs, strict=True) if texts is not None else ():
            if flat and prob < LEAST_PROB:
                break
            thousandths = round(1000 * float(prob))
            flat += (
                places.setdefault(text, len(places)),
                min(thousandths, 1000 if prob >= 1 else 999),
            )
        likely.append(flat)
    # The script writes spaces as signs: here they would be thrice as long.
    return [label(text).replace(SPACE, " ") for text in places], likely


def _held(one: Left | None) -> list[Any] | None:
    """Return two hexadecimal digits of percent a token, the eviction point, and a sentence."""
    if one is None:
        return None
    percents_T = np.rint(100 * one.held_T)
    is_some = (one.held_T > 0) & (one.held_T < 1)
    percents_T = np.where(is_some, np.clip(percents_T, 1, 99), percents_T)
    bytes_T = np.where(np.isnan(percents_T), _NO_NUMBER, percents_T).astype(np.uint8)
    flags = f" ({one.flags})" if one.flags else ""
    told = (
        f"{one.policy.family}, asked to keep {percent(one.policy.asked)}, holds {percent(one.share)} "
        f"of the entries when the last token is read; it begins to evict after {one.point} tokens{flags}."
    )
    return [bytes_T.tobytes().hex(), one.point, told]


def _missed(one: Missed | None) -> list[Any] | None:
    """Return the first step tried, a mark a step from there on, and a sentence."""
    if one is None:
        return None
    tried = np.flatnonzero(~np.isnan(one.missed_T))
    num_missed = int(np.nansum(one.missed_T))
    name = f"{one.scheme.family} with {count(one.scheme.x)} candidates"
    if not len(tried):
        return [0, "", f"{name} was tried on none of these tokens."]
    part_T = one.missed_T[tried[0] : tried[-1] + 1]
    marks = _MARKS[np.where(np.isnan(part_T), 2, part_T).astype(int)]
    told = (
        f"{name} has no candidate for the most likely token at {count(num_missed)} of "
        f"{count(len(tried))} steps ({percent(num_missed / len(tried))})."
    )
    return [int(tried[0]), "".join(marks), told]
