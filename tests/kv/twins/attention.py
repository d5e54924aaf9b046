"""Twins of the scorers by position and by attention, past and future."""

from __future__ import annotations

from tests import oracles_attention_scores as slow

TEXTS = [
    "sinkuniform",
    "sinkuniform:every=3,sinks=1,recent=2",
    "keepodd",
    "keepodd:at=prompt,sinks=2,recent=0.5",
    "tova",
    "tova:at=prompt",
    "tova:every=4,recent=0,sinks=1",
    "observed",
    "observed:every=3,reduce=max,recent=2",
    "scissorhands:history=6,every=4,recent=2",
    "scissorhands:history=1,every=1,sinks=0,recent=0",
    "scissorhands:at=prompt,history=50,recent=0",
    "redundancy:round_tokens=3,every=3,recent=1,sinks=0",
    "redundancy:layers=uniform,round_tokens=2,rounds=3,deep_layer=4,every=2,recent=0,sinks=1",
    "redundancy:layers=uniform,round_tokens=5,rounds=1,deep_layer=0,at=prompt,recent=0,sinks=0",
    "oracle",
    "oracle:every=5,sinks=1,recent=2",
    "oracle_error",
    "oracle_error:every=5,sinks=1,recent=2",
    "influence",
    "influence:every=5,sinks=1,recent=2",
]

TWINS = {
    "sinkuniform": lambda scorer: slow.mirrored_scores,
    "keepodd": lambda scorer: slow.odd_scores,
    "tova": lambda scorer: slow.last_scores,
    "observed": lambda scorer: slow.observed_scores(scorer.reduce),
    "scissorhands": lambda scorer: slow.persistence_scores(scorer.history),
    "redundancy": lambda scorer: slow.redundancy_scores(
        scorer.round_tokens, scorer.rounds, scorer.deep_layer
    ),
    "oracle": lambda scorer: slow.future_attention_scores,
    "oracle_error": lambda scorer: slow.future_error_scores,
    "influence": lambda scorer: slow.influence_scores,
}
"""By preset: from the policy's scorer to the slow score of (cache, KV head)."""
