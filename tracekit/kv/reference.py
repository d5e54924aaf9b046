"""Recorded rows of a stack of layers, and what all policies share: full attention, its sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tracekit.errors import InputError
from tracekit.kv.attend import row_blocks
from tracekit.kv.view import Future
from tracekit.measure.attention import as_wide, logits_HQK, outputs_HQD, visible_QK, weights_HQK

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from tracekit.kv.accumulate import Accumulator
    from tracekit.spec import LayerSpec, RopeSpec

CACHE_BYTES = 256 << 20
"""Full attention that a reference remembers; what is beyond is computed again for each family."""


SAMPLE_ROWS = 8
"""Rows of a sequence, at most, at which kept sets are compared with the best ones."""

SAMPLE_STEP = 16
"""Rows between them, at least."""


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
    rope
        Rotary embedding of the layers; None if they have none.
    projection_LEX
        Output projections, X = H * D; None if the trace does not hold them.
    influence_LPHRD
        Gradients of P influence probes at the attention outputs of the last R rows; None if there
        are none: then P = 0.
    influence_from
        The first row that has gradients, T - R.

    Raises
    ------
    InputError
        If the gradients do not end with the recorded rows.
    """

    def __init__(
        self,
        *,
        query_LHTD: torch.Tensor | np.ndarray,
        key_LGTD: torch.Tensor | np.ndarray,
        value_LGTD: torch.Tensor | np.ndarray,
        layer: LayerSpec,
        rope: RopeSpec | None = None,
        projection_LEX: torch.Tensor | None = None,
        influence_LPHRD: torch.Tensor | np.ndarray | None = None,
        influence_from: int = 0,
    ) -> None:
        self.query_LHTD, self.key_LGTD, self.value_LGTD = (
            as_wide(torch.as_tensor(array)) for array in (query_LHTD, key_LGTD, value_LGTD)
        )
        self.layer = layer
        self.rope = rope
        self.projection_LEX = None if projection_LEX is None else as_wide(projection_LEX)
        if influence_LPHRD is None:
            shape = (self.num_layers, 0, layer.num_heads, self.num_rows, self.value_LGTD.shape[-1])
            influence_LPHRD, influence_from = self.value_LGTD.new_zeros(shape), 0
        self.influence_LPHRD = as_wide(torch.as_tensor(influence_LPHRD))
        self.influence_from = influence_from
        _refuse_other_rows(self)
        self._blocks: dict[tuple[int, int], FullRows] = {}
        self._room = CACHE_BYTES
        self._accumulated: dict[tuple[Accumulator, int], torch.Tensor] = {}
        self._ranks: dict[int, torch.Tensor] = {}
        self._future: dict[int, torch.Tensor] = {}

    @property
    def num_rows(self) -> int:
        """T: the tokens that entered the cache."""
        return self.key_LGTD.shape[-2]

    @property
    def num_layers(self) -> int:
        """L."""
        return self.key_LGTD.shape[0]

    @property
    def future(self) -> Future:
        """All rows, for rules that look ahead."""
        return Future(
            layer=self.layer,
            query_LHTD=self.query_LHTD,
            key_LGTD=self.key_LGTD,
            value_LGTD=self.value_LGTD,
            influence_LPHRD=self.influence_LPHRD,
            influence_from=self.influence_from,
        )

    def influence(self, start: int, end: int) -> torch.Tensor:
        """Return gradients [L, P, H, Q, D] of rows ``start`` .. ``end`` - 1, 0 where there are none."""
        return self.future.influence(start, end)

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
        weights_LHQK = self._weights(slice(None), start, end)
        block = FullRows(weights_LHQK, outputs_HQD(weights_LHQK, self.value_LGTD[..., :end, :]))
        self._room -= sum(array.nbytes for array in block)
        if self._room >= 0:
            self._blocks[start, end] = block
        return block

    def accumulated(
        self, accumulators: tuple[Accumulator, ...], num_rows: int
    ) -> dict[Accumulator, torch.Tensor]:
        """Return what accumulators have after the first rows, all entries there: [1, L, X, K]."""
        missing = [one for one in accumulators if (one, num_rows) not in self._accumulated]
        if missing:
            parts = [self._accumulate(missing, at, num_rows) for at in range(self.num_layers)]
            for number, one in enumerate(missing):
                state = torch.cat([part[number] for part in parts], dim=1)
                self._accumulated[one, num_rows] = state
        return {one: self._accumulated[one, num_rows] for one in accumulators}

    def samples(self, point: int) -> set[int]:
        """Return the scored rows at which sets of keys are compared, evenly spaced."""
        num_scored = self.num_rows - point
        return set(range(point, self.num_rows, max(SAMPLE_STEP, -(-num_scored // SAMPLE_ROWS))))

    def rank_LGK(self, row: int) -> torch.Tensor:
        """Return the rank of each key in a row's attention, meant over the group, 0 the highest."""
        if row not in self._ranks:
            parts = [
                self._weights(slice(at, at + 1), row, row + 1) for at in range(self.num_layers)
            ]
            weights_LHK = torch.cat(parts)[:, :, 0]
            self._ranks[row] = _rank(self._by_group(weights_LHK))
        return self._ranks[row]

    def future_rank_LGK(self, point: int) -> torch.Tensor:
        """Return the rank of each of the first keys by what all later rows attend to it."""
        if point not in self._future:
            parts = [self._future_mass(at, point) for at in range(self.num_layers)]
            self._future[point] = _rank(self._by_group(torch.stack(parts)))
        return self._future[point]

    def _future_mass(self, at: int, point: int) -> torch.Tensor:
        """Return the attention [H, K] of one layer's rows from ``point`` on to the keys before."""
        mass_HK = self.key_LGTD.new_zeros(self.layer.num_heads, point)
        row_bytes = self.layer.num_heads * self.num_rows * self.key_LGTD.element_size()
        for start, end in row_blocks(point, self.num_rows, row_bytes):
            mass_HK += self._weights(slice(at, at + 1), start, end)[0, :, :, :point].sum(1)
        return mass_HK

    def _by_group(self, values_LHK: torch.Tensor) -> torch.Tensor:
        grouped_LGMK: torch.Tensor = values_LHK.unflatten(1, (self.layer.num_kv_heads, -1))
        return grouped_LGMK.mean(2)

    def _accumulate(
        self, accumulators: list[Accumulator], at: int, num_rows: int
    ) -> list[torch.Tensor]:
        """Return the accumulators of one layer: small matrices stay in the processor's caches."""
        heads = {True: self.layer.num_heads, False: self.layer.num_kv_heads}
        states = [
            self.key_LGTD.new_zeros(1, 1, heads[one.by_query_head], num_rows)
            for one in accumulators
        ]
        row_bytes = self.layer.num_heads * num_rows * self.key_LGTD.element_size()
        for start, end in row_blocks(0, num_rows, row_bytes):
            weights_1HQK = self._weights(slice(at, at + 1), start, end)
            weights = weights_1HQK.unflatten(1, (self.layer.num_kv_heads, 1, -1))
            for one, state in zip(accumulators, states, strict=True):
                seen = state[..., :end]
                seen.copy_(one.add(seen, weights, start))
        return states

    def _weights(self, layers: slice, start: int, end: int) -> torch.Tensor:
        """Return attention weights of rows ``start`` .. ``end`` - 1 over all that they see."""
        query_LHQD = self.query_LHTD[layers, :, start:end]
        key_LGKD = self.key_LGTD[layers, :, :end]
        seen_QK = visible_QK(
            self.layer, end - start, end, first_query=start, device=query_LHQD.device
        )
        logits_LHQK = logits_HQK(query_LHQD, key_LGKD, self.layer)
        return weights_HQK(logits_LHQK.masked_fill_(~seen_QK, -torch.inf), self.layer)


def _refuse_other_rows(reference: Reference) -> None:
    num_rows = reference.influence_from + reference.influence_LPHRD.shape[-2]
    if num_rows != reference.num_rows:
        msg = (
            f"influence probes end at row {num_rows} and the recorded rows at {reference.num_rows}: "
            "the trace is damaged, record it anew."
        )
        raise InputError(msg)


def _rank(value_LGK: torch.Tensor) -> torch.Tensor:
    """Return int32 ranks, 0 the highest; among equals the more recent first."""
    order = value_LGK.flip(-1).argsort(dim=-1, descending=True, stable=True)
    order = value_LGK.shape[-1] - 1 - order
    places = torch.arange(value_LGK.shape[-1], dtype=torch.int32, device=value_LGK.device)
    return torch.empty_like(order, dtype=torch.int32).scatter_(-1, order, places.expand_as(order))
