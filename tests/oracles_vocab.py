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


def frequency_ranking(sources: Sequence[int], everything: Sequence[int], width: int) -> list[int]:
    """Ids by how often the source holds them, then by how often everything does, then by id.

    What nothing holds is left out.
    """
    first, second = (
        [sum(token == i for token in tokens) for i in range(width)]
        for tokens in (sources, everything)
    )
    seen = [i for i in range(width) if second[i]]
    return sorted(seen, key=lambda i: (-first[i], -second[i], i))


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


def sampler_sets(logits: Sequence[float]) -> dict[str, set[int]]:
    """Tokens that top-k 50, top-p 0.95 and min-p 0.05 may draw, tokens as likely as their last too.

    Masked tokens are in none.
    """
    p, ids = softmax(logits), order(logits)
    mass, last = 0.0, ids[0]
    for last in ids:
        mass += p[last]
        if mass >= 0.95 - 1e-9:
            break
    there = [i for i in ids if logits[i] > -math.inf]
    return {
        "top_k": {i for i in there if logits[i] >= logits[ids[:50][-1]]},
        "top_p": {i for i in there if logits[i] >= logits[last]},
        "min_p": {i for i in there if p[i] >= 0.05 * p[ids[0]]},
    }


def candidate_set(ranking: Sequence[int], pinned: Sequence[int], size: int, width: int) -> set[int]:
    """Return the pinned tokens and the first ``size`` others; all tokens from V on."""
    others = [i for i in ranking if i >= 0 and i not in pinned]
    return set(range(width)) if size >= width else set(pinned) | set(others[:size])


def covered(
    logits: Sequence[float], ranking: Sequence[int], pinned: Sequence[int], size: int, chosen: int
) -> dict[str, float]:
    """Return what one set covers at one step, each measure from the distributions themselves."""
    width, p = len(logits), softmax(logits)
    inside = candidate_set(ranking, pinned, size, width)
    outside = [i for i in range(width) if i not in inside]
    mass, tail = (math.fsum(p[i] for i in some) for some in (inside, outside))
    even = tail / len(outside) if outside else 0.0
    backed_off = [p[i] if i in inside else even for i in range(width)]
    pruned = [p[i] / mass if i in inside and mass else 0.0 for i in range(width)]
    hits = {f"hit_{rule}": float(some <= inside) for rule, some in sampler_sets(logits).items()}
    return {
        "nll_full": neg_log(p[chosen]),
        "set_size": len(inside),
        "hit_chosen": float(chosen in inside),
        "hit_argmax": float(order(logits)[0] in inside),
        **hits,
        "neg_log_mass_nats": -math.log1p(-tail) if tail < 0.5 else neg_log(mass),
        "missing_mass": tail,
        "jsd_nats": jensen_shannon(p, pruned) if mass else math.log(2),
        "backoff_kl_nats": kullback_leibler(p, backed_off),
        "nll_backoff": neg_log(backed_off[chosen]),
    }


def kullback_leibler(p: Sequence[float], q: Sequence[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def jensen_shannon(p: Sequence[float], q: Sequence[float]) -> float:
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return (kullback_leibler(p, middle) + kullback_leibler(q, middle)) / 2


def causal_backoffs(steps: Sequence[Sequence[float]], sets: Sequence[set[int]]) -> list[float]:
    """KL(p || q) of each step; q has p's shape on the set, and what earlier steps missed outside.

    The foretold outside mass is the mean over the steps before and one at which all were alike.
    """
    missed: list[float] = []
    found = []
    for p, inside in zip(steps, sets, strict=True):
        outside = [i for i in range(len(p)) if i not in inside]
        mass, tail = (math.fsum(p[i] for i in some) for some in (inside, outside))
        foretold = (len(outside) / len(p) + math.fsum(missed)) / (1 + len(missed))
        q = list(p)
        for i in outside:
            q[i] = foretold / len(outside)
        for i in inside if outside else ():
            q[i] = p[i] / mass * (1 - foretold) if mass else 0.0
        found.append(kullback_leibler(p, q))
        missed.append(tail)
    return found


def interleaved(rankings: Sequence[Sequence[int]]) -> list[int]:
    """Return the first of each, then the second of each; a token that came before is passed over."""
    found: list[int] = []
    for place in range(max(map(len, rankings))):
        for ranking in rankings:
            if place < len(ranking) and ranking[place] not in found:
                found.append(ranking[place])
    return found


def neg_log(x: float) -> float:
    return -math.log(x) if x > 0 else math.inf
