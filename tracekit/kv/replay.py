"""Replay policies on one recorded sequence at level ``local``: each layer's inputs unchanged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tracekit.kv.attend import row_blocks
from tracekit.kv.engine import NEVER, Engine
from tracekit.measure.attention import as_wide, logits_HQK, outputs_HQD, visible_QK, weights_HQK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.kv.policy import Policy
    from tracekit.kv.schedule import Spans
    from tracekit.spec import LayerSpec


CACHE_BYTES = 256 << 20
"""Full attention that a reference remembers; what is beyond is computed again for each family."""


class FullRows(NamedTuple):
    """Attention of some rows under the full cache: weights [L, H, Q, K], outputs [L, H, Q, D]."""

    weights_LHQK: torch.Tensor
    output_LHQD: torch.Tensor


class Reference:
    """Recorded rows of a stack of layers, and their attention under the full cache.

    One reference serves any number of families: what they share is computed once.

    Parameters
    ----------
    query_LHTD, key_LGTD, value_LGTD
        Post-RoPE tensors (or arrays) of T rows; half precision is read as float32.
    layer
        The spec that the layers share, its index aside.
    """

    def __init__(
        self,
        *,
        query_LHTD: torch.Tensor | np.ndarray,
        key_LGTD: torch.Tensor | np.ndarray,
        value_LGTD: torch.Tensor | np.ndarray,
        layer: LayerSpec,
    ) -> None:
        self.query_LHTD, self.key_LGTD, self.value_LGTD = (
            as_wide(torch.as_tensor(array)) for array in (query_LHTD, key_LGTD, value_LGTD)
        )
        self.layer = layer
        self._blocks: dict[tuple[int, int], FullRows] = {}
        self._room = CACHE_BYTES

    @property
    def num_rows(self) -> int:
        """T: the tokens that entered the cache."""
        return self.key_LGTD.shape[-2]

    def rows(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values of positions ``start`` .. ``end`` - 1."""
        return (
            self.query_LHTD[..., start:end, :],
            self.key_LGTD[..., start:end, :],
            self.value_LGTD[..., start:end, :],
        )

    def blocks(self, first_row: int) -> Iterator[tuple[int, int]]:
        """Yield (first, last + 1) of the blocks in which rows from ``first_row`` on are done."""
        num_layers, num_heads = self.query_LHTD.shape[:2]
        row_bytes = num_layers * num_heads * self.num_rows * self.key_LGTD.element_size()
        return row_blocks(first_row, self.num_rows, row_bytes)

    def full(self, start: int, end: int) -> FullRows:
        """Return attention of one of the ``blocks``, K = ``end``."""
        if (start, end) in self._blocks:
            return self._blocks[start, end]
        query_LHQD = self.query_LHTD[..., start:end, :]
        _, key_LGKD, value_LGKD = self.rows(0, end)
        device = query_LHQD.device
        seen_QK = visible_QK(self.layer, end - start, end, first_query=start, device=device)
        logits_LHQK = logits_HQK(query_LHQD, key_LGKD, self.layer)
        weights_LHQK = weights_HQK(logits_LHQK.masked_fill_(~seen_QK, -torch.inf), self.layer)
        block = FullRows(weights_LHQK, outputs_HQD(weights_LHQK, value_LGKD))
        self._room -= sum(array.nbytes for array in block)
        if self._room >= 0:
            self._blocks[start, end] = block
        return block


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """What N policies of one family did to L layers of one sequence of T recorded rows.

    Scored rows are R positions, ``first_row`` .. T - 1; all arrays are numpy.

    Parameters
    ----------
    first_row
        The eviction point: the first row that reads the reduced cache.
    held_NLGR
        Entries read at each scored row, its own included (int64).
    full_R
        The same of the full cache: min(position + 1, window).
    evicted_at_NLGT
        Tokens seen when the entry of a position was evicted; ``engine.NEVER`` if it stayed (int32).
    error_sq_NLHR, norm_sq_LHR
        Squared L2 norm of pruned - full attention output, and of the full one.
    cosine_NLHR
        Cosine of the two; 1 where both are zero, 0 where one is.
    mass_kept_NLHR
        Attention that the full cache gives to the entries that are read; sink logits' share is in
        neither.
    num_evicted_NLG
        Entries evicted by the end.
    is_clipped_N
        Whether a budget was somewhere smaller than what was to be protected.
    is_clamped_N
        Whether a budget was somewhere larger than what the full cache held (sliding layers, budgets
        in tokens).
    """

    first_row: int
    held_NLGR: np.ndarray
    full_R: np.ndarray
    evicted_at_NLGT: np.ndarray
    error_sq_NLHR: np.ndarray
    norm_sq_LHR: np.ndarray
    cosine_NLHR: np.ndarray
    mass_kept_NLHR: np.ndarray
    num_evicted_NLG: np.ndarray
    is_clipped_N: np.ndarray
    is_clamped_N: np.ndarray

    def since(self, row: int) -> Replay:
        """Return the same with the scored rows from position ``row`` on alone."""
        cut = max(0, row - self.first_row)
        names = ("held_NLGR", "full_R", "error_sq_NLHR", "norm_sq_LHR", "cosine_NLHR")
        arrays = {name: getattr(self, name)[..., cut:] for name in (*names, "mass_kept_NLHR")}
        return replace(self, first_row=self.first_row + cut, **arrays)


