"""What one row of logits says: entropy and its kin, rank, support, and the thermodynamic form.

All sums are in float64 over shifted logits z / T - max; nothing is formed as 0 times infinity.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from tracekit.errors import UsageError
from tracekit.measure.radix import first_places
from tracekit.measure.support import SUPPORTS, supports

if TYPE_CHECKING:
    import numpy as np

BLOCK_NUMBERS = 1 << 19
"""Logits in one block; its float64 temporaries stay below 100 MB."""

RADIX_WIDTH, RADIX_THREADS = 1 << 14, 2
"""Rows at least so wide, of which ``topk`` would do at most so many at once, are radix sorted."""


def best_ids(score_TV: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids of the highest scores of each row, best first, ties by lower id.

    Parameters
    ----------
    score_TV
        Scores [T, V], without NaN; read as float32.
    k
        Ids a row; at most V are given.

    Returns
    -------
    Tensor
        int64 [T, min(k, V)].
    """
    # A float's bits, the magnitude flipped below zero, order as the floats do. Adding zero makes
    # one zero of two.
    bits_TV = (score_TV.float() + 0.0).view(torch.int32)
    bits_TV ^= (bits_TV >> 31) & 0x7FFFFFFF
    k = min(k, bits_TV.shape[1])
    if _is_sorted_sooner(bits_TV):
        return torch.from_numpy(first_places(bits_TV.bitwise_not_().numpy(), k))
    # With the id in the low half all keys differ: the order does not hang on how topk treats ties.
    key_TV = bits_TV.long().mul_(1 << 32)
    key_TV -= torch.arange(key_TV.shape[1], device=key_TV.device)
    return key_TV.topk(k).indices


def _is_sorted_sooner(bits_TV: torch.Tensor) -> bool:
    """Whether a radix sort row by row is faster than topk, which shares the rows among threads."""
    num_rows, width = bits_TV.shape
    num_at_once = min(num_rows, torch.get_num_threads())
    return bits_TV.device.type == "cpu" and width >= RADIX_WIDTH and num_at_once <= RADIX_THREADS


