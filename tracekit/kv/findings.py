"""Measures of a family's rows between two decisions, gathered KV head by KV head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.linalg import vecdot
from torch.nn.functional import pad

from tracekit.kv.engine import NEVER
from tracekit.kv.measures import Measures, cosine_of, count_seen, minus_log, overlap

if TYPE_CHECKING:
    from tracekit.kv.accumulate import Accumulator
    from tracekit.kv.engine import Engine
    from tracekit.kv.reference import Reference
    from tracekit.kv.sets import Read
    from tracekit.kv.sums import RowSums


class Findings:
    """What one family's rows after a decision read, filled head by head.

    Parameters
    ----------
    engine
        After the decision.
    reference
        The recorded rows.
    start, end
        Rows: those after the decision, up to the next.
    point
        The first scored row of all.
    """

    def __init__(
        self, engine: Engine, reference: Reference, start: int, end: int, point: int
    ) -> None:
        self._layer = reference.layer
        self._reference, self._start, self._end = reference, start, end
        self._point = point
        kept_NLGK = engine.evicted_at_NLGK == NEVER
        self._kept_NLGT = pad(kept_NLGK, (0, end - start), value=True)
        lead = (reference.num_layers, self._layer.num_heads, end - start)
        self._norm_sq_LHR = reference.key_LGTD.new_zeros(lead)
        names = ("error_sq", "cosine", "mass", "kl")
        num_sets = len(kept_NLGK)
        self._found = {name: self._norm_sq_LHR.new_zeros(num_sets, *lead) for name in names}
        # Full and pruned outputs, projected: the parts of a layer's heads are added up.
        num_parts = 0 if reference.projection_LEX is None else self._layer.num_kv_heads + 1
        shape = (1 + num_sets, reference.num_layers, num_parts, end - start)
        self._projected_sq = self._norm_sq_LHR.new_zeros(shape)
        self._projected_sum: torch.Tensor | float = 0.0
        lead = (reference.num_layers, self._layer.num_kv_heads, reference.influence_LPHRD.shape[1])
        self._influence_NLGPR = self._norm_sq_LHR.new_zeros(num_sets, *lead, end - start)
        self._accumulated = {
            one: pad(state, (0, end - start)) for one, state in engine.accumulated().items()
        }

    def take(self, rows: RowSums, read: Read, at: int, head: int) -> None:
        """Measure some rows of one KV head's query heads.

        Parameters
        ----------
        rows
            Under the full cache.
        read
            The same under each of the N sets.
        at, head
            Place of the layer in the stack, and the KV head.
        """
        full_XD, size = rows.output_XD, rows.layer.num_heads
        taken = slice(rows.start - self._start, rows.end - self._start)
        place = (at, slice(head * size, (head + 1) * size), taken)
        norm_sq_X = vecdot(full_XD, full_XD)
        delta_NXD = read.output_NXD - full_XD
        error_sq_NX = vecdot(delta_NXD, delta_NXD)
        size_sq_NX = vecdot(read.output_NXD, read.output_NXD)
        found = {
            "error_sq": error_sq_NX,
            "cosine": cosine_of(size_sq_NX, norm_sq_X, error_sq_NX),
            "mass": read.mass_NX,
            "kl": minus_log(read.mass_NX, rows.sink_X / rows.totals(rows.full_XC)),
        }
        self._norm_sq_LHR[place] = norm_sq_X.reshape(size, -1)
        for name, values_NX in found.items():
            self._found[name][(slice(None), *place)] = values_NX.unflatten(-1, (size, -1))
        if self._reference.projection_LEX is not None:
            vectors = torch.cat([full_XD[None], delta_NXD]).unflatten(1, (size, -1))
            self._project(vectors, self._reference.projection_LEX[at], (at, head, taken))
        if rows.influence_RPF.numel():
            delta_RFN = delta_NXD.unflatten(1, (size, -1)).permute(2, 1, 3, 0).flatten(1, 2)
            found_RPN = rows.influence_RPF @ delta_RFN
            self._influence_NLGPR[:, at, head, :, taken] = found_RPN.permute(2, 1, 0)
        for one, state_NLXK in self._accumulated.items():
            heads = (
                slice(head * size, (head + 1) * size)
                if one.by_query_head
                else slice(head, head + 1)
            )
            part_NLXK = state_NLXK[:, at : at + 1, heads, : rows.end]
            factor = one.factor(size)
            if factor is not None:
                part_NLXK += factor * read.received(rows)[:, None, None]
                continue
            weights_NMQK = read.weights(rows).unflatten(1, (size, -1))
            part_NLXK.copy_(one.add(part_NLXK, weights_NMQK[None, None], rows.start))

    def _project(
        self, vector_NMRD: torch.Tensor, weight_EX: torch.Tensor, place: tuple[int, int, slice]
    ) -> None:
        """Take squared norms after the output projection, of a head's part or the layer's sum."""
        at, head, scored = place
        width = weight_EX.shape[1] // self._layer.num_kv_heads
        part_EX = weight_EX[:, head * width : (head + 1) * width]
        projected_NRE = vector_NMRD.transpose(1, 2).flatten(2) @ part_EX.T
        self._projected_sq[:, at, head, scored] = projected_NRE.square().sum(-1)
        self._projected_sum = projected_NRE if head == 0 else self._projected_sum + projected_NRE
        self._projected_sq[:, at, -1, scored] = (
            torch.as_tensor(self._projected_sum).square().sum(-1)
        )

    def accumulated(self) -> dict[Accumulator, torch.Tensor]:
        """Return what the engine's accumulators have after these rows."""
        return self._accumulated

    def _held_NLGK(self, row: int) -> torch.Tensor:
        """Return what one row sees of what is kept."""
        held_NLGK = self._kept_NLGT[..., : row + 1].clone()
        if self._layer.window is not None:
            held_NLGK[..., : -self._layer.window] = False
        return held_NLGK

    def measures(self) -> Measures[torch.Tensor]:
        """Return all of it; entries held follow from the decision alone."""
        start, end = self._start, self._end
        held_NLGR = count_seen(self._kept_NLGT, self._layer, end - start)
        return Measures(
            held_NLGR=held_NLGR,
            read_NLGR=held_NLGR,
            fetched_NLGR=torch.zeros_like(held_NLGR),
            closed_NLGR=torch.zeros_like(held_NLGR),
            error_sq_NLHR=self._found["error_sq"],
            norm_sq_LHR=self._norm_sq_LHR,
            cosine_NLHR=self._found["cosine"],
            mass_kept_NLHR=self._found["mass"],
            row_kl_NLHR=self._found["kl"],
            overlap_NLGR=overlap(
                self._reference,
                self._point,
                range(start, end),
                lambda r: self._held_NLGK(start + r),
                held_NLGR.shape[:3],
            ),
            projected_sq_NLXR=self._projected_sq[1:],
            projected_norm_sq_LXR=self._projected_sq[0],
            influence_NLGPR=self._influence_NLGPR,
        )
