"""A fixed list: the tokens that came most often in other prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from tracekit.vocab.others import Others, Text
    from tracekit.vocab.view import View

Source = Literal["all", "given", "generated", "domain"]


@ESTIMATORS.register("frequency")
@dataclass(frozen=True)
class Frequency(CausalEstimator):
    """Most frequent tokens of the trace's other prompts, the same at every step.

    FR-Spec (Zhao et al. 2025, arXiv:2502.14856, section 3) counts a large corpus, VocabTrim
    (arXiv:2506.22694) what the model itself writes; these counts come from what the trace holds of
    other prompts. What the source did not hold follows by its count in all of them, equal counts go
    by lower id. The list ends where the counts do: a token that no other prompt holds is no
    candidate.

    Parameters
    ----------
    source
        What is counted: ``all`` tokens, template included; those ``given``; those ``generated`` by
        the model; or all of the prompt's own ``domain``.
    """

    name: ClassVar[str] = "frequency"
    source: Source = "all"

    @property
    def needs(self) -> Needs:
        """Other prompts."""
        return Needs(others=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the same ids for all steps."""
        others = view.others
        ids_K = others.fitted(("frequency", self.source), lambda: self._order(others))
        return ids_K[:limit].expand(view.num_steps, -1)

    def cost(self, view: View, size: int) -> Cost:
        """Return nothing: the rows of a fixed list can be stored side by side, in its order."""
        del view, size
        return Cost()

    def _order(self, others: Others) -> torch.Tensor:
        """Return the ids that came at all by the source's counts, then by those of everything."""

        def counted(text: Text) -> torch.Tensor:
            keeps_T = {
                "all": torch.ones_like(text.is_generated_T),
                "given": ~text.is_generated_T,
                "generated": text.is_generated_T,
                "domain": torch.full_like(text.is_generated_T, text.domain == others.domain),
            }
            return text.token_ids_T[keeps_T[self.source]]

        all_V = others.counts(lambda text: text.token_ids_T)
        seen_K = all_V.argsort(descending=True, stable=True)[: int(all_V.count_nonzero())]
        return seen_K[others.counts(counted)[seen_K].argsort(descending=True, stable=True)]
