"""Topics: hidden states are clustered as they come, and the topic of now names the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from tracekit.errors import UsageError
from tracekit.measure.leader import Leaders
from tracekit.measure.logits import best_ids
from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from tracekit.vocab.view import View


@ESTIMATORS.register("topic")
@dataclass(frozen=True)
class Topic(CausalEstimator):
    """Tokens nearest to the topic vector, by product with the head's rows, bias included.

    All final hidden states up to t, h_t included, are clustered in order (``measure/leader.py``);
    the topic vector is the running mean of the cluster that h_t is in. Directions are taken from the
    running mean of all states: two states of the built-in model have a cosine of 0.3 to 0.5 on
    average, without that mean below 0.1. The product is with the mean itself, not with its
    direction. No source measured this idea. Since h_t is a member of its cluster, a higher threshold
    or decay brings the topic vector nearer to h_t, whose product is the full head: the search costs
    as much as the head does.

    Parameters
    ----------
    threshold
        Least cosine at which a state joins a cluster, 0 to 1.
    decay
        Least weight of a new member in its cluster's mean, 0 to 1: 0 keeps the plain mean.
    """

    name: ClassVar[str] = "topic"
    threshold: float = 0.5
    decay: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.threshold, self.decay) > 1:
            msg = f"{self.text}: threshold and decay are numbers from 0 to 1."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """The hidden states and the head's weight."""
        return Needs(hidden=True, head=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the ids of the highest products, ties by lower id."""
        head = view.head
        topic_SE = self._topics(view).to(head.weight_VE)
        score_SV = torch.nn.functional.linear(topic_SE, head.weight_VE, head.bias_V)
        return best_ids(score_SV, limit).cpu()

    def cost(self, view: View, size: int) -> Cost:
        """Return two products a cluster, for its length and its cosine, and one with each row.

        The clusters are those before the step, held in the head's type. What the rows of a prompt
        cost when they are read is not counted.
        """
        del size
        spec = view.head_spec
        clustering = float(np.mean(view.memory["clusters"])) * spec.hidden_size
        search = spec.num_rows * spec.hidden_size
        numbers = clustering + search + spec.num_rows * spec.has_bias
        return Cost(macs=2 * clustering + search, bytes=numbers * view.bytes_per_number)

    def _topics(self, view: View) -> torch.Tensor:
        """Return the topic vector of each step, float64 [S, E], and keep what later blocks need."""
        none = Leaders(view.head_spec.hidden_size, threshold=self.threshold, decay=self.decay)
        first, leaders = view.memory.get("state", (0, none))
        is_step = set(view.rows_S.tolist())
        clusters: list[int] = []
        topics: list[np.ndarray] = []
        for row, state_E in enumerate(view.hidden_TE[first:].double().cpu().numpy(), first):
            num_clusters = leaders.num_clusters
            mean_E = leaders.join(state_E)
            if row in is_step:
                clusters.append(num_clusters)
                topics.append(mean_E)
        view.memory["state"] = len(view.hidden_TE), leaders
        view.memory["clusters"] = clusters
        return torch.from_numpy(np.stack(topics))
