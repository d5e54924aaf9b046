"""Which layers mind: one layer, or KV head, of one sequence changed at a time, all others full."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from tracekit import schema
from tracekit.kv.budget import Cache
from tracekit.kv.replay import Setting
from tracekit.live.one_layer import sweep_layers, untouched
from tracekit.live.run import full_run
from tracekit.measure.head import Head
from tracekit.measure.next_token import FullRows
from tracekit.model.head import head_tensors
from tracekit.progress import Progress, Silent
from tracekit.simulate.kv import spans_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import pyarrow as pa

    from tracekit.live.layer_rule import LayerRule
    from tracekit.live.one_layer import Swept
    from tracekit.live.run import FullRun
    from tracekit.measure.next_token import NextToken
    from tracekit.model.load import LoadedModel
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
    ModelError
        If the model is another one, or eviction cannot be run inside it.
    """
    rerun = open_sequence(trace, loaded, sequence, seed=seed)
    rows = [] if rerun is None else layer_sensitivity(rerun, rules, heads=heads, progress=progress)
    shared = {
        "sequence_id": sequence["sequence_id"],
        "domain": sequence["domain"],
        "level": "propagated",
    }
    columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
    return schema.LAYER_RESULTS.build(len(rows), shared | columns)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rerun:
    """A recorded sequence, run again under the full cache.

    Parameters
    ----------
    run
        The run.
    setting
        Where the sequence has its parts, and the layers that hold keys.
    last_id
        The token after the last row.
    scored_from
        First position that counts: the window before has scored the rest.
    """

    run: FullRun
    setting: Setting
    last_id: int
    scored_from: int = 1

    def scored(self, point: int) -> Scored | None:
        """Return the rows from a point on that count; None if there are none.

        The row at the point is the first that reads less, so it counts.
        """
        first = max(point, self.scored_from - 1)
        return Scored(self, first, point) if first < self.run.num_rows else None


def open_sequence(
    trace: Trace, loaded: LoadedModel, sequence: pd.Series[Any], *, seed: int
) -> Rerun | None:
    """Return a recorded sequence, run again; None if it is a single token.

    Parameters
    ----------
    trace, loaded, sequence, seed
        As in ``sweep_sequence``.
    """
    loaded.require(trace.spec)
    tokens = trace.table("tokens", sequence_id=str(sequence["sequence_id"]))
    ids = [int(one) for one in tokens["token_id"]]
    if len(ids) < 2:
        return None
    cache = Cache(tuple(one for one in loaded.spec.layers if one.holds_keys))
    return Rerun(
        run=full_run(loaded, ids[:-1]),
        setting=Setting(layers=(), cache=cache, spans=spans_of(sequence, tokens), seed=seed),
        last_id=ids[-1],
        scored_from=int(sequence["scored_from"]),
    )


class Scored:
    """Rows of a sequence that count, and their distributions under the full cache.

    Parameters
    ----------
    rerun
        The sequence.
    first_scored
        Position of the first row that counts.
    first_row
        Position of the first row of what is compared.
    """

    def __init__(self, rerun: Rerun, first_scored: int, first_row: int) -> None:
        run = rerun.run
        tensors = head_tensors(run.loaded.model)
        head = Head(tensors["head.weight"], tensors.get("head.bias"), run.spec.head)
        target_T = torch.cat([run.ids_1T[0, 1:], run.ids_1T.new_tensor([rerun.last_id])])
        self.num_rows = run.num_rows - first_scored
        self.cut = slice(first_scored - first_row, None)
        self._full = FullRows(run.hidden_TE[first_scored:], head, target_T[first_scored:])

    def compare(self, hidden_RE: torch.Tensor) -> NextToken:
        """Return the measures of the rows that count, of final hidden states from the first on."""
        return self._full.compare(hidden_RE[self.cut])


def layer_sensitivity(
    rerun: Rerun,
    rules: Sequence[LayerRule],
    *,
    heads: bool = False,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Return what each rule in each layer alone does to the next-token distributions.

    Parameters
    ----------
    rerun
        The sequence; the layers of its setting's cache are swept.
    rules, heads, progress
        As in ``sweep_sequence``; rules of one point are run side by side.

    Returns
    -------
    list of dict
        Columns of ``schema.LAYER_RESULTS``, by point, layer, rule, the layer before its KV heads.
    """
    run, setting, progress = rerun.run, rerun.setting, progress or Silent()
    groups: dict[int, list[LayerRule]] = {}
    for rule in rules:
        point = rule.point(setting.spans)
        if point is not None:
            groups.setdefault(point, []).append(rule)
    progress.start("sweeping layers", len(groups) * len(setting.cache.layers), "layers")
    rows: list[dict[str, Any]] = []
    for point, together in groups.items():
        scored = rerun.scored(point)
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
    left_frac = float(swept.left_frac_R[scored.cut].mean())
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
