"""Attention as a forecast of the next token: what the context's tokens get, and which keys last.

Positions that hold the same token count as one token. The first key of the sequence, on which heads
rest that look for nothing, is left out and what remains is scaled to 1: of a row over keys 0 to t
only keys 1 to t are its context.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from tracekit.measure.top_keys import jaccard, top_keys

if TYPE_CHECKING:
    from tracekit.measure.attention_shape import Rows

TOP_TOKENS = (1, 8, 64)
"""How many of a context's most attended tokens may be right."""


def without_first_key(rows: Rows) -> Rows:
    """Return rows without the sequence's first key, scaled to 1 over the others, float64.

    A row of which nothing is left (it sees no other key, or their weights are 0 in its precision)
    is 0 everywhere.
    """
    cut = max(0, 1 - rows.first_key)
    weights = rows.weights_HQK[..., cut:].double()
    rest = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return replace(
        rows,
        weights_HQK=weights / rest,
        seen_QK=rows.seen_QK[:, cut:],
        first_key=rows.first_key + cut,
    )


def attended_tokens(rows: Rows, ids_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return how the attention of each row foretells the token that came next.

    Parameters
    ----------
    rows
        Without the first key; each is followed by a token.
    ids_T
        int64: ids of the sequence's tokens, position 0 first.

    Returns
    -------
    dict
        By name, float64 [H, Q], NaN where it does not apply. Of all rows: ``copied_frac`` (1 where
        the next token is in the context), ``distinct_tokens`` (of the context), ``top_K_hit_all``
        (1 where the next token is among the K most attended), and those of ``repeats``. Of rows
        whose next token is in the context: ``next_mass`` (on all its positions), ``chance_mass``
        (its share of the positions), ``rank`` (among distinct tokens by mass, 1 the most attended;
        tokens of equal mass go before it), ``reciprocal_rank`` and ``top_K_hit``.
    """
    num_queries, num_keys = rows.seen_QK.shape
    # Every key and every next token lies in this span, so one numbering serves both.
    last = rows.first_query + num_queries
    ids_U, token_N = ids_T[rows.first_key : last + 1].unique(return_inverse=True)
    token_QK = token_N[:num_keys].expand(num_queries, -1)
    next_Q = token_N[rows.first_query + 1 - rows.first_key :]
    weights_HQK = rows.weights_HQK
    mass_HQU = weights_HQK.new_zeros(len(weights_HQK), num_queries, len(ids_U))
    mass_HQU.scatter_add_(-1, token_QK.expand(len(weights_HQK), -1, -1), weights_HQK)
    count_QU = mass_HQU.new_zeros(num_queries, len(ids_U))
    count_QU.scatter_add_(-1, token_QK, rows.seen_QK.double())
    in_context_QU = count_QU > 0
    next_count_Q = count_QU.gather(-1, next_Q[:, None])[:, 0]
    is_copied_Q = next_count_Q > 0
    at_HQ1 = next_Q[:, None].expand(len(mass_HQU), -1, -1)
    next_HQ1 = mass_HQU.gather(-1, at_HQ1)
    rank_HQ = ((mass_HQU >= next_HQ1) & in_context_QU).sum(-1).double()
    rank_HQ = rank_HQ.masked_fill(~is_copied_Q, torch.nan)
    columns = {
        "copied_frac": is_copied_Q.double(),
        "distinct_tokens": in_context_QU.sum(-1).double(),
        "next_mass": next_HQ1[..., 0].masked_fill(~is_copied_Q, torch.nan),
        "chance_mass": _where(is_copied_Q, next_count_Q / rows.num_seen_Q),
        "rank": rank_HQ,
        "reciprocal_rank": 1 / rank_HQ,
    }
    for k in TOP_TOKENS:
        is_hit_HQ = (rank_HQ <= k).double()
        columns[f"top_{k}_hit"] = _where(is_copied_Q, is_hit_HQ)
        columns[f"top_{k}_hit_all"] = is_hit_HQ
    columns |= repeats(rows, ids_T)
    return {name: one.expand(len(mass_HQU), -1) for name, one in columns.items()}


def repeats(rows: Rows, ids_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what each row attends to of the places that followed its token before.

    These are the keys that an induction head looks for (Olsson et al. 2022, "In-context Learning
    and Induction Heads"): positions i of the context with token i-1 equal to the row's own.

    Parameters
    ----------
    rows
        Without the first key; each is followed by a token.
    ids_T
        int64: ids of the sequence's tokens, position 0 first.

    Returns
    -------
    dict
        By name, float64, NaN where it does not apply. ``repeated_frac`` [Q]: 1 where there is such
        a place. Where there is: ``induction_mass`` [H, Q] on all of them, ``induction_chance`` [Q]
        (their share of the context's positions), ``induction_hit`` [Q] (1 where the next token
        stands at one of them).
    """
    num_queries, num_keys = rows.seen_QK.shape
    first_key, first_query = rows.first_key, rows.first_query
    own_Q = ids_T[first_query : first_query + num_queries]
    next_Q = ids_T[first_query + 1 : first_query + 1 + num_queries]
    before_K = ids_T[first_key - 1 : first_key - 1 + num_keys]
    follows_QK = rows.seen_QK & (before_K == own_Q[:, None])
    is_next_QK = ids_T[first_key : first_key + num_keys] == next_Q[:, None]
    is_repeated_Q = follows_QK.any(-1)
    mass_HQ = torch.einsum("hqk,qk->hq", rows.weights_HQK, follows_QK.double())
    return {
        "repeated_frac": is_repeated_Q.double(),
        "induction_mass": _where(is_repeated_Q, mass_HQ),
        "induction_chance": _where(is_repeated_Q, follows_QK.sum(-1) / rows.num_seen_Q.double()),
        "induction_hit": _where(is_repeated_Q, (follows_QK & is_next_QK).any(-1).double()),
    }


def anchors(rows: Rows, k: int) -> torch.Tensor:
    """Return the ``k`` positions that each row attends to most, mean over heads: int32 [Q, k].

    Parameters
    ----------
    rows
        Without the first key.
    k
        How many; equal weights (in float32): the newer key. A row whose context holds no more has
        no choice and is -1.
    """
    top_Qk = top_keys(rows.weights_HQK.mean(0), rows, k)
    return top_Qk.masked_fill((rows.num_seen_Q <= k)[:, None], -1)


def anchor_overlap(top_Rk: torch.Tensor, lag: int) -> torch.Tensor:
    """Return the Jaccard overlap of each row's anchors with those ``lag`` rows before.

    Parameters
    ----------
    top_Rk
        Anchors of consecutive rows, -1 in rows that have none.
    lag
        Rows between the two, at least 1.

    Returns
    -------
    Tensor
        float64 [R]; NaN where one of the two rows has none or was not given.
    """
    overlap = jaccard(top_Rk[lag:], top_Rk[:-lag])
    has_R = top_Rk[:, 0] >= 0
    missing = len(top_Rk) - len(overlap)
    return pad(_where(has_R[lag:] & has_R[:-lag], overlap), (missing, 0), value=torch.nan)


def _where(applies_Q: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return values [..., Q], NaN where they do not apply."""
    return values.masked_fill(~applies_Q, torch.nan)
