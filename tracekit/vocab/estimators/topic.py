"""Topics: hidden states are clustered as they come, and the nearest topic names the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

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
    """Tokens nearest to the topic vector, by a product with the whole head: it costs what that does.

    The final hidden states are clustered in order (``measure/leader.py``), and the topic vector is
    the running mean of a cluster. Directions are taken from the running mean of all states: two
    states of the built-in model have a cosine of 0.3 to 0.5 on average, without that mean below
    0.1. The product is with the topic vector itself, not with its direction, bias included. No
    source measured this idea.

    Parameters
    ----------
    of
        Whose mean the topic vector is. ``past``: of the cluster nearest to h_t among those of the
        states before it; h_t joins afterwards, and a step without an earlier state has no
        candidates. ``hidden``: of the cluster that h_t is a member of. That is largely the head
        itself: a higher threshold or decay brings the vector nearer to h_t, down to h_t alone.
    threshold
        Least cosine at which a state joins a cluster, 0 to 1.
    decay
        Least weight of a new member in its cluster's mean, 0 to 1: 0 keeps the plain mean.
    """

    name: ClassVar[str] = "topic"
    of: Literal["past", "hidden"] = "past"
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
        """Return the ids of the highest products, ties by lower id; none without a topic."""
        head = view.head
        wide_SE = self._topics(view)
        has_none_S1 = wide_SE.isnan().any(1, keepdim=True)
        topic_SE = wide_SE.nan_to_num().to(head.weight_VE)
        score_SV = torch.nn.functional.linear(topic_SE, head.weight_VE, head.bias_V)
        return best_ids(score_SV, limit).cpu().masked_fill(has_none_S1, -1)

    def cost(self, view: View, size: int) -> Cost:
        """Return two products a cluster, for its length and its cosine, and one with each row.

        The clusters are those before the step, held in the head's type; ``past`` searches them twice,
        since the centre moves when h_t joins. What the rows of a prompt cost when they are read is
        not counted.
        """
        del size
        spec = view.head_spec
        searches = {"past": 2, "hidden": 1}[self.of]
        clustering = searches * float(np.mean(view.memory["clusters"])) * spec.hidden_size
        search = spec.num_rows * spec.hidden_size
        numbers = clustering + search + spec.num_rows * spec.has_bias
        return Cost(macs=2 * clustering + search, bytes=numbers * view.bytes_per_number)

    def _topics(self, view: View) -> torch.Tensor:
        """Return the topic vector of each step, float64 [S, E], and keep what later blocks need.

        NaN where a step has none.
        """
        none = Leaders(view.head_spec.hidden_size, threshold=self.threshold, decay=self.decay)
        first, leaders = view.memory.get("state", (0, none))
        is_step = set(view.rows_S.tolist())
        clusters: list[int] = []
        topics: list[np.ndarray] = []
        for row, state_E in enumerate(view.hidden_TE[first:].double().cpu().numpy(), first):
            if row in is_step:
                clusters.append(leaders.num_clusters)
                topics.append(self._taken(leaders, state_E))
            else:
                leaders.join(state_E)
        view.memory["state"] = len(view.hidden_TE), leaders
        view.memory["clusters"] = clusters
        return torch.from_numpy(np.stack(topics))

    def _taken(self, leaders: Leaders, state_E: np.ndarray) -> np.ndarray:
        """Take in the state of a step and return its topic vector."""
        past_E = leaders.nearest(state_E)
        hidden_E = leaders.join(state_E)
        return {"past": past_E, "hidden": hidden_E}[self.of]
