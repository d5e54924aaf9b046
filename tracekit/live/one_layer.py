"""One layer at a time, or one KV head of it, under a rule: all other layers attend to all they see.

Layers below the one that is changed are as recorded and not run again; what the rule does to the
layer itself follows from its recorded inputs. Only the layers above are run, several runs at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from tracekit.kv.engine import NEVER
from tracekit.live.driver import drive, runs_at_once
from tracekit.live.layer_rule import Ruled
from tracekit.live.shared import attend_held
from tracekit.measure.attention import as_wide, visible_QK
from tracekit.schema import ALL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.kv.replay import Setting
    from tracekit.live.layer_rule import LayerRule
    from tracekit.live.run import FullRun
    from tracekit.spec import LayerSpec


class Swept(NamedTuple):
    """What became of the model when one layer of it was changed.

    Parameters
    ----------
    rule
        What was done.
    layer, kv_head
        Where; KV head ``schema.ALL`` is the whole layer.
    left_frac_R
        Entries that each row had left there, of those that it sees: float64, mean over KV heads.
    hidden_RE
        Final hidden states of the rows from the rule's point on.
    """

    rule: LayerRule
    layer: int
    kv_head: int
    left_frac_R: torch.Tensor
    hidden_RE: torch.Tensor


class _Cell(NamedTuple):
    rule: LayerRule
    kv_head: int
    ruled: Ruled


def sweep_layers(
    run: FullRun, rules: Sequence[LayerRule], setting: Setting, *, heads: bool
) -> Iterator[Swept]:
    """Change one layer after the other, and yield what the model made of it.

    Over L layers a rule costs the layer work of (L + 1) / 2 passes over the rows after its point;
    so does each KV head. Where layers read the keys of others, all from the lowest owner on are run.

    Parameters
    ----------
    run
        The sequence under the full cache.
    rules
        All of one point, which the sequence has.
    setting
        Where the sequence has its parts, and the layers that are swept: those of its cache.
    heads
        Whether each KV head is changed alone as well.

    Yields
    ------
    Swept
        By layer, then by rule, the whole layer before its KV heads.
    """
    first_row = rules[0].point(setting.spans)
    if first_row is None:
        return
    opened = [(rule, rule.open(run, setting, first_row)) for rule in rules]
    size = runs_at_once(run.num_rows - first_row)
    for layer in setting.cache.layers:
        as_is = _as_is(run, layer, first_row) if heads else None
        cells = []
        for rule, ruled_in in opened:
            ruled = ruled_in(layer.index)
            cells.append(_Cell(rule, ALL, ruled))
            parts = [] if as_is is None else _by_head(as_is, ruled, layer)
            cells += [_Cell(rule, head, part) for head, part in enumerate(parts)]
        for start in range(0, len(cells), size):
            yield from _together(run, layer, first_row, cells[start : start + size])


def untouched(run: FullRun, setting: Setting, first_row: int) -> torch.Tensor:
    """Return final hidden states [R, E] of rows that are run anew with nothing changed.

    The lowest layer attends as layers under a rule do, by weights that are written out: what differs
    from the full run is rounding, and no measurement of a layer is finer than this.

    Parameters
    ----------
    run, setting
        As in ``sweep_layers``.
    first_row
        Position of the first row.
    """
    layer = setting.cache.layers[0]
    query_1HTD, key_1GTD, value_1GTD = run.references[layer.index].rows(0, run.num_rows)
    output_1HRD = _written_out(query_1HTD[:, :, first_row:], key_1GTD, value_1GTD, layer)
    ruled = _as_is(run, layer, first_row)._replace(output_HRD=output_1HRD[0])
    steering = _OneLayer(run, layer, first_row, [ruled])
    return drive(run, steering, first_row, first_layer=layer.index)[0]


def _as_is(run: FullRun, layer: LayerSpec, first_row: int) -> Ruled:
    """Return the rows of a layer with nothing changed."""
    query_1HTD, key_1GTD, value_1GTD = run.references[layer.index].rows(0, run.num_rows)
    output_1HRD = _attend(query_1HTD[:, :, first_row:], key_1GTD, value_1GTD, layer)
    stays_GT = torch.full(key_1GTD.shape[1:3], NEVER, dtype=torch.int32, device=key_1GTD.device)
    left_GR = _num_seen_R(layer, first_row, run.num_rows).expand(layer.num_kv_heads, -1)
    return Ruled(output_1HRD[0], left_GR, stays_GT)


def _by_head(as_is: Ruled, ruled: Ruled, layer: LayerSpec) -> list[Ruled]:
    """Return what a rule did to each KV head alone, the others as they were."""
    parts = []
    for head in range(layer.num_kv_heads):
        own = slice(head * layer.group_size, (head + 1) * layer.group_size)
        output_HRD, evicted_at_GT = as_is.output_HRD.clone(), as_is.evicted_at_GT.clone()
        output_HRD[own] = ruled.output_HRD[own]
        evicted_at_GT[head] = ruled.evicted_at_GT[head]
        parts.append(Ruled(output_HRD, ruled.left_GR[head : head + 1], evicted_at_GT))
    return parts


def _num_seen_R(layer: LayerSpec, first_row: int, num_rows: int) -> torch.Tensor:
    """Return the entries that each row sees, int64."""
    return torch.tensor([layer.entries(row + 1) for row in range(first_row, num_rows)])


def _together(
    run: FullRun, layer: LayerSpec, first_row: int, cells: Sequence[_Cell]
) -> Iterator[Swept]:
    """Run the layers from one on, a run a cell."""
    steering = _OneLayer(run, layer, first_row, [cell.ruled for cell in cells])
    # Layers that read the keys of another get them from it in the same pass.
    owners = [one.owner for one in run.spec.layers if one.owner is not None]
    first_layer = min([layer.index, *owners])
    hidden_BRE = drive(run, steering, first_row, num_runs=len(cells), first_layer=first_layer)
    num_seen_R = _num_seen_R(layer, first_row, run.num_rows)
    for cell, hidden_RE in zip(cells, hidden_BRE, strict=True):
        left_frac_R = cell.ruled.left_GR.cpu().double().mean(0) / num_seen_R
        yield Swept(cell.rule, layer.index, cell.kv_head, left_frac_R, hidden_RE)


class _OneLayer:
    """Attention of B runs: what is known in one layer, over everything in those above."""

    def __init__(
        self, run: FullRun, layer: LayerSpec, first_row: int, ruled: Sequence[Ruled]
    ) -> None:
        self._run, self._layer, self._first_row = run, layer, first_row
        self._output_BHRD = torch.stack([one.output_HRD for one in ruled])
        self._evicted_at_BGT = torch.stack([one.evicted_at_GT for one in ruled])

    def attend(
        self,
        layer: int,
        query_BHQD: torch.Tensor,
        key_BGQD: torch.Tensor,
        value_BGQD: torch.Tensor,
    ) -> torch.Tensor:
        """Return attention outputs [B, H, Q, D] of one layer."""
        if layer == self._layer.index:
            return self._output_BHRD
        spec, reference = self._run.spec.layers[layer], self._run.references[layer]
        _, key_1GPD, value_1GPD = reference.rows(0, self._first_row)
        key_BGKD, value_BGKD = (
            torch.cat([before.expand(len(new), -1, -1, -1), as_wide(new)], dim=2)
            for before, new in ((key_1GPD, key_BGQD), (value_1GPD, value_BGQD))
        )
        if spec.owner == self._layer.index:
            # It reads the cache of the layer that is changed: what left it is gone here too.
            return attend_held(query_BHQD, key_BGKD, value_BGKD, self._evicted_at_BGT, spec)
        return _attend(query_BHQD, key_BGKD, value_BGKD, spec)


def _attend(
    query_BHQD: torch.Tensor, key_BGKD: torch.Tensor, value_BGKD: torch.Tensor, layer: LayerSpec
) -> torch.Tensor:
    """Return attention outputs [B, H, Q, D] of the newest rows over all that they see."""
    if layer.softcap is not None or layer.sinks is not None or layer.alibi is not None:
        return _written_out(query_BHQD, key_BGKD, value_BGKD, layer)
    # The fused kernel is 8 times faster than weights that are written out.
    num_rows, num_keys, device = query_BHQD.shape[2], key_BGKD.shape[2], key_BGKD.device
    first_row = num_keys - num_rows
    return scaled_dot_product_attention(
        as_wide(query_BHQD),
        key_BGKD,
        value_BGKD,
        attn_mask=visible_QK(layer, num_rows, num_keys, first_query=first_row, device=device),
        scale=layer.scale,
        enable_gqa=layer.group_size > 1,
    )


def _written_out(
    query_BHQD: torch.Tensor, key_BGKD: torch.Tensor, value_BGKD: torch.Tensor, layer: LayerSpec
) -> torch.Tensor:
    """Return the same by weights, as where entries are gone."""
    stays_BGK = torch.full(key_BGKD.shape[:3], NEVER, device=key_BGKD.device)
    return attend_held(query_BHQD, key_BGKD, value_BGKD, stays_BGK, layer)
