"""What the text holds already, and the tokens whose embeddings are nearest to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from tracekit.measure.nearest import NearestRows
from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost
from tracekit.vocab.order import first_of_each, packed
from tracekit.vocab.view import Needs

if TYPE_CHECKING:
    from tracekit.vocab.view import View

BLOCK_IDS = 1 << 21
"""Ids of contexts and neighbours that are put in order at once."""

ID_BYTES = 4
"""Bytes of a token id."""

Space = Literal["output", "input"]


@ESTIMATORS.register("neighbours")
@dataclass(frozen=True)
class Neighbours(CausalEstimator):
    """Tokens of the context, the most recently used first, then their neighbours.

    Behind the context comes the nearest neighbour of each of its tokens, in the same order, then the
    second nearest of each, and so on: by cosine of their rows, a token's own left out. The context
    alone, ``n=0``, is the part of an in-context vocabulary (MicroSpec, arXiv:2605.26444) that needs
    no head. A set has no more tokens than context and neighbours give, whatever the size asked.

    Parameters
    ----------
    n
        Neighbours of a token; 0 for the context alone.
    space
        Whose rows are compared: the head's (``output``) or the input embedding's (``input``). In a
        model that ties the two it makes no difference.
    """

    name: ClassVar[str] = "neighbours"
    least: ClassVar[int] = 0
    n: int = 8
    space: Space = "output"

    @property
    def needs(self) -> Needs:
        """The tokens, and the matrix of the space; the head keeps the neighbours found."""
        return Needs(tokens=True, head=True, embedding=self.space == "input")

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        """Return the context and its neighbours, each token at its first place."""
        recent_SM, table = recent_first(view.token_ids_T, view.rows_S), self._table(view)
        num_steps = max(1, BLOCK_IDS // (recent_SM.shape[1] * (1 + table.width)))
        num_rows = view.head_spec.num_rows
        ranked = [
            first_of_each(with_levels(part_SM, table), num_rows)[:, :limit]
            for part_SM in recent_SM.split(num_steps)
        ]
        return torch.cat(ranked)

    def cost(self, view: View, size: int) -> Cost:
        """Return the ids read: of each different token of the context its own and its neighbours'.

        The table of neighbours hangs on the model alone and is there before the first step. Tokens
        are told apart by comparing, without multiplying.
        """
        del size
        num_recent_S = (recent_first(view.token_ids_T, view.rows_S) >= 0).sum(1)
        num_ids_S = num_recent_S * (1 + self._table(view).width)
        return Cost(bytes=ID_BYTES * float(num_ids_S.double().mean()))

    def _table(self, view: View) -> NearestRows:
        """Return the table of the space, filled as tokens come up."""

        def make() -> NearestRows:
            rows_VE = view.head.weight_VE if self.space == "output" else view.embedding_VE
            return NearestRows(rows_VE, self.n)

        return view.head.memo.get(("neighbours", self.space, self.n), make)


def recent_first(token_ids_T: torch.Tensor, rows_S: torch.Tensor) -> torch.Tensor:
    """Return the different tokens that each step has read, the most recently used first.

    Parameters
    ----------
    token_ids_T
        Token ids up to the last step, int64.
    rows_S
        Row of each step, whose tokens are 0 ... rows_S[s].

    Returns
    -------
    Tensor
        int64 [S, M], M the most that a step has; -1 behind fewer.
    """
    num_tokens = len(token_ids_T)
    order_T = token_ids_T.argsort(stable=True)
    is_same_T = token_ids_T[order_T[1:]] == token_ids_T[order_T[:-1]]
    next_T = torch.full((num_tokens,), num_tokens)
    next_T[order_T[:-1][is_same_T]] = order_T[1:][is_same_T]
    # A step's last use of a token is one before it whose next use is not.
    row_S1 = rows_S[:, None]
    is_last_ST = (torch.arange(num_tokens) <= row_S1) & (next_T > row_S1)
    ids_ST = token_ids_T.flip(0).expand_as(is_last_ST)
    return packed(ids_ST, is_last_ST.flip(1))[:, : int(is_last_ST.sum(1).max())]


def with_levels(recent_SM: torch.Tensor, table: NearestRows) -> torch.Tensor:
    """Return tokens, then the first neighbour of each, then the second, int64 [S, M * (1 + N)].

    Parameters
    ----------
    recent_SM
        Tokens of each step, int64; -1, none, has neighbours -1.
    table
        Their neighbours.
    """
    nearest_SMN = table.of(recent_SM.clamp_min(0)).masked_fill(recent_SM[:, :, None] < 0, -1)
    return torch.cat([recent_SM, nearest_SMN.transpose(1, 2).flatten(1)], 1)
