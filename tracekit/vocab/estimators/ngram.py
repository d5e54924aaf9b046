"""N-grams of other prompts: what follows the last tokens elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from tracekit.measure.memo import Memo
from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.vocab.others import Others
    from tracekit.vocab.view import View

BACKOFF = 0.4
"""Factor for each token that a suffix is shorter than the longest that was found."""

ID_BYTES, COUNT_BYTES = 4, 4
"""Bytes of a token id, and of how often it followed."""


@ESTIMATORS.register("ngram")
@dataclass(frozen=True)
class Ngram(CausalEstimator):
    """Stupid back-off over n-grams counted in the other prompts.

    After Brants et al. 2007 (EMNLP, Large Language Models in Machine Translation, section 4). A
    token's score is count(suffix, token) / count(suffix) for the longest suffix of the text so far
    that it followed there, times 0.4 for each token by which that one is shorter than the longest
    that was found; of no suffix at all, its share of all tokens. So a frequent follower of two
    tokens can pass a rare one of three. Equal scores go by the longer suffix, then by the lower id.
    The ranking ends where the counts do: a token that no other prompt holds is no candidate.

    Parameters
    ----------
    longest
        Tokens of the longest suffix; with the token itself, n-grams of one more.
    """

    name: ClassVar[str] = "ngram"
    longest: int = 3

    @property
    def needs(self) -> Needs:
        """The text so far and other prompts."""
        return Needs(tokens=True, others=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the tokens of each step by score."""
        # Kept with the sequence, not with the trace: the index is as long as all other texts, and one
        # a prompt would fill the memory.
        if "ngrams" not in view.memory:
            view.memory["ngrams"] = _Ngrams.of(view.others, self.longest)
        ngrams: _Ngrams = view.memory["ngrams"]
        ids = view.token_ids_T.tolist()
        ranked, num_read = [], 0
        for row in view.rows_S.tolist():
            found = ngrams.followers(ids[max(0, row + 1 - self.longest) : row + 1])
            num_read += sum(len(some.id_X) for some in found)
            ranked.append(ngrams.ranked(found, limit))
        view.memory["num_read"] = num_read / view.num_steps
        return torch.from_numpy(np.stack(ranked))

    def cost(self, view: View, size: int) -> Cost:
        """Return the ids of the suffixes, all their followers with counts, and the candidates' ids."""
        suffixes = self.longest * (self.longest + 1) // 2
        ids = suffixes + min(size, len(view.memory["ngrams"].seen_K))
        followers = view.memory["num_read"] * (ID_BYTES + COUNT_BYTES)
        return Cost(bytes=ID_BYTES * ids + followers)


@dataclass(frozen=True, eq=False)
class _Followers:
    """Tokens that followed a suffix, by falling share of its occurrences, then by id."""

    id_X: np.ndarray
    share_X: np.ndarray

    @classmethod
    def counted(cls, followed_X: np.ndarray) -> _Followers:
        id_X, count_X = np.unique(followed_X, return_counts=True)
        order_X = np.argsort(-count_X, kind="stable")
        return cls(id_X[order_X], count_X[order_X] / len(followed_X))


@dataclass(frozen=True, eq=False)
class _Ngrams:
    """All places of some texts in the order of the tokens before them, the nearest token first.

    The places behind one suffix are neighbours, and those behind a longer one are among them.

    Parameters
    ----------
    before
        By distance, the token before each place; -1 where its text had not begun. int64 [X] each.
    follower_X
        The token at each place.
    seen_K
        Tokens that came, by falling count, then by id.
    share_V
        Share that each token of the vocabulary is of all that came.
    memo
        Followers by the places that they were counted at.
    """

    before: tuple[np.ndarray, ...]
    follower_X: np.ndarray
    seen_K: np.ndarray
    share_V: np.ndarray
    memo: Memo

    @classmethod
    def of(cls, others: Others, longest: int) -> _Ngrams:
        texts = [text.token_ids_T.numpy() for text in others.texts if len(text.token_ids_T)]
        padded = [np.concatenate([np.full(longest, -1), ids_T]) for ids_T in texts]
        none = np.empty((0, longest + 1), dtype=np.int64)
        windows = [np.lib.stride_tricks.sliding_window_view(ids, longest + 1) for ids in padded]
        place_XN = np.concatenate([none, *windows])
        place_XN = place_XN[np.lexsort(place_XN[:, :-1].T)]
        count_V = np.bincount(place_XN[:, -1], minlength=others.corpus.num_rows)
        return cls(
            before=tuple(place_XN[:, longest - 1 - n].copy() for n in range(longest)),
            follower_X=place_XN[:, -1].copy(),
            seen_K=np.argsort(-count_V, kind="stable")[: np.count_nonzero(count_V)],
            share_V=count_V / max(1, len(place_XN)),
            memo=Memo(),
        )

    def followers(self, suffix: Sequence[int]) -> list[_Followers]:
        """Return what followed each suffix of some tokens that has followers, the longest first."""
        start, end = 0, len(self.follower_X)
        found: list[_Followers] = []
        for token, before_X in zip(reversed(suffix), self.before, strict=False):
            start, end = start + np.searchsorted(before_X[start:end], [token, token + 1])
            if start == end:
                break
            some_X = self.follower_X[start:end]
            found.insert(0, self.memo.get((start, end), partial(_Followers.counted, some_X)))
        return found

    def ranked(self, found: Sequence[_Followers], limit: int) -> np.ndarray:
        """Return the tokens of highest score, int64 [K]: as many as came, if not limited."""
        is_new_V = np.ones(len(self.share_V), dtype=bool)
        id_parts, score_parts = [], []
        for shorter, some in enumerate(found):
            is_new_X = is_new_V[some.id_X]
            id_parts.append(some.id_X[is_new_X])
            score_parts.append(BACKOFF**shorter * some.share_X[is_new_X])
            is_new_V[some.id_X] = False
        # Of the rest, no more than the limit can be asked for behind what stands out of order.
        rest_K = self.seen_K[: limit + len(is_new_V) - int(is_new_V.sum())]
        rest_K = rest_K[is_new_V[rest_K]]
        id_K = np.concatenate([*id_parts, rest_K])
        score_K = np.concatenate([*score_parts, BACKOFF ** len(found) * self.share_V[rest_K]])
        # Stable, the longer suffix first: that is the order of equal scores.
        return id_K[np.argsort(-score_K, kind="stable")[:limit]]
