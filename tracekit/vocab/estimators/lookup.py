"""Prompt lookup: what followed the last tokens where they stood in this text before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence

from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from tracekit.vocab.view import View

ID_BYTES = 4
"""Bytes of a token id in the table."""


@ESTIMATORS.register("lookup")
@dataclass(frozen=True)
class Lookup(CausalEstimator):
    """Followers of earlier occurrences of the text's last tokens, prompt included.

    Those of the longest suffix that occurred before come first, then those of shorter ones, down to
    the last token alone; of each suffix, what followed it most recently comes first. Prompt-lookup
    decoding (Saxena 2023) copies a run of tokens behind the first match as a draft; here one token is
    to be foretold, so all matches count. Tokens that followed none of the suffixes are no candidates,
    wherever else they stand in the text.

    Parameters
    ----------
    longest
        Tokens of the longest suffix.
    """

    name: ClassVar[str] = "lookup"
    longest: int = 4

    @property
    def needs(self) -> Needs:
        """The text so far."""
        return Needs(tokens=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the followers at each step; -1 where there are no more."""
        followers = view.memory.setdefault("followers", _Followers(self.longest))
        ids = view.token_ids_T.tolist()
        ranked = []
        for row in view.rows_S.tolist():
            followers.read(ids[followers.num_read : row + 1])
            ranked.append(torch.tensor(followers.listed(limit), dtype=torch.int64))
        return pad_sequence(ranked, batch_first=True, padding_value=-1)

    def cost(self, view: View, size: int) -> Cost:
        """Return the ids of the suffixes, found and brought up to date, and of the candidates."""
        suffixes = self.longest * (self.longest + 1)
        return Cost(bytes=ID_BYTES * (suffixes + min(size, view.head_spec.num_rows)))


class _Followers:
    """What followed each run of up to ``longest`` tokens, in one text that is read on and on."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._last: list[int] = []
        # A dictionary is a list of distinct tokens here, the most recent at its end.
        self._table: dict[tuple[int, ...], dict[int, None]] = {}
        self.num_read = 0

    def read(self, ids: list[int]) -> None:
        """Take in the next tokens."""
        for token in ids:
            for suffix in self._suffixes():
                behind = self._table.setdefault(suffix, {})
                behind.pop(token, None)
                behind[token] = None
            self._last = [*self._last, token][-self._longest :]
        self.num_read += len(ids)

    def listed(self, limit: int) -> list[int]:
        """Return the followers of the last tokens, best first, each once."""
        found: dict[int, None] = {}
        for suffix in self._suffixes():
            for token in reversed(self._table.get(suffix, {})):
                if len(found) == limit:
                    return list(found)
                found.setdefault(token)
        return list(found)

    def _suffixes(self) -> list[tuple[int, ...]]:
        return [tuple(self._last[start:]) for start in range(len(self._last))]
