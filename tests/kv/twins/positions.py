"""Twins of presets whose keys stand at their place in the cache: the rule is that of others.

What turned keys do to the outputs is tested in ``test_positions.py``.
"""

from __future__ import annotations

from tests import oracles

TEXTS = ["streamingllm:positions=original", "streamingllm:positions=original,every=3,sinks=2"]

TWINS = {"streamingllm": lambda scorer: oracles.recency_scores}
"""By preset: from the policy's scorer to the slow score of (cache, KV head)."""
