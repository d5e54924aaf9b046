"""What a family's accumulators have so far, for each key of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from tracekit.kv.accumulate import Accumulator
    from tracekit.kv.reader import Outcome
    from tracekit.spec import LayerSpec


class Totals:
    """States of some accumulators, [N, L, H or G, K] each; N is 1 before the first decision.

    Parameters
    ----------
    accumulators
        What is accumulated.
    layer
        The spec that the layers share.
    """

    def __init__(self, accumulators: Sequence[Accumulator], layer: LayerSpec) -> None:
        self._accumulators, self._layer = tuple(accumulators), layer
        self._states: dict[Accumulator, torch.Tensor] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is accumulated at all."""
        return not self._accumulators

    @property
    def states(self) -> dict[Accumulator, torch.Tensor]:
        """A copy of the table of states, not of the states."""
        return dict(self._states)

    def replace(self, states: Mapping[Accumulator, torch.Tensor]) -> None:
        """Take states that somebody has computed already."""
        self._states |= states

    def grow(self, num_new: int, key_LGKD: torch.Tensor, num_sets: int) -> None:
        """Make room for keys that no row has seen yet.

        Parameters
        ----------
        num_new
            How many.
        key_LGKD
            All keys, these included: the states' type and device.
        num_sets
            N.
        """
        num_layers, num_keys = key_LGKD.shape[0], key_LGKD.shape[2]
        for one in self._accumulators:
            if one in self._states:
                self._states[one] = pad(self._states[one], (0, num_new))
                continue
            heads = self._layer.num_heads if one.by_query_head else self._layer.num_kv_heads
            self._states[one] = key_LGKD.new_zeros(num_sets, num_layers, heads, num_keys)

    def add(self, outcome: Outcome) -> None:
        """Take in the attention of some rows; there is room for their keys already."""
        rows = outcome.rows
        for one, state_NLXK in self._states.items():
            part_NLXK = state_NLXK[..., : rows.stop]
            part_NLXK.copy_(one.add(part_NLXK, outcome.weights_LGNMQK, rows.start))

    def add_gathered(
        self, weights_LGMQC: torch.Tensor, position_LGC: torch.Tensor, first_row: int
    ) -> None:
        """Take in the attention of some rows of one policy over gathered entries.

        Parameters
        ----------
        weights_LGMQC
            Attention weights; 0 at places that hold nothing.
        position_LGC
            Position of each place; there is room for their keys already.
        first_row
            Position of the first row.
        """
        if not self._states:
            return
        num_keys = next(iter(self._states.values())).shape[-1]
        is_whole = position_LGC.shape[-1] == num_keys  # each key at its own place
        place_LGC = position_LGC if is_whole else position_LGC.where(position_LGC < num_keys, 0)
        received_LGC = weights_LGMQC.sum((2, 3))
        for one, state_NLXK in self._states.items():
            factor = one.factor(self._layer.group_size)
            if factor is not None and is_whole:
                state_NLXK[0].add_(received_LGC, alpha=factor)
                continue
            if factor is not None:
                state_NLXK[0].scatter_add_(-1, place_LGC, factor * received_LGC)
                continue
            end = first_row + weights_LGMQC.shape[3]
            wide_LGMQK = weights_LGMQC
            if not is_whole:
                wide = weights_LGMQC.new_zeros(*weights_LGMQC.shape[:-1], num_keys)
                at = place_LGC[:, :, None, None].expand_as(weights_LGMQC)
                wide_LGMQK = wide.scatter_add_(-1, at, weights_LGMQC)
            wide_LGMQK = wide_LGMQK[..., :end]
            part_NLXK = state_NLXK[..., :end]
            part_NLXK.copy_(one.add(part_NLXK, wide_LGMQK[:, :, None], first_row))

    def spread(self, num_sets: int) -> None:
        """Give each of N policies a state of its own, once their kept sets differ."""
        self._states = {
            one: state.expand(num_sets, -1, -1, -1).contiguous()
            for one, state in self._states.items()
        }
