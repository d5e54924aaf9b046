"""Rows of one KV head against all keys: exponentials once, sums over any set of keys from them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from tracekit.measure.attention import logits_HQK, outputs_HQD, visible_QK, weights_HQK

if TYPE_CHECKING:
    from tracekit.kv.reference import Reference
    from tracekit.spec import LayerSpec


class RowSums(NamedTuple):
    """The rows of one KV head's query heads, X = M * R of them, and sums over their keys.

    A sum has C = D + 1 columns: of exp(logit) * value, and of exp(logit). Exponentials are taken
    against the maximum of the full row.

    Parameters
    ----------
    layer
        The spec of this KV head alone.
    query_MRD, key_TD, value_TD
        Recorded rows; keys and values up to the last of the rows.
    start, end
        Positions of the rows.
    point
        Tokens seen at the last decision: keys before it are held or not, later ones are.
    exp_KX, value_KC
        Exponentials of all keys, and their values with a one.
    later_XC, full_XC
        Sums over the keys from ``point`` on, which all policies share, and over all keys.
    sink_X
        The sink's own exponential, 0 without a sink.
    influence_RPF
        Gradients of the P probes at the outputs of each row, F = M * D.
    """

    layer: LayerSpec
    query_MRD: torch.Tensor
    key_TD: torch.Tensor
    value_TD: torch.Tensor
    start: int
    end: int
    point: int
    exp_KX: torch.Tensor
    value_KC: torch.Tensor
    later_XC: torch.Tensor
    full_XC: torch.Tensor
    sink_X: torch.Tensor
    influence_RPF: torch.Tensor

    @classmethod
    def of(
        cls, reference: Reference, at: int, head: int, point: int, start: int, end: int
    ) -> RowSums:
        """Compute the exponentials and the shared sums of rows ``start`` .. ``end`` - 1.

        Parameters
        ----------
        reference
            The recorded rows.
        at, head
            Place of the layer in the stack, and the KV head.
        point
            Tokens seen at the last decision.
        start, end
            First row, and last + 1.
        """
        layer = one_head(reference.layer, head)
        heads = slice(head * layer.num_heads, (head + 1) * layer.num_heads)
        query_MRD = reference.query_LHTD[at, heads, start:end]
        key_TD = reference.key_LGTD[at, head, :end]
        value_TD = reference.value_LGTD[at, head, :end]
        logits_KX = _logits_KX(query_MRD, key_TD, layer)
        seen_RK = visible_QK(layer, end - start, end, first_query=start, device=key_TD.device)
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
        influence_PMRD = reference.influence(start, end)[at, :, heads]
        return cls(
            layer=layer,
            query_MRD=query_MRD,
            key_TD=key_TD,
            value_TD=value_TD,
            start=start,
            end=end,
            point=point,
            exp_KX=exp_KX,
            value_KC=value_KC,
            later_XC=later_XC,
            full_XC=full_XC,
            sink_X=sink_X,
            influence_RPF=influence_PMRD.permute(2, 0, 1, 3).flatten(2).contiguous(),
        )

    @property
    def output_XD(self) -> torch.Tensor:
        """Outputs under the full cache."""
        return self.outputs(self.full_XC)

    def outputs(self, sums_XC: torch.Tensor) -> torch.Tensor:
        """Return outputs of sums, sink in the denominator."""
        return sums_XC[..., :-1] / self.totals(sums_XC)[..., None]

    def masses(self, sums_XC: torch.Tensor) -> torch.Tensor:
        """Return the full cache's mass on the keys of sums, the sink's share in neither."""
        return sums_XC[..., -1] / self.totals(self.full_XC)

    def totals(self, sums_XC: torch.Tensor) -> torch.Tensor:
        """Return the denominators of sums, sink included."""
        tiny = torch.finfo(sums_XC.dtype).tiny
        return (sums_XC[..., -1] + self.sink_X).clamp(min=tiny)

    def seen_RK(self) -> torch.Tensor:
        """Return which keys each row may see."""
        return visible_QK(
            self.layer,
            self.end - self.start,
            self.end,
            first_query=self.start,
            device=self.key_TD.device,
        )


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


class Anew(NamedTuple):
    """Rows against the maximum of what they keep: outputs, weights, and the full cache's mass."""

    output_XD: torch.Tensor
    weights_XK: torch.Tensor
    mass_X: torch.Tensor


def anew(rows: RowSums, kept_K: torch.Tensor) -> Anew:
    """Return all rows of a head under one set, for those whose exponentials got lost.

    Parameters
    ----------
    rows
        As they were summed.
    kept_K
        bool: which of the keys before ``rows.point`` are kept.
    """
    layer = rows.layer
    kept_T = pad(kept_K, (0, len(rows.key_TD) - len(kept_K)), value=True)
    seen_RK = rows.seen_RK()
    logits_MRK = logits_HQK(rows.query_MRD, rows.key_TD[None], layer)
    kept_MRK = logits_MRK.masked_fill(~(seen_RK & kept_T), -torch.inf)
    weights_MRK = weights_HQK(kept_MRK, layer)
    output_MRD = outputs_HQD(weights_MRK, rows.value_TD[None])
    lse_MR = logits_MRK.masked_fill(~seen_RK, -torch.inf).logsumexp(-1)
    if layer.sinks is not None:
        lse_MR = torch.logaddexp(lse_MR, lse_MR.new_tensor(layer.sinks)[:, None])
    mass_MR = (kept_MRK.logsumexp(-1) - lse_MR).exp()
    return Anew(output_MRD.flatten(0, 1), weights_MRK.flatten(0, 1), mass_MR.flatten())
