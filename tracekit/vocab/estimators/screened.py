"""Learned screening: what followed contexts like this one in other prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.errors import UsageError
from tracekit.measure.clusters import cluster_rows
from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.others import example_rows
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from tracekit.measure.head import Head
    from tracekit.vocab.view import View

ID_BYTES = 4
"""Bytes of a token id in a cluster's list."""

BLOCK_NUMBERS = 1 << 22
"""Probabilities of examples that are made at once."""


@dataclass(frozen=True, eq=False)
class Screen:
    """Clusters of contexts, and all tokens in the order of each.

    Parameters
    ----------
    centroid_JE
        Mean context of each cluster, float32.
    order_JV
        Token ids, int32.
    """

    centroid_JE: torch.Tensor
    order_JV: torch.Tensor

    @classmethod
    def fit(cls, head: Head, hidden_XE: torch.Tensor, num: int, seed: int) -> Screen:
        """Return the clusters of some contexts, and what the full head finds likely in each.

        Parameters
        ----------
        head
            Gives each example's whole distribution.
        hidden_XE
            Final hidden states of the examples.
        num, seed
            Clusters asked for, and the seed of k-means.
        """
        clusters = cluster_rows(hidden_XE.float(), num, seed)
        total_JV = torch.zeros((len(clusters.centroid_JE), head.spec.num_rows))
        examples_X = torch.arange(len(hidden_XE))
        for rows_X in examples_X.split(max(1, BLOCK_NUMBERS // head.spec.num_rows)):
            prob_XV = head.logits(hidden_XE[rows_X]).cpu().softmax(1)
            total_JV.index_add_(0, clusters.cluster_V[rows_X], prob_XV)
        # Tokens are put in the order of all examples first, which then decides ties.
        order_V = total_JV.sum(0).argsort(descending=True, stable=True)
        place_JV = total_JV[:, order_V].argsort(dim=1, descending=True, stable=True)
        return cls(clusters.centroid_JE.float(), order_V.int()[place_JV])

    def nearest(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """Return the cluster whose centroid is nearest to each context, int64 [S]."""
        half_J = self.centroid_JE.square().sum(1) / 2
        return (hidden_SE.float().cpu() @ self.centroid_JE.T - half_J).argmax(1)


@ESTIMATORS.register("screened")
@dataclass(frozen=True)
class Screened(CausalEstimator):
    """Tokens by their mean probability in the other prompts' contexts nearest to this one.

    The final hidden states of other prompts' steps are clustered by k-means; each cluster has all
    tokens in the order of their mean probability under the full head over its examples, which is
    the order that covers the most mass on them; ties go by the mean over all examples, then by
    lower id. A step takes the order of the nearest centroid.

    After L2S (Chen et al. 2019, arXiv:1810.12406), whose clusters begin as k-means too. There z(h)
    is the largest v_j . h, with v_j and the sets trained together through a Gumbel softmax under a
    budget for the mean size, on one-hot labels: the tokens of the exact softmax's top k. Here
    nothing is trained beyond k-means, sets of all sizes are prefixes of one order, and each cluster
    has the same size.

    Parameters
    ----------
    clusters
        Clusters of contexts; at most as many as there are different examples. Their orders are held
        for each fold of prompts, 4 bytes a token and cluster: 13 MB for 64 of 49 152 tokens.
    seed
        Of k-means.
    """

    name: ClassVar[str] = "screened"
    least: ClassVar[int] = 0
    clusters: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.clusters:
            msg = f"{self.text}: clusters must be at least 1."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """The hidden state, the head, and other prompts."""
        return Needs(hidden=True, head=True, others=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the order of each step's cluster."""
        screen = self._screen(view)
        return screen.order_JV[screen.nearest(view.hidden_SE), :limit].long()

    def cost(self, view: View, size: int) -> Cost:
        """Return a product with each centroid, and the ids of the candidates."""
        spec, num = view.head_spec, len(self._screen(view).centroid_JE)
        ids = ID_BYTES * min(size, spec.num_rows)
        numbers = num * (spec.hidden_size + 1)
        return Cost(macs=num * spec.hidden_size, bytes=numbers * view.bytes_per_number + ids)

    def _screen(self, view: View) -> Screen:
        others, head = view.others, view.head
        return others.fitted_by_fold(
            (self.name, self.clusters, self.seed),
            lambda: Screen.fit(head, example_rows(others)[0], self.clusters, self.seed),
        )
