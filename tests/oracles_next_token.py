"""Measures of a next token by loops over the vocabulary, in float64 with exact sums.

llama.cpp's own steps are taken in float32 where that tool takes them so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

f32 = np.float32


def log_probs(logits: Sequence[float]) -> list[float]:
    highest = max(logits)
    total = math.log(math.fsum(math.exp(z - highest) for z in logits))
    return [z - highest - total for z in logits]


def first_best(scores: Sequence[float]) -> int:
    best = 0
    for token, score in enumerate(scores):
        if score > scores[best]:
            best = token
    return best


def kl(logp: Sequence[float], logq: Sequence[float]) -> float:
    terms = []
    for lp, lq in zip(logp, logq, strict=True):
        p = math.exp(lp)
        if p > 0:
            terms.append(math.inf if lq == -math.inf else p * (lp - lq))
    return math.fsum(terms)


def jsd(logp: Sequence[float], logq: Sequence[float]) -> float:
    terms = []
    for lp, lq in zip(logp, logq, strict=True):
        p, q = math.exp(lp), math.exp(lq)
        middle = (p + q) / 2
        terms += [x * (math.log(x) - math.log(middle)) / 2 for x in (p, q) if x > 0]
    return math.fsum(terms)


def margin(scores: Sequence[float], token: int) -> float:
    others = [score for other, score in enumerate(scores) if other != token]
    return scores[token] - max(others) if others else math.nan


def coded(logits: Sequence[float]) -> list[float]:
    """Encode to 16 bits and decode, as ``log_softmax`` of perplexity.cpp."""
    z = [f32(x) for x in logits]
    highest = max(z)
    lowest = max(min(z), f32(highest - f32(16)))
    total = math.log(math.fsum(float(np.exp(f32(x - highest))) for x in z))
    floor = f32(f32(lowest - highest) - f32(total))
    scale = f32(f32(highest - lowest) / f32(65535))
    decoded = []
    for x in z:
        code = 0.0
        if scale > 1e-38 and x > lowest:  # below, float32 has no 1 / scale
            code = float(np.rint(f32(f32(f32(1) / scale) * f32(x - lowest))))
        decoded.append(float(f32(f32(scale * f32(code)) + floor)))
    return decoded


def common(full: Sequence[float], pruned: Sequence[float], target: int) -> dict[str, Any]:
    """Return what does not depend on the convention."""
    logp, logq = log_probs(full), log_probs(pruned)
    return {
        "nll_pruned": -logq[target],
        "jsd_nats": jsd(logp, logq),
        "entropy_full_nats": -math.fsum(math.exp(x) * x for x in logp if x > -math.inf),
        "top1_margin_full": margin(full, first_best(full)),
        "hit": first_best(pruned) == target,
    }


def ours(full: Sequence[float], pruned: Sequence[float], target: int) -> dict[str, Any]:
    logp, logq, top = log_probs(full), log_probs(pruned), first_best(full)
    return common(full, pruned, target) | {
        "nll_full": -logp[target],
        "kl_nats": kl(logp, logq),
        "delta_p": math.exp(logq[target]) - math.exp(logp[target]),
        "same_top": top == first_best(pruned),
        "margin_pruned": margin(pruned, top),
        "hit_full": top == target,
    }


def llama_cpp(full: Sequence[float], pruned: Sequence[float], target: int) -> dict[str, Any]:
    base, logq = coded(full), log_probs(pruned)
    top = first_best(base)
    terms = []
    for lp, lq in zip(base, logq, strict=True):
        if lp > -16:
            terms.append(math.inf if lq == -math.inf else math.exp(lp) * (lp - lq))
    return common(full, pruned, target) | {
        "nll_full": -base[target],
        "kl_nats": math.fsum(terms),
        "delta_p": math.exp(logq[target]) - math.exp(base[target]),
        "same_top": top == first_best(pruned),
        "margin_pruned": margin(pruned, top),
        "hit_full": top == target,
    }
