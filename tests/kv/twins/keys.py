"""Twins of the scorers that are made of keys, values and queries."""

from __future__ import annotations

from tests import oracles_key_scores as slow

TEXTS = [
    "keydiff",
    "keydiff:every=3,recent=2",
    "lagkv",
    "lagkv:lag=3,sinks=2",
    "lagkv:lag=1,sinks=0,every=4",
    "lagkv:lag=4,sinks=1,every=5,recent=2",
    "cur",
    "cur:window=3,sinks=0",
    "cur:window=4,every=3,recent=3",
    "expected:future=3",
    "expected:future=2,sinks=0,epsilon=0.01",
    "expected:future=1,sinks=2,every=6",
]

TWINS = {
    "keydiff": lambda scorer: slow.key_difference_scores,
    "lagkv": lambda scorer: slow.lag_scores(scorer.sinks, scorer.lag),
    "cur": lambda scorer: slow.leverage_product_scores(scorer.window),
    "expected": lambda scorer: slow.expected_scores(scorer.sinks, scorer.future, scorer.epsilon),
}
"""By preset: from the policy's scorer to the slow score of (cache, KV head)."""