def replay(
    policies: Sequence[Policy],
    reference: Reference,
    *,
    layers: Sequence[int],
    spans: Spans,
    seed: int,
) -> Replay | None:
    """Replay policies that differ in the kept amount alone.

    Parameters
    ----------
    policies
        N policies of one family.
    reference
        The recorded rows of L layers.
    layers
        Their numbers.
    spans
        Where the parts of the sequence end.
    seed
        Of the sequence, for rules that draw.

    Returns
    -------
    Replay or None
        None if the sequence has no such eviction point, or no row to score after it.

    Raises
    ------
    UsageError
        If the policies cannot be replayed together.
    InputError
        If a score of a held key is not a number.
    """
    engine, schedule = Engine(reference.layer, layers, policies, seed), policies[0].schedule
    point, num_rows = schedule.point(spans), reference.num_rows
    if point is None or point >= num_rows:
        return None
    engine.absorb(*reference.rows(0, point))
    decisions = set(schedule.decisions(point, num_rows))
    measures: list[_Measures] = []
    for block in reference.blocks(point):
        stops = sorted({*block, *(seen for seen in decisions if block[0] < seen < block[1])})
        for start, end in pairwise(stops):
            if start in decisions:
                engine.decide()
            output_NLHQD = engine.read(*reference.rows(start, end))
            rows = slice(start - block[0], end - block[0])
            full = FullRows(*(array[..., rows, :] for array in reference.full(*block)))
            measures.append(_measure(engine, output_NLHQD, full))
    return _collect(engine, point, measures)


class _Measures(NamedTuple):
    """What is measured at each row of a block, rows last."""

    held_NLGR: torch.Tensor
    error_sq_NLHR: torch.Tensor
    norm_sq_LHR: torch.Tensor
    cosine_NLHR: torch.Tensor
    mass_kept_NLHR: torch.Tensor


def _measure(engine: Engine, output_NLHQD: torch.Tensor, full: FullRows) -> _Measures:
    """Compare the newest rows with the same rows under the full cache."""
    num_rows, num_keys = output_NLHQD.shape[-2], engine.num_tokens
    stays_NLGK = (engine.evicted_at_NLGK == NEVER).to(output_NLHQD.dtype)
    first, device = num_keys - num_rows, output_NLHQD.device
    seen_QK = visible_QK(engine.layer, num_rows, num_keys, first_query=first, device=device)
    weights_LHQK = full.weights_LHQK[..., :num_keys]
    weights = weights_LHQK.reshape(*stays_NLGK.shape[1:3], -1, num_keys)
    mass = weights @ stays_NLGK.permute(1, 2, 3, 0)
    mass_LHQN = mass.reshape(*weights_LHQK.shape[:3], -1)
    norm_sq_LHQ = full.output_LHQD.square().sum(-1)
    size_sq_NLHQ = output_NLHQD.square().sum(-1)
    dot_NLHQ = (output_NLHQD * full.output_LHQD).sum(-1)
    norms_NLHQ = size_sq_NLHQ.sqrt() * norm_sq_LHQ.sqrt()
    both_zero_NLHQ = (size_sq_NLHQ == 0) & (norm_sq_LHQ == 0)
    return _Measures(
        held_NLGR=(stays_NLGK @ seen_QK.T.to(stays_NLGK)).long(),
        error_sq_NLHR=(output_NLHQD - full.output_LHQD).square().sum(-1),
        norm_sq_LHR=norm_sq_LHQ,
        cosine_NLHR=(dot_NLHQ / norms_NLHQ).where(norms_NLHQ > 0, both_zero_NLHQ.to(dot_NLHQ)),
        mass_kept_NLHR=mass_LHQN.permute(3, 0, 1, 2),
    )


def _collect(engine: Engine, point: int, measures: Sequence[_Measures]) -> Replay:
    """Join the blocks' measures and add the engine's own account."""
    joined = {
        name: torch.cat(blocks, dim=-1).cpu().numpy()
        for name, blocks in zip(_Measures._fields, zip(*measures, strict=True), strict=True)
    }
    positions = range(point, engine.num_tokens)
    evicted_at_NLGT = engine.evicted_at_NLGK.cpu().numpy()
    return Replay(
        first_row=point,
        full_R=np.array([engine.layer.entries(position + 1) for position in positions]),
        evicted_at_NLGT=evicted_at_NLGT,
        num_evicted_NLG=(evicted_at_NLGT != NEVER).sum(-1),
        is_clipped_N=engine.is_clipped_N.numpy(),
        is_clamped_N=engine.is_clamped_N.numpy(),
        **joined,
    )
