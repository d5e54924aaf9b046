"""Which tokens a policy kept in one head of one layer, and until when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracekit.errors import UsageError
from tracekit.kv.engine import NEVER
from tracekit.registry import unknown
from tracekit.simulate.kv import replays, spans_of
from tracekit.simulate.question import seed_of
from tracekit.simulate.refusals import refuse_impossible
from tracekit.simulate.stacks import Stacks

if TYPE_CHECKING:
    from tracekit.simulate.plan import Plan
    from tracekit.trace.reader import Trace


@dataclass(frozen=True, kw_only=True, eq=False)
class Strip:
    """The life of the cache entries of one head under one policy.

    Parameters
    ----------
    policy
        Canonical text.
    point
        The eviction point: tokens seen at the first decision.
    decisions
        Tokens seen at each decision.
    evicted_at_T
        Tokens seen when each entry was evicted; -1 if it stayed.
    """

    policy: str
    point: int
    decisions: tuple[int, ...]
    evicted_at_T: np.ndarray

    def kept_T(self, seen: int) -> np.ndarray:
        """Return which of the first ``seen`` entries are there once so many tokens were seen."""
        evicted_at_T = self.evicted_at_T[:seen]
        return (evicted_at_T < 0) | (evicted_at_T > seen)


def explain(
    trace: Trace, sequence_id: str, layer: int, head: int, plan: Plan
) -> tuple[list[str], list[Strip]]:
    """Return the tokens that enter the cache, as text, and a strip for each policy of a plan.

    Parameters
    ----------
    trace
        Recorded with queries, keys and values.
    sequence_id, layer, head
        Sequence, layer number and KV head.
    plan
        Its policies are replayed on this sequence; those without an eviction point are left out.

    Raises
    ------
    UsageError
        If there is no such sequence, layer or head.
    """
    rows = {str(row["sequence_id"]): row for _, row in trace.sequences.iterrows()}
    refuse_impossible(trace, plan)
    if not plan.families:
        msg = "there is no policy to explain: name one with --kv."
        raise UsageError(msg)
    if sequence_id not in rows:
        raise UsageError(unknown("sequence", sequence_id, list(rows)))
    stacks = Stacks(trace, sequence_id, plan.bytes_per_number)
    held = {one.index: one for one in stacks.cache.layers}
    if layer not in held or not 0 <= head < held[layer].num_kv_heads:
        last = max((one.num_kv_heads for one in held.values()), default=0) - 1
        msg = (
            f"layer {layer}, KV head {head} cannot be replayed: layers {_ranges(list(held))}, KV "
            f"heads 0 to {last} can."
        )
        raise UsageError(msg)
    row = rows[sequence_id]
    tokens = trace.table("tokens", sequence_id=sequence_id)
    spans, seed = spans_of(row, tokens), seed_of(row, plan.seed)
    strips = []
    for layers, policies, result in replays(stacks, plan.families, spans, seed):
        numbers = [one.index for one in layers]
        if layer not in numbers:
            continue
        for n, policy in enumerate(policies):
            evicted_at_T = result.evicted_at_NLGT[n, numbers.index(layer), head].astype(np.int64)
            strips.append(
                Strip(
                    policy=policy.text,
                    point=result.first_row,
                    decisions=policy.schedule.decisions(result.first_row, spans),
                    evicted_at_T=np.where(evicted_at_T == NEVER, -1, evicted_at_T),
                )
            )
    texts = trace.vocabulary()["text"].to_numpy(dtype=object)
    return [str(text) for text in texts[tokens["token_id"].to_numpy()][: spans.num_rows]], strips


def _ranges(numbers: list[int]) -> str:
    """Return ``0 to 29`` where nothing is missing, else all numbers."""
    if numbers and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
