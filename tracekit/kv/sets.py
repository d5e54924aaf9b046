"""Attention of one KV head's rows under N sets of kept keys, from one set of exponentials."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from tracekit.kv.engine import NEVER
from tracekit.kv.sums import Anew, RowSums, anew

if TYPE_CHECKING:
    from tracekit.kv.engine import Engine

SMALL = {torch.float32: 1e-20, torch.float64: 1e-200}
"""Kept part of a row's sum below which exponentials may have lost digits to underflow."""


class Sets:
    """The N kept sets of one family, and the order of keys in which each is a beginning.

    Parameters
    ----------
    engine
        After the decision whose sets these are.
    """

    def __init__(self, engine: Engine) -> None:
        self._kept_NLGK = engine.evicted_at_NLGK == NEVER
        kept_NLGK = self._kept_NLGK
        self._level_LGK = (~kept_NLGK).sum(0)
        level = self._level_LGK[None]
        self._last_NLG = level.where(kept_NLGK, -1).amax(-1)
        first_out_NLG = level.where(~kept_NLGK, len(kept_NLGK) + 1).amin(-1)
        self._is_nested_LG = (self._last_NLG < first_out_NLG).all(0)
        self._keeps_all_NLG = kept_NLGK.all(-1)

    def read(self, rows: RowSums, at: int, head: int) -> Read:
        """Return what rows of one head read under each set.

        Parameters
        ----------
        rows
            Exponentials and sums of the head's rows.
        at, head
            Place of the layer in the stack, and the KV head.
        """
        kept_NK = self._kept_NLGK[:, at, head]
        if bool(self._is_nested_LG[at, head]):
            sums_NXC = _nested(rows, self._level_LGK[at, head], self._last_NLG[:, at, head])
        else:
            sums_NXC = torch.stack([_masked(rows, kept_K) for kept_K in kept_NK])
        keeps_all_N = self._keeps_all_NLG[:, at, head]
        if bool(keeps_all_N.any()):
            sums_NXC[keeps_all_N] = rows.full_XC
        output_NXD, mass_NX = rows.outputs(sums_NXC), rows.masses(sums_NXC)
        lost_NX = sums_NXC[..., -1] + rows.sink_X < SMALL[sums_NXC.dtype]
        again = {n: anew(rows, kept_NK[n]) for n in lost_NX.any(-1).nonzero()[:, 0].tolist()}
        for n, one in again.items():
            output_NXD[n] = one.output_XD.where(lost_NX[n, :, None], output_NXD[n])
            mass_NX[n] = one.mass_X.where(lost_NX[n], mass_NX[n])
        share_NX = (1 / rows.totals(sums_NXC)).masked_fill(lost_NX, 0)
        return Read(kept_NK, output_NXD, mass_NX, share_NX, lost_NX, again)


class Read(NamedTuple):
    """What X rows of a head read under N sets.

    Parameters
    ----------
    kept_NK
        bool: keys before the last decision that each set keeps.
    output_NXD
        Attention outputs.
    mass_NX
        The full cache's mass on what is kept.
    share_NX
        Factor from exponentials to attention weights; 0 for lost rows.
    lost_NX, again
        Rows whose exponentials lost digits to underflow, and, by set, all rows computed anew.
    """

    kept_NK: torch.Tensor
    output_NXD: torch.Tensor
    mass_NX: torch.Tensor
    share_NX: torch.Tensor
    lost_NX: torch.Tensor
    again: dict[int, Anew]

    def received(self, rows: RowSums) -> torch.Tensor:
        """Return the attention that each key receives from all rows together, [N, K]."""
        received_NK = self.share_NX @ rows.exp_KX.T
        received_NK[:, : self.kept_NK.shape[1]].masked_fill_(~self.kept_NK, 0)
        for n, one in self.again.items():
            received_NK[n] += self.lost_NX[n].to(received_NK) @ one.weights_XK
        return received_NK

    def weights(self, rows: RowSums) -> torch.Tensor:
        """Return attention weights, [N, X, K]."""
        weights_NXK = self.share_NX[..., None] * rows.exp_KX.T
        weights_NXK[..., : self.kept_NK.shape[1]].masked_fill_(~self.kept_NK[:, None], 0)
        for n, one in self.again.items():
            weights_NXK[n] = one.weights_XK.where(self.lost_NX[n, :, None], weights_NXK[n])
        return weights_NXK


def _nested(rows: RowSums, level_K: torch.Tensor, last_N: torch.Tensor) -> torch.Tensor:
    """Return the sums [N, X, C] of sets that are beginnings of one order."""
    most = int(last_N.max())
    order_K = level_K.argsort(stable=True)
    ends = [0, *(level_K.bincount(minlength=most + 1).cumsum(0)[: most + 1].tolist())]
    order_K = order_K[: ends[-1]]
    # index_select copies whole rows; indexing does not, and is several times slower.
    exp_KX, value_KC = (one.index_select(0, order_K) for one in (rows.exp_KX, rows.value_KC))
    sums_XC, steps = rows.later_XC, []
    for start, end in pairwise(ends):
        if end > start:
            sums_XC = torch.addmm(sums_XC, exp_KX[start:end].T, value_KC[start:end])
        steps.append(sums_XC)
    # A set that keeps none of the prompt has no last level.
    return torch.stack([steps[last] if last >= 0 else rows.later_XC for last in last_N.tolist()])


def _masked(rows: RowSums, kept_K: torch.Tensor) -> torch.Tensor:
    """Return the sums [X, C] of one set."""
    place_K = kept_K.nonzero()[:, 0]
    exp_KX, value_KC = (one.index_select(0, place_K) for one in (rows.exp_KX, rows.value_KC))
    return torch.addmm(rows.later_XC, exp_KX.T, value_KC)
