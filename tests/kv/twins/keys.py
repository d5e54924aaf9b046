"""Twins of the scorers that are made of keys, values and queries."""

from __future__ import annotations

from tests import oracles_key_scores as slow

SEED = 7

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
    "vatp",
    "vatp:sinks=1,recent=2,every=3,reduce=max",
    "vatp:sinks=0,recent=0,at=prompt",
    "caote",
    "caote:at=prompt,recent=0",
    "caote:window=3,every=4",
    "rkv:every=5",
    "rkv:window=2,kernel=3,mix=0.5,at=prompt",
    "rkv:window=3,kernel=1,mix=0.9,threshold=0.0,every=4,recent=0",
    "leverage",
    "leverage:every=4,recent=2,ridge=1.0",
    "leverage:sketch=3",
    "noncausal",
    "noncausal:chunk=5",
    "noncausal:chunk=3,every=4,recent=2",
    "compactor:sinks=2,newest=1",
    "compactor:sinks=1,newest=2,chunk=4,blend=2.0,every=5",
    "compactor:sketch=2,ridge=0.5",
]

TWINS = {
    "keydiff": lambda scorer: slow.key_difference_scores,
    "lagkv": lambda scorer: slow.lag_scores(scorer.sinks, scorer.lag),
    "cur": lambda scorer: slow.leverage_product_scores(scorer.window),
    "expected": lambda scorer: slow.expected_scores(scorer.sinks, scorer.future, scorer.epsilon),
    "vatp": lambda scorer: slow.value_attention_scores(scorer.reduce),
    "caote": lambda scorer: slow.caote_scores(scorer.window),
    "rkv": lambda scorer: slow.r_kv_scores(
        scorer.window, scorer.kernel, scorer.mix, scorer.threshold
    ),
    "leverage": lambda scorer: slow.leverage_scores(scorer.sketch, scorer.ridge, SEED),
    "noncausal": lambda scorer: slow.non_causal_scores(scorer.chunk),
    "compactor": lambda scorer: slow.compactor_scores(
        scorer.sinks,
        scorer.newest,
        scorer.blend,
        scorer.chunk,
        scorer.sketch,
        scorer.ridge,
        SEED,
    ),
}
"""By preset: from the policy's scorer to the slow score of (cache, KV head)."""
