"""Keys whose key and value are large among their neighbours stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.errors import UsageError
from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    from tracekit.kv.view import View


@SCORERS.register("leverage_product")
@dataclass(frozen=True)
class LeverageProduct(Scorer):
    """Score = share of the squared key norm in its block, times the same of the value.

    Serves ``cur`` (CurDKV, arXiv:2509.15038, as kvpress's ``CURPress`` computes it: ``kv_product``
    with the local approximation and no random projection). Blocks are ``window`` neighbours in the
    cache, from the first held key on; the last may have fewer, which makes its shares larger.
    Differences: where all keys or all values of a block are zero their shares are 0, where kvpress
    has 0/0; its division by the sum over all keys changes no order within a head and is left out.

    Parameters
    ----------
    window
        Keys of a block.
    """

    window: int = 16

    presets: ClassVar = (Preset(name="cur", sinks=4),)

    def __post_init__(self) -> None:
        if self.window < 1:
            msg = f"window={self.window} is a number of tokens, at least 1."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """Keys and values."""
        return Needs(keys=True, values=True)

    def score(self, view: View) -> torch.Tensor:
        """Return products of shares, [N, L, G, K]."""
        held_NLGK = view.held_NLGK
        block_NLGK = (held_NLGK.cumsum(-1) - 1).clamp(min=0) // self.window
        key_NLGK, value_NLGK = (
            _share(entry_LGKD, held_NLGK, block_NLGK)
            for entry_LGKD in (view.key_LGKD, view.value_LGKD)
        )
        return key_NLGK * value_NLGK


def _share(
    entry_LGKD: torch.Tensor, held_NLGK: torch.Tensor, block_NLGK: torch.Tensor
) -> torch.Tensor:
    """Return the share of each squared norm in the sum of its block, [N, L, G, K]."""
    square_NLGK = entry_LGKD.square().sum(-1).where(held_NLGK, 0)
    total_NLGK = torch.zeros_like(square_NLGK).scatter_add_(-1, block_NLGK, square_NLGK)
    tiny = torch.finfo(square_NLGK.dtype).tiny
    return square_NLGK / total_NLGK.gather(-1, block_NLGK).clamp(min=tiny)
