"""The shape of attention rows: how concentrated they are, and where their mass lies.

Weights come in blocks of rows, each row a distribution over the keys that it sees: the share that a
sink logit takes is set aside and reported as ``key_mass``. Every number is one a row and query head
(or one a row, of some keys); means over rows and heads are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import pad

from tracekit.measure.attention import as_wide, logits_HQK, visible_QK, weights_HQK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracekit.spec import LayerSpec

MASS_PERCENT = (90, 95, 99)
"""Shares of a row's mass for which the keys are counted, in percent."""

TOP_PERCENT = (1, 5, 10)
"""Shares of the seen keys, rounded up to whole keys, whose largest mass is measured, in percent."""

FIRST_KEYS = (1, 4)
"""First keys of the sequence whose mass is measured."""

NEWEST_KEYS = (1, 32, 128)
"""Newest keys of a row, its own included, whose mass is measured."""

SLACK = 1e-6
"""A mass is reached when less than this is missing: 19 of 20 like keys hold 95 % of the mass."""

BLOCK_BYTES = 8 << 20
"""Attention weights that are in memory at once; larger blocks leave the processor's caches."""


@dataclass(frozen=True)
class Rows:
    """Attention of a block of consecutive queries over consecutive keys.

    Parameters
    ----------
    weights_HQK
        Attention, float32 or float64: each row sums to 1 over the keys that it sees, 0 elsewhere.
    seen_QK
        Which keys each query sees, at least one, bool.
    key_mass_HQ
        Share of the softmax that keys have; 1 unless the layer has sink logits.
    first_query, first_key
        Their positions.
    """

    weights_HQK: torch.Tensor
    seen_QK: torch.Tensor
    key_mass_HQ: torch.Tensor
    first_query: int = 0
    first_key: int = 0

    @property
    def num_seen_Q(self) -> torch.Tensor:
        """Keys that each query sees, int64."""
        return self.seen_QK.sum(-1)

    def between(self, start: int, end: int) -> torch.Tensor:
        """Return the weights [H, Q, end - start] of the keys at these positions, 0 if not given."""
        first, last = self.first_key, self.first_key + self.weights_HQK.shape[-1]
        inside = self.weights_HQK[..., max(0, start - first) : max(0, end - first)]
        before = min(max(0, first - start), end - start)
        return pad(inside, (before, max(0, end - max(last, start))))

    def since(self, query: int) -> Rows:
        """Return the rows from the query at a position on, maybe none."""
        cut = max(0, query - self.first_query)
        return replace(
            self,
            weights_HQK=self.weights_HQK[:, cut:],
            seen_QK=self.seen_QK[cut:],
            key_mass_HQ=self.key_mass_HQ[:, cut:],
            first_query=self.first_query + cut,
        )


