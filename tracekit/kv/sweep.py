"""All amounts of policies that decide once, each for about the price of its largest.

Keys are sorted by how many of the N sets keep them, so that the sets are the beginnings of one
order. Sums of exp(logit) and of exp(logit) * value over the segments of that order are added up: N
outputs for one product with the values. Rows after the decision see all keys of the tokens that
follow it, whatever the policy: that part, and the exponentials, are shared by all policies.

Exponentials are taken against the maximum of the full row. Where what is kept is so small beside
it that digits are lost, the rows are computed anew against their own maximum; where a set keeps
everything, the full output is taken as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from tracekit.kv import attend
from tracekit.kv.compare import Measures, cosine_of, count_seen, minus_log, overlap
from tracekit.kv.engine import NEVER
from tracekit.measure.attention import logits_HQK, outputs_HQD, visible_QK, weights_HQK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.kv.engine import Engine
    from tracekit.kv.reference import Reference
    from tracekit.spec import LayerSpec

SMALL = {torch.float32: 1e-20, torch.float64: 1e-200}
"""Kept part of a row's sum below which exponentials may have lost digits to underflow."""


def sweep(engines: Sequence[Engine], reference: Reference, point: int) -> list[Measures]:
    """Return what the rows after the one decision read under each of several families.

    Parameters
    ----------
    engines
        One a family, after its decision; attention must read what was written of all that is held.
    reference
        The recorded rows.
    point
        Tokens seen at the decision.

    Returns
    -------
    list of Measures
        One an engine, the same as reading the rows one by one.
    """
    plans = [_Plan(engine) for engine in engines]
    results = [_Results(engine, reference, point) for engine in engines]
    for at in range(reference.num_layers):
        for start, end in _row_blocks(reference, point):
            for head in range(reference.layer.num_kv_heads):
                rows = _Rows.of(reference, at, head, point, start, end)
                for plan, result in zip(plans, results, strict=True):
                    result.take(rows, plan.parts(rows, at, head), at, head)
    return [one.measures() for one in results]


def _row_blocks(reference: Reference, point: int) -> Iterator[tuple[int, int]]:
    row_bytes = reference.layer.group_size * reference.num_rows * reference.key_LGTD.element_size()
    return attend.row_blocks(point, reference.num_rows, row_bytes)


class _Rows(NamedTuple):
    """The rows of one KV head's query heads, X = M * R of them, against keys in order.

    ``exp_KX`` are exponentials over the prompt's keys, ``value_KC`` their values and a one;
    ``later_XC`` is what all policies share, ``full_XC`` the sum over everything. The last column of
    sums is that of the exponentials; ``sink_X`` is the sink's own.
    """

    query_MRD: torch.Tensor
    exp_KX: torch.Tensor
    value_KC: torch.Tensor
    later_XC: torch.Tensor
    full_XC: torch.Tensor
    sink_X: torch.Tensor
    layer: LayerSpec
    key_TD: torch.Tensor
    value_TD: torch.Tensor
    start: int
    end: int
    point: int

    @classmethod
    def of(
        cls, reference: Reference, at: int, head: int, point: int, start: int, end: int
    ) -> _Rows:
        """Compute the exponentials and the shared sums of rows ``start`` .. ``end`` - 1."""
        layer = one_head(reference.layer, head)
        heads = slice(head * layer.num_heads, (head + 1) * layer.num_heads)
        query_MRD = reference.query_LHTD[at, heads, start:end]
        key_TD = reference.key_LGTD[at, head, :end]
        value_TD = reference.value_LGTD[at, head, :end]
        logits_KX = _logits_KX(query_MRD, key_TD, layer)
        seen_RK = visible_QK(
            layer, end - start, end, first_query=start, device=key_TD.device
        )
        if layer.window is not None or end > point:
            first = 0 if layer.window is not None else point
            unseen_KX = ~seen_RK.T[first:].repeat(1, layer.num_heads)
            logits_KX[first:].masked_fill_(unseen_KX, -torch.inf)
        peak_X = logits_KX.amax(0)
        sink_X = torch.zeros_like(peak_X)
        if layer.sinks is not None:
            sink = peak_X.new_tensor(layer.sinks).repeat_interleave(end - start)
            peak_X = torch.maximum(peak_X, sink)
            sink_X = (sink - peak_X).exp()
        exp_KX = logits_KX.sub_(peak_X).exp_()
        value_KC = torch.cat([value_TD, torch.ones_like(value_TD[:, :1])], dim=1)
        later_XC = exp_KX[point:].T @ value_KC[point:]
        full_XC = torch.addmm(later_XC, exp_KX[:point].T, value_KC[:point])
        return cls(
            query_MRD, exp_KX[:point], value_KC[:point], later_XC, full_XC, sink_X, layer, key_TD,
            value_TD, start, end, point,
        )  # fmt: skip

    @property
    def output_XD(self) -> torch.Tensor:
        """Outputs under the full cache."""
        return self.outputs(self.full_XC)

    def outputs(self, sums_XC: torch.Tensor) -> torch.Tensor:
        """Return outputs of sums, sink in the denominator."""
        total_X1 = (sums_XC[..., -1:] + self.sink_X[:, None]).clamp(min=_tiny(sums_XC))
        return sums_XC[..., :-1] / total_X1

    def masses(self, sums_XC: torch.Tensor) -> torch.Tensor:
        """Return the full cache's mass on the keys of sums, the sink's share in neither."""
        return sums_XC[..., -1] / (self.full_XC[..., -1] + self.sink_X).clamp(min=_tiny(sums_XC))


