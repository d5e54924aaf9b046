"""KV eviction on one recorded sequence at level local: replays layer stacks, tallies the measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.kv.plan import make_shares, observe
from tracekit.kv.replay import Family, Setting, replay
from tracekit.kv.schedule import Spans
from tracekit.simulate.columns import Stack
from tracekit.simulate.held import HeldEntries
from tracekit.simulate.lengths import length_bucket
from tracekit.simulate.stacks import Stacks
from tracekit.simulate.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd
    import pyarrow as pa

    from tracekit.kv.budget import Cache
    from tracekit.kv.policy import Policy
    from tracekit.kv.replay import Replay
    from tracekit.simulate.question import Tables
    from tracekit.simulate.tally import Tallied
    from tracekit.spec import LayerSpec
    from tracekit.trace.reader import Trace


def replay_sequence(
    trace: Trace,
    sequence: pd.Series[Any],
    families: Sequence[Sequence[Policy]],
    *,
    seed: int,
    bytes_per_number: int,
) -> dict[str, Tables]:
    """Return, by policy text, the rows of ``schema.KV_RESULTS`` and ``HELD`` on one sequence.

    Parameters
    ----------
    trace
        Recorded with queries, keys and values.
    sequence
        Its row of ``trace.sequences``.
    families
        Policies; those of one family differ in the amount alone.
    seed
        Of random policies on this sequence.
    bytes_per_number
        For the accounting.

    Returns
    -------
    dict
        ``kv``: rows for each layer and KV head, each layer, and all together, over all steps and by
        bucket of steps. ``held``: one row. Policies whose eviction point the sequence does not have
        are left out.
    """
    recorded = Recorded.of(trace, sequence)
    scores_probes = any(family[0].scorer.needs.influence for family in families)
    stacks = Stacks(trace, recorded.sequence_id, bytes_per_number, probes=scores_probes)
    tallies: dict[Policy, tuple[Tally, HeldEntries]] = {}
    for policies, stack in stacked(stacks, families, recorded, seed):
        for n, policy in enumerate(policies):
            for one in tallies.setdefault(policy, (Tally(), HeldEntries())):
                one.add(stack, n)
    return {
        policy.text: {
            "kv": result_rows(policy, "local", tally, tally.columns(), recorded, stacks.cache),
            "held": held.row(policy, recorded.sequence_id),
        }
        for policy, (tally, held) in tallies.items()
    }


@dataclass(frozen=True, eq=False)
class Recorded:
    """What all levels must know of a recorded sequence beside its layers.

    Parameters
    ----------
    row
        Of ``trace.sequences``.
    spans
        Where its parts end.
    needle_T, answer_T
        Positions of the needle in the prompt, and of a marked answer; empty if there is none.
    """

    row: pd.Series[Any]
    spans: Spans
    needle_T: np.ndarray
    answer_T: np.ndarray

    @classmethod
    def of(cls, trace: Trace, sequence: pd.Series[Any]) -> Recorded:
        """Read it from a trace, ``sequence`` its row of ``trace.sequences``."""
        tokens = trace.table("tokens", sequence_id=str(sequence["sequence_id"]))
        needle_T, answer_T = (
            np.flatnonzero((tokens["span"] == name).to_numpy()) for name in ("needle", "answer")
        )
        return cls(sequence, spans_of(sequence, tokens), needle_T, answer_T)

    @property
    def sequence_id(self) -> str:
        """Its id."""
        return str(self.row["sequence_id"])


def stacked(
    stacks: Stacks, families: Sequence[Sequence[Policy]], recorded: Recorded, seed: int
) -> Iterator[tuple[tuple[Policy, ...], Stack]]:
    """Yield the columns of each family on each stack of layers, stack by stack.

    Families whose eviction point the sequence does not have are left out.
    """
    for layers, policies, result in replays(stacks, families, recorded.spans, seed):
        # A window of text scores again what the window before it has scored: it is cut off.
        scored = result.since(int(recorded.row["scored_from"]) - 1)
        yield (
            policies,
            Stack(
                policies,
                layers,
                scored,
                point=result.first_row,
                needle_T=recorded.needle_T,
                bytes_per_number=stacks.cache.bytes_per_number,
            ),
        )


def replays(
    stacks: Stacks, families: Sequence[Sequence[Policy]], spans: Spans, seed: int
) -> Iterator[tuple[list[LayerSpec], tuple[Policy, ...], Replay]]:
    """Yield what each family did to each stack of layers, stack by stack.

    Families whose eviction point the sequence does not have are left out.
    """
    planned = _plan(stacks, families, spans, seed)
    for layers, reference in stacks:
        setting = _setting(stacks, layers, spans, seed)
        for family, result in zip(planned, replay(planned, reference, setting), strict=True):
            if result is not None:
                yield layers, family.policies, result


def spans_of(sequence: pd.Series[Any], tokens: pd.DataFrame) -> Spans:
    """Return where a recorded sequence's parts end, and where its chat template stands.

    Parameters
    ----------
    sequence
        Its row of ``trace.sequences``.
    tokens
        Its rows of ``schema.TOKENS``.
    """
    template = np.flatnonzero(tokens["is_template"].to_numpy(dtype=bool))
    return Spans(
        context_end=_whole(sequence["context_end"]),
        prompt_end=_whole(sequence["prompt_end"]),
        turn_ends=_ends(sequence["turn_ends"]),
        num_tokens=int(sequence["num_tokens"]),
        template=tuple(template.tolist()),
    )


def _ends(values: Any) -> tuple[int, ...]:
    """Return the ends of turns; imported text has none."""
    return () if values is None else tuple(int(end) for end in values)


def _whole(value: Any) -> int | None:
    return None if value is None or np.isnan(value) else int(value)


def _setting(stacks: Stacks, layers: Sequence[Any], spans: Spans, seed: int) -> Setting:
    numbers = tuple(one.index for one in layers)
    return Setting(layers=numbers, cache=stacks.cache, spans=spans, seed=seed)


def _plan(
    stacks: Stacks, families: Sequence[Sequence[Policy]], spans: Spans, seed: int
) -> list[Family]:
    """Return the families with the frozen plans of their budgets, made over all layers."""
    planned = [place for place, one in enumerate(families) if not one[0].layers.is_uniform]
    # A plan that looks at nothing needs no look at the layers.
    looking = [place for place in planned if families[place][0].layers.looks]
    seen: dict[int, list[Any]] = {place: [] for place in planned}
    for layers, reference in stacks if looking else ():
        setting = _setting(stacks, layers, spans, seed)
        for place in looking:
            seen[place].append(observe(families[place][0], reference, setting))
    setting = _setting(stacks, (), spans, seed)
    shares = {place: make_shares(families[place], seen[place], setting) for place in planned}
    return [Family(tuple(one), shares.get(place)) for place, one in enumerate(families)]


def result_rows(
    policy: Policy, level: str, tally: Tally, tallied: Tallied, recorded: Recorded, cache: Cache
) -> pa.Table:
    """Return rows of ``schema.KV_RESULTS`` of one policy.

    Parameters
    ----------
    policy
        What was replayed.
    level
        Whose rows they are.
    tally
        Of the policy, all stacks taken.
    tallied
        Its columns, or those of them that belong to the level.
    recorded
        The sequence.
    cache
        The layers.
    """
    sequence, spans = recorded.row, recorded.spans
    shared = {
        "sequence_id": sequence["sequence_id"],
        "domain": sequence["domain"],
        "policy": policy.text,
        "family": policy.family,
        "level": level,
        "causal": policy.causal,
        "selects": policy.selector is not None,
        "evict_at": policy.schedule.text,
        "query_aware": policy.schedule.query_aware(spans),
        "bucket": length_bucket(int(sequence["num_tokens"])),
        "target_frac": policy.target_frac(spans, cache),
        "is_clipped": tally.is_clipped,
        "is_clamped": tally.is_clamped,
    }
    buckets, index, columns = tallied
    num_rows = len(index)
    own = {
        "layer": np.tile(index[:, 0], len(buckets)),
        "kv_head": np.tile(index[:, 1], len(buckets)),
        "steps": np.repeat([one.name for one in buckets], num_rows),
        "num_scored": np.repeat([one.end - one.start for one in buckets], num_rows),
        "is_idle": policy.evicts_only & (columns["num_evicted"].reshape(-1) == 0),
    }
    flat = {name: array.reshape(-1) for name, array in columns.items()}
    return schema.KV_RESULTS.build(num_rows * len(buckets), shared | flat | own)
