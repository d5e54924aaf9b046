"""Slow twins of the vocabulary engine and the logit statistics: loops over formulas, float64.

They import nothing of the package.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def softmax(logits: Sequence[float]) -> list[float]:
    peak = max(logits)
    weights = [math.exp(z - peak) if z > -math.inf else 0.0 for z in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def order(scores: Sequence[float]) -> list[int]:
    """Ids by score, highest first, ties by lower id."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def log_z(logits: Sequence[float]) -> float:
    peak = max(logits)
    return peak + math.log(math.fsum(math.exp(z - peak) for z in logits if z > -math.inf))


def statistics(
    logits: Sequence[float], target: int, *, num_tokens: int, temperature: float, top_k: int
) -> dict[str, Any]:
    """Every statistic of one row, from its definition."""
    scaled = [z / temperature for z in logits]
    there = [i for i, z in enumerate(logits) if z > -math.inf]
    p, log_total = softmax(scaled), log_z(scaled)
    surprisal = {i: log_total - scaled[i] for i in there}
    entropy = math.fsum(p[i] * surprisal[i] for i in there)
    mean_logit = math.fsum(logits[i] for i in there) / len(there)
    ids = order(logits)
    supports = {}
    for percent in (90, 95, 99):
        mass, count = 0.0, 0
        for i in ids:
            mass, count = mass + p[i], count + 1
            if mass >= percent / 100 - 1e-9:
                break
        supports[f"effective_support_{percent}"] = count
    return {
        "entropy_nats": entropy,
        "varentropy": math.fsum(p[i] * (surprisal[i] - entropy) ** 2 for i in there),
        "surprisal_nats": surprisal.get(target, math.inf),
        "rank": sum(z > logits[target] for z in logits),
        "top1_margin": scaled[ids[0]] - scaled[ids[1]] if len(ids) > 1 else math.nan,
        "logsumexp": log_total,
        "free_energy": -temperature * log_total + mean_logit,
        "internal_energy": -math.fsum(p[i] * logits[i] for i in there) + mean_logit,
        **supports,
        "renyi2_nats": -math.log(math.fsum(x * x for x in p)),
        "padded_mass": math.fsum(p[num_tokens:]),
        "nonfinite": len(logits) - len(there),
        "top_ids": ids[:top_k],
        "top_logprobs": [-surprisal.get(i, math.inf) for i in ids[:top_k]],
    }


def frequency_ranking(tokens: Sequence[tuple[str, int]], prompt_id: str, width: int) -> list[int]:
    counts = [0] * width
    for prompt, token in tokens:
        if prompt != prompt_id:
            counts[token] += 1
    return order(counts)


def previous_ranking(runs: Sequence[Sequence[float]], top: int) -> list[int]:
    """Ids in the order of their last use: the last run first, within a run by rank."""
    pool: list[int] = []
    for logits in reversed(runs):
        for i in order(logits)[:top]:
            if i not in pool:
                pool.append(i)
    return pool


def lowrank_preview(
    weight_VE: np.ndarray, bias_V: np.ndarray | None, hidden_E: np.ndarray, rank: int
) -> np.ndarray:
    u, s, v = np.linalg.svd(weight_VE.astype(np.float64), full_matrices=False)
    cut: np.ndarray = u[:, :rank] @ np.diag(s[:rank]) @ v[:rank]
    return cut @ hidden_E.astype(np.float64) + (0.0 if bias_V is None else bias_V)


def covered(
    logits: Sequence[float],
    ranking: Sequence[int],
    pinned: Sequence[int],
    size: int,
    chosen: int,
) -> dict[str, float]:
    """Return what one set covers at one step: the pinned tokens and the first ``size`` others."""
    others = [i for i in ranking if i >= 0 and i not in pinned]
    inside = set(pinned) | set(others[:size])
    if size >= len(logits):
        inside = set(range(len(logits)))
    p = softmax(logits)
    mass = math.fsum(p[i] for i in inside)
    tail = math.fsum(p[i] for i in range(len(p)) if i not in inside)
    backoff = p[chosen] if chosen in inside else tail / (len(p) - len(inside))
    return {
        "hit_chosen": float(chosen in inside),
        "hit_argmax": float(order(logits)[0] in inside),
        "mass": mass,
        "neg_log_mass_nats": -math.log1p(-tail) if tail < 0.5 else neg_log(mass),
        "set_size_mean": len(inside),
        "nll_full": neg_log(p[chosen]),
        "nll_backoff": neg_log(backoff),
    }


def neg_log(x: float) -> float:
    return -math.log(x) if x > 0 else math.inf
