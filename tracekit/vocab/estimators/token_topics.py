"""Topics of tokens: which clusters of the vocabulary the text has drawn from of late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.errors import UsageError
from tracekit.measure.clusters import Clusters, cluster_rows
from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.order import opened
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from tracekit.measure.head import Head
    from tracekit.vocab.view import View

SEED = 0
"""Of the clusters."""

NUMBER_BYTES = 4
"""Bytes of a token id in a list, and of a list's weight."""


@ESTIMATORS.register("token_topics")
@dataclass(frozen=True)
class TokenTopics(CausalEstimator):
    """Clusters of tokens by how much of the text of late is of them, each cluster whole.

    Tokens are clustered by their rows of the head, offline. The weights of the clusters begin at 0;
    every token x of the text, from position 0 on, makes them p <- (1 - rate) p + rate onehot(cluster
    of x). Clusters follow each other by weight, ties by number; inside of a cluster the lower id
    comes first, since byte-pair ids were given in the order of merges, frequent ones first. On the
    built-in model counts in other prompts, as the order inside or as the weights to begin with,
    moved the hits by less than 0.01, so nothing but the own text is read; the longest row first
    covered less. No source measured this idea.

    Parameters
    ----------
    lists
        Clusters of tokens; at most the distinct rows of the head.
    rate
        Weight of the newest token, 0 to 1.
    """

    name: ClassVar[str] = "token_topics"
    lists: int = 256
    rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate > 1:
            msg = f"{self.text}: rate is a number from 0 to 1."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """The tokens and the head's weight."""
        return Needs(tokens=True, head=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the clusters' tokens, the heaviest cluster first."""
        clusters = self._clusters(view.head)
        order_SJ = self._weights(view, clusters).argsort(dim=1, descending=True, stable=True)
        members_V = clusters.cluster_V.argsort(stable=True)
        return opened(order_SJ, clusters.size_J, members_V, limit)

    def cost(self, view: View, size: int) -> Cost:
        """Return the upkeep of the weights, and the ids of the candidates."""
        lists = len(self._clusters(view.head).size_J)
        ids = min(size, view.head_spec.num_rows)
        return Cost(macs=lists, bytes=NUMBER_BYTES * (lists + ids))

    def _clusters(self, head: Head) -> Clusters:
        return head.memo.get(
            (self.name, self.lists), lambda: cluster_rows(head.weight_VE, self.lists, SEED)
        )

    def _weights(self, view: View, clusters: Clusters) -> torch.Tensor:
        """Return the weights at each step, float64 [S, J], and keep those of the last."""
        start_J = torch.zeros(len(clusters.size_J), dtype=torch.float64)
        next_row, weight_J = view.memory.get("state", (0, start_J))
        cluster_T = clusters.cluster_V[view.token_ids_T]
        weights = []
        for row in view.rows_S.tolist():
            for cluster in cluster_T[next_row : row + 1].tolist():
                weight_J = weight_J * (1 - self.rate)
                weight_J[cluster] += self.rate
            weights.append(weight_J)
            next_row = row + 1
        view.memory["state"] = next_row, weight_J
        return torch.stack(weights)
