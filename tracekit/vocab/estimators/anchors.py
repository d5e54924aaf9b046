"""Attention anchors: what the most attended tokens, pooled, lie nearest to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from tracekit.measure.logits import best_ids
from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.layers import LayerChoice
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from tracekit.vocab.view import View

Of = Literal["output", "input", "hidden", "past"]

HIDDEN = ("hidden", "past")
"""Choices that pool final hidden states."""

Metric = Literal["dot", "cosine"]

EVERYWHERE = LayerChoice.parse("all")

SMALLEST = torch.finfo(torch.float32).tiny
"""Least length of a row that is divided by: the cosine with a row of zeros is 0."""


@ESTIMATORS.register("anchors")
@dataclass(frozen=True)
class Anchors(CausalEstimator):
    """Top tokens by their product with the attention-weighted mean of attended states.

    The claim of "attention anchors", in the form of one query a step: no published measurement of
    it is known. The first position takes the attention that goes nowhere (StreamingLLM, Xiao et al.
    2023, arXiv:2309.17453, section 3.1), so it is left out; of equally attended positions the
    earlier counts. A step that attends to nothing else, as the first does, has no candidates. The
    head's bias is left out: this is a search among embeddings.

    Parameters
    ----------
    of
        What is pooled: rows of the head for the attended tokens (``output``), rows of the input
        embedding (``input``), final hidden states up to the step's own (``hidden``), or those before
        it (``past``). A step's own state is what the head reads, so ``hidden`` is largely the head
        itself. The search is in the input embedding for ``input``, else in the head.
    layers
        Layers, or single heads (``18.6/17.5``), whose attention is read, mean over all heads: those
        that look away from the first position count for more.
    top
        Most attended positions that are pooled.
    power
        To which their attention is raised: 0 pools them alike.
    metric
        ``dot`` is what the head itself computes from a state, long rows before short ones;
        ``cosine`` goes by direction alone.
    """

    name: ClassVar[str] = "anchors"
    of: Of = "output"
    layers: LayerChoice = EVERYWHERE
    top: int = 16
    power: float = 1.0
    metric: Metric = "dot"

    @property
    def needs(self) -> Needs:
        """Attention, and the states and rows that are compared; the head keeps the rows' lengths."""
        return Needs(
            attention=self.layers,
            head=True,
            hidden=self.of in HIDDEN,
            tokens=self.of not in HIDDEN,
            embedding=self.of == "input",
        )

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the ids of the highest products, ties by lower id."""
        rows_VE = self._rows(view)
        weight_SN, position_SN = self._anchors(view)
        pooled_SE = self._pooled(view, weight_SN, position_SN)
        score_SV = (pooled_SE.to(rows_VE) @ rows_VE.T).float()
        if self.metric == "cosine":
            score_SV *= self._inverse_lengths(view)
        has_anchors_S1 = (weight_SN > 0).any(1, keepdim=True)
        return best_ids(score_SV, limit).cpu().masked_fill(~has_anchors_S1, -1)

    def cost(self, view: View, size: int) -> Cost:
        """Return pooling, so many states a step, and the search: a product with all V rows.

        The attention itself counts nothing: the layers have computed it, although fused kernels do
        not give it away.
        """
        del size
        spec = view.head_spec
        num_pooled_S = (view.rows_S - int(self.of == "past")).clamp(0, self.top)
        numbers = (float(num_pooled_S.double().mean()) + spec.num_rows) * spec.hidden_size
        numbers += spec.num_rows * (self.metric == "cosine")
        return Cost(macs=numbers, bytes=numbers * view.bytes_per_number)

    def _anchors(self, view: View) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and positions of the most attended tokens, [S, N]; weight 0 is none."""
        attention_SK = view.attention_SK().clone()
        attention_SK[:, 0] = 0
        if self.of == "past":
            attention_SK.scatter_(1, view.rows_S[:, None], 0)
        position_SN = best_ids(attention_SK, self.top)
        attention_SN = attention_SK.gather(1, position_SN)
        # Powers of shares of the largest do not all vanish: their sum is 1 at least.
        share_SN = attention_SN / attention_SN[:, :1]
        weight_SN = torch.where(attention_SN > 0, share_SN**self.power, 0.0)
        weight_SN /= weight_SN.sum(1, keepdim=True).clamp_min(1)
        # What has no weight may lie after the step: the first position stands in for it.
        return weight_SN, position_SN.masked_fill(weight_SN == 0, 0)

    def _pooled(
        self, view: View, weight_SN: torch.Tensor, position_SN: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted means of what is pooled, float32 [S, E]."""
        if self.of in HIDDEN:
            ids_SN, states_XE = position_SN, view.hidden_TE
        else:
            ids_SN, states_XE = view.token_ids_T[position_SN], self._rows(view)
        some_X, place_SN = ids_SN.unique(return_inverse=True)
        pooled_SE: torch.Tensor = torch.nn.functional.embedding_bag(
            place_SN, states_XE[some_X].float(), mode="sum", per_sample_weights=weight_SN
        )
        return pooled_SE

    def _rows(self, view: View) -> torch.Tensor:
        """Return the matrix that is searched, [V, E]."""
        return view.embedding_VE if self.of == "input" else view.head.weight_VE

    def _inverse_lengths(self, view: View) -> torch.Tensor:
        """Return 1 / length of each row that is searched, float32 [V], computed once."""
        rows_VE = self._rows(view)

        def make() -> torch.Tensor:
            length_V: torch.Tensor = torch.linalg.vector_norm(rows_VE, dim=1, dtype=torch.float32)
            return length_V.clamp_min(SMALLEST).reciprocal()

        return view.head.memo.get(("inverse row lengths", self.of == "input"), make)
