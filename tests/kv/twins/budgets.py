"""Policies with budgets that differ by layer or head; their plans are in tests/oracles_budgets."""

from __future__ import annotations

from tests import oracles

TEXTS = [
    "adakv:window=3",
    "adakv:window=2,kernel=3,safeguard=0.5,every=4",
    "adakv:window=1,kernel=1,safeguard=0.0,recent=0,sinks=1",
    "knorm:heads=adaptive,safeguard=1.0,every=3",
    "h2o:heads=adaptive,every=2",
    "pyramidkv:window=2,kernel=3,pyramid_window=0",
    "pyramidkv:window=3,pyramid_window=3,beta=2.5,every=5",
    "adapyramid:window=2,pyramid_window=1",
    "adapyramid:window=2,pyramid_window=0,every=3",
    "knorm:layers=tiers",
    "h2o:layers=tiers,shallow=0.05,deep=0.4,deep_from=0.4,every=3",
    "cake:window=3,cake_window=4",
    "cake:window=3,cake_window=2,tau1=1.0,tau2=1.0,every=4",
    "zigzagkv:window=3,zigzag_window=3",
    "zigzagkv:window=3,zigzag_window=2,zigzag_mass=0.5,heads=adaptive",
    "simlayerkv:sinks=1,lazy_sinks=1,lazy_recent=2,lazy_threshold=0.2,lazy_rows=3",
    "simlayerkv:lazy_sinks=2,lazy_recent=6,lazy_threshold=0.5,every=2",
    "headkv:window=2",
    "headkv:window=2,head_floor=0.0,every=4",
    "duoattention:sinks=1,stream=3",
    "duoattention:sinks=2,stream=4,every=1",
]


def _window_scores(scorer):
    return oracles.window_scores(
        scorer.window, scorer.kernel, scorer.pool, scorer.reduce, scorer.order
    )


TWINS = dict.fromkeys(
    ("adakv", "pyramidkv", "adapyramid", "cake", "zigzagkv", "headkv"), _window_scores
) | dict.fromkeys(("simlayerkv", "duoattention"), lambda scorer: oracles.recency_scores)
"""By preset: from the policy's scorer to the slow score of (cache, KV head)."""
