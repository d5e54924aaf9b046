"""Clustered head: score the centroids of the head's rows, then open the nearest lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch.nn.functional import normalize

from tracekit.measure.clusters import Clusters, cluster_rows
from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.order import opened
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from tracekit.measure.head import Head
    from tracekit.vocab.view import View

ID_BYTES = 4
"""Bytes of a token id in a list."""

SEED = 0
"""Of the clusters."""


@dataclass(frozen=True, eq=False)
class Lists:
    """The head's rows in lists.

    Parameters
    ----------
    clusters
        The lists; in each the longest row first.
    bias_J
        Mean bias of a list's unmasked tokens; -inf where all are masked, 0 without a bias.
    """

    clusters: Clusters
    bias_J: torch.Tensor


@ESTIMATORS.register("clustered")
@dataclass(frozen=True)
class Clustered(CausalEstimator):
    """Lists of tokens with similar rows, in the order of their mean logit.

    Inverted lists over the unembedding (Auvolat et al. 2015, arXiv:1507.05910; FlashHead,
    arXiv:2603.14591), except that lists are opened until the size is reached, not so many of them,
    and that they are not of equal size. Scale and soft-cap keep the order and are left out. Within
    a list the longest row comes first, which is fixed before any step; on the built-in model the
    row nearest to the centroid covered as much.

    Parameters
    ----------
    lists
        Clusters of the head's rows; at most the distinct ones.
    metric
        What makes rows similar: their direction (``cosine``), or their difference
        (``euclidean``). On the built-in model directions covered more, small sets above all.
    """

    name: ClassVar[str] = "clustered"
    lists: int = 512
    metric: Literal["cosine", "euclidean"] = "cosine"

    @property
    def needs(self) -> Needs:
        """The hidden state and the head's weight."""
        return Needs(hidden=True, head=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the members of the best lists, ties by the list's number."""
        lists = self._lists_of(view.head)
        centroid_JE = lists.clusters.centroid_JE
        score_SJ = view.hidden_SE.to(centroid_JE) @ centroid_JE.T + lists.bias_J
        order_SJ = score_SJ.argsort(dim=1, descending=True, stable=True)
        return opened(order_SJ, lists.clusters.size_J, lists.clusters.members_V, limit)

    def cost(self, view: View, size: int) -> Cost:
        """Return a product with the centroids, and the ids of the lists that are opened."""
        spec, num = view.head_spec, len(self._lists_of(view.head).bias_J)
        numbers = num * (spec.hidden_size + spec.has_bias)
        return Cost(
            macs=num * spec.hidden_size,
            bytes=numbers * view.bytes_per_number + size * ID_BYTES,
        )

    def _lists_of(self, head: Head) -> Lists:
        return head.memo.get(("clustered", self.text), lambda: self._cluster(head))

    def _cluster(self, head: Head) -> Lists:
        weight_VE = head.weight_VE.cpu().float()
        points_VE = normalize(weight_VE, dim=1) if self.metric == "cosine" else weight_VE
        found = cluster_rows(points_VE, self.lists, SEED)
        clusters = Clusters.of(weight_VE, found.cluster_V)
        bias_J = torch.zeros(len(clusters.size_J))
        if head.bias_V is not None:
            bias_V = head.bias_V.cpu().float()
            is_open_V = bias_V.isfinite()
            total_J = bias_J.index_add(0, clusters.cluster_V, bias_V.masked_fill(~is_open_V, 0))
            count_J = bias_J.index_add(0, clusters.cluster_V, is_open_V.float())
            bias_J = (total_J / count_J).masked_fill(count_J == 0, -torch.inf)
        return Lists(clusters, bias_J)