def attention_blocks(
    query_HTD: torch.Tensor, key_GTD: torch.Tensor, layer: LayerSpec, first_row: int
) -> Iterator[Rows]:
    """Yield the attention of the rows from ``first_row`` on, in blocks of bounded size.

    Parameters
    ----------
    query_HTD, key_GTD
        Post-RoPE queries and keys of one layer; half precision is read as float32.
    layer
        How it attends.
    first_row
        Position of the first row wanted.
    """
    query_HTD, key_GTD = as_wide(query_HTD), as_wide(key_GTD)
    num_heads, num_rows = query_HTD.shape[:2]
    width = num_rows if layer.window is None else min(num_rows, layer.window)
    size = max(1, BLOCK_BYTES // (num_heads * width * key_GTD.element_size()))
    without_sinks = replace(layer, sinks=None)
    for start in range(first_row, num_rows, size):
        end = min(start + size, num_rows)
        first_key = 0 if layer.window is None else max(0, start - layer.window + 1)
        seen_QK = visible_QK(
            layer,
            end - start,
            end - first_key,
            first_query=start,
            first_key=first_key,
            device=key_GTD.device,
        )
        scores = logits_HQK(query_HTD[:, start:end], key_GTD[:, first_key:end], layer)
        scores = scores.masked_fill_(~seen_QK, -torch.inf)
        weights = weights_HQK(scores, without_sinks)
        key_mass = (
            weights.new_ones(weights.shape[:-1])
            if layer.sinks is None
            else weights_HQK(scores, layer).sum(-1)
        )
        yield Rows(weights, seen_QK, key_mass, start, first_key)


def row_shape(rows: Rows) -> dict[str, torch.Tensor]:
    """Return what describes each row, by name, each [H, Q] float64.

    Returns
    -------
    dict
        The columns of ``schema.ATTENTION_RESULTS`` that are means over rows. ``entropy_frac`` is
        NaN where a row sees one key alone. Gini is that of the seen keys: 0 where all are alike,
        1 - 1 / seen where one has everything.
    """
    weights, num_seen_Q = rows.weights_HQK.double(), rows.num_seen_Q
    entropy_HQ = torch.special.entr(weights).sum(-1)
    columns = {
        "seen_keys": num_seen_Q.double().expand_as(entropy_HQ),
        "key_mass": rows.key_mass_HQ.double(),
        "entropy_nats": entropy_HQ,
        "entropy_frac": entropy_HQ / num_seen_Q.double().log(),
        "effective_keys": weights.sum(-1).square() / weights.square().sum(-1),
    }
    return columns | _concentration(rows) | _places(weights, rows)


def num_distances(num_tokens: int, window: int | None) -> int:
    """Return how many distance bins hold all keys that any row of a layer sees.

    Parameters
    ----------
    num_tokens
        Length of the sequence, at least 1.
    window
        Keys that a row sees at most; None: all up to its own.
    """
    width = num_tokens if window is None else min(num_tokens, window)
    # Bin 0 is distance 0, bin b the distances of b binary digits.
    return 1 + (width - 1).bit_length()


def distance_mass(rows: Rows, num_bins: int) -> torch.Tensor:
    """Return the mass of each row by distance from query to key: 0, 1, 2 to 3, 4 to 7 ...

    The sequence's first key is left out: it takes what a row has no use for (Xiao et al. 2023,
    arXiv 2309.17453), at whatever distance it is. These and ``first_1_mass``, which is 0 where a
    window has passed it, add up to 1. The bins are ours.

    Parameters
    ----------
    rows
        Of one layer.
    num_bins
        As ``num_distances`` says; farther keys are left out.

    Returns
    -------
    Tensor
        float64 [H, Q, num_bins].
    """
    first = max(1, rows.first_key)
    # Without the first key in the sums, its mass rounds nothing away.
    inside_HQK = rows.weights_HQK[..., first - rows.first_key :].double()
    before_HQK = pad(inside_HQK.cumsum(-1), (1, 0))
    query_Q1 = torch.arange(inside_HQK.shape[-2], device=inside_HQK.device)[:, None]
    # Keys newer than the query are 0; a bin ends where the next, older one begins.
    ends = torch.tensor([0, *(1 << b for b in range(num_bins))], device=inside_HQK.device)
    places_QB = (query_Q1 + rows.first_query + 1 - first - ends).clamp_min(0)
    at_HQB = before_HQK.gather(-1, places_QB.expand(len(before_HQK), -1, -1))
    return (at_HQB[..., :-1] - at_HQB[..., 1:]).clamp_min(0)


def _concentration(rows: Rows) -> dict[str, torch.Tensor]:
    """Return what the sorted weights of each row say."""
    num_seen_Q = rows.num_seen_Q
    # numpy sorts without indices, several times faster than torch sorts with them.
    ascending = torch.from_numpy(np.sort(rows.weights_HQK.cpu().numpy(), axis=-1))
    ascending = ascending.to(rows.weights_HQK.device).double()
    mass_HQK = ascending.flip(-1).cumsum(-1)
    # Integers divide to float32 in torch.
    wide_Q = num_seen_Q.double()
    columns: dict[str, torch.Tensor] = {}
    for percent in MASS_PERCENT:
        count_HQ = 1 + (mass_HQK < percent / 100 - SLACK).sum(-1).double()
        columns |= {f"keys_{percent}": count_HQ, f"keys_{percent}_frac": count_HQ / wide_Q}
    for percent in TOP_PERCENT:
        last_Q1 = (num_seen_Q * percent + 99).div(100, rounding_mode="floor")[:, None] - 1
        at_HQ1 = last_Q1.expand(len(mass_HQK), -1, -1)
        columns[f"top_{percent}_mass"] = mass_HQK.gather(-1, at_HQ1)[..., 0]
    # Unseen keys are the first zeros of the order: ranks count from the first seen key.
    num_keys = ascending.shape[-1]
    place_K = torch.arange(1, num_keys + 1, device=ascending.device, dtype=torch.float64)
    total_HQ = mass_HQK[..., -1]
    rank_sum_HQ = ascending @ place_K - (num_keys - wide_Q) * total_HQ
    gini_HQ = 2 * rank_sum_HQ / (wide_Q * total_HQ) - (wide_Q + 1) / wide_Q
    return columns | {"gini": gini_HQ.clamp_min(0)}


def _places(weights: torch.Tensor, rows: Rows) -> dict[str, torch.Tensor]:
    """Return where the mass of each row lies: at the start, near the query, how far from it."""
    num_queries, num_keys = weights.shape[-2:]
    query_Q1 = torch.arange(num_queries, device=weights.device)[:, None] + rows.first_query
    key_1K = torch.arange(num_keys, device=weights.device)[None] + rows.first_key
    distance_QK = (query_Q1 - key_1K).clamp_min(0)
    columns = {f"first_{n}_mass": rows.between(0, n).double().sum(-1) for n in FIRST_KEYS}
    for n in NEWEST_KEYS:
        columns[f"newest_{n}_mass"] = (weights * (distance_QK < n)).sum(-1)
    return columns | {"mean_distance": (weights * distance_QK).sum(-1)}
