"""Eviction and a transform stacked: what each costs alone, both together, and the difference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tracekit import schema
from tracekit.kv.parse import parse
from tracekit.kv.schedule import parse_schedule
from tracekit.measure.stats import bootstrap_mean, paired_difference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd

    from tracekit.kv.policy import Policy

ERROR_BOUND = 0.1
"""Relative output error from which a transform alone is said to cost too much to be stacked."""

PERPLEXITY_BOUND = 2.0
"""The same in points of perplexity."""

MEASURES = {
    "local": {"output_error": ("output_error", 1), "output_error_sq": ("output_error", 2)},
    "predicted": {"kl_predicted_nats": ("kl_predicted_nats", 1)},
    "propagated": {"kl_nats": ("kl_nats", 1)},
}
"""By level, measures as powers of a column. Squares of independent errors add up, and so does KL."""


class Parts(NamedTuple):
    """A stacked policy taken apart."""

    eviction: Policy
    transform: Policy


def parts_of(policy: Policy) -> Parts | None:
    """Return the policy without its transform, and its transform on the full cache.

    The transform alone starts where the policy's first decision is made, and stores as much as
    there is: later decisions of a policy that evicts nothing change nothing.

    Parameters
    ----------
    policy
        Any policy.

    Returns
    -------
    Parts or None
        None if the policy does not evict, or has no transform.
    """
    if policy.transform is None or not policy.scorer.evicts:
        return None
    items = policy.schedule.items
    if "above" not in items:  # where there is one, a single decision has no text of its own
        items = {"at": items.get("from", items.get("at", ""))}
    alone = replace(parse("full"), schedule=parse_schedule(items), transform=policy.transform)
    return Parts(replace(policy, transform=None), alone)


def stacking(frame: pd.DataFrame, *, seed: int) -> dict[str, list[Any]]:
    """Return the columns of ``schema.STACKING``.

    Interaction = together - (eviction alone + transform alone), on the same sequences: above 0 the
    two make each other worse, below 0 they lose the same entries twice.

    Parameters
    ----------
    frame
        Rows of ``schema.KV_RESULTS``; those of all layers and all steps together are used.
    seed
        Of the bootstrap; sequences are resampled.

    Returns
    -------
    dict
        One row a stacked policy, level and measure; where a part was not run n is 0. Sequences on
        which the policy evicted nothing are left out and counted.
    """
    is_layers = (frame["layer"] == schema.ALL) & (frame["kv_head"] == schema.ALL)
    whole = frame[is_layers & (frame["steps"] == schema.ANY)]
    rows = [
        row | {"level": str(level)}
        for level, cells in whole.groupby("level", observed=True, sort=False)
        for stack in _stacks(cells)
        for row in stack.rows(MEASURES[str(level)], seed)
    ]
    return {one.name: [row[one.name] for row in rows] for one in schema.STACKING.columns}


@dataclass(frozen=True, eq=False)
class _Stack:
    """A stacked policy's results on S sequences that have all three."""

    texts: tuple[str, str, str]
    eviction: pd.DataFrame
    transform: pd.DataFrame
    together: pd.DataFrame
    num_excluded: int

    def rows(self, measures: Mapping[str, tuple[str, int]], seed: int) -> Iterator[dict[str, Any]]:
        """Yield one row a measure, each a power of a column."""
        change_S = np.exp(_column(self.transform, "nll_pruned"))
        change_S -= np.exp(_column(self.transform, "nll_full"))
        error = _mean(_column(self.transform, "output_error"))
        change = _mean(change_S)
        shared = {
            **dict(zip(("policy", "eviction", "transform"), self.texts, strict=True)),
            "kept_frac": _mean(_column(self.together, "kept_frac")),
            "num_excluded": self.num_excluded,
            "error_bound": ERROR_BOUND,
            "exceeds_error_bound": None if error is None else error > ERROR_BOUND,
            "perplexity_change": change,
            "perplexity_bound": PERPLEXITY_BOUND,
            "exceeds_perplexity_bound": None if change is None else change > PERPLEXITY_BOUND,
        }
        for measure, (column, power) in measures.items():
            eviction_S, transform_S, together_S = (
                _column(part, column) ** power
                for part in (self.eviction, self.transform, self.together)
            )
            interval = paired_difference(together_S, eviction_S + transform_S, seed=seed)
            yield shared | {
                "measure": measure,
                "eviction_mean": _mean(eviction_S),
                "transform_mean": _mean(transform_S),
                "together_mean": _mean(together_S),
                "interaction": interval.mean,
                "low": interval.low,
                "high": interval.high,
                "n": interval.n,
            }


def _stacks(cells: pd.DataFrame) -> Iterator[_Stack]:
    """Yield the stacked policies of one level, their parts on the same sequences in one order."""
    by_text = {
        str(text): part.set_index("sequence_id").sort_index()
        for text, part in cells.groupby("policy", observed=True, sort=False)
    }
    nothing = cells.iloc[:0].set_index("sequence_id")
    for text, found in by_text.items():
        parts = parts_of(parse(text)) if "+" in text else None
        if parts is None:
            continue
        texts = (text, parts.eviction.text, parts.transform.text)
        together = found[(found["num_evicted"] > 0) | (found["target_frac"] >= 1)]
        eviction, transform = (by_text.get(one, nothing) for one in texts[1:])
        common = together.index.intersection(eviction.index).intersection(transform.index)
        yield _Stack(
            texts=texts,
            eviction=eviction.loc[common],
            transform=transform.loc[common],
            together=together.loc[common],
            num_excluded=len(found) - len(together),
        )


def _column(part: pd.DataFrame, name: str) -> np.ndarray:
    """Return a measure as float64, null as NaN."""
    return part[name].to_numpy(dtype=np.float64, na_value=np.nan)


def _mean(values: np.ndarray) -> float | None:
    return bootstrap_mean(values, seed=0, resamples=1).mean
