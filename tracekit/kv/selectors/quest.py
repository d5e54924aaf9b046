"""Read the pages whose bounds promise the largest products with the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tracekit.errors import UsageError
from tracekit.kv.order import highest, order_of
from tracekit.kv.pages import products_NLGMQP
from tracekit.kv.selector import SELECTORS, GroupReduce, Selector, reduced

if TYPE_CHECKING:
    from tracekit.kv.selector import Choice, Fitted
    from tracekit.spec import LayerSpec


@SELECTORS.register("quest")
@dataclass(frozen=True)
class Quest(Selector):
    """Reads whole pages, those with the highest upper bound of query times key.

    Tang et al. 2024 (arXiv:2406.10774, section 3.3): score of a page = the sum over channels d of
    max(q_d min_d, q_d max_d), with the least and the largest key of the page in each channel, taken
    when the page is full and not narrowed while its first entries leave a layer's window. The open
    page, which has the row's own entry, is always read: no bound of it is needed.

    Differences: one set for each KV head, the scores reduced over its query heads, where the
    original reads another set for each query head. The budget counts entries of the open page one
    by one, so that read=1 reads all; the original reads budget // page pages and counts the open
    one as a whole. No layer is left dense (the original leaves out layers 0 and 1). Soft-caps and
    ALiBi are left out of the bound.

    Parameters
    ----------
    page
        Entries of a page, in cache order.
    least
        Pages that are read whatever the budget, the open one included.
    reduce
        ``max`` or ``mean`` over the query heads of a KV head.
    """

    page: int = 16
    least: int = 3
    reduce: GroupReduce = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page < 1 or self.least < 1:
            msg = f"page={self.page} and least={self.least} must be at least 1."
            raise UsageError(msg)

    @property
    def page_size(self) -> int:
        """Entries of a page."""
        return self.page

    def summarise(self, key_XCD: torch.Tensor) -> Fitted:
        """Return the largest and least key in each channel, [X, D] each."""
        return key_XCD.amax(1), key_XCD.amin(1)

    def choose(self, choice: Choice) -> torch.Tensor:
        """Return the entries of the best pages, [N, L, G, Q, K]."""
        pages = choice.pages
        bound_NLGPE = torch.cat(pages.summary, dim=-1)
        query_LGMQD = choice.query_LGMQD
        signed_LGMQE = torch.cat([query_LGMQD.clamp(min=0), query_LGMQD.clamp(max=0)], dim=-1)
        score_NLGMQP = products_NLGMQP(signed_LGMQE, bound_NLGPE)
        order_NLGQP = order_of(reduced(score_NLGMQP, self.reduce), pages.candidates_NLGQP)
        count_NLGQ = pages.others_NLGQ(choice.budget_NQ).clamp(min=self.least - 1)
        return pages.entries(highest(order_NLGQP, count_NLGQ))

    def index_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return the bytes of two keys a page."""
        return 2 * layer.head_dim * bytes_per_number / self.page
