"""Read the chunks whose mean key is attended to most, and chunks that have no good mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tracekit.errors import UsageError
from tracekit.kv.order import highest, order_of
from tracekit.kv.pages import products_NLGMQP
from tracekit.kv.selector import SELECTORS, GroupReduce, Selector, reduced

if TYPE_CHECKING:
    from tracekit.kv.pages import Pages
    from tracekit.kv.selector import Choice, Fitted
    from tracekit.spec import LayerSpec

_OUTLIER, _LOCAL = 2.0, 3.0
"""Scores above any attention."""


@SELECTORS.register("shadowkv")
@dataclass(frozen=True)
class ShadowKV(Selector):
    """Reads chunks by the attention to their mean key; outlying and newest chunks come first.

    Sun et al. 2024 (arXiv:2410.21465, section 4): a chunk's landmark is the mean of its keys, taken
    when the chunk is full; score = softmax over the landmarks, the maximum over the query heads of
    a KV head. Chunks whose least cosine between a key and the landmark is lowest are outliers.

    Differences: the open chunk is always read and all else is inside the budget, newest chunks
    first, then outliers, then landmarks; the original adds the outliers (48 chunks) and the newest
    to its budget (256 chunks): hence ``outliers`` as a share. They are chosen anew among the chunks
    that a row finds full, where the original fixes them after the prompt, and they take part in the
    softmax. Keys are not replaced by their low-rank form. Soft-caps and ALiBi are left out.

    Parameters
    ----------
    chunk
        Entries of a chunk, in cache order.
    local
        Newest full chunks that come first.
    outliers
        Fraction of the chunks read, the open one aside, that goes to outliers, rounded down.
    reduce
        ``max`` or ``mean`` over the query heads of a KV head.
    """

    chunk: int = 8
    local: int = 4
    outliers: float = 0.15
    reduce: GroupReduce = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1 or self.local < 0 or not 0 <= self.outliers <= 1:
            msg = (
                f"chunk={self.chunk} must be at least 1, local={self.local} not negative, and "
                f"outliers={self.outliers} in [0, 1]."
            )
            raise UsageError(msg)

    @property
    def page_size(self) -> int:
        """Entries of a chunk."""
        return self.chunk

    def summarise(self, key_XCD: torch.Tensor) -> Fitted:
        """Return the mean key [X, D] and its least cosine to a key of the chunk [X]."""
        mean_X1D = key_XCD.mean(1, keepdim=True)
        cosine_XC = functional.cosine_similarity(key_XCD, mean_X1D, dim=-1)
        return mean_X1D[:, 0], cosine_XC.amin(1)

    def choose(self, choice: Choice) -> torch.Tensor:
        """Return the entries of the best chunks, [N, L, G, Q, K]."""
        pages = choice.pages
        is_full_NLGQP = pages.candidates_NLGQP
        count_NLGQ = pages.others_NLGQ(choice.budget_NQ)
        page_P = torch.arange(is_full_NLGQP.shape[-1], device=is_full_NLGQP.device)
        is_local_NLGQP = page_P >= pages.own_NLGQ[..., None] - self.local
        outlying_NLGQP = order_of(-pages.summary[1][:, :, :, None], is_full_NLGQP & ~is_local_NLGQP)
        is_outlier_NLGQP = highest(outlying_NLGQP, (count_NLGQ * self.outliers).long())
        score_NLGQP = self._attention(choice, pages, is_full_NLGQP)
        score_NLGQP = score_NLGQP.masked_fill(is_outlier_NLGQP, _OUTLIER)
        score_NLGQP = score_NLGQP.masked_fill(is_local_NLGQP, _LOCAL)
        return pages.entries(highest(order_of(score_NLGQP, is_full_NLGQP), count_NLGQ))

    def _attention(self, choice: Choice, pages: Pages, is_full_NLGQP: torch.Tensor) -> torch.Tensor:
        """Return the softmax over the landmarks of full chunks, reduced: [N, L, G, Q, P]."""
        logits_NLGMQP = choice.layer.scale * products_NLGMQP(choice.query_LGMQD, pages.summary[0])
        lowest = torch.finfo(logits_NLGMQP.dtype).min
        masked_NLGMQP = logits_NLGMQP.where(is_full_NLGQP[:, :, :, None], lowest)
        return reduced(masked_NLGMQP.softmax(-1), self.reduce)

    def index_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return the bytes of one key a chunk."""
        return layer.head_dim * bytes_per_number / self.chunk