def one_head(layer: LayerSpec, head: int) -> LayerSpec:
    """Return the spec of one KV head and its query heads."""
    size = layer.group_size
    own = slice(head * size, (head + 1) * size)
    return replace(
        layer,
        num_heads=size,
        num_kv_heads=1,
        sinks=None if layer.sinks is None else layer.sinks[own],
        alibi=None if layer.alibi is None else layer.alibi[own],
    )


def _logits_KX(query_MRD: torch.Tensor, key_KD: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """Return logits with keys first: a reordering of keys is then a copy of whole rows."""
    logits_KX = key_KD @ (query_MRD * layer.scale).flatten(0, 1).T
    if layer.softcap is not None:
        logits_KX.div_(layer.softcap).tanh_().mul_(layer.softcap)
    if layer.alibi is not None:
        slope_X = logits_KX.new_tensor(layer.alibi).repeat_interleave(query_MRD.shape[1])
        logits_KX += torch.arange(len(key_KD), device=key_KD.device)[:, None] * slope_X
    return logits_KX


class _Plan:
    """The order of one family's keys, and where each of its N sets ends in it."""

    def __init__(self, engine: Engine) -> None:
        self._kept_NLGK = engine.evicted_at_NLGK == NEVER
        kept_NLGK = self._kept_NLGK
        self._level_LGK = (~kept_NLGK).sum(0)
        level = self._level_LGK[None]
        self._last_NLG = level.where(kept_NLGK, -1).amax(-1)
        first_out_NLG = level.where(~kept_NLGK, len(kept_NLGK) + 1).amin(-1)
        self._is_nested_LG = (self._last_NLG < first_out_NLG).all(0)
        self._keeps_all_NLG = kept_NLGK.all(-1)

    def parts(self, rows: _Rows, at: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs [N, X, D] and the full cache's mass on what is kept, [N, X]."""
        kept_NK = self._kept_NLGK[:, at, head]
        if bool(self._is_nested_LG[at, head]):
            sums_NXC = _nested(rows, self._level_LGK[at, head], self._last_NLG[:, at, head])
        else:
            sums_NXC = torch.stack([_masked(rows, kept_K) for kept_K in kept_NK])
        output_NXD, mass_NX = rows.outputs(sums_NXC), rows.masses(sums_NXC)
        lost_NX = sums_NXC[..., -1] + rows.sink_X < SMALL[sums_NXC.dtype]
        for n in lost_NX.any(-1).nonzero()[:, 0].tolist():
            anew_XD, anew_X = _anew(rows, kept_NK[n])
            output_NXD[n] = anew_XD.where(lost_NX[n, :, None], output_NXD[n])
            mass_NX[n] = anew_X.where(lost_NX[n], mass_NX[n])
        keeps_all_N = self._keeps_all_NLG[:, at, head]
        if bool(keeps_all_N.any()):
            output_NXD[keeps_all_N] = rows.output_XD
            mass_NX[keeps_all_N] = rows.masses(rows.full_XC)
        return output_NXD, mass_NX


def _nested(rows: _Rows, level_K: torch.Tensor, last_N: torch.Tensor) -> torch.Tensor:
    """Return the sums [N, X, C] of sets that are beginnings of one order."""
    most = int(last_N.max())
    order_K = level_K.argsort(stable=True)
    ends = [0, *(level_K.bincount(minlength=most + 1).cumsum(0)[: most + 1].tolist())]
    order_K = order_K[: ends[-1]]
    exp_KX, value_KC = rows.exp_KX[order_K], rows.value_KC[order_K]
    sums_XC, steps = rows.later_XC, []
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        if end > start:
            sums_XC = torch.addmm(sums_XC, exp_KX[start:end].T, value_KC[start:end])
        steps.append(sums_XC)
    # A set that keeps none of the prompt has no last level.
    return torch.stack([steps[last] if last >= 0 else rows.later_XC for last in last_N.tolist()])


def _masked(rows: _Rows, kept_K: torch.Tensor) -> torch.Tensor:
    """Return the sums [X, C] of one set."""
    return torch.addmm(rows.later_XC, rows.exp_KX[kept_K].T, rows.value_KC[kept_K])


def _anew(rows: _Rows, kept_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [X, D] and masses [X] of one set, against the maximum of what it keeps."""
    layer, num_keys = rows.layer, len(rows.key_TD)
    kept_T = pad(kept_K, (0, num_keys - len(kept_K)), value=True)
    seen_RK = visible_QK(
        layer, rows.end - rows.start, num_keys, first_query=rows.start, device=kept_K.device
    )
    logits_MRK = logits_HQK(rows.query_MRD, rows.key_TD[None], layer)
    kept_MRK = logits_MRK.masked_fill(~(seen_RK & kept_T), -torch.inf)
    output_MRD = outputs_HQD(weights_HQK(kept_MRK, layer), rows.value_TD[None])
    lse_MR = logits_MRK.masked_fill(~seen_RK, -torch.inf).logsumexp(-1)
    if layer.sinks is not None:
        lse_MR = torch.logaddexp(lse_MR, lse_MR.new_tensor(layer.sinks)[:, None])
    mass_MR = (kept_MRK.logsumexp(-1) - lse_MR).exp()
    return output_MRD.flatten(0, 1), mass_MR.flatten()


def _tiny(array: torch.Tensor) -> float:
    return torch.finfo(array.dtype).tiny


class _Results:
    """The measures of one family, filled head by head."""

    def __init__(self, engine: Engine, reference: Reference, point: int) -> None:
        self._layer = reference.layer
        self._reference, self._point = reference, point
        self._num_scored = reference.num_rows - point
        kept_NLGK = engine.evicted_at_NLGK == NEVER
        self._kept_NLGT = pad(kept_NLGK, (0, self._num_scored), value=True)
        lead = (reference.num_layers, self._layer.num_heads, self._num_scored)
        self._norm_sq_LHR = reference.key_LGTD.new_zeros(lead)
        names = ("error_sq", "cosine", "mass", "kl")
        num_sets = len(kept_NLGK)
        self._found = {name: self._norm_sq_LHR.new_zeros(num_sets, *lead) for name in names}
        # Full and pruned outputs, projected: the parts of a layer's heads are added up.
        num_parts = 0 if reference.projection_LEX is None else self._layer.num_kv_heads + 1
        shape = (1 + num_sets, reference.num_layers, num_parts, self._num_scored)
        self._projected_sq = self._norm_sq_LHR.new_zeros(shape)
        self._projected_sum: torch.Tensor | float = 0.0

    def take(
        self, rows: _Rows, parts: tuple[torch.Tensor, torch.Tensor], at: int, head: int
    ) -> None:
        """Measure some rows of one KV head's query heads."""
        output_NXD, mass_NX = parts
        full_XD, size = rows.output_XD, rows.layer.num_heads
        scored = slice(rows.start - self._point, rows.end - self._point)
        place = (at, slice(head * size, (head + 1) * size), scored)
        norm_sq_X = full_XD.square().sum(-1)
        delta_NXD = output_NXD - full_XD
        error_sq_NX = delta_NXD.square().sum(-1)
        share_X = rows.sink_X / (rows.full_XC[..., -1] + rows.sink_X).clamp(min=_tiny(mass_NX))
        found = {
            "error_sq": error_sq_NX,
            "cosine": cosine_of(output_NXD.square().sum(-1), norm_sq_X, error_sq_NX),
            "mass": mass_NX,
            "kl": minus_log(mass_NX, share_X),
        }
        self._norm_sq_LHR[place] = norm_sq_X.reshape(size, -1)
        for name, values_NX in found.items():
            self._found[name][(slice(None), *place)] = values_NX.unflatten(-1, (size, -1))
        if self._reference.projection_LEX is not None:
            vectors = torch.cat([full_XD[None], delta_NXD]).unflatten(1, (size, -1))
            self._project(vectors, self._reference.projection_LEX[at], (at, head, scored))

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
        self._projected_sq[:, at, -1, scored] = torch.as_tensor(self._projected_sum).square().sum(-1)

    def measures(self) -> Measures:
        """Return all of it; entries held follow from the decision alone."""
        num_rows, point = self._reference.num_rows, self._point
        device = self._kept_NLGT.device
        seen_RT = visible_QK(
            self._layer, self._num_scored, num_rows, first_query=point, device=device
        )
        held_NLGR = count_seen(self._kept_NLGT, seen_RT)
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
                point,
                range(point, num_rows),
                lambda r: self._kept_NLGT & seen_RT[r],
                held_NLGR.shape[:3],
            ),
            projected_sq_NLXR=self._projected_sq[1:],
            projected_norm_sq_LXR=self._projected_sq[0],
        )
