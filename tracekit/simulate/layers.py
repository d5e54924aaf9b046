"""Which layers mind: one layer, or KV head, of one sequence changed at a time, all others full."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from tracekit import schema
from tracekit.live.one_layer import sweep_layers, untouched
from tracekit.progress import Progress, Silent
from tracekit.simulate.rerun import rerun

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import pyarrow as pa

    from tracekit.kv.replay import Setting
    from tracekit.live.layer_rule import LayerRule
    from tracekit.live.one_layer import Swept
    from tracekit.model.load import LoadedModel
    from tracekit.simulate.rerun import Rerun, Scored
    from tracekit.trace.reader import Trace


def sweep_sequence(
    trace: Trace,
    loaded: LoadedModel,
    sequence: pd.Series[Any],
    rules: Sequence[LayerRule],
    *,
    heads: bool,
    seed: int,
    progress: Progress | None = None,
) -> pa.Table:
    """Return the rows of ``schema.LAYER_RESULTS`` on one recorded sequence.

    Parameters
    ----------
    trace
        The trace; its token ids are read.
    loaded
        The model with which it was recorded.
    sequence
        Its row of ``trace.sequences``.
    rules
        What is done to a layer (``live.layer_rule.parse_rule``).
    heads
        Whether each KV head is changed alone as well.
    seed
        Of random policies on this sequence.
    progress
        Told of each finished layer.

    Returns
    -------
    Table
        Empty if the sequence has a single token. Rules whose point the sequence does not have, or
        after which nothing is scored, have no rows.

    Raises
    ------
    InputError
        If a token is none of the model's.
    ModelError
        If the model is another one, or eviction cannot be run inside it.
    """
    again = rerun(trace, loaded, sequence, seed=seed)
    rows = [] if again is None else layer_sensitivity(again, rules, heads=heads, progress=progress)
    shared = {
        "sequence_id": sequence["sequence_id"],
        "domain": sequence["domain"],
        "level": "propagated",
    }
    columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
    return schema.LAYER_RESULTS.build(len(rows), shared | columns)


def layer_sensitivity(
    again: Rerun,
    rules: Sequence[LayerRule],
    *,
    heads: bool = False,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Return what each rule in each layer alone does to the next-token distributions.

    Parameters
    ----------
    again
        The sequence in the model again; the layers of its setting's cache are swept.
    rules, heads, progress
        As in ``sweep_sequence``; rules of one point are run side by side.

    Returns
    -------
    list of dict
        Columns of ``schema.LAYER_RESULTS``, by point, layer, rule, the layer before its KV heads.
    """
    run, setting, progress = again.run, again.setting, progress or Silent()
    groups: dict[int, list[LayerRule]] = {}
    for rule in rules:
        point = rule.point(setting.spans)
        if point is not None:
            groups.setdefault(point, []).append(rule)
    progress.start("sweeping layers", len(groups) * len(setting.cache.layers), "layers")
    rows: list[dict[str, Any]] = []
    for point, together in groups.items():
        scored = again.scored(point)
        if scored is None:
            continue
        noise = scored.compare(untouched(run, setting, point)).kl_nats.mean()
        swept = sweep_layers(run, together, setting, heads=heads)
        for _, of_layer in groupby(swept, key=lambda one: one.layer):
            found = [_row(one, scored, setting) for one in of_layer]
            rows += [row | {"noise_kl_nats": float(noise)} for row in found]
            progress.advance()
    return rows


def _row(swept: Swept, scored: Scored, setting: Setting) -> dict[str, Any]:
    """Return the columns of one cell."""
    step = scored.compare(swept.hidden_RE)
    left_frac = float(swept.left_frac_R[-scored.num_rows :].mean())
    amounts = {"dropped_entries_frac": None, "kept_frac": None} | swept.rule.amounts(left_frac)
    return amounts | {
        "rule": swept.rule.text,
        "layer": swept.layer,
        "kv_head": swept.kv_head,
        "target_frac": swept.rule.target_frac(setting.spans, setting.cache),
        "is_idle": swept.rule.is_idle(left_frac),
        "nll_full": float(step.nll_full.mean()),
        "nll_pruned": float(step.nll_pruned.mean()),
        "kl_nats": float(step.kl_nats.mean()),
        "same_top_frac": float(step.same_top.mean()),
        "num_scored": scored.num_rows,
    }