def step_statistics(
    logits_TV: torch.Tensor,
    target_T: torch.Tensor,
    *,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int = 20,
) -> dict[str, np.ndarray]:
    """Return the statistics columns of ``schema.STEPS`` for rows of logits.

    The distribution is over all rows of the head, padded ones included, because that is what the
    model samples from; ``padded_mass`` says how much lies on rows that no token has. Masked logits
    (-inf) have probability 0 and count in ``nonfinite``.

    Parameters
    ----------
    logits_TV
        Raw logits [T, V], any floating type, read as float32; -inf is allowed.
    target_T
        Token that came, int64 [T].
    num_tokens
        Entries of the tokenizer: logits from there on are padding.
    temperature
        T, by which logits are divided.
    top_k
        Most likely tokens whose ids and log-probabilities are returned.

    Returns
    -------
    dict
        Arrays of T rows. float32, but float64 for the whole numbers ``rank`` and
        ``effective_support_*``, so that they can be NaN; int32 for ``nonfinite``; 2-d ``top_ids``
        (int32) and ``top_logprobs`` [T, min(top_k, V)]. A row that holds +inf or NaN, or nothing
        finite, has no distribution: NaN in every column but ``nonfinite``, -1 in ``top_ids``.
        ``surprisal_nats`` of a masked target is inf; ``top1_margin`` is NaN where V is 1.

    Raises
    ------
    UsageError
        If the temperature is not above 0.

    Notes
    -----
    ``free_energy`` F = -T ln Z and ``internal_energy`` U = -E[z] have the mean finite logit
    subtracted, which the softmax does not see, so that steps can be compared; F = U - T S holds to
    float32 rounding. ``rank`` counts strictly higher logits. The effective support is the smallest
    k whose k most likely tokens reach the mass (within 1e-9).
    """
    if not temperature > 0:
        msg = f"the temperature of step statistics is {temperature:g}: give one above 0."
        raise UsageError(msg)
    num_rows, width = logits_TV.shape
    size = max(1, BLOCK_NUMBERS // width)
    blocks = [
        _block_statistics(
            logits_TV[start : start + size],
            target_T[start : start + size],
            num_tokens=num_tokens,
            temperature=temperature,
            top_k=top_k,
        )
        for start in range(0, max(num_rows, 1), size)
    ]
    return {name: torch.cat([b[name] for b in blocks]).cpu().numpy() for name in blocks[0]}


def _block_statistics(
    logits_TV: torch.Tensor,
    target_T: torch.Tensor,
    *,
    num_tokens: int,
    temperature: float,
    top_k: int,
) -> dict[str, torch.Tensor]:
    is_bad_T = ~has_distribution(logits_TV)
    found = _exponentials(logits_TV.float(), is_bad_T, temperature)
    logits_TV, masked_TV, nonfinite_T, peak_T, shifted_TV, prob_TV = found
    total_T = prob_TV.sum(1)
    prob_TV /= total_T[:, None]
    log_total_T = total_T.log()
    expected_T = torch.linalg.vecdot(prob_TV, shifted_TV)
    spread_TV = (shifted_TV - expected_T[:, None]).square_()
    average_T = shifted_TV.sum(1) / (masked_TV.shape[1] - masked_TV.sum(1))

    best_TK = best_ids(logits_TV, max(top_k, 2))
    target_T1, top_TK = target_T[:, None], best_TK[:, :top_k]
    log_prob_TK = shifted_TV.gather(1, top_TK) - log_total_T[:, None]
    surprisal_T = log_total_T - shifted_TV.gather(1, target_T1)[:, 0]
    columns = {
        "entropy_nats": log_total_T - expected_T,
        "varentropy": torch.linalg.vecdot(prob_TV, spread_TV),
        "surprisal_nats": surprisal_T.masked_fill(masked_TV.gather(1, target_T1)[:, 0], math.inf),
        "top1_margin": _margin(logits_TV.gather(1, best_TK[:, :2])) / temperature,
        "logsumexp": peak_T + log_total_T,
        "free_energy": -temperature * (log_total_T - average_T),
        "internal_energy": -temperature * (expected_T - average_T),
        "renyi2_nats": -torch.linalg.vecdot(prob_TV, prob_TV).log(),
        "padded_mass": prob_TV[:, num_tokens:].sum(1),
        "top_logprobs": log_prob_TK.masked_fill(masked_TV.gather(1, top_TK), -math.inf),
    }
    columns = {name: values.float() for name, values in columns.items()}
    columns["rank"] = (logits_TV > logits_TV.gather(1, target_T1)).sum(1).double()
    for percent, support_T in zip(SUPPORTS, supports(prob_TV, shifted_TV), strict=True):
        columns[f"effective_support_{percent}"] = support_T.double()
    for values in columns.values():
        values[is_bad_T] = math.nan
    columns["nonfinite"] = nonfinite_T.int()
    columns["top_ids"] = top_TK.int().masked_fill_(is_bad_T[:, None], -1)
    return columns


class _Exponentials(NamedTuple):
    """Logits, which are masked, how many a row are not finite, and exp(z / T - max), not yet 1 in sum."""

    logits_TV: torch.Tensor
    masked_TV: torch.Tensor
    nonfinite_T: torch.Tensor
    peak_T: torch.Tensor
    shifted_TV: torch.Tensor
    prob_TV: torch.Tensor


def _exponentials(
    logits_TV: torch.Tensor, is_bad_T: torch.Tensor, temperature: float
) -> _Exponentials:
    scaled_TV = logits_TV.double()
    nonfinite_T = torch.zeros_like(is_bad_T, dtype=torch.int64)
    masked_TV = torch.zeros_like(is_bad_T)[:, None].expand_as(logits_TV)
    # What is not finite leaves no sum finite: most blocks need no look at each of their logits.
    if not bool(scaled_TV.sum().isfinite()):
        nonfinite_T = (~logits_TV.isfinite()).sum(1)
        # Rows without a distribution are computed as zeros and blanked at the end.
        logits_TV = logits_TV.masked_fill(is_bad_T[:, None], 0)
        masked_TV = logits_TV == -math.inf
        scaled_TV = logits_TV.masked_fill(masked_TV, -torch.finfo(torch.float32).max).double()
    scaled_TV /= temperature
    peak_T = scaled_TV.amax(1)
    shifted_TV = scaled_TV.sub_(peak_T[:, None])
    prob_TV = shifted_TV.exp()
    if bool(masked_TV.any()):
        shifted_TV.masked_fill_(masked_TV, 0)
        prob_TV.masked_fill_(masked_TV, 0)
    return _Exponentials(logits_TV, masked_TV, nonfinite_T, peak_T, shifted_TV, prob_TV)


def has_distribution(logits_TV: torch.Tensor) -> torch.Tensor:
    """Return which rows have a softmax: no NaN, no +inf, not everything masked; bool [T]."""
    return logits_TV.amax(1).isfinite()


def _margin(best_T2: torch.Tensor) -> torch.Tensor:
    """Return the highest logit minus the second; NaN where there is only one."""
    if best_T2.shape[1] < 2:
        return best_T2.new_full((len(best_T2),), math.nan)
    return (best_T2[:, 0] - best_T2[:, 1]).double()
