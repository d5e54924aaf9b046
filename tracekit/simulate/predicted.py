"""KV eviction on one recorded sequence at level predicted: what influence probes foretell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.errors import TraceError
from tracekit.kv.view import begins_late
from tracekit.measure.influence import BLOCK_ROWS, block_sums, foretell
from tracekit.simulate.columns import LOCAL
from tracekit.simulate.kv import Recorded, result_rows, stacked
from tracekit.simulate.stacks import Stacks, probed_from, probed_layers
from tracekit.simulate.tally import Tallied, Tally

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import pyarrow as pa

    from tracekit.kv.policy import Policy
    from tracekit.kv.schedule import Spans
    from tracekit.simulate.columns import Stack
    from tracekit.trace.reader import Trace


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is foretold of one sequence.

    Parameters
    ----------
    tables
        By policy text, rows of ``schema.KV_RESULTS``.
    refused
        By policy text, why nothing is foretold of it.
    note
        What the prediction leaves out; empty if nothing.
    """

    tables: dict[str, pa.Table]
    refused: dict[str, str]
    note: str


def predict_sequence(
    trace: Trace,
    sequence: pd.Series[Any],
    families: Sequence[Sequence[Policy]],
    *,
    seed: int,
    bytes_per_number: int,
    block: int = BLOCK_ROWS,
) -> Prediction:
    """Return what the recorded probes foretell of policies on one sequence.

    The KL of the next-token distributions is estimated as in ``measure.influence``, from the change
    of each layer's attention output, its inputs unchanged. A layer's or head's row has its
    contribution, which may be negative: contributions add up to the row of all layers. There is
    one number for all steps: the gradient at a row holds the labels of later rows, so that a bucket
    of steps has no prediction of its own.

    Parameters
    ----------
    trace
        Recorded with influence probes.
    sequence
        Its row of ``trace.sequences``.
    families
        Policies; those of one family differ in the amount alone.
    seed
        Of random policies on this sequence.
    bytes_per_number
        For the accounting.
    block
        Rows, counted from the eviction point, whose effects are added up before they are squared.

    Returns
    -------
    Prediction
        Rows as at level local, without what is measured there alone; policies whose eviction point
        the sequence does not have are in neither dictionary.

    Raises
    ------
    TraceError
        If the sequence has no probes.
    """
    recorded = Recorded.of(trace, sequence)
    first_row = probed_from(trace, recorded.sequence_id)
    if first_row is None:
        said = sequence["unprobed"]
        if not isinstance(said, str) and trace.manifest["settings"].get("probes") is not None:
            return Prediction(tables={}, refused={}, note="")  # no row that a policy could change
        why = said if isinstance(said, str) else "record it with --capture influence"
        msg = f"{recorded.sequence_id} of {trace.path} has no influence probes: {why}."
        raise TraceError(msg)
    refused = {
        policy.text: why
        for family in families
        if (why := _refusal(family[0], recorded.spans, first_row))
        for policy in family
    }
    going = [family for family in families if family[0].text not in refused]
    stacks = Stacks(trace, recorded.sequence_id, bytes_per_number, probes=True)
    found: dict[str, _Foresight] = {}
    for policies, stack in stacked(stacks, going, recorded, seed) if going else ():
        for n, policy in enumerate(policies):
            found.setdefault(policy.text, _Foresight()).add(stack, n, block)
    by_text = {policy.text: policy for family in going for policy in family}
    tables = {
        text: result_rows(
            by_text[text], "predicted", one.tally, one.tallied(), recorded, stacks.cache
        )
        for text, one in found.items()
    }
    numbers = [layer.index for layer in stacks.cache.layers]
    return Prediction(
        tables=tables,
        refused=refused,
        note=_left_out(numbers, probed_layers(trace, recorded.sequence_id)),
    )


@dataclass
class _Foresight:
    """One policy on one sequence, taken in layer stack by layer stack."""

    tally: Tally = field(default_factory=Tally)
    _sums: list[np.ndarray] = field(default_factory=list)
    _num_scored: int = 0

    def add(self, stack: Stack, n: int, block: int) -> None:
        """Take the ``n``-th policy of a family on a stack of layers."""
        self.tally.add(stack, n)
        effect_LGPR = stack.result.measures.influence_NLGPR[n]
        self._num_scored = effect_LGPR.shape[-1]
        self._sums.append(block_sums(effect_LGPR, block=block, offset=stack.steps_before))

    def tallied(self) -> Tallied:
        """Return the columns of the tally that belong to the level, and what is foretold."""
        buckets, index, columns = self.tally.columns()
        kept = {name: array for name, array in columns.items() if name not in LOCAL}
        told = foretell(self._sums, self._num_scored)
        heads = [np.column_stack([part_LG, part_LG.sum(1)]) for part_LG in told.parts_nats]
        kl, spread = (np.full((len(buckets), len(index)), np.nan) for _ in range(2))
        # The first bucket is that of all steps, the last row that of all layers.
        kl[0] = np.concatenate([*(rows.reshape(-1) for rows in heads), [told.kl_nats]])
        spread[0, -1] = told.se_nats
        return Tallied(
            buckets, index, kept | {"kl_predicted_nats": kl, "kl_predicted_se_nats": spread}
        )


def _refusal(policy: Policy, spans: Spans, first_row: int) -> str:
    """Return why probes from a row on foretell nothing of a policy; '' if they do."""
    point = policy.schedule.point(spans)
    decisions = () if point is None else policy.schedule.decisions(point, spans)
    if not decisions:
        return ""
    if decisions[0] != point:
        return (
            "it evicts before the first scored row, and what the rows between pass on is not "
            "foretold: ask for --level propagated."
        )
    return begins_late(decisions[0], first_row)


def _left_out(layers: Sequence[int], probed: frozenset[int]) -> str:
    """Return a sentence about layers without probes; '' if there are none."""
    missing = [one for one in layers if one not in probed]
    if not missing:
        return ""
    return (
        f"{len(missing)} of {len(layers)} layers have no probes: what is foretold is the harm done "
        "in the others alone."
    )
