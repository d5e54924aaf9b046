"""Twins of the first scorers: full, random, recency, accumulated, key norm, window attention."""

from __future__ import annotations

from typing import Any

from tests import oracles

SEED = 7

TEXTS = [
    "full",
    "random",
    "random:every=3",
    "streaming",
    "streaming:at=prompt",
    "window:recent=0.5,sinks=1",
    "h2o",
    "h2o:every=4,reduce=max",
    "h2o:reduce=sum,sinks=2,recent=3",
    "h2o:at=prompt",
    "h2o:every=3,above=12,grace=4",
    "h2o:every=8",
    "h2o:every=8,reduce=max",
    "h2o:every=6,evict-prompt=5,recent=1",
    "streaming:at=prompt,evict-prompt=3",
    "snapkv:window=2,evict-prompt=7",
    "snapkv:window=3",
    "snapkv:window=2,kernel=3,pool=max,order=group_pool,reduce=max",
    "snapkv:window=5,kernel=3,pool=max,recent=2,every=4",
    "snapkv:window=4,kernel=1,reduce=max,recent=0,sinks=3",
    "finch:positions=original,window=4",
    "knorm",
    "knorm:every=2,recent=2",
]


def _window(scorer: Any) -> oracles.SlowScore:
    return oracles.window_scores(
        scorer.window, scorer.kernel, scorer.pool, scorer.reduce, scorer.order
    )


TWINS = {
    "full": lambda scorer: oracles.zero_scores,
    "random": lambda scorer: oracles.random_scores(SEED),
    "streaming": lambda scorer: oracles.recency_scores,
    "window": lambda scorer: oracles.recency_scores,
    "h2o": lambda scorer: oracles.received_scores(scorer.reduce),
    "knorm": lambda scorer: oracles.key_norm_scores,
    "snapkv": _window,
    "finch": _window,
}
"""By preset: from the policy's scorer to the slow score of (cache, KV head)."""
